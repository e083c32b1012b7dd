"""`job.session()`, `job.asession()`: what SQLAlchemy rolls back is rolled back, the rest is committed with the job."""

from __future__ import annotations

import asyncio
import gc
from functools import cache
from typing import Any

import psycopg
import pytest
from accounts import accounts, balances
from transactional_tasks import declared
from workers import Eyes, until, work

from pgqueue import Job
from pgqueue.errors import Error
from pgqueue.testing import adrain
from pgqueue.worker.transactions import sqlalchemy

sa = pytest.importorskip("sqlalchemy")
orm = pytest.importorskip("sqlalchemy.orm")

__all__ = ["accounts"]


class Base(orm.DeclarativeBase):  # type: ignore[misc, name-defined]
    """The tables of `accounts`, mapped."""


class Account(Base):
    __tablename__ = "account"
    id = orm.mapped_column(sa.Integer, primary_key=True)
    balance = orm.mapped_column(sa.Integer)


class Versioned(Base):
    """A row that SQLAlchemy updates only in the version it has read."""

    __tablename__ = "versioned"
    id = orm.mapped_column(sa.Integer, primary_key=True)
    version = orm.mapped_column(sa.Integer, nullable=False)
    x = orm.mapped_column(sa.Integer)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


async def completed(dsn: str, eyes: Eyes, fn: object, times: int = 1) -> None:
    """A worker has completed so many jobs of this handler, one after another on one connection."""
    made = declared(fn)  # type: ignore[arg-type]
    async with work(dsn, made, concurrency=1) as worker:
        with psycopg.connect(dsn) as conn:
            made.using(retry=1).enqueue_many(conn, [()] * times)
        await until(lambda: sum(eyes.states().get(state, 0) for state in ("completed", "failed")) == times)
        await until(lambda: not worker.services.context._transactional._open)
    assert eyes.all("SELECT message FROM pgqueue.attempt") == []


async def test_a_savepoint_that_was_rolled_back_takes_nothing_else_with_it(dsn: str, accounts: Eyes) -> None:
    def refuses(job: Job) -> str:
        session = job.session()
        job.connection.execute("INSERT INTO effect VALUES (%s, 'before')", [job.id])
        session.execute(sa.text("INSERT INTO effect VALUES (:job, 'session')"), {"job": job.id})
        session.flush()
        session.get_one(Account, 3).balance += 1
        with pytest.raises(LookupError), session.begin_nested():
            session.execute(sa.text("UPDATE account SET balance = balance - 50 WHERE id = 1"))
            raise LookupError
        return "refused"

    await completed(dsn, accounts, refuses)
    assert accounts.one("SELECT result FROM pgqueue.job_done") == "refused"
    assert balances(accounts) == [100, 200, 51]
    assert accounts.all("SELECT note FROM effect ORDER BY 1") == [("before",), ("session",)]


async def test_a_begin_block_that_was_rolled_back_and_caught_keeps_nothing(dsn: str, accounts: Eyes) -> None:
    def moves(job: Job) -> str:
        session = job.session()
        with pytest.raises(LookupError), session.begin():
            session.execute(sa.text("UPDATE account SET balance = balance - 50 WHERE id = 1"))
            session.add(Account(id=9, balance=900))
            session.flush()
            raise LookupError
        session.get_one(Account, 2).balance += 1
        return "refused"

    await completed(dsn, accounts, moves)
    assert balances(accounts) == [100, 201, 50]


async def test_a_caught_conflict_leaves_nothing_half_written(dsn: str, accounts: Eyes) -> None:
    """The flush has updated the first row when it finds that the second is not what it has read."""
    stale = pytest.importorskip("sqlalchemy.orm.exc").StaleDataError
    accounts.do("CREATE TABLE versioned (id int PRIMARY KEY, version int NOT NULL, x int NOT NULL)")
    accounts.do("INSERT INTO versioned VALUES (1, 1, 0), (2, 1, 0)")

    def conflicts(job: Job) -> str:
        session = job.session()
        one, two = session.get_one(Versioned, 1), session.get_one(Versioned, 2)
        accounts.do("UPDATE versioned SET version = 2 WHERE id = 2")
        one.x, two.x = 1, 1
        with pytest.raises(stale):
            session.flush()
        return "conflict"

    await completed(dsn, accounts, conflicts)
    assert accounts.one("SELECT result FROM pgqueue.job_done") == "conflict"
    assert accounts.all("SELECT version, x FROM versioned ORDER BY id") == [(1, 0), (2, 0)]


@pytest.mark.parametrize("flushed", [False, True])
async def test_a_with_block_keeps_its_changes(dsn: str, accounts: Eyes, flushed: bool) -> None:
    def adds(job: Job) -> str:
        with job.session() as session:
            session.add(Account(id=9, balance=900))
            session.get_one(Account, 1).balance -= 50
            if flushed:
                session.flush()
        with job.session() as session:
            session.get_one(Account, 2).balance += 50
        return "done"

    await completed(dsn, accounts, adds)
    assert balances(accounts) == [50, 250, 50, 900]


async def test_jobs_leave_nothing_of_sqlalchemy_on_their_connection(dsn: str, accounts: Eyes) -> None:
    """SQLAlchemy adds a handler of notices to every connection it gets, and ours is the same again and again."""
    handlers: list[int] = []
    pids: set[int] = set()

    def asks(job: Job) -> None:
        assert job.session().scalar(sa.text("SELECT 1")) == 1
        handlers.append(len(job.connection._notice_handlers))
        pids.add(job.connection.info.backend_pid)

    await completed(dsn, accounts, asks, times=5)
    assert handlers == [handlers[0]] * 5
    assert len(pids) == 1


@pytest.mark.promise("T15")
async def test_a_session_that_outlives_its_job_undoes_nothing_of_the_next_one(dsn: str, accounts: Eyes) -> None:
    """SQLAlchemy rolls back when it is no longer referenced. By then the next job may have its connection."""
    kept: list[Any] = []

    def writes(job: Job) -> None:
        if kept:
            job.session().execute(sa.text("INSERT INTO effect VALUES (:job, 'second')"), {"job": job.id})
            kept.clear()
            gc.collect()
        else:
            kept.append(job.session())
            kept[0].execute(sa.text("INSERT INTO effect VALUES (:job, 'first')"), {"job": job.id})

    await completed(dsn, accounts, writes, times=2)
    assert accounts.all("SELECT note FROM effect ORDER BY 1") == [("first",), ("second",)]


# Async sessions ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("T15")
async def test_what_an_async_session_writes_is_committed_with_the_job(dsn: str, accounts: Eyes) -> None:
    async def moves(job: Job) -> str:
        session = await job.asession()
        assert session is await job.asession()
        conn = await job.aconnection()
        await conn.execute("INSERT INTO effect VALUES (%s, 'before')", [job.id])
        await session.execute(sa.text("INSERT INTO effect VALUES (:job, 'session')"), {"job": job.id})
        (await session.get_one(Account, 1)).balance -= 50
        session.add(Account(id=9, balance=900))
        with pytest.raises(LookupError):
            async with session.begin_nested():
                await session.execute(sa.text("UPDATE account SET balance = 0"))
                raise LookupError
        (await session.get_one(Account, 2)).balance += 50
        return "done"

    await completed(dsn, accounts, moves)
    assert accounts.one("SELECT result FROM pgqueue.job_done") == "done"
    assert balances(accounts) == [50, 250, 50, 900]
    assert accounts.all("SELECT note FROM effect ORDER BY 1") == [("before",), ("session",)]


@pytest.mark.promise("T15")
async def test_what_an_async_session_has_written_goes_with_its_attempt(dsn: str, accounts: Eyes) -> None:
    async def fails(job: Job) -> None:
        session = await job.asession()
        (await session.get_one(Account, 1)).balance -= 50
        await session.flush()
        raise LookupError("after the write")

    made = declared(fails)
    async with work(dsn, made, concurrency=1):
        with psycopg.connect(dsn) as conn:
            id = made.using(retry=1).enqueue(conn).id
        await until(accounts.is_in(id, "failed"))
    assert balances(accounts) == [100, 200, 50]
    assert accounts.all("SELECT message FROM pgqueue.attempt") == [("after the write",)]


async def test_a_flush_at_the_end_that_fails_fails_the_attempt(dsn: str, accounts: Eyes) -> None:
    async def doubles(job: Job) -> None:
        (await job.asession()).add(Account(id=1, balance=0))

    made = declared(doubles)
    async with work(dsn, made, concurrency=1) as worker:
        with psycopg.connect(dsn) as conn:
            id = made.using(retry=1).enqueue(conn).id
        await until(accounts.is_in(id, "failed"))
        await until(lambda: not worker.services.context._transactional._open)
    assert balances(accounts) == [100, 200, 50]
    assert "duplicate key" in accounts.one("SELECT message FROM pgqueue.attempt")


async def test_an_async_session_is_not_for_the_handler_to_end(dsn: str, accounts: Eyes) -> None:
    async def ends(job: Job) -> None:
        async with await job.asession() as session:
            session.add(Account(id=9, balance=900))
        for end in (session.commit, session.rollback):
            with pytest.raises(Error, match="the worker"):
                await end()
        async with await job.asession() as session:
            with pytest.raises(LookupError):
                async with session.begin_nested():
                    session.add(Account(id=10, balance=1))
                    raise LookupError

    await completed(dsn, accounts, ends)
    assert balances(accounts) == [100, 200, 50, 900]


async def test_async_sessions_leave_nothing_on_their_connection(
    dsn: str, accounts: Eyes, recwarn: pytest.WarningsRecorder
) -> None:
    """One that is kept beyond its job touches the connection no more, and none is left for the garbage collector."""
    kept: list[Any] = []
    pids: set[int] = set()

    async def writes(job: Job) -> None:
        session = await job.asession()
        await session.execute(sa.text("INSERT INTO effect VALUES (:job, 'x')"), {"job": job.id})
        conn = await job.aconnection()
        assert len(conn._notice_handlers) == 0
        pids.add(conn.info.backend_pid)
        for each in kept:
            assert each is not session
        kept.append(session)
        if len(kept) == 4:
            kept.clear()
            gc.collect()

    await completed(dsn, accounts, writes, times=5)
    assert accounts.one("SELECT count(*) FROM effect") == 5
    assert len(pids) == 1
    assert [str(each.message) for each in recwarn if "garbage" in str(each.message)] == []


async def test_each_kind_of_handler_is_told_which_session_is_its_own(dsn: str, accounts: Eyes) -> None:
    async def on_loop(job: Job) -> None:
        with pytest.raises(Error, match=r"await job.asession\(\)"):
            job.session()

    def in_thread(job: Job) -> None:
        with pytest.raises(Error, match=r"job.session\(\)"):
            asyncio.run(job.asession())

    await completed(dsn, accounts, on_loop)
    accounts.do("TRUNCATE pgqueue.job_done")
    await completed(dsn, accounts, in_thread)


@pytest.mark.promise("F463")
async def test_an_async_session_says_which_sqlalchemy_it_needs(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before_2_0_16(url: str, *, async_creator: object = None, **options: object) -> object:
        raise TypeError("Invalid argument(s) 'async_creator' sent to create_engine()")

    async def asks(job: Job) -> None:
        for _ in range(2):  # the second ask, too
            with pytest.raises(Error, match=r"job\.asession\(\) needs SQLAlchemy 2\.0\.16 or newer"):
                await job.asession()
        await (await job.aconnection()).execute("UPDATE account SET balance = balance - 50 WHERE id = 1")

    def in_thread(job: Job) -> None:
        job.session().get(Account, 2).balance -= 50

    monkeypatch.setattr(sqlalchemy, "_async_engine", cache(sqlalchemy._async_engine.__wrapped__))
    monkeypatch.setattr("sqlalchemy.ext.asyncio.create_async_engine", before_2_0_16)
    await completed(dsn, accounts, asks)
    accounts.do("TRUNCATE pgqueue.job_done")
    await completed(dsn, accounts, in_thread)
    assert balances(accounts) == [50, 150, 50]


async def test_a_drain_has_an_async_session_too(dsn: str, accounts: Eyes) -> None:
    async def moves(job: Job) -> None:
        (await (await job.asession()).get_one(Account, 1)).balance -= 50

    async def fails(job: Job) -> None:
        session = await job.asession()
        (await session.get_one(Account, 2)).balance -= 50
        await session.flush()
        raise LookupError

    good, bad = declared(moves), declared(fails)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await good.aenqueue(conn)
        await bad.using(retry=1).aenqueue(conn)
        drained = await adrain(conn)
        assert (drained.completed, drained.failed) == (1, 1)
    assert balances(accounts) == [50, 200, 50]
