"""Plain jobs and jobs with keys: lanes and a claim of their own, priority over both, and no kind that starves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import psycopg
import pytest
from lock_desk import Desk
from workers import Eyes, Taker

from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement
from pgqueue.worker.fetch.kinds import Kind
from pgqueue.worker.run.slots import Room

ALL = 1000
HALF_AND_HALF = """
    INSERT INTO pgqueue.job (task, queue, lock_key)
    SELECT 'x', %s, CASE WHEN n > %s THEN n::text END FROM generate_series(1, %s) AS n
"""
LONG_ROW = """
    INSERT INTO pgqueue.job (task, priority, rank, lock_key) SELECT 'x', 1, 3, 'busy' FROM generate_series(1, 12000)
"""


@pytest.fixture
async def desk(dsn: str) -> AsyncIterator[Desk]:
    claims.clear()
    made = Desk(dsn, link=Noting(dsn, "pgqueue"))
    yield made
    await made.close()


def plain(eyes: Eyes, number: int = 1, priority: int = 5) -> list[int]:
    insert = """INSERT INTO pgqueue.job (task, priority, rank) SELECT 'plain', %(p)s, 2 * %(p)s + 1
                FROM generate_series(1, %(n)s) RETURNING id"""
    return [id for (id,) in eyes.conn.execute(insert, {"n": number, "p": priority}).fetchall()]


def keyed(eyes: Eyes, number: int = 1, priority: int = 5) -> list[int]:
    """Jobs with a lock each, all of them free."""
    insert = """INSERT INTO pgqueue.job (task, priority, rank, lock_key)
                SELECT 'keyed', %(p)s, 2 * %(p)s + 1, gen_random_uuid()::text
                FROM generate_series(1, %(n)s) RETURNING id"""
    return [id for (id,) in eyes.conn.execute(insert, {"n": number, "p": priority}).fetchall()]


class Noting(Link):
    """Notes which claims are sent."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        if name in ("fetch_claim", "keyed_claim_move"):
            claims.append(name)
        return super().statement(name, **params)


claims: list[str] = []


async def steps(taker: Taker, room: int, number: int) -> list[list[int]]:
    """What each of so many rounds of the fetcher brought, with room for so many jobs in each."""
    brought = []
    for _ in range(number):
        taker.jobs.clear()
        taker.room = room
        if not taker.fetcher.hungry(taker.queues):
            break
        await taker.fetcher._step()
        brought.append([job.id for job in taker.jobs])
    return brought


async def test_without_jobs_with_keys_their_claim_is_not_sent(desk: Desk, eyes: Eyes) -> None:
    await steps(desk, 10, 9)  # a start at zero is of both kinds
    claims.clear()
    plain(eyes, 30)
    desk.fetcher.wake()
    assert [len(ids) for ids in await steps(desk, 10, 9)] == [10, 10, 10, 0]
    assert claims == ["fetch_claim"] * 4


async def test_a_reading_that_sees_a_job_with_keys_leads_to_their_claim(desk: Desk, eyes: Eyes) -> None:
    first, [second] = plain(eyes, 3), keyed(eyes)
    desk.fetcher.keyed_claim.left = 1
    assert [ids for ids in await steps(desk, ALL, 9) if ids] == [first, [second]]
    assert claims[:2] == ["fetch_claim", "keyed_claim_move"]


@pytest.mark.promise("F08")
async def test_a_reading_moves_the_cursors_of_the_kind_that_it_does_not_ask(desk: Desk, eyes: Eyes) -> None:
    """Else each reading would walk over all jobs of that kind that other workers have taken."""
    await steps(desk, 10, 9)
    keyed(eyes, 100)
    eyes.do("DELETE FROM pgqueue.job_available")  # by another worker
    plain(eyes, 30)
    desk.fetcher.wake()
    await steps(desk, 10, 9)
    cursors = desk.fetcher.watermark._cursors
    assert {cursors["default", 11, keyed] for keyed in (False, True)} == {130}


@pytest.mark.promise("F08")
async def test_the_cursors_of_all_pools_rise_again_after_a_start_at_zero(dsn: str, eyes: Eyes) -> None:
    desk = Desk(dsn, ("a", "b"))
    shares = [Room(("a",), 10), Room(("b",), 10)]
    desk.hands.to_fetch = lambda: shares
    insert = (
        "INSERT INTO pgqueue.job (task, queue) SELECT 'x', q FROM unnest('{a,b}'::text[]) q, generate_series(1, 200)"
    )
    eyes.do(insert)
    desk.fetcher.wake(zero=True)

    def risen() -> bool:
        cursors = desk.fetcher.watermark._cursors
        return all(cursors.get((queue, 11, True)) for queue in "ab")

    assert not risen()
    for _ in range(60):
        await desk.fetcher._step()
        if risen():
            break
    assert risen()
    await desk.close()


@pytest.mark.promise("F13")
@pytest.mark.parametrize("urgent", ["plain", "keyed"])
async def test_priority_is_strict_over_both_kinds(desk: Desk, eyes: Eyes, urgent: str) -> None:
    """Each has three priorities, turn and turn about; with room for two, all come in the order of their priorities."""
    desk.fetcher.keyed_claim.left = 100
    expected: list[set[int]] = []
    for priority in range(6):
        put = (plain, keyed)[(priority + (urgent == "keyed")) % 2]
        expected.append(set(put(eyes, 4, priority)))
    brought = [id for ids in await steps(desk, 2, 60) for id in ids]
    order = [next(place for place, ids in enumerate(expected) if id in ids) for id in brought]
    assert order == sorted(order) and len(order) == 24


async def test_a_more_urgent_job_of_the_other_kind_that_comes_later_is_next(desk: Desk, eyes: Eyes) -> None:
    desk.fetcher.keyed_claim.left = 100
    plain(eyes, 100)
    await steps(desk, 10, 2)
    urgent = set(keyed(eyes, 5, priority=1))
    desk.fetcher.wake()
    brought = [set(ids) for ids in await steps(desk, 10, 2)]
    assert urgent in brought


async def test_kinds_of_one_priority_take_turns(desk: Desk, eyes: Eyes) -> None:
    desk.fetcher.keyed_claim.left = 100
    kinds = {id: "plain" for id in plain(eyes, 200)} | {id: "keyed" for id in keyed(eyes, 200)}
    brought = [ids for ids in await steps(desk, 10, 24) if ids]
    first = [kinds[ids[0]] for ids in brought]
    assert {"plain", "keyed"} == set(first[:6]), first
    assert all({kinds[id] for id in ids} == {kind} for ids, kind in zip(brought, first, strict=True))


async def test_jobs_with_keys_that_came_alone_for_long_have_their_turns_beside_plain_ones(
    desk: Desk, eyes: Eyes
) -> None:
    """The naive version counts all the time that either kind has taken, and then serves plain jobs only."""
    desk.fetcher.keyed_claim.left = 10_000
    keyed(eyes, 3_000)
    await steps(desk, 10, 200)
    plain(eyes, 3_000)
    desk.fetcher.wake()
    claims.clear()
    await steps(desk, 10, 60)
    assert "keyed_claim_move" in claims[:45]


async def test_where_a_slot_is_seldom_free_each_kind_has_every_second_one(
    desk: Desk, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are long: a claim's time is nothing beside the time until the next."""
    now = [100.0]
    monkeypatch.setattr("pgqueue.worker.fetch.fetcher.monotonic", lambda: now[0])
    desk.fetcher.keyed_claim.left = 10_000
    kinds = {id: "plain" for id in plain(eyes, 50)} | {id: "keyed" for id in keyed(eyes, 50)}
    got: list[str] = []
    for _ in range(40):
        got += [kinds[id] for ids in await steps(desk, 1, 1) for id in ids]
        now[0] += 1.0
    assert got.count("keyed") >= 16 <= got.count("plain")


@pytest.mark.parametrize("priority", [5, 9])
async def test_a_plain_job_that_a_reading_sees_is_taken_though_no_wake_told_of_it(
    desk: Desk, eyes: Eyes, priority: int
) -> None:
    desk.fetcher.keyed_claim.left = 10_000
    await steps(desk, 10, 9)
    keyed(eyes, 2_000, priority)
    desk.fetcher.wake()
    await steps(desk, 10, 3)
    mine = plain(eyes, 5, priority)
    assert set(mine) <= {id for ids in await steps(desk, 10, 100) for id in ids}


@pytest.mark.promise("F13")
async def test_what_comes_more_urgent_is_seen_by_the_next_reading(desk: Desk, eyes: Eyes) -> None:
    """Also after a claim that was held back: only the kind that it made way for looks beyond ranks."""
    desk.fetcher.keyed_claim.left = 10_000
    await steps(desk, 10, 9)
    fetcher, share = desk.fetcher, Room(desk.queues, 10)
    keyed(eyes, 30, priority=5)
    plain(eyes, 30, priority=1)
    fetcher.wake()
    await fetcher._fetch(share, fetcher.kinds.keyed)
    assert desk.jobs == []
    await fetcher._fetch(share, fetcher.kinds.next(share.queues, monotonic()))
    assert {job.priority for job in desk.jobs} == {1}
    [urgent] = keyed(eyes, 1, priority=0)
    fetcher.wake()
    desk.jobs.clear()
    for _ in range(2):
        await fetcher._fetch(share, fetcher.kinds.next(share.queues, monotonic()))
    assert desk.jobs[0].id == urgent


async def test_plain_jobs_behind_a_more_urgent_long_row_wait_for_few_fetches(desk: Desk, eyes: Eyes) -> None:
    await steps(desk, 10, 9)
    eyes.do(LONG_ROW)
    mine = set(plain(eyes, 10))
    desk.fetcher.wake()
    assert mine & {id for ids in await steps(desk, 10, 30) for id in ids}


async def test_a_pool_without_jobs_is_left_alone_while_another_has_many(dsn: str, eyes: Eyes) -> None:
    desk = Desk(dsn, ("a", "b"))
    desk.fetcher.keyed_claim.left = 10_000
    shares = [Room(("a",), 10), Room(("b",), 10)]
    desk.hands.to_fetch = lambda: shares
    asked: list[str] = []
    real = desk.fetcher._fetch

    async def fetch(room: Room, kind: Kind) -> bool | None:
        asked.append(room.queues[0])
        return await real(room, kind)

    desk.fetcher._fetch = fetch  # type: ignore[method-assign]
    eyes.do(HALF_AND_HALF, "a", 500, 1000)
    for _ in range(60):
        await desk.fetcher._step()
    assert asked.count("b") <= 4
    await desk.close()


@pytest.mark.parametrize("pools", [1, 2])
async def test_a_worker_that_was_marked_dead_comes_to_rest(dsn: str, eyes: Eyes, pools: int) -> None:
    queues = ("a", "b")[:pools]
    desk = Desk(dsn, queues)
    shares = [Room((queue,), 10) for queue in queues]
    desk.hands.to_fetch = lambda: shares
    for queue in queues:
        eyes.do(HALF_AND_HALF, queue, 50, 100)
    eyes.do("UPDATE pgqueue.worker SET dead_at = now()")
    number = 0
    while any(desk.fetcher.hungry(share.queues) for share in shares):
        await desk.fetcher._step()
        number += 1
        assert number < 20
    await desk.close()


@pytest.mark.promise("F13")
@pytest.mark.parametrize("locked", ["plain", "keyed"])
async def test_an_urgent_job_that_is_locked_holds_the_other_kind_up_for_a_fetch_only(
    dsn: str, desk: Desk, eyes: Eyes, locked: str
) -> None:
    desk.fetcher.keyed_claim.left = 100
    [urgent] = (plain if locked == "plain" else keyed)(eyes, 1, priority=0)
    others = set((keyed if locked == "plain" else plain)(eyes, 20, priority=5))
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM pgqueue.job_available WHERE id = %s FOR KEY SHARE", [urgent])
        brought = await steps(desk, 10, 30)
        assert {id for ids in brought for id in ids} == others
        assert len(brought) <= 12, brought  # it comes to rest: no fetch after the other
    desk.fetcher.wake(zero=True)
    assert urgent in [id for ids in await steps(desk, 10, 9) for id in ids]


async def test_where_the_first_of_both_kinds_are_locked_it_comes_to_rest(dsn: str, desk: Desk, eyes: Eyes) -> None:
    ids = plain(eyes, 1, priority=0) + keyed(eyes, 1, priority=3)
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM pgqueue.job_available WHERE id = ANY (%s) FOR KEY SHARE", [ids])
        assert len(await steps(desk, 10, 30)) <= 6
    desk.fetcher.keyed_claim.left = 100
    desk.fetcher.wake(zero=True)
    assert sorted(id for brought in await steps(desk, 10, 9) for id in brought) == sorted(ids)


async def test_a_poll_is_skipped_only_while_both_kinds_are_known_to_be_at_their_end(desk: Desk, eyes: Eyes) -> None:
    shares = [Room(desk.queues, 10)]
    await steps(desk, 10, 9)
    claims.clear()
    await desk.fetcher._look(shares)
    assert not desk.fetcher.hungry(desk.queues) and claims == []
    [id] = keyed(eyes)  # and no wake tells of it
    desk.fetcher.keyed_claim.left = 1
    await desk.fetcher._look(shares)
    assert [id] in await steps(desk, 10, 9)


async def test_news_that_come_while_plain_jobs_are_asked_for_are_not_lost(dsn: str, desk: Desk, eyes: Eyes) -> None:
    """A job with keys is committed after the reading has seen none, and before its answer is processed."""
    real = desk.session.run
    made: list[int] = []

    async def run(*messages: Any, **how: Any) -> Any:
        answers = await real(*messages, **how)
        if not made:
            made.extend(keyed(eyes))
            desk.fetcher.wake()
        return answers

    desk.session.run = run  # type: ignore[method-assign]
    desk.fetcher.keyed_claim.left = 1
    assert made in await steps(desk, 10, 5)


@pytest.mark.promise("F13")
@pytest.mark.parametrize("kind", ["plain", "keyed"])
async def test_a_poison_job_that_must_run_alone_is_found_among_both_kinds(desk: Desk, eyes: Eyes, kind: str) -> None:
    insert = """INSERT INTO pgqueue.job_available (task, rank, crashes, lock_key, holds)
                VALUES ('x', -1, 2, %s, %s) RETURNING id"""
    id = eyes.one(insert, *(("k", True) if kind == "keyed" else (None, False)))
    await desk.fetcher._fetch_alone(Room(desk.queues, 1, alone=True))
    assert [job.id for job in desk.jobs] == [id]


async def test_which_kind_a_job_is_its_keys_say(desk: Desk, eyes: Eyes) -> None:
    """Also of a row that was put in by hand."""
    ids = plain(eyes, 2) + keyed(eyes, 2)
    granted = eyes.one(
        "INSERT INTO pgqueue.job_available (task, rank, limit_key, holds) VALUES ('x', 10, 'l', true) RETURNING id"
    )
    desk.fetcher.keyed_claim.left = 1
    assert sorted(id for brought in await steps(desk, ALL, 9) for id in brought) == sorted([*ids, granted])


@pytest.mark.second
async def test_both_kinds_together_leave_nothing_behind(dsn: str, desk: Desk, eyes: Eyes) -> None:
    """Transactions of both kinds that end in any order, beside claims; one that draws its positions early ends last."""
    desk.fetcher.keyed_claim.left = 10_000
    insert = """INSERT INTO pgqueue.job (task, lock_key)
                VALUES ('x', CASE WHEN %s THEN gen_random_uuid()::text END) RETURNING id"""
    waiting: list[psycopg.Connection[Any]] = []
    put, got = set[int](), set[int]()
    for number in range(120):
        conn = psycopg.connect(dsn)
        waiting.append(conn)
        for _ in range(2):
            put.add(conn.execute(insert, [number % 3 == 0]).fetchone()[0])  # type: ignore[index]
        if len(waiting) > 6:
            ending = waiting.pop(number * 7 % len(waiting))
            ending.commit()
            ending.close()
        desk.fetcher.wake()
        got |= {id for ids in await steps(desk, 3, 3) for id in ids}
        await asyncio.sleep(0)
    for conn in waiting:
        conn.commit()
        conn.close()
    desk.fetcher.wake()
    got |= {id for ids in await steps(desk, ALL, 30) for id in ids}
    assert got == put
