"""The end of a transactional job in one message: it is there, it survives what drops it, and it clears or closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from accounts import accounts, balances
from handler_pools import whole
from transactional_tasks import BOTH, declared, enqueued, outcomes
from workers import Eyes, until, work

from pgqueue import Job
from pgqueue.worker.transactions import handler_connection
from pgqueue.worker.transactions.handler_connection import UNDISTURBED

__all__ = ["accounts"]

WRITE = "UPDATE account SET balance = balance + 1 WHERE id = 1"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The connections that have completed a job in one message, in order."""
    conns: list[Any] = []
    ending = handler_connection._Both._ending

    def ends(conn: Any, statement: Any, ahead: bool) -> bytes:
        if statement is not None:
            conns.append(conn)
        return ending(conn, statement, ahead)

    monkeypatch.setattr(handler_connection._Both, "_ending", ends)
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
    dsn: str, accounts: Eyes, sent: list[Any], caplog: pytest.LogCaptureFixture, on_loop: bool
) -> None:
    """Its job has ended all the same: what clears comes after the COMMIT, whatever is said of it."""
    pids: list[int] = []

    drop = 'DEALLOCATE "pgqueue_1_1"'

    def leaves(job: Job, dropping: bool) -> None:
        conn = job.connection
        pids.append(conn.info.backend_pid)
        conn.execute(WRITE)
        if dropping:
            conn.execute("SELECT pg_advisory_lock(42)")
            conn.execute(drop)

    async def aleaves(job: Job, dropping: bool) -> None:
        conn = await job.aconnection()
        pids.append(conn.info.backend_pid)
        await conn.execute(WRITE)
        if dropping:
            await conn.execute("SELECT pg_advisory_lock(42)")
            await conn.execute(drop)

    leaving = declared(aleaves if on_loop else leaves)
    async with work(dsn, leaving, concurrency=1) as worker:
        await ran(dsn, accounts, worker, leaving, True)
        await until(lambda: accounts.one("SELECT pg_try_advisory_xact_lock(42)"))
        await ran(dsn, accounts, worker, leaving, False)
    assert "given to another worker" not in caplog.text  # for so it looks to whom nothing was committed
    assert len(set(pids)) == 2 and len(sent) == 1  # from then on without the names
    assert balances(accounts)[0] == 102
    assert outcomes(accounts) == []


@pytest.mark.parametrize("result", ["größer →", None])
@BOTH
async def test_a_commit_that_fails_after_the_completion_keeps_neither(
    dsn: str, accounts: Eyes, sent: list[Any], on_loop: bool, result: str | None
) -> None:
    """A deferred constraint fails at the COMMIT, after the completion: nothing of either is kept."""
    accounts.do("CREATE TABLE later (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    twice = "INSERT INTO later VALUES (1), (1)"

    def defers(job: Job) -> str | None:
        job.connection.execute("SELECT pg_advisory_lock(42)")
        job.connection.execute(twice if job.attempt == 1 else WRITE)
        return result

    async def adefers(job: Job) -> str | None:
        conn = await job.aconnection()
        await conn.execute("SELECT pg_advisory_lock(42)")
        await conn.execute(twice if job.attempt == 1 else WRITE)
        return result

    deferring = declared(adefers if on_loop else defers)
    async with work(dsn, deferring, concurrency=1) as worker:
        await ran(dsn, accounts, worker, deferring)
    assert len(sent) == (2 if result is None else 0)  # a result goes with a completion of its own
    assert outcomes(accounts) == ["failed"]
    assert accounts.one("SELECT error_type FROM pgqueue.attempt") == "UniqueViolation"
    assert accounts.one("SELECT count(*) FROM later") == 0
    assert accounts.one("SELECT result FROM pgqueue.job_done") == result
    assert balances(accounts)[0] == 101


@BOTH
async def test_whatever_is_said_at_a_commit_it_is_found_out_whether_it_took_place(
    dsn: str, accounts: Eyes, sent: list[Any], caplog: pytest.LogCaptureFixture, on_loop: bool
) -> None:
    """A trigger can say at the COMMIT what only what follows it can say otherwise."""
    accounts.do("CREATE TABLE late (id int)")
    accounts.do(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$; "
        "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )

    def defers(job: Job) -> None:
        job.connection.execute(WRITE)
        if job.attempt == 1:
            job.connection.execute("INSERT INTO late VALUES (1)")

    async def adefers(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute(WRITE)
        if job.attempt == 1:
            await conn.execute("INSERT INTO late VALUES (1)")

    deferring = declared(adefers if on_loop else defers)
    async with work(dsn, deferring, concurrency=1) as worker:
        await ran(dsn, accounts, worker, deferring)
    assert len(sent) == 2 == len(set(sent))
    assert outcomes(accounts) == ["failed"]
    assert accounts.one("SELECT error_type FROM pgqueue.attempt") == "RaiseException"
    assert balances(accounts)[0] == 101
    said = [each.getMessage() for each in caplog.records if "finding out whether it was committed" in each.getMessage()]
    assert said and "\n" not in "".join(said)


@BOTH
async def test_a_version_tag_is_quoted_for_the_session_as_its_handler_left_it(
    dsn: str, accounts: Eyes, sent: list[Any], on_loop: bool
) -> None:
    """The only text of ours that goes without being a parameter."""
    tag = "l'été \\'; DROP TABLE account; --"
    strange = "SET LOCAL client_encoding = 'LATIN1'; SET LOCAL standard_conforming_strings = off"

    def changes(job: Job) -> None:
        job.connection.execute(WRITE)
        job.connection.execute(strange)

    async def achanges(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute(WRITE)
        await conn.execute(strange)

    changing = declared(achanges if on_loop else changes)
    async with work(dsn, changing, concurrency=1, version_tag=tag) as worker:
        await ran(dsn, accounts, worker, changing)
    assert len(sent) == 1
    assert accounts.one("SELECT version_tag FROM pgqueue.job_done") == tag
    assert balances(accounts)[0] == 101


@BOTH
async def test_an_encoding_that_psycopg_does_not_know_keeps_no_job_from_its_end(
    dsn: str, accounts: Eyes, sent: list[Any], on_loop: bool
) -> None:
    """Where all that is sent is ASCII."""

    def changes(job: Job) -> None:
        job.connection.execute(WRITE)
        job.connection.execute("SET client_encoding = 'EUC_TW'")

    async def achanges(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute(WRITE)
        await conn.execute("SET client_encoding = 'EUC_TW'")

    changing = declared(achanges if on_loop else changes)
    async with work(dsn, changing, concurrency=1, version_tag="v1") as worker:
        await ran(dsn, accounts, worker, changing)
    assert len(sent) == 1
    assert outcomes(accounts) == []
    assert balances(accounts)[0] == 101


@pytest.mark.second
@pytest.mark.parametrize("result", ["a result", None])
async def test_a_statement_that_fails_just_before_the_commit_is_no_success(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch, result: str | None
) -> None:
    """A thread of the handler's that was not waited for: COMMIT would be a ROLLBACK, and no error."""
    check, runs = handler_connection._check, list[int]()

    def fails(conn: Any) -> None:
        with pytest.raises(psycopg.Error):
            conn.execute("SELECT 1/0")

    def checks(conn: Any) -> None:
        check(conn)
        if len(runs) == 1:
            stray = threading.Thread(target=fails, args=[conn])
            stray.start()
            stray.join(1.0)  # so long it may try: it has to wait for the connection's lock

    monkeypatch.setattr(handler_connection, "_check", checks)

    def writes(job: Job) -> str | None:
        runs.append(job.id)
        job.connection.execute(WRITE)
        return result

    writing = declared(writes)
    async with work(dsn, writing, concurrency=1) as worker:
        await ran(dsn, accounts, worker, writing)
    assert balances(accounts)[0] == 101
    assert len(runs) == 1


@BOTH
async def test_what_cannot_be_prepared_is_an_error_of_the_attempt(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    """Not something to try for ever: nobody could stop that."""
    name = accounts.one("SELECT current_database()")
    accounts.do(f"ALTER DATABASE \"{name}\" SET lock_timeout = '20ms'")

    def writes(job: Job) -> None:
        job.connection.execute(WRITE)

    async def awrites(job: Job) -> None:
        await (await job.aconnection()).execute(WRITE)

    writing = declared(awrites if on_loop else writes)
    async with work(dsn, writing, concurrency=1) as worker:
        with psycopg.connect(dsn) as holder:
            holder.execute("LOCK TABLE pgqueue.job_done")
            job_id = enqueued(dsn, writing)
            await until(lambda: "aborted" in outcomes(accounts))
        await until(accounts.is_in(job_id, "completed"))
        await until(lambda: whole(worker))
    assert balances(accounts)[0] == 101


async def test_a_connection_that_is_closed_while_libpq_waits_is_an_error(dsn: str, accounts: Eyes) -> None:
    """By a watchdog of the handler's, say, in the middle of its COMMIT: nobody frees what libpq reads."""
    accounts.do("CREATE TABLE late (id int)")
    accounts.do(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql "
        "AS $$ BEGIN PERFORM pg_sleep(30); RETURN NULL; END $$; "
        "CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    conns: list[Any] = []

    def writes(job: Job) -> None:
        conns.append(job.connection)
        job.connection.execute(WRITE)
        if len(conns) == 1:
            job.connection.execute("INSERT INTO late VALUES (1)")

    writing = declared(writes)
    async with work(dsn, writing, concurrency=1) as worker:
        job_id = enqueued(dsn, writing)
        await until(lambda: accounts.one("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == 1)
        await asyncio.to_thread(conns[0].close)
        await until(accounts.is_in(job_id, "completed"))
        await until(lambda: whole(worker))
    assert balances(accounts)[0] == 101
    assert len(conns) == 2


async def test_a_connection_that_nobody_waits_for_is_closed_with_a_word(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the server would log each failed attempt as a client that was lost in its transaction."""
    hung_up: list[Any] = []
    monkeypatch.setattr(handler_connection, "hang_up", hung_up.append)
    conns: list[Any] = []

    def fails(job: Job) -> None:
        conns.append(job.connection)
        job.connection.execute(WRITE)
        if len(conns) == 1:
            raise ValueError("not this time")

    failing = declared(fails)
    async with work(dsn, failing, concurrency=1) as worker:
        await ran(dsn, accounts, worker, failing)
    assert conns[0].closed and conns[0] is not conns[1]
    assert hung_up == []
    assert balances(accounts)[0] == 101
