"""The end of a transactional job in one message: it is there, it survives what drops it, and it clears or closes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from test_transactions import accounts, balances, declared, outcomes
from test_work import BOTH, enqueued, whole
from workers import Eyes, until, work

from pgqueue import Job
from pgqueue.borrowed import UNDISTURBED, AsyncBorrowed, Borrowed

__all__ = ["accounts"]

WRITE = "UPDATE account SET balance = balance + 1 WHERE id = 1"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The connections that have completed a job in one message, in order."""
    conns: list[Any] = []
    complete, acomplete = Borrowed._complete, AsyncBorrowed._complete

    def completes(conn: Borrowed, statement: Any, ahead: bool) -> Any:
        conns.append(conn)
        return complete(conn, statement, ahead)

    async def acompletes(conn: AsyncBorrowed, statement: Any, ahead: bool) -> Any:
        conns.append(conn)
        return await acomplete(conn, statement, ahead)

    monkeypatch.setattr(Borrowed, "_complete", completes)
    monkeypatch.setattr(AsyncBorrowed, "_complete", acompletes)
    yield conns


async def ran(dsn: str, eyes: Eyes, worker: Any, asked: Any, *args: Any) -> int:
    """The job that was completed and is over."""
    job_id = enqueued(dsn, asked, *args)
    await until(eyes.is_in(job_id, "completed"))
    await until(lambda: whole(worker))
    return job_id


@BOTH
async def test_what_psycopg_drops_costs_no_attempt_and_is_prepared_again(
    dsn: str, accounts: Eyes, sent: list[Any], on_loop: bool
) -> None:
    """After a rollback to a savepoint psycopg drops every prepared statement of the session."""

    def rolls(job: Job, back: bool) -> None:
        conn = job.connection
        conn.execute(WRITE, prepare=True)
        if back:
            with pytest.raises(psycopg.errors.CheckViolation), conn.transaction():
                conn.execute("UPDATE account SET balance = -1")

    async def arolls(job: Job, back: bool) -> None:
        conn = await job.aconnection()
        await conn.execute(WRITE, prepare=True)
        if back:
            with pytest.raises(psycopg.errors.CheckViolation):
                async with conn.transaction():
                    await conn.execute("UPDATE account SET balance = -1")

    rolling = declared(arolls if on_loop else rolls)
    async with work(dsn, rolling, concurrency=1) as worker:
        await ran(dsn, accounts, worker, rolling, False)
        assert len(sent) == 1
        await ran(dsn, accounts, worker, rolling, True)
        assert len(sent) == 1
        for _ in range(UNDISTURBED):
            await ran(dsn, accounts, worker, rolling, False)
        await ran(dsn, accounts, worker, rolling, False)
        assert len(sent) >= 2 and len(set(sent)) == 1
    assert balances(accounts)[0] == 100 + 3 + UNDISTURBED
    assert outcomes(accounts) == []


@BOTH
async def test_what_is_dropped_unseen_aborts_the_run_once_and_not_again(
    dsn: str, accounts: Eyes, sent: list[Any], on_loop: bool
) -> None:
    """In a function of the handler's. Nothing was committed, and the job runs again; from then on without the name."""
    drop = "DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$"

    def drops(job: Job) -> None:
        job.connection.execute(WRITE)
        job.connection.execute(drop)

    async def adrops(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute(WRITE)
        await conn.execute(drop)

    dropping = declared(adrops if on_loop else drops)
    async with work(dsn, dropping, concurrency=1) as worker:
        await ran(dsn, accounts, worker, dropping)
        assert len(sent) == 1
        assert balances(accounts)[0] == 101
        for _ in range(2):
            await ran(dsn, accounts, worker, dropping)
        assert len(sent) == 1
    assert balances(accounts)[0] == 103
    assert outcomes(accounts) == ["aborted"]
    assert accounts.one("SELECT max(attempt) FROM pgqueue.job_done") == 1


@BOTH
async def test_a_session_that_could_not_be_cleared_is_not_lent_again(
    dsn: str, accounts: Eyes, sent: list[Any], on_loop: bool
) -> None:
    """Its job has ended all the same: what clears comes after the COMMIT."""
    pids: list[int] = []

    def leaves(job: Job) -> None:
        conn = job.connection
        pids.append(conn.info.backend_pid)
        conn.execute(WRITE)
        conn.execute("SELECT pg_advisory_lock(42)")
        conn.execute('DEALLOCATE "pgqueue_1_8"')

    async def aleaves(job: Job) -> None:
        conn = await job.aconnection()
        pids.append(conn.info.backend_pid)
        await conn.execute(WRITE)
        await conn.execute("SELECT pg_advisory_lock(42)")
        await conn.execute('DEALLOCATE "pgqueue_1_8"')

    leaving = declared(aleaves if on_loop else leaves)
    async with work(dsn, leaving, concurrency=1) as worker:
        for _ in range(2):
            await ran(dsn, accounts, worker, leaving)
        await until(lambda: accounts.one("SELECT pg_try_advisory_xact_lock(42)"))
    assert len(set(pids)) == 2 == len(set(sent))
    assert balances(accounts)[0] == 102
    assert outcomes(accounts) == []


@BOTH
async def test_a_commit_that_fails_after_the_completion_keeps_neither(
    dsn: str, accounts: Eyes, sent: list[Any], on_loop: bool
) -> None:
    """A deferred constraint fails at the COMMIT, after the completion: nothing of either is kept."""
    accounts.do("CREATE TABLE later (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    twice = "INSERT INTO later VALUES (1), (1)"

    def defers(job: Job) -> str:
        job.connection.execute("SELECT pg_advisory_lock(42)")
        job.connection.execute(twice if job.attempt == 1 else WRITE)
        return "größer →"

    async def adefers(job: Job) -> str:
        conn = await job.aconnection()
        await conn.execute("SELECT pg_advisory_lock(42)")
        await conn.execute(twice if job.attempt == 1 else WRITE)
        return "größer →"

    deferring = declared(adefers if on_loop else defers)
    async with work(dsn, deferring, concurrency=1) as worker:
        await ran(dsn, accounts, worker, deferring)
    assert len(sent) == 2
    assert outcomes(accounts) == ["failed"]
    assert accounts.one("SELECT error_type FROM pgqueue.attempt") == "UniqueViolation"
    assert accounts.one("SELECT count(*) FROM later") == 0
    assert accounts.one("SELECT result FROM pgqueue.job_done") == "größer →"
    assert balances(accounts)[0] == 101
