"""The session of a transactional job ends before the COMMIT: nothing was kept, it runs again, no attempt is spent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from accounts import accounts
from transactional_tasks import declared, enqueued, outcomes
from workers import Eyes, until, wait_until, work

from pgqueue import Fail, Job, RetryPolicy
from pgqueue.worker.run import serialization_retries
from pgqueue.worker.run.serialization_retries import ABORTS_MOST, aborted

__all__ = ["accounts"]

pytestmark = pytest.mark.promise("T07")
BOTH = pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
ONCE = RetryPolicy(attempts=1)
SESSION = "SELECT pg_terminate_backend(%s, 5000)"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization_retries, "PAUSE_MOST", 0.06)


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
    assert not aborted(policy, psycopg.errors.RaiseException("refused at the COMMIT"), session_lost=True)
    assert not aborted(policy, Fail("so"), session_lost=True)
    assert not aborted(policy, asyncio.CancelledError(), session_lost=True)
    assert not aborted(RetryPolicy(attempts=5, fail_on=(psycopg.OperationalError,)), lost, session_lost=True)
    assert not aborted(RetryPolicy(attempts=5, function=lambda job, error: 1.0), lost, session_lost=True)
