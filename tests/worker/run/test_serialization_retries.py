"""Deadlocks, serialization failures and lock timeouts: run again in place, uncounted up to ten, whoever raised them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from contextvars import ContextVar
from typing import Any

import asyncpg
import django.db.utils
import psycopg
import psycopg2
import pytest
import sqlalchemy
import sqlalchemy.exc
from psycopg.errors import DeadlockDetected, LockNotAvailable, UniqueViolation
from workers import Eyes, until, work

import pgqueue
from pgqueue import RetryPolicy
from pgqueue.client.tasks import task
from pgqueue.jobs.job import Job
from pgqueue.worker.run import serialization_retries
from pgqueue.worker.run.serialization_retries import ABORTS_MOST, aborted, pause, sqlstate

setting: ContextVar[str] = ContextVar("setting", default="clean")


class Stage:
    """What handlers and test share: the database, and the moments they wait for."""

    def __init__(self) -> None:
        self.dsn = ""
        self.runs: list[int] = []
        self.meet: Callable[[], object] = lambda: None
        self.act: Callable[[Job], object] = lambda job: None


stage = Stage()


@pytest.fixture(autouse=True)
def anew(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.__init__()  # type: ignore[misc]
    stage.dsn = dsn
    monkeypatch.setattr(serialization_retries, "PAUSE_MOST", 0.06)


# Which errors --------------------------------------------------------------------------------------------------------


def raised_from(cause: BaseException, error: Exception) -> Exception:
    try:
        raise error from cause
    except Exception as raised:
        return raised


class Psycopg2Deadlock(Exception):
    """As psycopg2 says it; in its own errors only the server's answer sets the code."""

    pgcode = "40P01"


class Broken(Exception):
    @property
    def sqlstate(self) -> str:
        raise ValueError("not even that")


ABORTS = {
    "psycopg deadlock": DeadlockDetected(),
    "psycopg serialization": psycopg.errors.SerializationFailure(),
    "psycopg lock timeout": LockNotAvailable(),
    "psycopg2": Psycopg2Deadlock(),
    "asyncpg": asyncpg.exceptions.SerializationError(),
    "sqlalchemy": sqlalchemy.exc.OperationalError("SELECT 1", None, DeadlockDetected()),
    "sqlalchemy with psycopg2": sqlalchemy.exc.DBAPIError("SELECT 1", None, Psycopg2Deadlock()),
    "django": raised_from(DeadlockDetected(), django.db.utils.OperationalError("deadlock detected")),
    "wrapped twice": raised_from(
        sqlalchemy.exc.OperationalError("SELECT 1", None, DeadlockDetected()), RuntimeError("could not transfer")
    ),
    "broken": raised_from(DeadlockDetected(), Broken()),
}


@pytest.mark.promise("T07")
@pytest.mark.parametrize("name", ABORTS)
def test_an_abort_is_known_whoever_raised_it(name: str) -> None:
    assert aborted(RetryPolicy(), ABORTS[name])


def circle() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


@pytest.mark.parametrize(
    "error",
    [
        UniqueViolation(),
        psycopg.OperationalError("the connection is lost"),
        ValueError("40P01"),
        Broken(),
        circle(),
        raised_from(DeadlockDetected(), pgqueue.Retry(5)),
        raised_from(DeadlockDetected(), pgqueue.Fail("no")),
        raised_from(DeadlockDetected(), pgqueue.Snooze(5)),
        raised_from(DeadlockDetected(), pgqueue.Cancel("no")),
    ],
    ids=repr,
)
def test_anything_else_is_what_it_was(error: BaseException) -> None:
    assert not aborted(RetryPolicy(), error)


def test_fail_on_and_a_retry_function_win_and_retry_on_does_not_matter() -> None:
    error = sqlalchemy.exc.OperationalError("SELECT 1", None, DeadlockDetected())
    assert not aborted(RetryPolicy(fail_on=(sqlalchemy.exc.OperationalError,)), error)
    assert not aborted(RetryPolicy(fail_on=(DeadlockDetected,)), DeadlockDetected())
    assert not aborted(RetryPolicy.of(lambda attempt, exc: 3), error)
    assert aborted(RetryPolicy(retry_on=(OSError,)), error)
    assert aborted(RetryPolicy(fail_on=(OSError,)), error)


@pytest.mark.parametrize("abort", [1_024, 1_025, 10_000, 10**9])
def test_a_pause_is_1_s_at_most_after_any_number_of_aborts(abort: int) -> None:
    assert serialization_retries.PAUSE_LEAST <= pause(abort) <= serialization_retries.PAUSE_MOST


def test_pauses_are_50_ms_to_1_s_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization_retries, "PAUSE_MOST", 1.0)
    pauses = {number: [pause(number) for _ in range(500)] for number in range(1, ABORTS_MOST + 1)}
    assert min(map(min, pauses.values())) >= 0.05
    assert max(pauses[1]) <= 0.1
    assert 0.7 < max(pauses[10]) <= 1.0
    assert len({round(each, 6) for each in pauses[10]}) > 400


# With a database: real aborts ----------------------------------------------------------------------------------------

SETUP = "CREATE TABLE acct (id int PRIMARY KEY, n int NOT NULL DEFAULT 0); INSERT INTO acct VALUES (1), (2)"
QUICK = "SET deadlock_timeout = '20ms'"


@task(name="aborts.moves")
def moves(job: Job, first: int, second: int) -> None:
    stage.runs.append(job.id)
    with psycopg.connect(stage.dsn) as conn:
        conn.execute(QUICK)
        conn.execute("UPDATE acct SET n = n + 1 WHERE id = %s", [first])
        stage.meet()
        conn.execute("UPDATE acct SET n = n + 1 WHERE id = %s", [second])


@task(name="aborts.moves_async")
async def moves_async(job: Job, first: int, second: int) -> None:
    stage.runs.append(job.id)
    async with await psycopg.AsyncConnection.connect(stage.dsn) as conn:
        await conn.execute(QUICK)
        await conn.execute("UPDATE acct SET n = n + 1 WHERE id = %s", [first])
        await asyncio.to_thread(stage.meet)
        await conn.execute("UPDATE acct SET n = n + 1 WHERE id = %s", [second])


@pytest.mark.promise("T06", "T07")
@pytest.mark.parametrize("crosses", [moves, moves_async], ids=lambda each: each.name)
async def test_of_two_jobs_that_deadlock_the_victim_runs_again_at_once(
    crosses: Any, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do(SETUP)
    barrier = threading.Barrier(2)
    stage.meet = lambda: len(stage.runs) > 2 or barrier.wait(30)
    jobs = [crosses.enqueue(conn, 1, 2).id, crosses.enqueue(conn, 2, 1).id]
    conn.commit()
    async with work(dsn, crosses) as worker:
        await until(eyes.done(2))
        assert worker.services.executor._retries.retried == 1
    assert eyes.all("SELECT n FROM acct ORDER BY id") == [(2,), (2,)]
    assert eyes.all("SELECT DISTINCT state, attempt FROM pgqueue.job") == [("completed", 1)]
    [(victim, attempt, outcome, error, message, started, traceback)] = eyes.all(
        "SELECT job_id, attempt, outcome, error_type, message, started_at < finished_at, traceback FROM pgqueue.attempt"
    )
    assert (attempt, outcome, error, started) == (1, "aborted", "DeadlockDetected", True)
    assert "deadlock detected" in message
    assert crosses.fn.__name__ in traceback
    assert stage.runs == [*jobs, victim] or stage.runs == [*reversed(jobs), victim]


@task(name="aborts.transfers", transactional=True)
def transfers(job: Job, first: int, second: int) -> None:
    stage.runs.append(job.id)
    job.connection.execute(QUICK)
    job.connection.execute("UPDATE acct SET n = n - 1 WHERE id = %s", [first])
    job.enqueue(moves, 1, 1)
    stage.meet()
    job.connection.execute("UPDATE acct SET n = n + 1 WHERE id = %s", [second])


@task(name="aborts.transfers_async", transactional=True)
async def transfers_async(job: Job, first: int, second: int) -> None:
    stage.runs.append(job.id)
    conn = await job.aconnection()
    await conn.execute(QUICK)
    await conn.execute("UPDATE acct SET n = n - 1 WHERE id = %s", [first])
    job.enqueue(moves, 1, 1)
    await asyncio.to_thread(stage.meet)
    await conn.execute("UPDATE acct SET n = n + 1 WHERE id = %s", [second])


@pytest.mark.promise("T06", "T07")
@pytest.mark.parametrize("crosses", [transfers, transfers_async], ids=lambda each: each.name)
async def test_of_two_transactional_jobs_that_deadlock_both_happen_once(
    crosses: Any, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do(SETUP)
    barrier = threading.Barrier(2)
    stage.meet = lambda: len(stage.runs) > 2 or barrier.wait(30)
    crosses.using(queue="cross").enqueue(conn, 1, 2)
    crosses.using(queue="cross").enqueue(conn, 2, 1)
    conn.commit()
    async with work(dsn, crosses, queues=["cross"]):
        await until(eyes.done(2))
    assert len(stage.runs) == 3
    assert eyes.all("SELECT n FROM acct ORDER BY id") == [(0,), (0,)]
    assert eyes.all("SELECT attempt, outcome FROM pgqueue.attempt") == [(1, "aborted")]
    # What the aborted run had enqueued went with it.
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = 'aborts.moves'") == 2


@task(name="aborts.waits_for_a_lock")
async def waits_for_a_lock() -> None:
    async with await psycopg.AsyncConnection.connect(stage.dsn) as conn:
        await conn.execute("SET lock_timeout = '30ms'")
        await conn.execute("UPDATE acct SET n = n + 1 WHERE id = 1")


@pytest.mark.promise("T07", "I12")
async def test_a_lock_that_is_not_got_in_time_is_tried_again_until_it_is_free(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do(SETUP)
    waits_for_a_lock.enqueue(conn)
    conn.commit()
    conn.execute("UPDATE acct SET n = 10 WHERE id = 1")
    async with work(dsn, waits_for_a_lock):
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.attempt WHERE error_type = 'LockNotAvailable'") >= 2)
        conn.commit()
        await until(eyes.done(1))
    assert eyes.one("SELECT n FROM acct WHERE id = 1") == 11
    assert eyes.one("SELECT attempt FROM pgqueue.job") == 1


@task(name="aborts.serializes")
def serializes() -> None:
    with psycopg.connect(stage.dsn) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("SELECT sum(n) FROM acct")
        stage.meet()
        conn.execute("UPDATE acct SET n = n + 1 WHERE id = 1")


@pytest.mark.promise("T07")
async def test_a_serialization_failure_runs_again(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    eyes.do(SETUP)
    disturbed: list[int] = []

    def disturb() -> None:
        if not disturbed:
            disturbed.append(1)
            with psycopg.connect(dsn) as other:
                other.execute("UPDATE acct SET n = n + 1 WHERE id = 1")

    stage.meet = disturb
    serializes.enqueue(conn)
    conn.commit()
    async with work(dsn, serializes):
        await until(eyes.done(1))
    assert eyes.one("SELECT n FROM acct WHERE id = 1") == 2
    assert eyes.all("SELECT outcome, error_type FROM pgqueue.attempt") == [("aborted", "SerializationFailure")]


# With a database: aborts as often as we like -------------------------------------------------------------------------

ABORT = "DO $$ BEGIN RAISE 'we take turns' USING ERRCODE = '40P01'; END $$"


def run(job: Job) -> None:
    stage.runs.append(job.attempt)
    stage.act(job)
    with psycopg.connect(stage.dsn) as conn:
        conn.execute(ABORT)


TWICE = RetryPolicy(attempts=2, first=0)


@task(name="aborts.in_thread", retry=TWICE)
def in_thread(job: Job) -> None:
    run(job)


@task(name="aborts.on_loop", retry=TWICE)
async def on_loop(job: Job) -> None:
    run(job)


@task(name="aborts.timed", retry=1, timeout=2.0)
def timed(job: Job) -> None:
    run(job)


BOTH = pytest.mark.parametrize("always", [in_thread, on_loop], ids=lambda each: each.name)
ROWS = "SELECT attempt, outcome, count(*)::int FROM pgqueue.attempt GROUP BY 1, 2 ORDER BY 1, 2"


@pytest.mark.promise("T07")
@BOTH
async def test_after_ten_aborts_in_the_life_of_a_job_the_next_are_failures(
    always: Any, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    job = always.enqueue(conn).id
    conn.commit()
    async with work(dsn, always, poll=0.05):
        await until(eyes.is_in(job, "failed"))
    assert stage.runs == [1] * 11 + [2]
    assert eyes.all(ROWS) == [(1, "aborted", 10), (1, "failed", 1), (2, "failed", 1)]


@pytest.mark.second
@BOTH
async def test_the_ten_are_counted_over_all_workers_of_a_job(
    always: Any, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """A worker in the pause is told to go; the next one does not begin at none."""
    job = always.enqueue(conn).id
    conn.commit()
    async with work(dsn, always, poll=0.05) as worker:
        # In its pause, not in its handler: what stops that could come between its connect() and the `with`.
        await until(lambda: len(stage.runs) >= 4 and worker.services.executor._retries._pausing)
        await worker.stop(0)
    await until(lambda: eyes.state(job) == "available")
    assert eyes.one("SELECT attempt FROM pgqueue.job") == 0
    async with work(dsn, always, poll=0.05):
        await until(eyes.is_in(job, "failed"))
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt WHERE outcome = 'aborted'") == ABORTS_MOST


@pytest.mark.promise("T03")
@BOTH
async def test_a_job_given_to_another_worker_is_not_run_again_here(
    always: Any, dsn: str, eyes: Eyes, conn: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(job: Job) -> None:
        with psycopg.connect(dsn) as other:
            other.execute("DELETE FROM pgqueue.job_running")

    stage.act = lose
    always.enqueue(conn)
    conn.commit()
    async with work(dsn, always) as worker:
        await until(lambda: stage.runs and not worker.state.held)
        assert worker.services.completer.fenced == 0
    assert stage.runs == [1]
    assert eyes.all(ROWS) == []
    assert "had been given to another worker" in caplog.text


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization_retries, "PAUSE_LEAST", 60.0)
    monkeypatch.setattr(serialization_retries, "PAUSE_MOST", 60.0)
    monkeypatch.setattr(serialization_retries, "PAUSE_FIRST", 60.0)


@pytest.mark.usefixtures("long_pauses")
@BOTH
async def test_a_cancel_ends_the_pause(always: Any, dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    job = always.enqueue(conn).id
    conn.commit()
    async with work(dsn, always) as worker:
        await until(lambda: eyes.all(ROWS))
        pgqueue.cancel(conn, job)
        conn.commit()
        await until(eyes.is_in(job, "cancelled"))
        await until(lambda: not worker.services.executor._retries._pausing)
        assert len(stage.runs) == 1


@pytest.mark.usefixtures("long_pauses")
@BOTH
async def test_a_worker_that_goes_quiet_ends_the_pause_and_gives_the_job_back(
    always: Any, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    job = always.enqueue(conn).id
    conn.commit()
    async with work(dsn, always) as worker:
        await until(lambda: eyes.all(ROWS))
        worker.quiet()
        await asyncio.wait_for(worker.run(), 30)
    assert (eyes.state(job), eyes.one("SELECT attempt FROM pgqueue.job")) == ("available", 0)
    assert len(stage.runs) == 1


@pytest.mark.second
async def test_a_timeout_counts_over_the_runs_in_place(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    gate = threading.Event()
    stage.act = lambda job: len(stage.runs) == 3 and gate.wait(30)
    timed.enqueue(conn)
    conn.commit()
    async with work(dsn, timed) as worker:
        await until(lambda: worker.services.executor._timeouts._next < float("inf"))
        await until(lambda: len(stage.runs) == 3)
        await until(lambda: any(run.stop_outcome for run in worker.services.executor._running.runs.values()))
        gate.set()
        await until(lambda: eyes.states() == {"failed": 1})
    assert eyes.one("SELECT reason FROM pgqueue.job") == "timeout"


@BOTH
async def test_an_abort_that_cannot_be_noted_is_a_failure(
    always: Any, dsn: str, eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*args: object) -> None:
        raise psycopg.OperationalError("the database is away")

    job = always.enqueue(conn).id
    conn.commit()
    async with work(dsn, always, poll=0.05) as worker:
        monkeypatch.setattr(worker.services.executor._retries, "_note", away)
        await until(eyes.is_in(job, "failed"))
    assert eyes.all(ROWS) == [(1, "failed", 1), (2, "failed", 1)]


@task(name="aborts.in_time")
def in_time(job: Job) -> None:
    stage.runs.append(job.attempt)
    with psycopg.connect(stage.dsn, autocommit=True) as conn:
        while not (conn.execute("SELECT pgqueue.now() > %s", [job.deadline]).fetchone() or [None])[0]:
            conn.execute("SELECT pg_sleep(0.01)")
    if len(stage.runs) == 1:
        raise DeadlockDetected


async def test_a_deadline_that_passes_meanwhile_stops_no_run_of_a_started_attempt(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    async with work(dsn, in_time):
        for seconds in (0.3, 3.0, 30.0):  # on a slow machine it may not have started by then
            if not stage.runs:
                in_time.using(deadline=seconds).enqueue(conn)
                conn.commit()
                await until(lambda: eyes.states().keys() <= {"completed", "cancelled"})
    assert eyes.states()["completed"] == 1
    assert stage.runs == [1, 1]


@BOTH
@pytest.mark.parametrize("how", ["cancel", "quiet"])
async def test_what_stops_a_job_does_not_wait_for_its_note(
    always: Any, how: str, dsn: str, eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database does not answer it. Naive: a sync handler that has left is taken for one that does not stop."""
    noting, answer = asyncio.Event(), asyncio.Event()

    async def unanswered(*args: object) -> int:
        noting.set()
        await answer.wait()
        return 0

    async with work(dsn, always) as worker:
        monkeypatch.setattr(worker.services.executor._retries, "_note", unanswered)
        job = always.enqueue(conn).id
        conn.commit()
        await asyncio.wait_for(noting.wait(), 50)
        if how == "cancel":
            pgqueue.cancel(conn, job)
            conn.commit()
            await until(eyes.is_in(job, "cancelled"))
        else:
            worker.quiet()
            await asyncio.wait_for(worker.run(), 30)
            assert (eyes.state(job), eyes.one("SELECT attempt FROM pgqueue.job")) == ("available", 0)
        answer.set()
    assert stage.runs == [1]


@task(name="aborts.dirty")
async def dirty(job: Job) -> str:
    before = setting.get()
    setting.set("changed")
    stage.runs.append(1)
    if len(stage.runs) == 1:
        raise DeadlockDetected
    return before


@task(name="aborts.dirty_thread")
def dirty_thread(job: Job) -> str:
    before = setting.get()
    setting.set("changed")
    stage.runs.append(1)
    if len(stage.runs) == 1:
        raise DeadlockDetected
    return before


@pytest.mark.parametrize("leaves", [dirty, dirty_thread], ids=lambda each: each.name)
async def test_the_next_run_does_not_feel_the_one_before(
    leaves: Any, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    leaves.enqueue(conn)
    conn.commit()
    async with work(dsn, leaves):
        await until(eyes.done(1))
    assert eyes.one("SELECT result FROM pgqueue.job") == "clean"
    assert len(stage.runs) == 2


def test_drivers_that_raise_for_real(dsn: str) -> None:
    with closing(psycopg2.connect(dsn)) as old, old.cursor() as cursor, pytest.raises(psycopg2.Error) as error:
        cursor.execute(ABORT)
    assert sqlstate(error.value) == "40P01"
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    with engine.connect() as conn, pytest.raises(sqlalchemy.exc.DBAPIError) as wrapping:
        conn.execute(sqlalchemy.text(ABORT))
    engine.dispose()
    assert sqlstate(wrapping.value) == "40P01"
