"""The session of a transactional job ends before the COMMIT: nothing was kept, it runs again, no attempt is spent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from accounts import accounts
from servers import Server
from transactional_tasks import declared, enqueued, outcomes
from workers import Eyes, until, wait_until, work

import pgqueue
from pgqueue import Cancel, Fail, Job, Retry, RetryPolicy, Snooze, Worker
from pgqueue.database import migrations
from pgqueue.worker.run import serialization_retries
from pgqueue.worker.run.serialization_retries import ABORTS_MOST, aborted

__all__ = ["accounts"]

pytestmark = [pytest.mark.promise("T07"), pytest.mark.each_value]
BOTH = pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
ONCE = RetryPolicy(attempts=1)
SESSION = "SELECT pg_terminate_backend(%s, 5000)"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization_retries, "PAUSE_MOST", 0.06)


@pgqueue.task(name="lost.plain")
def plain() -> None:
    """A job without a transaction of its own."""


class Losing:
    """A handler that writes, then calls `lose` with its session's process, in its first `times` runs."""

    def __init__(self, eyes: Eyes, times: int, lose: Callable[[Any], object] | None = None) -> None:
        self.eyes, self.times = eyes, times
        self.runs = 0
        self.attempts: set[int] = set()
        self._lose = lose or (lambda pid: eyes.do(SESSION, pid))

    def task(self, on_loop: bool, asks: bool, **options: Any) -> Any:
        """`asks`: the handler sends a statement after the loss, and so hears of it before the COMMIT."""

        def writes(job: Job) -> None:
            conn = job.connection
            conn.execute("UPDATE account SET balance = balance - 10 WHERE id = 1")
            if self._loses(job):
                self._lose(conn.info.backend_pid)
                if asks:
                    conn.execute("SELECT 1")

        async def awrites(job: Job) -> None:
            conn = await job.aconnection()
            await conn.execute("UPDATE account SET balance = balance - 10 WHERE id = 1")
            if self._loses(job):
                await asyncio.to_thread(self._lose, conn.info.backend_pid)
                if asks:
                    await conn.execute("SELECT 1")

        return declared(awrites if on_loop else writes, **options)

    def _loses(self, job: Job) -> bool:
        self.runs += 1
        self.attempts.add(job.attempt)
        return self.runs <= self.times


def with_policy(asked: Any, policy: RetryPolicy) -> Any:
    return asked.using(retry=policy)


@BOTH
@pytest.mark.parametrize("asks", [True, False], ids=["handler", "commit"])
async def test_a_job_without_retries_outlives_the_end_of_its_session(
    dsn: str, accounts: Eyes, on_loop: bool, asks: bool
) -> None:
    losing = Losing(accounts, times=3)
    writing = losing.task(on_loop, asks)
    async with work(dsn, writing):
        await until(accounts.is_in(enqueued(dsn, with_policy(writing, ONCE)), "completed"))
    assert (losing.runs, losing.attempts) == (4, {1})
    assert outcomes(accounts) == ["aborted"] * 3
    assert accounts.one("SELECT balance FROM account WHERE id = 1") == 90


ALL = """
    SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'pgqueue %' AND pid <> pg_backend_pid()
"""


@BOTH
@pytest.mark.parametrize("asks", [True, False], ids=["handler", "commit"])
async def test_a_job_outlives_the_end_of_all_sessions_of_its_worker(
    dsn: str, accounts: Eyes, on_loop: bool, asks: bool
) -> None:
    """That over which the loss is noted ends with them. It was used before."""
    losing = Losing(accounts, times=2, lose=lambda pid: accounts.one(ALL))
    writing = losing.task(on_loop, asks)
    async with work(dsn, writing, plain):
        await until(accounts.is_in(enqueued(dsn, plain), "completed"))
        await until(accounts.is_in(enqueued(dsn, with_policy(writing, ONCE)), "completed"))
    assert (losing.runs, losing.attempts) == (3, {1})
    assert accounts.one("SELECT balance FROM account WHERE id = 1") == 90


async def test_a_job_that_ends_its_session_each_time_is_not_run_for_ever(dsn: str, accounts: Eyes) -> None:
    losing = Losing(accounts, times=1000)
    writing = losing.task(False, True)
    async with work(dsn, writing):
        await until(accounts.is_in(enqueued(dsn, with_policy(writing, ONCE)), "failed"))
    assert losing.runs == ABORTS_MOST + 1
    assert accounts.one("SELECT balance FROM account WHERE id = 1") == 100


@BOTH
@pytest.mark.parametrize("asks", [True, False], ids=["handler", "commit"])
async def test_a_handler_whose_session_ended_by_a_timeout_has_failed(
    dsn: str, accounts: Eyes, on_loop: bool, asks: bool
) -> None:
    """It took too long: running it again at once would take as long again."""
    gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
    losing = Losing(accounts, times=1000, lose=lambda pid: wait_until(lambda: accounts.one(gone, pid)))
    writing = losing.task(on_loop, asks)
    with psycopg.connect(dsn, autocommit=True) as conn:
        database = conn.info.dbname
        conn.execute(f'ALTER DATABASE "{database}" SET idle_in_transaction_session_timeout = 200'.encode())
    async with work(dsn, writing):
        await until(accounts.is_in(enqueued(dsn, with_policy(writing, ONCE)), "failed"))
    assert losing.runs == 1
    assert outcomes(accounts) == ["failed"]


@pytest.mark.parametrize("aborts", ["a lost session", "a serialization failure"])
async def test_a_task_group_that_failed_is_made_again(dsn: str, accounts: Eyes, aborts: str) -> None:
    """On Python 3.11 it leaves its task with a request to end."""
    runs: list[int] = []

    async def groups(job: Job) -> None:
        runs.append(job.attempt)
        conn = await job.aconnection()
        await conn.execute("UPDATE account SET balance = balance - 10 WHERE id = 1")
        if len(runs) == 1 and aborts == "a lost session":
            await asyncio.to_thread(accounts.do, SESSION, conn.info.backend_pid)

        async def step() -> None:
            if len(runs) == 1 and aborts == "a serialization failure":
                raise psycopg.errors.SerializationFailure("x")
            await conn.execute("SELECT 1")

        async with asyncio.TaskGroup() as group:
            group.create_task(step())

    grouping = declared(groups)
    async with work(dsn, grouping):
        await until(accounts.is_in(enqueued(dsn, with_policy(grouping, ONCE)), "completed"))
    assert (runs, outcomes(accounts)) == ([1, 1], ["aborted"])
    assert accounts.one("SELECT balance FROM account WHERE id = 1") == 90


@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_a_handler_that_closes_its_connection_has_not_lost_it(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    runs: list[int] = []

    def closes(job: Job) -> None:
        runs.append(job.attempt)
        job.connection.close()

    async def acloses(job: Job) -> None:
        runs.append(job.attempt)
        await (await job.aconnection()).close()

    closing = declared(acloses if on_loop else closes)
    async with work(dsn, closing):
        await until(accounts.is_in(enqueued(dsn, with_policy(closing, ONCE)), "failed"))
    assert runs == [1]


def test_what_the_handler_asks_for_and_errors_of_the_server_come_first() -> None:
    policy = RetryPolicy(attempts=5)
    lost = psycopg.OperationalError("server closed the connection unexpectedly")
    assert aborted(policy, lost, session_lost=True)
    assert not aborted(policy, lost)
    assert aborted(policy, ValueError("made of it"), session_lost=True)
    assert aborted(policy, psycopg.errors.CrashShutdown("x"), session_lost=True)
    assert not aborted(policy, psycopg.errors.IdleInTransactionSessionTimeout("x"), session_lost=True)
    # What PgBouncer says: of the end of the server's session, and of a time limit of its own.
    assert aborted(policy, psycopg.errors.ProtocolViolation("server conn crashed?\nand more"), session_lost=True)
    assert not aborted(policy, psycopg.errors.ProtocolViolation("query_timeout"), session_lost=True)
    assert not aborted(policy, psycopg.errors.RaiseException("refused at the COMMIT"), session_lost=True)
    assert not aborted(policy, Fail("so"), session_lost=True)
    assert not aborted(policy, asyncio.CancelledError(), session_lost=True)
    assert not aborted(RetryPolicy(attempts=5, fail_on=(psycopg.OperationalError,)), lost, session_lost=True)
    assert not aborted(RetryPolicy(attempts=5, function=lambda job, error: 1.0), lost, session_lost=True)
    for asked in (Fail("so"), Cancel("so"), Retry(1.0), Snooze(1.0)):
        group = ExceptionGroup("a TaskGroup", [lost, asked])
        assert not aborted(policy, group, session_lost=True)
    assert aborted(policy, ExceptionGroup("a TaskGroup", [lost, lost]), session_lost=True)
    mixed = ExceptionGroup("a TaskGroup", [lost, psycopg.errors.UniqueViolation("x")])
    assert not aborted(policy, mixed, session_lost=True)
    # So a pooler says that a transaction was idle, or a query took, for too long.
    assert not aborted(policy, psycopg.errors.ProtocolViolation("idle transaction timeout"), session_lost=True)
    assert aborted(policy, psycopg.errors.ConnectionFailure("x"), session_lost=True)


@BOTH
@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK", "COMMIT; SELECT 1", "END"])
async def test_a_handler_that_ended_its_transaction_itself_and_lost_its_session_is_not_run_again(
    dsn: str, accounts: Eyes, how: str, on_loop: bool
) -> None:
    runs: list[int] = []

    def ends(job: Job) -> None:
        runs.append(job.attempt)
        conn = job.connection
        conn.execute("UPDATE account SET balance = balance - 10 WHERE id = 1")
        conn.execute(how.encode())
        accounts.do(SESSION, conn.info.backend_pid)
        conn.execute("SELECT 1")

    async def aends(job: Job) -> None:
        runs.append(job.attempt)
        conn = await job.aconnection()
        await conn.execute("UPDATE account SET balance = balance - 10 WHERE id = 1")
        await conn.execute(how.encode())
        await asyncio.to_thread(accounts.do, SESSION, conn.info.backend_pid)
        await conn.execute("SELECT 1")

    ending = declared(aends if on_loop else ends)
    async with work(dsn, ending):
        job = enqueued(dsn, ending)
        await until(accounts.is_in(job, "failed"))
    assert runs == [1]
    assert accounts.one("SELECT balance FROM account WHERE id = 1") == (100 if how == "ROLLBACK" else 90)
    [(said,)] = accounts.all("SELECT message FROM pgqueue.attempt")
    assert "ended the transaction by itself" in said


async def test_a_loss_that_the_handler_has_dealt_with_is_no_reason_any_more(dsn: str, accounts: Eyes) -> None:
    """It has a new transaction since, and fails by itself."""
    runs: list[int] = []

    async def deals(job: Job) -> None:
        runs.append(job.attempt)
        with contextlib.suppress(psycopg.OperationalError):
            async for _ in job.aiterate(lambda cursor: [(n, n) for n in range((cursor or 0) + 1, 4)], 1):
                conn = await job.aconnection()
                await conn.execute("UPDATE account SET balance = balance - 10 WHERE id = 1")
                await asyncio.to_thread(accounts.do, SESSION, conn.info.backend_pid)
        await (await job.aconnection()).execute("SELECT 1")
        raise ValueError("a failure of its own")

    dealing = declared(deals)
    async with work(dsn, dealing):
        await until(accounts.is_in(enqueued(dsn, with_policy(dealing, ONCE)), "failed"))
    assert runs == [1]
    assert outcomes(accounts) == ["failed"]


# Many at once ---------------------------------------------------------------------------------------------------------

LOCKED = "SELECT pg_advisory_lock(%s)"
SESSIONS = """
    SELECT count(*)::int, count(*) FILTER (WHERE xact_start IS NOT NULL)::int,
           count(*) FILTER (WHERE EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND locktype = 'advisory'))::int
    FROM pg_stat_activity a WHERE datname = current_database() AND application_name = 'pgqueue job'
"""


def left(worker: Worker, eyes: Eyes, on_loop: bool, size: int) -> dict[str, Any]:
    """What is held still after all jobs have ended: slots, runs, permits, transactions, sessions and what they hold."""
    services = worker.services
    pool = services.context._transactional._around.pool
    permits = (pool.on_loop if on_loop else pool.threads).permits
    [(sessions, transactions, locks)] = eyes.all(SESSIONS)
    held = {
        "jobs": len(worker.state.held),
        "slots": sum(group.running for group in services.running.groups),
        "runs": len(services.running.runs),
        "pauses": len(services.executor._retries._pausing),
        "notes": len(services.executor._retries._noting),
        "permits": permits is not None and permits.taken + len(permits._waiting),
        "open": len(services.context._transactional._open),
        "sessions": max(0, sessions - size),
        "transactions": transactions,  # one that was begun early is undone a little later
        "advisory locks": locks,
    }
    return {what: number for what, number in held.items() if number}


@pytest.mark.second
@BOTH
@pytest.mark.parametrize("size", [10, 3])
@pytest.mark.parametrize("asks", [True, False], ids=["handler", "commit"])
async def test_after_fifty_losses_of_ten_jobs_at_once_nothing_is_held(
    dsn: str, accounts: Eyes, asks: bool, size: int, on_loop: bool
) -> None:
    runs, losses = Counter[int](), 0
    together = threading.Barrier(10)

    def begins(job: Job) -> bool:
        runs[job.id] += 1
        return losses > 0 and runs[job.id] <= 5

    def lose(pid: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(SESSION, [pid])

    def writes(job: Job) -> None:
        loses = begins(job)
        if not losses:
            together.wait(30)
        conn = job.connection
        conn.execute(LOCKED, [job.id])
        conn.execute("INSERT INTO effect VALUES (%s)", [job.id])
        if loses:
            lose(conn.info.backend_pid)
            if asks:
                conn.execute("SELECT 1")

    async def awrites(job: Job) -> None:
        loses = begins(job)
        if not losses:
            await until(lambda: len(runs) == 10)
        conn = await job.aconnection()
        await conn.execute(LOCKED, [job.id])
        await conn.execute("INSERT INTO effect VALUES (%s)", [job.id])
        if loses:
            await asyncio.to_thread(lose, conn.info.backend_pid)
            if asks:
                await conn.execute("SELECT 1")

    writing = declared(awrites if on_loop else writes)
    async with work(dsn, writing, concurrency=10, pool_size=size) as worker:

        async def all_end(jobs: int) -> None:
            """A run gives back its slot after its job's end is written: in a thread that may be much later."""
            await until(accounts.done(jobs))
            with contextlib.suppress(AssertionError):  # the next line says what is held
                await until(lambda: not left(worker, accounts, on_loop, size))
            assert left(worker, accounts, on_loop, size) == {}

        for _ in range(10):
            enqueued(dsn, writing)
        await all_end(10)
        threads, tasks, losses = threading.active_count(), len(asyncio.all_tasks()), 5
        threads += 10 if on_loop else 0  # those of the loop's own executor, in which this test ends sessions
        for _ in range(10):
            enqueued(dsn, with_policy(writing, ONCE))
        await all_end(20)
        await until(lambda: len(asyncio.all_tasks()) <= tasks and threading.active_count() <= threads)
    assert accounts.all("SELECT count(*)::int, count(DISTINCT job)::int FROM effect") == [(20, 20)]
    assert outcomes(accounts) == ["aborted"] * 50
    assert accounts.all("SELECT DISTINCT state, attempt FROM pgqueue.job") == [("completed", 1)]


@pytest.mark.second
@BOTH
@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_of_the_server_doubles_and_loses_nothing_of_ten_jobs(
    own_server: Server, mode: str, on_loop: bool
) -> None:
    """Half of them are in a batch. Whether an attempt is spent depends on how soon the server is back."""
    dsn = own_server.dsn("postgres")
    migrations.migrate(dsn)
    with psycopg.connect(dsn) as conn:
        conn.execute("CREATE TABLE effect (job bigint NOT NULL, n int NOT NULL)")
    waiting, down = set[int](), threading.Event()
    numbers = [(n, n) for n in range(1, 6)]

    def goes(job: Job, batches: bool) -> None:
        for batch in job.iterate(lambda cursor: numbers[cursor or 0 :], 1) if batches else [[3]]:
            job.connection.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, batch[0]])
            if batch[0] == 3 and job.id not in waiting:
                waiting.add(job.id)
                assert down.wait(60)

    async def each(job: Job, batches: bool) -> AsyncIterator[list[int]]:
        if not batches:
            yield [3]
            return
        async for batch in job.aiterate(lambda cursor: numbers[cursor or 0 :], 1):
            yield batch

    async def agoes(job: Job, batches: bool) -> None:
        async for batch in each(job, batches):
            conn = await job.aconnection()
            await conn.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, batch[0]])
            if batch[0] == 3 and job.id not in waiting:
                waiting.add(job.id)
                await until(down.is_set)

    going = declared(agoes if on_loop else goes)
    async with work(dsn, going, concurrency=10, poll=0.05):
        for number in range(10):
            enqueued(dsn, going, number % 2 == 0)
        await until(lambda: len(waiting) == 10)
        await asyncio.to_thread(own_server.stop, mode)
        down.set()
        await asyncio.to_thread(own_server.start)
        eyes = Eyes(dsn)
        await until(eyes.done(10))
    effects = eyes.all("SELECT count(*)::int, count(DISTINCT (job, n))::int FROM effect")
    eyes.close()
    assert effects == [(30, 30)]
