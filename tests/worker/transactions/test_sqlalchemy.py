"""`job.session()`: what SQLAlchemy rolls back is rolled back, what it keeps is committed with the job."""

from __future__ import annotations

import gc
from typing import Any

import psycopg
import pytest
from accounts import accounts, balances
from transactional_tasks import declared
from workers import Eyes, until, work

from pgqueue import Job

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
