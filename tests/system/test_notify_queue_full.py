"""NOTIFY is only a hint: while the server's NOTIFY queue is full, nothing fails, and nothing waits longer than a poll.

The server is the tests' own, with a queue of 64 pages. A session that listens and stays in a transaction keeps it full.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from time import monotonic
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pytest
from notify_queues import fill, full, held, small_server
from servers import Server
from workers import Eyes, until, work

import pgqueue
from pgqueue import Every, Job, RetryPolicy, Snooze, Unique, task
from pgqueue.client.tasks import Task
from pgqueue.database import drivers
from pgqueue.database.notify_queue import is_full
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Row, Statement
from pgqueue.pytest_plugin import Databases
from pgqueue.worker.fetch import notify_watch
from pgqueue.worker.run import serialization_retries
from pgqueue.worker.worker import Worker

POLL = 0.2
"""What the workers here are told; the default is one second."""
SOON = 5.0
"""Seconds in which a job runs here: a poll, and what a slow machine takes. Without a look it would be 15."""


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    server = small_server()
    yield server
    server.end()


@pytest.fixture(scope="module")
def small_databases(small: Server) -> Iterator[Databases]:
    made = Databases(small.dsn("postgres"), small.copy_strategy)
    yield made
    made.close()


@pytest.fixture
def dsn(small_databases: Databases) -> Iterator[str]:
    with small_databases.copy() as made:
        pgqueue.configure(dsn=made)
        yield made


@pytest.fixture
def holder(dsn: str) -> Iterator[int]:
    """The queue is full; the pid of the session that holds it back."""
    with full(dsn) as pid:
        yield pid


@task(name="full.plain")
async def plain() -> None: ...


@task(name="full.unique", unique=Unique("{key}", on_duplicate="replace"))
async def unique(key: str) -> None: ...


@pytest.mark.promise("F28")
@pytest.mark.parametrize("autocommit", [False, True])
def test_every_way_to_enqueue_commits(dsn: str, eyes: Eyes, holder: int, autocommit: bool) -> None:
    later = plain.using(delay=60)
    with psycopg.connect(dsn, autocommit=autocommit) as conn:
        plain.enqueue(conn)
        later.enqueue(conn)
        for _ in range(2):
            unique.enqueue(conn, "a")
        pgqueue.enqueue_many(conn, [plain.new(), plain.new()])
        pgqueue.enqueue_many(conn, [later.new(), plain.new()])
        pgqueue.enqueue_many(conn, [unique.new("b"), plain.new()])
        conn.execute("SELECT pgqueue.enqueue('full.plain')")
        conn.execute("SELECT pgqueue.enqueue('full.plain', run_at => now() + interval '1 minute')")
        conn.execute("SELECT pgqueue.enqueue('full.plain', unique_key => 'c')")
    assert eyes.states() == {"available": 9, "scheduled": 3}


@asynccontextmanager
async def leader(dsn: str, *tasks: Task[..., Any]) -> AsyncIterator[Worker]:
    """A worker that does the duties, too, and has seen how full the queue is."""
    async with work(dsn, *tasks, poll=POLL) as worker:
        await until(worker.services.election.leads)
        await until(lambda: worker.services.notify_watch.usage)
        yield worker


@pytest.mark.promise("F28")
async def test_what_a_handler_says_comes_true(
    dsn: str, eyes: Eyes, aconn: psycopg.AsyncConnection, holder: int
) -> None:
    """Each of these ends notifies: of a time to start, of a result that is waited for, of a successor."""
    runs = Counter[str]()

    @task(name="full.raises", retry=RetryPolicy(5, first=0.1))
    async def raises() -> None:
        runs["raises"] += 1
        if runs["raises"] == 1:
            raise ValueError("once")

    @task(name="full.snoozes")
    async def snoozes() -> Snooze | None:
        runs["snoozes"] += 1
        return Snooze(0.1) if runs["snoozes"] == 1 else None

    @task(name="full.returns")
    async def returns() -> str:
        await until(lambda: eyes.all("SELECT FROM pgqueue.job_waiter"))
        return "a result"

    @task(name="full.succeeded")
    async def succeeded(job: Job) -> None:
        job.enqueue(plain)

    @task(name="full.transactional", transactional=True)
    async def transactional(job: Job) -> str:
        await (await job.aconnection()).execute("SELECT 1")
        await until(lambda: eyes.all("SELECT FROM pgqueue.job_waiter"))
        return "committed"

    every: tuple[Task[..., Any], ...] = (raises, snoozes, returns, succeeded, transactional)
    async with leader(dsn, plain, *every):
        handles = [await each.aenqueue(aconn) for each in every]
        await aconn.commit()
        results = await asyncio.gather(*[handle.aresult(SOON) for handle in handles])
        assert results == [None, None, "a result", None, "committed"]
        await until(eyes.done(6), SOON)
    assert runs == {"raises": 2, "snoozes": 2}
    assert eyes.all("SELECT outcome FROM pgqueue.attempt ORDER BY outcome") == [("failed",), ("snoozed",)]


@pytest.mark.promise("F28")
@pytest.mark.parametrize("usage", [0.92, 1.0])
async def test_what_is_told_by_notify_is_found_within_a_poll(
    dsn: str, eyes: Eyes, aconn: psycopg.AsyncConnection, usage: float
) -> None:
    """A new job, a due one, a schedule, a request to stop, a free lock. Without a full queue none waits for a poll."""
    started = asyncio.Event()

    @task(name="full.endless", retry=1)
    async def endless() -> None:
        started.set()
        await asyncio.sleep(3600)

    @task(name="full.ticked")
    async def ticked() -> None: ...

    @task(name="full.locked", lock="one", timeout=60)
    async def locked() -> None: ...

    done = "SELECT FROM pgqueue.job_done WHERE task = %s HAVING count(*) >= %s"
    with held(dsn):
        fill(dsn, usage)
        async with leader(dsn, plain, endless, ticked, locked) as worker:
            looks = worker.services.ticks._known
            await until(lambda: worker.services.ticks._known > looks)  # the first looks are over
            began = monotonic()
            await plain.aenqueue(aconn)
            await plain.using(delay=0.1).aenqueue(aconn)
            await pgqueue.aenqueue_many(aconn, [locked.new() for _ in range(5)])
            stopped = await endless.aenqueue(aconn)
            await pgqueue.schedules.aadd(aconn, "full", Every(1), ticked)
            await aconn.commit()
            await asyncio.wait_for(started.wait(), SOON)
            await pgqueue.acancel(aconn, stopped.id)
            await aconn.commit()
            await until(lambda: eyes.all(done, "full.plain", 2), SOON)
            await until(lambda: eyes.all(done, "full.locked", 5), SOON)
            await until(lambda: eyes.all(done, "full.ticked", 1), SOON)
            await until(eyes.is_in(stopped.id, "cancelled"), SOON)
            assert monotonic() - began < 2 * SOON
    assert "failed" not in eyes.states()


@pytest.mark.promise("F28")
@pytest.mark.parametrize("busy", [False, True])
async def test_a_worker_without_room_asks_for_the_use_by_itself(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """Else its fetcher asks, beside its own look."""
    begun, go = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(notify_watch, "LOOK_SECONDS", POLL)
    if not busy:
        monkeypatch.setattr(notify_watch, "BUSY_POLLS", 1_000)

    @task(name="full.waits")
    async def waits() -> None:
        begun.set()
        await go.wait()

    async with work(dsn, waits, poll=POLL, concurrency=1) as worker:
        watch, asked, found = worker.services.notify_watch, 0, list[int]()
        real = watch.look

        async def look() -> None:
            nonlocal asked
            asked += 1
            await real()

        monkeypatch.setattr(watch, "look", look)
        monkeypatch.setattr(watch, "_told_nothing", lambda: found.append(asked))
        if busy:
            with psycopg.connect(dsn) as conn:
                waits.enqueue(conn)
            await begun.wait()
        with full(dsn):
            await until(lambda: found)
            assert (found[0] > 0) is busy
            go.set()


@pytest.mark.promise("F28")
async def test_one_warning_a_minute_names_the_session(dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture) -> None:
    with full(dsn, "the culprit") as pid, full(dsn, "another that came later"):
        async with leader(dsn, plain) as worker, work(dsn, plain, poll=POLL):
            await until(lambda: "NOTIFY queue" in caplog.text)
            for _ in range(3):
                await worker.services.notify_watch.look()
    [said] = [record.getMessage() for record in caplog.records if "NOTIFY queue" in record.getMessage()]
    assert "NOTIFY queue is 100 % full" in said
    assert f"session {pid} (the culprit, postgres in " in said
    assert "idle in transaction for" in said


@pytest.mark.second
@pytest.mark.promise("F28")
async def test_the_server_says_which_session_is_furthest_behind(dsn: str) -> None:
    """An older transaction that does not listen holds nothing back. The server says it once in 5 s."""
    with psycopg.connect(dsn) as older:
        older.execute("SELECT 1")
        with full(dsn) as pid:
            async with leader(dsn, plain) as worker:
                said: list[int | None] = [None]
                while said[-1] is None:
                    said.append(await worker.services.notify_watch._furthest_behind())
                assert said[-1] == pid
        older.rollback()


# Notifies without a look at the queue, as a statement of ours does whose look was a moment too early.
TOO_EARLY = (
    "WITH made AS (INSERT INTO pgqueue.job (state, task, args, rank) VALUES ('available', 'full.plain', '{}', 11))"
    "SELECT CASE WHEN %(notify)s::boolean THEN pg_notify('pgqueue.default', '')::text END"
)


def too_early() -> Statement[list[Row]]:
    return Statement(TOO_EARLY, {"notify": True}, list)


@pytest.mark.promise("F28")
async def test_a_message_whose_notify_is_refused_is_sent_again_without_it(dsn: str, eyes: Eyes, holder: int) -> None:
    session = Session(Link(dsn, "pgqueue"), "test")
    reading: Statement[list[Row]] = Statement("SELECT count(*) FROM pgqueue.job", {}, list)
    assert await session.run(too_early()) == [[(None,)]]
    assert await session.run_then(too_early(), then=[reading]) == [[(None,)], [(2,)]]
    assert session.generation == 1  # its connection is as good as before
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):  # which transaction was refused is not known
        await session.run_then(too_early(), then=[too_early()])
    assert eyes.states() == {"available": 2}
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):  # another's NOTIFY, as of a trigger
        await session.run(Statement("SELECT pg_notify('app', '')", {}, list))
    await session.close()


@pytest.mark.promise("F28")
async def test_so_is_a_statement_that_is_a_transaction_of_its_own(dsn: str, eyes: Eyes, holder: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        assert drivers.run(conn, too_early()) == [(None,)]
        assert drivers.run(conn.cursor(), too_early()) == [(None,)]
    with closing(psycopg2.connect(dsn)) as conn2:
        conn2.autocommit = True
        assert drivers.run(conn2, too_early()) == [(None,)]
    conn3 = await asyncpg.connect(dsn)
    assert await drivers.arun(conn3, too_early()) == [(None,)]
    await conn3.close()
    assert eyes.states() == {"available": 4}
    with closing(psycopg.connect(dsn)) as conn:
        drivers.run(conn, too_early())
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):  # in an application's transaction it is the COMMIT
            conn.commit()
    assert eyes.states() == {"available": 4}


@pytest.mark.promise("F28")
async def test_other_limits_of_the_server_are_no_full_queue(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        with pytest.raises(psycopg.errors.ProgramLimitExceeded) as caught:
            conn.execute("DO $$ BEGIN RAISE EXCEPTION 'no more' USING ERRCODE = '54000'; END $$")
        assert not is_full(caught.value)


@pytest.mark.promise("F28")
@pytest.mark.each_value
@pytest.mark.parametrize("on_loop", [True, False])
@pytest.mark.parametrize("kind", ["transactional", "iterates", "its own connection"])
async def test_a_handler_whose_own_notify_is_refused_runs_again_until_there_is_room(
    dsn: str, eyes: Eyes, aconn: psycopg.AsyncConnection, on_loop: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writes were undone each time, no attempt is spent, and neither policy nor `fail_on` is asked."""
    monkeypatch.setattr(serialization_retries, "UNABLE_SECONDS", 0.1)
    eyes.do("CREATE TABLE effect (n int)")
    write, tell, runs = "INSERT INTO effect VALUES (1)", "NOTIFY app", list[int]()

    def writes(job: Job) -> None:
        runs.append(job.attempt)
        if kind == "its own connection":
            with closing(psycopg.connect(dsn)) as conn:
                conn.execute(write)
                conn.execute(tell)
                conn.commit()
            return
        for _ in job.iterate(lambda after: [] if after else [(1, 1)]) if kind == "iterates" else [()]:
            job.connection.execute(write)
            job.connection.execute(tell)

    async def awrites(job: Job) -> None:
        if kind == "its own connection":
            return writes(job)
        runs.append(job.attempt)
        if kind == "iterates":
            async for _ in job.aiterate(lambda after: [] if after else [(1, 1)]):
                await (await job.aconnection()).execute(write)
                await (await job.aconnection()).execute(tell)
        else:
            await (await job.aconnection()).execute(write)
            await (await job.aconnection()).execute(tell)
        return None

    policy = RetryPolicy(1, fail_on=(psycopg.Error,))
    telling = task(name="full.tells", retry=policy, transactional=kind == "transactional")(
        awrites if on_loop else writes
    )
    async with AsyncExitStack() as stack:
        with full(dsn):
            await stack.enter_async_context(leader(dsn, telling))
            await telling.aenqueue(aconn)
            await aconn.commit()
            await until(lambda: len(runs) >= 3)
            assert eyes.one("SELECT count(*) FROM effect") == 0
        await until(eyes.done(1))
    assert eyes.one("SELECT count(*) FROM effect") == 1
    assert set(runs) == {1}
    assert eyes.all("SELECT DISTINCT outcome, error_type FROM pgqueue.attempt") == [
        ("interrupted", "ProgramLimitExceeded")
    ]
