"""A session whose socket is full ends only when it is told twice: its last message waits for a stopped client."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import inf
from typing import Any

import pytest
from psycopg import OperationalError, pq
from workers import Eyes, Taker, until, wait_until, work

from pgqueue.database.sessions import Link, Session
from pgqueue.worker.liveness.rescue import Rescue
from pgqueue.worker.transactions.handler_pool import HandlerPool, Side
from pgqueue.worker.transactions.steps import run

ROW_BYTES = 511
"""What a row of 500 letters has in the socket."""
BUFFER_BYTES = 8192
"""The server keeps so much back before it sends."""
MESSAGE = b"""
SELECT pg_advisory_xact_lock(7); SELECT repeat('x', 500) FROM generate_series(1, %d); SELECT pg_sleep(600)
"""


class Stopped:
    """The connection of a process that is stopped: it sends one message, and reads nothing."""

    def __init__(self, dsn: str, eyes: Eyes, rows: int) -> None:
        self._conn = pq.PGconn.connect(dsn.encode())
        self._eyes = eyes
        self.pid = self._conn.backend_pid
        self._conn.send_query(MESSAGE % rows)

    def waits_for(self) -> str | None:
        """What its session waits for; None if it has ended."""
        found = self._eyes.one("SELECT coalesce(wait_event, '') FROM pg_stat_activity WHERE pid = %s", self.pid)
        return None if found is None else str(found)

    def unread(self) -> int:
        """How many bytes lie in its socket."""
        [number] = struct.unpack("i", fcntl.ioctl(self._conn.socket, termios.FIONREAD, b"\0" * 4))
        return int(number)

    def close(self) -> None:
        self._conn.finish()


@contextmanager
def with_a_full_socket(dsn: str, eyes: Eyes) -> Iterator[Stopped]:
    """It works on, with a lock, and half a buffer of its answer has no room in its socket."""
    with closing(Stopped(dsn, eyes, 1_000_000)) as probe:
        wait_until(lambda: probe.waits_for() == "ClientWrite")
        room = probe.unread()
        eyes.do("SELECT pg_terminate_backend(%s)", probe.pid)
        wait_until(lambda: probe.waits_for() is None)
    with closing(Stopped(dsn, eyes, (room + BUFFER_BYTES // 2) // ROW_BYTES)) as stopped:
        wait_until(lambda: stopped.waits_for() == "PgSleep")
        yield stopped


@pytest.mark.promise("F24")
async def test_a_session_with_a_full_socket_is_told_to_end_until_it_has_ended(dsn: str, eyes: Eyes) -> None:
    """The naive rescue tells it once: then it waits for room to say why it ends, with its transaction open."""
    rescuer, victim = Taker(dsn), Taker(dsn)
    sessions = "UPDATE pgqueue.worker SET sessions = jsonb_build_array(jsonb_build_object('pid', %s)) WHERE id = %s"
    with with_a_full_socket(dsn, eyes) as once:
        eyes.do("SELECT pg_terminate_backend(%s)", once.pid)
        wait_until(lambda: once.waits_for() == "ClientWrite")
        assert not eyes.one("SELECT pg_try_advisory_xact_lock(7)")
    with with_a_full_socket(dsn, eyes) as stopped:
        eyes.do("INSERT INTO pgqueue.job (task) VALUES ('x')")
        await victim.fetch()
        eyes.do(sessions, stopped.pid, victim.worker_id)
        beat = eyes.one("SELECT beat FROM pgqueue.worker WHERE id = %s", victim.worker_id)
        assert await Rescue(rescuer.session, notify=True, rescued=lambda: None).rescue(victim.worker_id, beat)
        assert stopped.waits_for() is None
        assert eyes.one("SELECT pg_try_advisory_xact_lock(7)")
    assert eyes.states() == {"available": 1}
    await rescuer.close()
    await victim.close()


@pytest.mark.promise("F24")
async def test_a_session_that_has_not_ended_in_time_is_told_again_by_the_looks_for_stray_jobs(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive rescue is over after its last pause: the session keeps its locks as long as its client is stopped."""
    monkeypatch.setattr("pgqueue.worker.liveness.rescue.END_PAUSES", ())
    rescuer, victim = Taker(dsn), Taker(dsn)
    sessions = "UPDATE pgqueue.worker SET sessions = jsonb_build_array(jsonb_build_object('pid', %s)) WHERE id = %s"
    with with_a_full_socket(dsn, eyes) as stopped:
        eyes.do(sessions, stopped.pid, victim.worker_id)
        rescue = Rescue(rescuer.session, notify=True, rescued=lambda: None)
        assert await rescue.rescue(victim.worker_id, 0)
        await until(lambda: stopped.waits_for() == "ClientWrite")
        assert not eyes.one("SELECT pg_try_advisory_xact_lock(7)")
        await rescue.strays()
        await until(lambda: stopped.waits_for() is None)
        assert eyes.one("SELECT pg_try_advisory_xact_lock(7)")
        await rescue.strays()
        assert rescue._stuck == {}
    await rescuer.close()
    await victim.close()


@pytest.mark.promise("F24")
@pytest.mark.parametrize("name", ["sessions_end", "transactions_end_session"])
async def test_a_statement_that_ends_a_session_of_ours_tells_it_until_it_has_ended(
    name: str, dsn: str, eyes: Eyes
) -> None:
    """What the naive one leaves is the same as above: its session waits, and its lock is kept."""
    link = Link(dsn, "pgqueue")
    session = Session(link, "fetch")
    with with_a_full_socket(dsn, eyes) as stopped:
        [start] = eyes.all("SELECT backend_start::text FROM pg_stat_activity WHERE pid = %s", stopped.pid)
        end = link.statement(name, pid=stopped.pid, backend_start=start[0])
        assert await session.run(end) == [[(True,)]]
        assert stopped.waits_for() is None
        assert eyes.one("SELECT pg_try_advisory_xact_lock(7)")
        assert await session.run(end) == [[]]
    await session.close()


@pytest.mark.promise("F24")
@pytest.mark.parametrize("on_loop", [True, False])
async def test_a_session_that_a_handler_has_left_is_told_until_it_has_ended(
    on_loop: bool, dsn: str, eyes: Eyes
) -> None:
    """Before the next job gets a connection: it may wait for the locks."""

    async def listed() -> None: ...

    pools = HandlerPool(Link(dsn, "pgqueue"), 2, listed)
    side: Side[Any] = pools.on_loop if on_loop else pools.threads
    with with_a_full_socket(dsn, eyes) as stopped:
        [[start]] = eyes.all("SELECT backend_start::text FROM pg_stat_activity WHERE pid = %s", stopped.pid)
        pools.orphans.add((stopped.pid, start))
        taking = side.acquire()
        conn = await (taking if on_loop else asyncio.to_thread(run, taking))
        assert pools.orphans == set() and stopped.waits_for() is None
        assert eyes.one("SELECT pg_try_advisory_xact_lock(7)")
        giving = side.release(conn)
        await (giving if on_loop else asyncio.to_thread(run, giving))
    await pools.close()


@pytest.mark.promise("F24", "F470")
@pytest.mark.parametrize("on_loop", [True, False])
async def test_a_session_that_has_not_ended_in_time_is_told_again_and_no_job_waits_for_that(
    on_loop: bool, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: that is logged, and forgotten: what the session has locked stays locked, and no other worker knows it. Or
    it is told again on a connection of the jobs. There is one, and a job has it."""

    async def listed() -> None: ...

    async def in_vain(self: Side[Any], conn: Any, statement: Any) -> list[tuple[bool]]:
        return [(False,)]

    async def done(step: Any) -> Any:
        return await (step if on_loop else asyncio.to_thread(run, step))

    link = Link(dsn, "pgqueue")
    pools, session = HandlerPool(link, 2, listed, size=1), Session(link, "fetch")
    any_message = link.statement("sessions_server")
    side: Side[Any] = pools.on_loop if on_loop else pools.threads
    with with_a_full_socket(dsn, eyes) as stopped:
        [[start]] = eyes.all("SELECT backend_start::text FROM pg_stat_activity WHERE pid = %s", stopped.pid)
        orphan = (stopped.pid, start)
        pools.orphans.add(orphan)
        with monkeypatch.context() as patched:
            patched.setattr(Side, "rows", in_vain)
            conn = await done(side.acquire())
        assert pools.orphans == set() and pools.stuck() == [orphan]
        assert orphan not in pools.identities(), "the sign-off would wait for it"
        await session.run(any_message)
        assert stopped.waits_for() == "PgSleep" and pools.stuck() == [orphan], "it is not time yet"
        link.stuck[orphan] = 0.0
        await session.run(any_message)
        await until(lambda: stopped.waits_for() == "ClientWrite")
        link.stuck[orphan] = 0.0
        await session.run(any_message)
        await until(lambda: stopped.waits_for() is None)
        assert pools.stuck() == [orphan], "that it is gone is seen when it is told again"
        link.stuck[orphan] = 0.0
        await session.run(any_message)
        assert pools.stuck() == []
        assert eyes.one("SELECT pg_try_advisory_xact_lock(7)")
        await done(side.release(conn))
    await session.close()
    await pools.close()


@pytest.mark.promise("F470")
async def test_a_session_that_is_being_told_to_end_is_known_to_others(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies meanwhile leaves it to them. So does one whose connection breaks meanwhile."""

    async def listed() -> None: ...

    known: list[list[Any]] = []

    async def rows(self: Side[Any], conn: Any, statement: Any) -> list[tuple[bool]]:
        known.append([*self.pools.identities(), *self.pools.stuck()])
        if len(known) == 1:
            raise OperationalError("away")
        return [(True,)]

    monkeypatch.setattr(Side, "rows", rows)
    pools = HandlerPool(Link(dsn, "pgqueue"), 2, listed)
    session = (0, "2026-01-01")
    pools.orphans.add(session)
    with pytest.raises(OperationalError):
        await pools.on_loop.acquire()
    assert pools.orphans == {session} and pools.stuck() == []
    await pools.on_loop.release(await pools.on_loop.acquire())
    assert [session in each for each in known] == [True, True]
    assert session not in [*pools.identities(), *pools.stuck()]
    await pools.close()


@pytest.mark.promise("F470")
async def test_a_session_that_has_not_ended_is_known_to_others_and_no_heartbeat_tells_it(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, lease=1.5) as worker:
        link = worker.services.state.link
        link.stuck[(0, "2026-01-01")] = inf
        await until(lambda: eyes.one("""SELECT sessions @> '[{"pid": 0}]' FROM pgqueue.worker"""))
        assert worker.services.heartbeat._session.link.stuck is not link.stuck


@pytest.mark.promise("F24")
async def test_one_job_alone_waits_for_a_session_that_a_handler_has_left(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: each job that takes a connection meanwhile tells the same session, and waits for its end."""

    async def listed() -> None: ...

    asked, answered = asyncio.Event(), asyncio.Event()
    rows = Side.rows

    async def late(self: Side[Any], conn: Any, statement: Any) -> Any:
        asked.set()
        await answered.wait()
        return await rows(self, conn, statement)

    pools = HandlerPool(Link(dsn, "pgqueue"), 2, listed)
    pools.orphans.add((0, "2026-01-01"))  # no session's
    with monkeypatch.context() as patched:
        patched.setattr(Side, "rows", late)
        first = asyncio.create_task(pools.on_loop.acquire())
        await asyncio.wait_for(asked.wait(), 60)
        second = await asyncio.wait_for(pools.on_loop.acquire(), 60)
        assert not first.done()
        answered.set()
        for conn in (await first, second):
            await pools.on_loop.release(conn)
    assert pools.orphans == set()
    await pools.close()
