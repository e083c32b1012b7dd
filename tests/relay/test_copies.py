"""Copies of databases: each has a name of its own, and what waits in one is said, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from commands import pgqueue as command
from relays import Sides, app_dsn, eventually, sides

from pgqueue.admin.doctor import doctor
from pgqueue.admin.lag import relays
from pgqueue.pytest_plugin import Databases
from pgqueue.relay.relay import Relay
from pgqueue.relay.source import Stopped

__all__ = ["app_dsn", "sides"]

TENANTS = 10


@contextmanager
def copied(databases: Databases, dsn: str) -> Iterator[str]:
    """A copy of this database, which lies elsewhere. No session may be in it."""
    with databases.copy(str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])) as copy:
        yield copy


@contextmanager
def looked_at(app_dsn: str, dsn: str) -> Iterator[Sides]:
    with psycopg.connect(app_dsn, autocommit=True) as app, psycopg.connect(dsn, autocommit=True) as queue:
        yield Sides(app, queue)


async def look(later: int, app_dsn: str, dsn: str, queue: psycopg.Connection[object]) -> None:
    """The relay of this outbox comes so many seconds later; it remembers for 100 s."""
    for table, columns in {"relayed": ["relayed_at"], "relay_fence": ["look", "next", "next_at"]}.items():
        for column in columns:
            queue.execute(
                f"UPDATE pgqueue.{table} SET {column} = {column} - make_interval(secs => {later})".encode()  # noqa: S608
            )
    assert await Relay(app_dsn, dsn, memory=100.0).once()


@pytest.mark.promise("F200")
async def test_databases_made_from_one_template_do_not_meet(
    app_dsn: str, dsn: str, pgqueue_databases: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither outboxes at one queue, which none has used before, nor queues at one outbox."""
    with ExitStack() as stack:
        tenants = [stack.enter_context(copied(pgqueue_databases, app_dsn)) for _ in range(TENANTS)]
        both = [stack.enter_context(looked_at(tenant, dsn)) for tenant in tenants]
        relaying = [asyncio.create_task(Relay(tenant, dsn).run()) for tenant in tenants]
        for number, one in enumerate(both):
            one.stage(f"{number}a", f"{number}b")
        queue = both[0].queue
        try:
            await eventually(lambda: len({lag.name for lag in relays(queue) if lag.waiting == 0}) == TENANTS)
            await eventually(lambda: not any(one.left() for one in both))
        finally:
            for task in relaying:
                task.cancel()
            await asyncio.gather(*relaying, return_exceptions=True)
        assert sorted(both[0].delivered()) == sorted(f"{number}{row}" for number in range(TENANTS) for row in "ab")
        assert len({lag.source for lag in relays(queue)}) == TENANTS
        assert "another session" not in caplog.text
        for tenant in tenants:  # each knows the one name of the queue, which all have settled at once
            assert await Relay(tenant, dsn).once()
        with looked_at(app_dsn, dsn) as template:
            [(name,)] = template.app.execute("SELECT source FROM pgqueue.outbox_source").fetchall()
        both[0].app.execute(
            "UPDATE pgqueue.outbox_source SET (source, home, target, epoch) = (%s, NULL, NULL, 0)", [name]
        )
        assert await Relay(tenants[0], dsn).once()  # restored from before its first use: it finds its name again
        assert len(relays(queue)) == TENANTS
        other = stack.enter_context(pgqueue_databases.copy())  # made from the template of `dsn`, as that was
        with pytest.raises(Stopped, match="belongs to another queue"):
            await Relay(tenants[0], other).once()


@pytest.mark.promise("F201")
async def test_what_waits_in_a_copy_is_said_with_the_reason_and_nothing_is_left_after_it_is_adopted(
    app_dsn: str, dsn: str, pgqueue_databases: Databases
) -> None:
    """As after pg_upgrade: the outbox lies elsewhere. One of its rows was delivered before, and not deleted."""
    with looked_at(app_dsn, dsn) as old:
        old.stage("gone", "locked")
        with psycopg.connect(app_dsn) as holder:
            holder.execute("SELECT FROM pgqueue.outbox WHERE id = 2 FOR UPDATE")
            assert await Relay(app_dsn, dsn).once()
    with copied(pgqueue_databases, app_dsn) as new_dsn, looked_at(new_dsn, dsn) as new:
        new.stage("waits")
        relay = Relay(new_dsn, dsn)
        with pytest.raises(
            Stopped, match=r"^2 staged jobs wait, and none is delivered: this outbox is a copy: .*--adopt"
        ):
            await relay.once()
        shown = command("status", dsn=dsn).stdout
        assert f"STOPPED, the relay of {relay.name}: this outbox is a copy: it was at " in shown
        assert f"RELAY of {relay.name}: staged jobs that wait: 2, the oldest for " in shown
        [finding] = [found for found in doctor(new.queue).findings if found.name == "relay"]
        assert finding.what == f"the relay of outbox {relay.name} delivers nothing, and 2 staged jobs wait"
        assert "is a copy" in finding.todo and "--adopt" in finding.todo
        assert await Relay(new_dsn, dsn, adopt=True).once()
        assert (new.delivered(), new.left()) == (["gone", "locked", "waits"], 0)
        assert [(lag.name, lag.waiting, lag.stopped) for lag in relays(new.queue)] == [(relay.name, 0, None)]
        assert not [found for found in doctor(new.queue).findings if found.name == "relay"]
        for later, left in ((0, 3), (110, 2), (110, 0)):  # an age after a look that has not found it
            await look(later, new_dsn, dsn, new.queue)
            assert new.queue.execute("SELECT count(*) FROM pgqueue.relayed").fetchone() == (left,)


@pytest.mark.promise("F201")
async def test_a_copy_forgets_nothing_of_an_outbox_that_still_lives(
    app_dsn: str, dsn: str, pgqueue_databases: Databases
) -> None:
    """Its relay is away for longer than the memory, and one of its rows was delivered and not deleted."""
    with looked_at(app_dsn, dsn) as old:
        old.stage("gone")
        assert await Relay(app_dsn, dsn).once()
    with copied(pgqueue_databases, app_dsn) as new_dsn, looked_at(app_dsn, dsn) as old:
        assert await Relay(new_dsn, dsn, adopt=True).once()
        old.stage("locked")
        with psycopg.connect(app_dsn) as holder:
            holder.execute("SELECT FROM pgqueue.outbox FOR UPDATE")
            assert await Relay(app_dsn, dsn).once()
        for later in (0, 110, 110, 110):
            await look(later, new_dsn, dsn, old.queue)
        assert await Relay(app_dsn, dsn).once()
        assert (old.delivered(), old.left()) == (["gone", "locked"], 0)


@pytest.mark.promise("F201")
async def test_rows_that_were_put_aside_keep_no_other_memory(app_dsn: str, dsn: str, sides: Sides) -> None:
    """More of them than are read at once, and all of them older."""
    assert await Relay(app_dsn, dsn).once()
    sides.queue.execute(
        "INSERT INTO pgqueue.relayed (uid, source, staged_id, job_id, relayed_at) "
        "SELECT gen_random_uuid(), source, n, n, now() + make_interval(secs => n / 1e6) "
        "FROM pgqueue.relay_fence, generate_series(1, 5100) AS n"
    )
    uids = sides.queue.execute("SELECT uid FROM pgqueue.relayed ORDER BY relayed_at LIMIT 5050").fetchall()
    aside = "INSERT INTO pgqueue.outbox_refused SELECT 1, 't', '{}', NULL, 1, NULL, unnest(%s::uuid[]), now(), 'r'"
    sides.app.execute(aside, [[uid for (uid,) in uids]])
    for later in (200, 110, 110):
        await look(later, app_dsn, dsn, sides.queue)
    assert sides.queue.execute("SELECT count(*) FROM pgqueue.relayed").fetchone() == (5_050,)
