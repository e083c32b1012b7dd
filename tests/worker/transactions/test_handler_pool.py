"""Connections for handlers: as many as slots, nothing is left behind in one, none stays with its locks."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from time import sleep
from typing import Any

import psycopg
import pytest
import sqlalchemy
from accounts import accounts, balances
from faults import Wire
from handler_pools import FOUND, LEFT, SESSIONS, restless, tidied, whole
from psycopg_pool import PoolTimeout
from transactional_tasks import BOTH, declared, enqueued, outcomes
from workers import Eyes, until, work

import pgqueue
from pgqueue import Fail, Job
from pgqueue.database.sessions import Away, Identity, Link
from pgqueue.database.statements import Statement
from pgqueue.worker.transactions import handler_pool
from pgqueue.worker.transactions.handler_pool import HandlerPool, Side
from pgqueue.worker.transactions.steps import run

__all__ = ["accounts", "restless"]


# What a handler leaves behind ----------------------------------------------------------------------------------------


@pytest.fixture
def boss(accounts: Eyes) -> Iterator[str]:
    """A role that may do what we may."""
    name = f"boss_{accounts.one('SELECT current_database()')}"
    accounts.do(f'CREATE ROLE "{name}" SUPERUSER')
    yield name
    accounts.do(f'DROP ROLE "{name}"')


@pytest.mark.parametrize("who", ["ROLE", "SESSION AUTHORIZATION"])
@BOTH
async def test_nothing_of_a_session_is_left_to_the_next_job(
    dsn: str, accounts: Eyes, boss: str, who: str, on_loop: bool
) -> None:
    found: list[Any] = []

    def looks(job: Job) -> None:
        conn = job.connection
        found.append([conn.execute(FOUND).fetchone(), conn.prepare_threshold])

    async def alooks(job: Job) -> None:
        conn = await job.aconnection()
        found.append([await (await conn.execute(FOUND)).fetchone(), conn.prepare_threshold])

    def leaves(job: Job) -> None:
        for sql in (*LEFT, f'SET {who} "{boss}"'):
            job.connection.execute(sql)
        job.connection.row_factory = psycopg.rows.dict_row
        job.connection.cursor_factory = psycopg.RawCursor
        job.connection.prepare_threshold = 0

    async def aleaves(job: Job) -> None:
        conn = await job.aconnection()
        for sql in (*LEFT, f'SET {who} "{boss}"'):
            await conn.execute(sql)
        conn.row_factory = psycopg.rows.dict_row
        conn.cursor_factory = psycopg.AsyncRawCursor
        conn.prepare_threshold = 0

    looking, leaving = declared(alooks if on_loop else looks), declared(aleaves if on_loop else leaves)
    async with work(dsn, looking, leaving, concurrency=1) as worker:
        for number, asked in enumerate((looking, leaving, looking), 1):
            enqueued(dsn, asked)
            await until(accounts.done(number))
            await until(lambda: whole(worker))
            # Others are free of it at once, not when the pool lets the connection go.
            assert accounts.one("SELECT pg_try_advisory_xact_lock(42)")
    before, after = found
    assert after == before


ENDED = "SELECT count(*) FROM pgqueue.job WHERE state IN ('completed', 'failed')"
OTHERS = "SELECT count(*) FROM pg_prepared_statements WHERE name NOT LIKE 'pgqueue%'"


@pytest.mark.promise("F198")
@pytest.mark.parametrize("how", ["in its transaction", "after an error", "after its own COMMIT"])
@BOTH
async def test_nothing_of_a_session_is_left_by_an_attempt_that_failed(
    dsn: str, accounts: Eyes, how: str, on_loop: bool
) -> None:
    """And the session is the same. Naive: it is rolled back and lent again."""
    found: list[Any] = []
    before = ["COMMIT"] if how == "after its own COMMIT" else []
    after = ["SELECT 1 / 0"] if how == "after an error" else []

    def looks(job: Job) -> None:
        conn = job.connection
        found.append([*(conn.execute(sql).fetchone() for sql in (FOUND, OTHERS)), conn.prepare_threshold])

    async def alooks(job: Job) -> None:
        conn = await job.aconnection()
        rows = [await (await conn.execute(sql)).fetchone() for sql in (FOUND, OTHERS)]
        found.append([*rows, conn.prepare_threshold])

    def leaves(job: Job) -> None:
        conn = job.connection
        with suppress(psycopg.errors.DivisionByZero):
            for sql in (*before, *LEFT, *after):
                conn.execute(sql, prepare="now" in sql or "SELECT pg_adv" in sql)
        conn.row_factory, conn.cursor_factory, conn.prepare_threshold = psycopg.rows.dict_row, psycopg.RawCursor, 0
        raise Fail("as it wants")

    async def aleaves(job: Job) -> None:
        conn = await job.aconnection()
        with suppress(psycopg.errors.DivisionByZero):
            for sql in (*before, *LEFT, *after):
                await conn.execute(sql, prepare="now" in sql or "SELECT pg_adv" in sql)
        conn.row_factory, conn.cursor_factory = psycopg.rows.dict_row, psycopg.AsyncRawCursor
        conn.prepare_threshold = 0
        raise Fail("as it wants")

    looking, leaving = declared(alooks if on_loop else looks), declared(aleaves if on_loop else leaves)
    async with work(dsn, looking, leaving, concurrency=1) as worker:
        for asked, state in ((looking, "completed"), (leaving, "failed"), (looking, "completed")):
            await until(accounts.is_in(enqueued(dsn, asked), state))
            await until(lambda: whole(worker))
            assert accounts.one("SELECT pg_try_advisory_xact_lock(42)")
        assert len(worker.services.handler_pool.identities()) == 1
    assert found[1] == found[0]


@pytest.mark.promise("F198")
@pytest.mark.parametrize("what", ["a statement", "a pipeline", "a COPY", "a COPY's block", "a stop"])
@BOTH
async def test_a_session_that_is_in_the_middle_of_something_goes_to_no_other_job(
    dsn: str, accounts: Eyes, what: str, on_loop: bool
) -> None:
    """Nor does the attempt wait for what the handler has left there, which gets an error; the session ends.

    Naive: libpq's connection is freed. The statement that waits reads what was freed, or from the next connection with
    the same file descriptor.
    """
    pids, kept, errors = list[int](), list[Any](), list[BaseException | None]()

    def sleeps(conn: psycopg.Connection[Any]) -> None:
        try:
            conn.execute("SELECT pg_sleep(600)")
        except psycopg.Error as error:
            errors.append(error)

    def begun() -> bool:
        return bool(
            accounts.one("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND pid = %s", pids[0])
        )

    def looks(job: Job) -> None:
        pids.append(job.connection.info.backend_pid)

    async def alooks(job: Job) -> None:
        pids.append((await job.aconnection()).info.backend_pid)

    def leaves(job: Job) -> None:
        if pids:
            return
        conn = job.connection  # an attempt may time out before it has one
        pids.append(conn.info.backend_pid)
        match what:
            case "a statement":
                kept.append(threading.Thread(target=sleeps, args=(conn,)))
                kept[0].start()
                while not begun():
                    sleep(0.01)
            case "a pipeline":
                kept.append(conn.pipeline())
                kept[0].__enter__()
            case "a COPY":
                conn.pgconn.exec_(b"COPY effect FROM STDIN")
            case "a COPY's block":
                kept.append(conn.cursor().copy("COPY effect FROM STDIN"))
                kept[0].__enter__()
            case "a stop":
                while True:
                    sleep(0.01)
        raise Fail("as it wants")

    async def aleaves(job: Job) -> None:
        if pids:
            return
        conn = await job.aconnection()
        pids.append(conn.info.backend_pid)
        match what:
            case "a statement":
                kept.append(asyncio.ensure_future(conn.execute("SELECT pg_sleep(600)")))
                await until(begun)
            case "a pipeline":
                kept.append(conn.pipeline())
                await kept[0].__aenter__()
            case "a COPY":
                conn.pgconn.exec_(b"COPY effect FROM STDIN")
            case "a COPY's block":
                kept.append(conn.cursor().copy("COPY effect FROM STDIN"))
                await kept[0].__aenter__()
            case "a stop":
                await asyncio.sleep(3600)
        raise Fail("as it wants")

    leaving = declared(aleaves if on_loop else leaves, **({"timeout": 0.3} if what == "a stop" else {}))
    looking = declared(alooks if on_loop else looks)
    async with work(dsn, looking, leaving, concurrency=1) as worker:
        await until(accounts.is_in(enqueued(dsn, leaving), "completed" if what == "a stop" else "failed"))
        await until(lambda: whole(worker))
        await until(accounts.is_in(enqueued(dsn, looking), "completed"))
        await until(lambda: not accounts.one("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pids[0]))
        if what == "a statement":
            if on_loop:
                await asyncio.wait(kept, timeout=30)
                errors.append(kept[0].exception())
            else:
                await asyncio.to_thread(kept[0].join, 30)
            assert [type(error) for error in errors] == [psycopg.OperationalError]
    if what == "a COPY's block" and not on_loop:
        with suppress(psycopg.Error):  # an older psycopg raises here, else in the garbage collector
            kept[0].__exit__(None, None, None)
    assert len(set(pids)) == 2


@pytest.mark.promise("F198")
@BOTH
async def test_a_dead_link_holds_up_no_attempt_that_failed(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    """The session is ended by the next one: it had a row locked."""
    monkeypatch.setattr(handler_pool, "CLEAR_SECONDS", 0.2)
    takes = "UPDATE account SET balance = balance - 10 WHERE id = 1"
    with Wire(dsn) as wire:

        def fails(job: Job) -> None:
            job.connection.execute(takes)
            if job.attempt == 1:
                wire.kill("pgqueue job")
                raise ValueError

        async def afails(job: Job) -> None:
            await (await job.aconnection()).execute(takes)
            if job.attempt == 1:
                wire.kill("pgqueue job")
                raise ValueError

        failing = declared(afails if on_loop else fails)
        async with work(wire.dsn, failing, concurrency=1) as worker:
            await until(accounts.is_in(enqueued(dsn, failing), "completed"))
            assert worker.services.handler_pool.orphans == set()
    assert (outcomes(accounts), balances(accounts)[0]) == (["failed"], 90)


# How many there are --------------------------------------------------------------------------------------------------


async def test_there_is_a_connection_for_every_slot(dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that a queue has of its own are slots, too."""
    monkeypatch.setattr("pgqueue.worker.transactions.handler_pool.GET_SECONDS", 20.0)
    all_have_one = threading.Barrier(8)

    def meets(job: Job) -> None:
        job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])
        all_have_one.wait(30)

    meeting = declared(meets)
    async with work(dsn, meeting, queues=["default", "mail:6"], concurrency=2):
        with psycopg.connect(dsn) as conn:
            meeting.enqueue_many(conn, [()] * 2)
            meeting.using(queue="mail").enqueue_many(conn, [()] * 6)
        await until(accounts.done(8), 30)
    assert accounts.one("SELECT count(*) FROM pgqueue.attempt") == 0


async def test_handlers_in_threads_and_on_the_loop_have_as_many_each(dsn: str, accounts: Eyes) -> None:
    """So there are twice as many as slots, after a burst of each kind: connections are kept for a minute."""
    in_threads, on_loop = threading.Barrier(3), asyncio.Barrier(3)

    def meets(job: Job) -> None:
        job.connection.execute("SELECT 1")
        in_threads.wait(30)

    async def ameets(job: Job) -> None:
        await (await job.aconnection()).execute("SELECT 1")
        await asyncio.wait_for(on_loop.wait(), 30)

    tasks = declared(meets), declared(ameets)
    async with work(dsn, *tasks, concurrency=3) as worker:
        for number, each in enumerate(tasks, 1):
            with psycopg.connect(dsn) as conn:
                each.enqueue_many(conn, [()] * 3)
            await until(accounts.done(3 * number), 30)
        assert len(accounts.backends("pgqueue job")) == 2 * worker.settings.handler_connections == 6


# Connections that broke on one side ----------------------------------------------------------------------------------


class Reset(Wire):
    """A wire whose worker's end is reset; the server never hears of it."""

    def reset(self, name: str) -> int:
        return self._loop.call(self._reset(name))

    async def _reset(self, name: str) -> int:
        number = await self._kill((name,))
        for line in self._lines:
            if line.name == name and not line.sound.is_set():
                line.ends[1].transport.abort()
        return number


@pytest.mark.promise("F24")
@BOTH
async def test_a_session_whose_connection_broke_is_ended_before_the_next_run(
    dsn: str, accounts: Eyes, on_loop: bool
) -> None:
    """It has its row locked still, so the next run would wait for it until the server noticed, in hours."""
    wire = Reset(dsn)
    pids: list[int] = []
    listed: list[Any] = []
    there = f"SELECT count(*) {SESSIONS} AND pid = %s"
    known = "SELECT sessions @> jsonb_build_array(jsonb_build_object('pid', %s::int)) FROM pgqueue.worker"
    update = "UPDATE account SET balance = balance - 10 WHERE id = 1"

    def writes(job: Job) -> None:
        if pids:
            asyncio.run_coroutine_threadsafe(heartbeat.listed(), loop).result(30)
            listed.append((accounts.one(there, pids[0]), accounts.one(known, pids[0])))
        conn = job.connection
        conn.execute(update)
        pids.append(conn.info.backend_pid)
        if len(pids) == 1:
            assert wire.reset("pgqueue job") == 1
            conn.execute("SELECT 1")

    async def awrites(job: Job) -> None:
        if pids:
            await heartbeat.listed()
            listed.append((accounts.one(there, pids[0]), accounts.one(known, pids[0])))
        conn = await job.aconnection()
        await conn.execute(update)
        pids.append(conn.info.backend_pid)
        if len(pids) == 1:
            assert wire.reset("pgqueue job") == 1
            await conn.execute("SELECT 1")

    writing = declared(awrites if on_loop else writes)
    with wire:
        async with work(wire.dsn, writing, concurrency=2) as worker:
            heartbeat, loop = worker.services.heartbeat, asyncio.get_running_loop()
            await until(accounts.is_in(enqueued(dsn, writing), "completed"))
            await tidied(worker, accounts)
            assert listed == [(1, True)]
            assert accounts.one(there, pids[0]) == 0
            assert worker.services.handler_pool.orphans == set()
    assert balances(accounts)[0] == 90
    assert accounts.all("SELECT outcome, error_type FROM pgqueue.attempt") == [("aborted", "OperationalError")]


@pytest.mark.promise("F24")
@pytest.mark.parametrize("size", [None, 1], ids=["a connection for each slot", "permits"])
@BOTH
async def test_a_connection_that_died_in_the_pool_goes_to_no_job_beside_a_session_to_end(
    dsn: str, eyes: Eyes, size: int | None, on_loop: bool
) -> None:
    """What ends that session is the first statement on a connection. The job would pay for it with an attempt."""

    async def listed() -> None: ...

    lender = HandlerPool(Link(dsn, "pgqueue"), 3, listed, size=size)
    side: Side[Any] = lender.on_loop if on_loop else lender.threads

    async def do(body: Coroutine[Any, Any, Any]) -> Any:
        return await (body if on_loop else asyncio.to_thread(run, body))

    try:
        conns = [await do(side.acquire()) for _ in range(size or 3)]
        for conn in conns:
            await do(side.release(conn))
        for pid, _ in eyes.backends("pgqueue job"):
            eyes.do("SELECT pg_terminate_backend(%s, 10000)", pid)
        lender.orphans.add((0, "2026-01-01"))  # no worker's
        conn = await do(side.acquire())
        assert conn not in conns and lender.orphans == set()
        assert await do(side.rows(conn, Statement("SELECT 1", {}, list))) == [(1,)]
        await do(side.release(conn))
    finally:
        await lender.close()


@pytest.mark.promise("F197")
@pytest.mark.parametrize("size", [None, 2], ids=["a connection for each slot", "permits"])
@BOTH
async def test_sessions_that_ended_while_idle_cost_no_attempt(
    dsn: str, accounts: Eyes, size: int | None, on_loop: bool
) -> None:
    """Whatever asks for the connection. Naive: the first job finds one dead. The statement that is to end its session
    goes to the next dead one, on behalf of another job."""
    held, free = threading.Semaphore(0), threading.Event()
    write = "INSERT INTO effect VALUES (1)"

    def numbers(cursor: int | None) -> list[tuple[int, int]]:
        return [(n, n) for n in range((cursor or 0) + 1, 4)]

    def hold() -> None:
        held.release()
        assert free.wait(30)

    def writes(job: Job, way: str) -> None:
        if way == "iterate":
            for _ in job.iterate(numbers, 1):
                job.connection.execute(write)
            return
        if way == "session":
            job.session().execute(sqlalchemy.text(write))
        else:
            job.connection.execute(write)
        if way == "hold":
            hold()

    async def awrites(job: Job, way: str) -> None:
        if way == "iterate":
            async for _ in job.aiterate(numbers, 1):
                await (await job.aconnection()).execute(write)
            return
        if way == "session":
            await (await job.asession()).execute(sqlalchemy.text(write))
        else:
            await (await job.aconnection()).execute(write)
        if way == "hold":
            await asyncio.to_thread(hold)

    writing = pgqueue.task(name="idle.writes", transactional=True, retry=1)(awrites if on_loop else writes)
    locked = pgqueue.task(name="idle.locked", transactional=True, retry=1, lock="one", timeout=60)(
        awrites if on_loop else writes
    )
    async with work(dsn, writing, locked, concurrency=4, pool_size=size, poll=0.05) as worker:
        jobs = size or 4
        for _ in range(jobs):
            enqueued(dsn, writing, "hold")
        await asyncio.to_thread(lambda: [held.acquire(timeout=30) for _ in range(jobs)])
        free.set()
        await until(accounts.done(jobs))
        for way in ("connection", "iterate", "session"):
            await until(lambda: whole(worker))
            dead = [pid for pid, _ in accounts.backends("pgqueue job")]
            for pid in dead:
                accounts.do("SELECT pg_terminate_backend(%s, 10000)", pid)
            for asked in (writing, writing, writing, locked, locked):
                enqueued(dsn, asked, way)
            jobs += 5
            await until(lambda: accounts.one(ENDED) >= jobs)  # noqa: B023
            assert outcomes(accounts) == []


@pytest.mark.promise("I11")
@pytest.mark.usefixtures("restless")
async def test_who_gets_no_connection_is_told_why(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler_pool, "GET_SECONDS", 0.3)

    async def listed() -> None: ...

    lender = HandlerPool(Link(dsn, "pgqueue"), 1, listed)
    conn = await asyncio.to_thread(run, lender.threads.acquire())
    with pytest.raises(PoolTimeout, match=r"within 0.3 s: the database takes none, or all 1 \(one for each slot\)"):
        await asyncio.to_thread(run, lender.threads.acquire())
    waits = asyncio.ensure_future(asyncio.to_thread(run, lender.threads.acquire()))
    run(lender.threads.release(conn))
    run(lender.threads.release(await waits))  # the job that waits is given the one that comes back
    aconn = await lender.on_loop.acquire()
    with pytest.raises(PoolTimeout, match=r"all 1 \(one for each slot\)"):
        await lender.on_loop.acquire()
    await lender.on_loop.release(aconn)
    await lender.close()


@pytest.mark.promise("I11")
async def test_a_server_that_accepts_and_says_nothing_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the job's attempt is not spent. Naive: the server is away only after a try to connect has failed, and the
    first one lasts longer than the job waits."""
    monkeypatch.setattr(handler_pool, "GET_SECONDS", 0.3)

    async def listed() -> None: ...

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        dsn = f"host=127.0.0.1 port={port} user=u dbname=d connect_timeout=60 sslmode=disable gssencmode=disable"
        link = Link(dsn, "pgqueue")
        lender = HandlerPool(link, 1, listed)
        with pytest.raises(Away, match="the database is away"):
            await asyncio.to_thread(run, lender.threads.acquire())
        with pytest.raises(Away, match="the database is away"):
            await lender.on_loop.acquire()
        assert not link.outage.is_on()
    await lender.close()


@pytest.mark.promise("I11")
async def test_while_a_session_of_the_worker_is_lost_the_database_is_away(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_pool, "GET_SECONDS", 0.3)

    async def listed() -> None: ...

    link = Link(dsn, "pgqueue")
    lender = HandlerPool(link, 1, listed)
    conn = await lender.on_loop.acquire()
    link.outage.lost("beat", psycopg.OperationalError("gone"))
    with pytest.raises(Away, match="the database is away"):
        await lender.on_loop.acquire()
    link.outage.answered("beat")
    with pytest.raises(PoolTimeout, match="the database takes none"):
        await lender.on_loop.acquire()
    await lender.on_loop.release(conn)
    await lender.close()


@pytest.mark.second
async def test_the_beat_may_ask_for_the_sessions_at_any_moment() -> None:
    """Connections are made meanwhile, in other threads."""

    class Conn:
        closed = False

        class info:
            backend_pid = 7

    async def listed() -> None:
        raise AssertionError

    lender = HandlerPool(Link("", "pgqueue"), 1, listed)
    conns = [Conn() for _ in range(20_000)]
    first: Identity = (7, "then")

    def made() -> None:
        for conn in conns:
            lender._own(conn, [first])  # type: ignore[arg-type]

    making = asyncio.create_task(asyncio.to_thread(made))

    def asked() -> int:
        times = 0
        while not making.done():
            lender.identities()
            times += 1
        return times

    assert await asyncio.to_thread(asked) > 0
    await making
    assert lender.identities() == [first] * len(conns)
