"""A database is made read only, by order: nothing is taken from it, and when that is lifted all goes on by itself."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from accounts import accounts
from commands import pgqueue as pgqueue_command
from servers import Server
from transactional_tasks import BOTH, outcomes
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job, RetryPolicy
from pgqueue.admin.health import health
from pgqueue.admin.queries import status
from pgqueue.database import migrations, outage
from pgqueue.database.sessions import ReadOnly
from pgqueue.worker.liveness.registration import register
from pgqueue.worker.run.serialization_retries import unable

__all__ = ["accounts"]

pytestmark = pytest.mark.promise("F188")

LIFTED_SECONDS = 15.0
ON = "ALTER DATABASE {} SET default_transaction_read_only = on"
OFF = "ALTER DATABASE {} RESET default_transaction_read_only"
ALL = """
    SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'pgqueue %' AND pid <> pg_backend_pid()
"""
# The COMMIT of a transaction that writes waits while the test holds the lock.
SLOW = """
    CREATE FUNCTION waits() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_advisory_xact_lock_shared(77); RETURN NULL; END';
    CREATE CONSTRAINT TRIGGER waits AFTER UPDATE ON account DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (new.id = 2) EXECUTE FUNCTION waits();
"""
COMMITTING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77 AND NOT granted"
WRITE = "UPDATE account SET balance = balance - 10 WHERE id = %s"
ONCE = RetryPolicy(attempts=1)


class Runs:
    """Tasks of each kind, which note how often they run. Those that `last` go on when the test says so."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self.attempts: set[int] = set()
        self.begun: Counter[str] = Counter()
        self.go_on = threading.Event()

    def note(self, job: Job, done: bool = True) -> None:
        self.attempts.add(job.attempt)
        (self.of if done else self.begun)[job.task] += 1

    def plain(self, name: str, *, lasts: bool = False) -> Any:
        async def plain(job: Job) -> None:
            self.note(job, done=False)
            if lasts:
                await asyncio.to_thread(self.go_on.wait)
            self.note(job)

        return pgqueue.task(name=name, retry=ONCE)(plain)

    def writing(self, name: str, on_loop: bool, *, lasts: bool = False, account: int = 1) -> Any:
        def writes(job: Job) -> None:
            self.note(job, done=False)
            job.connection.execute(WRITE, [account])
            if lasts:
                self.go_on.wait()
            self.note(job)

        async def awrites(job: Job) -> None:
            self.note(job, done=False)
            await (await job.aconnection()).execute(WRITE, [account])
            if lasts:
                await asyncio.to_thread(self.go_on.wait)
            self.note(job)

        return pgqueue.task(name=name, transactional=True, retry=ONCE)(awrites if on_loop else writes)


def fence(eyes: Eyes) -> None:
    """Make the database read only, and end all sessions of workers."""
    eyes.do(ON.format(eyes.one("SELECT current_database()")))
    eyes.one(ALL)


def lift(eyes: Eyes) -> None:
    """New sessions may write again. No session is ended."""
    eyes.do(OFF.format(eyes.one("SELECT current_database()")))


async def test_each_kind_of_job_goes_on_when_the_order_is_lifted(
    dsn: str, accounts: Eyes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is taken, nothing that was kept runs twice, no attempt is spent, and it is said now and then."""
    monkeypatch.setattr(outage, "SAID_SECONDS", 2.0)
    caplog.set_level(logging.WARNING)
    accounts.do(SLOW)
    runs = Runs()
    lasting = [
        runs.plain("plain.lasts", lasts=True),
        *(runs.writing(f"writes.lasts.{on}", on, lasts=True) for on in (False, True)),
    ]
    committing = [runs.writing(f"commits.{on}", on, account=2) for on in (False, True)]
    due = [runs.plain("plain.due"), *(runs.writing(f"writes.due.{on}", on, account=3) for on in (False, True))]
    holder = Eyes(dsn)
    holder.one("SELECT pg_advisory_lock(77)")
    async with work(dsn, *lasting, *committing, *due):
        for task in (*lasting, *committing):
            task.enqueue(accounts.conn)
        await until(lambda: runs.begun.total() == 5 and accounts.one(COMMITTING))
        fence(accounts)
        holder.close()
        for task in due:  # as an application that may write all the same
            task.enqueue(accounts.conn)
        runs.go_on.set()
        await until(lambda: any("read only for" in each for each in caplog.messages))
        assert sum("read only (" in each for each in caplog.messages) == 1
        assert not any(task.name in runs.begun for task in due)
        assert set(accounts.states()) <= {"running", "available"}
        lift(accounts)
        await until(accounts.done(8), LIFTED_SECONDS)
    assert runs.attempts == {1}
    assert runs.of["plain.lasts"] == runs.of["plain.due"] == 1
    balances = accounts.all("SELECT id, balance FROM account ORDER BY id")
    assert balances == [(1, 80), (2, 180), (3, 30)]
    assert set(outcomes(accounts)) <= {"aborted", "interrupted"}


async def test_sessions_that_nothing_ends_take_an_order_to_the_server(own_server: Server) -> None:
    """ALTER SYSTEM tells the sessions that are open, too, and they are told when it is lifted."""
    dsn = own_server.dsn("postgres")
    await asyncio.to_thread(migrations.migrate, dsn)
    runs = Runs()
    plain, writes = runs.plain("system.plain"), runs.writing("system.writes", True)
    with psycopg.connect(dsn, autocommit=True, options="-c default_transaction_read_only=off") as conn:
        eyes = Eyes(f"{dsn}&options=-c%20default_transaction_read_only%3Doff")
        eyes.do("CREATE TABLE account (id int PRIMARY KEY, balance int)")
        async with work(dsn, plain, writes, lease=3) as worker:
            for task in (plain, writes):
                task.enqueue(conn)
            await until(eyes.done(2))
            eyes.do("ALTER SYSTEM SET default_transaction_read_only = on")
            eyes.one("SELECT pg_reload_conf()")
            await until(worker.state.link.outage.read_only)
            for task in (plain, writes):
                task.enqueue(conn)
            await until(worker.services.heartbeat.late)
            assert runs.begun.total() == 2
            eyes.do("ALTER SYSTEM RESET default_transaction_read_only")
            eyes.one("SELECT pg_reload_conf()")
            await until(eyes.done(4), LIFTED_SECONDS)
        eyes.close()
    assert runs.of == {"system.plain": 2, "system.writes": 2}


@BOTH
@pytest.mark.parametrize("how", ["SET TRANSACTION READ ONLY", "SET LOCAL transaction_read_only = on"])
async def test_a_handler_that_makes_its_transaction_read_only_fails_by_its_own_error(
    dsn: str, accounts: Eyes, on_loop: bool, how: str
) -> None:
    """Given back, it would run for ever."""

    def reads(job: Job) -> None:
        job.connection.execute(how.encode())

    async def areads(job: Job) -> None:
        await (await job.aconnection()).execute(how.encode())

    task: Any = pgqueue.task(name="reads", transactional=True, retry=ONCE)(areads if on_loop else reads)
    async with work(dsn, task) as worker:
        job = task.enqueue(accounts.conn)
        await until(accounts.is_in(job.id, "failed"))
        assert not worker.state.link.outage.read_only()
    [(kind, outcome)] = accounts.all("SELECT error_type, outcome FROM pgqueue.attempt")
    assert (kind, outcome) == ("ReadOnlySqlTransaction", "failed")


@pytest.mark.promise("F191")
async def test_commands_name_the_order(dsn: str, eyes: Eyes) -> None:
    """A worker has given a sign of life just now, and takes nothing."""
    async with work(dsn, Runs().plain("told")) as worker:
        await worker.seen()
        fence(eyes)
        told = [["health", "--ready"], ["doctor"], ["status"]]
        found = [await asyncio.to_thread(pgqueue_command, *each, dsn=dsn) for each in told]
    ready, doctor, standing = found
    assert [each.returncode for each in found] == [1, 1, 0]
    assert "takes jobs: the database is read only (default_transaction_read_only)" in ready.stderr
    assert doctor.stdout.lstrip().splitlines()[0].startswith("CRITICAL read_only: the database is read only")
    assert "READ ONLY: default_transaction_read_only is on" in standing.stdout


@pytest.mark.promise("F191")
@pytest.mark.parametrize(
    ("by", "options", "ordered"),
    [
        (ON, "", True),
        ("ALTER ROLE ALL IN DATABASE {} SET default_transaction_read_only = on", "", True),
        ("ALTER ROLE CURRENT_USER IN DATABASE {} SET default_transaction_read_only = on", "", False),
        (ON, "default_transaction_read_only=off", False),
        ("SELECT '{}'", "default_transaction_read_only=on", False),
    ],
    ids=["database", "all roles", "role", "way out", "asker"],
)
def test_only_an_order_to_all_is_named(dsn: str, eyes: Eyes, by: str, options: str, ordered: bool) -> None:
    register(eyes.conn, "pgqueue", lease=15, concurrency=1, version_tag="", queues=["default"], tasks=["t"])
    eyes.do("UPDATE pgqueue.worker SET state = 'running', host = 'here'")
    eyes.do(by.format(eyes.one("SELECT current_database()")))
    with psycopg.connect(dsn, options=f"-c {options}" if options else None) as conn:
        assert (health(conn, "here").ready, health(conn, "here").read_only) == (not ordered, ordered)
        assert status(conn).read_only is ordered
        assert ("read_only" in {each.name for each in pgqueue.doctor(conn).findings}) is ordered


@pytest.mark.promise("F191")
async def test_a_worker_whose_dsn_says_so_works_all_the_same(dsn: str, accounts: Eyes) -> None:
    """The way out."""
    runs = Runs()
    tasks = [runs.plain("out.plain"), *(runs.writing(f"out.{on}", on) for on in (False, True))]
    fence(accounts)
    async with work(f"{dsn}&options=-c%20default_transaction_read_only%3Doff", *tasks):
        for task in tasks:
            task.enqueue(accounts.conn)
        await until(accounts.done(3))


def test_only_what_comes_from_a_session_that_began_read_only_is_given_back() -> None:
    """However the handler has wrapped it; but not its own error of the same SQLSTATE."""

    def raised(wrap: Callable[[], None]) -> Exception:
        with pytest.raises(ValueError) as found:
            wrap()
        return found.value

    def with_cause() -> None:
        raise ValueError from ReadOnly()

    def without_cause() -> None:
        try:
            raise ReadOnly
        except psycopg.Error:
            raise ValueError  # noqa: B904

    began = [ReadOnly(), raised(with_cause), raised(without_cause), ExceptionGroup("two", [ReadOnly(), ReadOnly()])]
    for error in began:
        given_back = unable(error)
        assert given_back is not None and not given_back.spent
    assert unable(psycopg.errors.ReadOnlySqlTransaction("its own")) is None
