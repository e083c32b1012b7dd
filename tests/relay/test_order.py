"""Jobs with an order key arrive in order; what does not go holds back what comes after it with its key, and no more."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path

import psycopg
import pytest
from relays import Sides, app_dsn, eventually, relay_process, relaying, sides
from workers import wait_until

import pgqueue
from pgqueue.relay.callable_target import CallableTarget, Refuse, StagedJob
from pgqueue.relay.refused import retry
from pgqueue.relay.relay import Relay

__all__ = ["app_dsn", "sides"]

mail = pgqueue.remote("shop.mail")


def stage(conn: psycopg.Connection[object], key: str | None, *values: str) -> None:
    pgqueue.enqueue_many(pgqueue.Outbox(conn, order_by=key), [mail.new(x=value) for value in values])


def of_key(values: list[str], key: str) -> list[str]:
    return [value for value in values if value.startswith(key)]


@pytest.mark.promise("E12")
@pytest.mark.parametrize("batch", [1, 3, 500])
async def test_what_waits_holds_back_its_key_and_no_other(batch: int, app_dsn: str, dsn: str, sides: Sides) -> None:
    """A stranger holds the unique key of `a1`."""
    with psycopg.connect(dsn) as stranger:
        pgqueue.enqueue(stranger, mail.using(unique="k"), x="stranger")
        outbox = pgqueue.Outbox(sides.app, order_by="a")
        stage(sides.app, "a", "a0")
        pgqueue.enqueue_many(outbox, [mail.using(unique="k").new(x="a1"), mail.using(unique="l").new(x="a2")])
        for number in range(3, 8):
            stage(sides.app, "a", f"a{number}")
            stage(sides.app, "b", f"b{number}")
            stage(sides.app, None, f"c{number}")
        async with relaying(Relay(app_dsn, dsn, batch=batch)):
            await eventually(lambda: sides.left() == 7)
            assert of_key(sides.delivered(), "a") == ["a0"]
            assert of_key(sides.delivered(), "b") == [f"b{number}" for number in range(3, 8)]
            stage(sides.app, "a", "a8")
            stage(sides.app, "b", "b8")
            await eventually(lambda: "b8" in sides.delivered())
            stranger.rollback()
            await eventually(lambda: sides.left() == 0)
    assert of_key(sides.delivered(), "a") == [f"a{number}" for number in range(9)]
    assert sides.doubled() == []


@pytest.mark.promise("E12")
@pytest.mark.parametrize("batch", [2, 500])
async def test_what_is_refused_holds_back_its_key_until_it_is_tried_again(
    batch: int, app_dsn: str, dsn: str, sides: Sides
) -> None:
    stage(sides.app, "a", "a0")
    sides.app.execute("INSERT INTO pgqueue.outbox (task, args, order_key) VALUES ('two words', '{\"x\": \"a1\"}', 'a')")
    stage(sides.app, "a", "a2", "a3")
    stage(sides.app, "b", "b0")
    assert await Relay(app_dsn, dsn, batch=batch).once()
    assert sides.delivered() == ["a0", "b0"]
    assert (sides.left(), len(sides.refused())) == (2, 1)
    stage(sides.app, "a", "a4")
    assert await Relay(app_dsn, dsn, batch=batch).once()
    assert sides.delivered() == ["a0", "b0"]
    sides.app.execute("UPDATE pgqueue.outbox_refused SET task = 'mended'")
    assert retry(sides.app) == 1
    assert await Relay(app_dsn, dsn, batch=batch).once()
    assert (sides.delivered(), sides.left()) == (["a0", "b0", "a1", "a2", "a3", "a4"], 0)


@pytest.mark.promise("E12")
async def test_a_row_that_commits_late_is_before_what_was_staged_after_it(app_dsn: str, dsn: str, sides: Sides) -> None:
    """Its id is below the cursor, and the next transaction begins after its commit: a read sees both, or neither."""
    with psycopg.connect(app_dsn) as late:
        async with relaying(Relay(app_dsn, dsn)):
            for number in range(10):
                stage(late, "a", f"a{number:02}-1")
                stage(sides.app, None, f"c{number}")
                await eventually(lambda number=number: f"c{number}" in sides.delivered())
                late.commit()
                stage(sides.app, "a", f"a{number:02}-2")
                await eventually(lambda: sides.left() == 0)
    assert of_key(sides.delivered(), "a") == [f"a{number:02}-{each}" for number in range(10) for each in (1, 2)]


@pytest.mark.promise("E12")
@pytest.mark.parametrize("seed", range(3))
async def test_order_holds_whatever_fails_and_however_transactions_overlap(
    seed: int, app_dsn: str, sides: Sides
) -> None:
    """Transactions of one key follow each other, those of different keys overlap; a fifth of the calls fail."""
    chance = random.Random(seed)
    came: dict[str, list[int]] = defaultdict(list)

    async def receive(job: StagedJob) -> None:
        await asyncio.sleep(0)
        if chance.random() < 0.2:
            raise ConnectionError("away")
        assert job.order_key is not None
        came[job.order_key].append(job.args["n"])

    keys = ["a", "b", "c", "d"]
    staged = dict.fromkeys(keys, 0)
    connections = {key: await psycopg.AsyncConnection.connect(app_dsn) for key in keys}
    async with relaying(Relay(app_dsn, CallableTarget(receive), batch=chance.choice((1, 3, 50)))):
        for _ in range(150):
            key = chance.choice(keys)
            outbox = pgqueue.Outbox(connections[key], order_by=key)
            await pgqueue.aenqueue(outbox, mail, n=staged[key])
            staged[key] += 1
            if chance.random() < 0.5:
                await connections[key].commit()
        for conn in connections.values():
            await conn.commit()
            await conn.close()
        await eventually(lambda: sides.left() == 0, 60.0)
    assert came == {key: list(range(number)) for key, number in staged.items() if number}


async def test_a_callable_that_refuses_holds_back_the_key(app_dsn: str, sides: Sides) -> None:
    came: list[str] = []

    def receive(job: StagedJob) -> None:
        if job.args["x"] == "a1":
            raise Refuse("never")
        came.append(job.args["x"])

    stage(sides.app, "a", "a0", "a1", "a2")
    stage(sides.app, "b", "b0")
    assert await Relay(app_dsn, CallableTarget(receive)).once()
    assert came == ["a0", "b0"] and (sides.left(), len(sides.refused())) == (1, 1)


@pytest.mark.promise("E10")
@pytest.mark.parametrize("batch", [1, 500])
async def test_a_row_that_was_delivered_and_is_held_back_now_is_not_delivered_again(
    batch: int, app_dsn: str, dsn: str, sides: Sides
) -> None:
    """It came before the row that it is behind was committed; a crash has left it, and the memory would go."""
    with psycopg.connect(app_dsn) as late, psycopg.connect(dsn) as stranger:
        pgqueue.enqueue(stranger, mail.using(unique="k"), x="stranger")
        pgqueue.enqueue(pgqueue.Outbox(late, order_by="a"), mail.using(unique="k"), x="first")
        stage(sides.app, "a", "second")
        sides.app.execute("CREATE TABLE kept AS TABLE pgqueue.outbox")
        assert await Relay(app_dsn, dsn).once()
        late.commit()
        sides.app.execute("INSERT INTO pgqueue.outbox SELECT * FROM kept")
        assert await Relay(app_dsn, dsn, batch=batch).once()
        assert sides.left() == 1  # known, and so deleted, whatever is before it
        assert sides.delivered() == ["second"]


@pytest.mark.parametrize("wrong", ["", "x" * 501, "a\0"])
def test_an_order_key_is_a_text_that_can_be_stored(wrong: str) -> None:
    with pytest.raises(pgqueue.InvalidArguments, match="order_by"):
        pgqueue.Outbox(object(), order_by=wrong)


@pytest.mark.second
@pytest.mark.promise("E12")
def test_order_holds_beside_kills_of_the_relay(app_dsn: str, dsn: str, sides: Sides, tmp_path: Path) -> None:
    """The relay is killed while it works, again and again; each job arrives once, and each key in order."""
    keys = [f"k{number}-" for number in range(5)]
    chance = random.Random(1)
    staged = dict.fromkeys(keys, 0)
    for _ in range(12):
        with relay_process(app_dsn, dsn, tmp_path, 7) as relay:
            wait_until(relay.works, 30.0)
            for _ in range(100):
                key = chance.choice(keys)
                stage(sides.app, key, f"{key}{staged[key]}")
                staged[key] += 1
            before = sides.left()
            wait_until(lambda before=before: sides.left() < max(1, before), 30.0)  # type: ignore[misc]
    with relay_process(app_dsn, dsn, tmp_path, 7):
        wait_until(lambda: sides.left() == 0, 60.0)
    delivered = sides.delivered()
    for key, number in staged.items():
        assert of_key(delivered, key) == [f"{key}{each}" for each in range(number)]
