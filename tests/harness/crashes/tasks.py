"""What the jobs of the crash harness do, and the tables in which it shows.

Every job has a token of its application's. Its row in `ledger` commits with the job, so whatever is in the ledger must
have happened; each run of a handler writes a row in `effect`. A transfer moves 50 between two of three accounts of its
own that hold 100, 200 and 50: the total is 350, whenever anybody looks.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from fault_work import EVENTS, note, noted

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.jobs.job import Job
from pgqueue.jobs.retry import RetryPolicy

# Every job has a token of its application's; the row of the ledger commits with the job, or neither is there.
TABLES = """
CREATE SEQUENCE token;
CREATE TABLE ledger (token bigint PRIMARY KEY, kind text NOT NULL, job_id bigint NOT NULL);
CREATE TABLE effect (token bigint NOT NULL, kind text NOT NULL, run bigint NOT NULL);
CREATE TABLE account (token bigint NOT NULL, name text NOT NULL, balance integer NOT NULL, PRIMARY KEY (token, name));
CREATE INDEX ON effect (token);
CREATE INDEX ON ledger (job_id);
"""

AGAIN = RetryPolicy(attempts=1000, first=0.02, factor=1)
HOLD_SECONDS = 0.6


class Home:
    """What the handlers of this process share: the way to the database, and the count of what has begun."""

    def __init__(self, dsn: str, enough: int) -> None:
        self.dsn = dsn
        self.enough = asyncio.Event()
        self._left = enough
        self._loop = asyncio.get_running_loop()
        self._sync: psycopg.Connection[Any] | None = None
        self._async: psycopg.AsyncConnection[Any] | None = None
        self._turn = threading.Lock()
        self._aturn = asyncio.Lock()

    def began(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._loop.call_soon_threadsafe(self.enough.set)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        """The handlers' own connection, in autocommit mode; not the queue's."""
        with self._turn:
            if self._sync is None or self._sync.closed:
                self._sync = psycopg.connect(self.dsn, autocommit=True, application_name="handler")
            yield self._sync

    def write(self, token: int, kind: str, run: int) -> None:
        """An effect of its own: committed, whatever becomes of the job."""
        with self.connection() as conn, answer_noted(token):
            conn.execute("INSERT INTO effect VALUES (%s, %s, %s)", (token, kind, run))

    async def awrite(self, token: int, kind: str, run: int) -> None:
        async with self._aturn:
            if self._async is None or self._async.closed:
                self._async = await psycopg.AsyncConnection.connect(
                    self.dsn, autocommit=True, application_name="handler"
                )
            with answer_noted(token):
                await self._async.execute("INSERT INTO effect VALUES (%s, %s, %s)", (token, kind, run))


@contextmanager
def answer_noted(token: int) -> Iterator[None]:
    """Note an effect whose write got no answer: it is committed, or not."""
    try:
        yield
    except psycopg.OperationalError:
        if EVENTS in os.environ:
            note(os.environ[EVENTS], event="unanswered", key=token, pid=os.getpid())
        raise


home: Home = None  # type: ignore[assignment]  # each forked child makes its own


# What the jobs do ----------------------------------------------------------------------------------------------------


@task(name="crash.plain", retry=AGAIN)
async def plain(job: Job, token: int) -> None:
    home.began()
    await home.awrite(token, "plain", job.attempt)


@task(name="crash.sync", retry=AGAIN)
def sync(job: Job, token: int) -> int:
    home.began()
    home.write(token, "sync", job.attempt)
    return token


@task(name="crash.flaky", retry=AGAIN)
async def flaky(job: Job, token: int) -> None:
    """Fails after its effect, the first time."""
    home.began()
    await home.awrite(token, "flaky", job.attempt)
    if job.attempt == 1:
        raise RuntimeError("the first attempt fails")


@task(name="crash.fails", retry=AGAIN)
async def fails(job: Job, token: int) -> object:
    home.began()
    await home.awrite(token, "fails", job.attempt)
    return pgqueue.Fail("as it should")


@task(name="crash.slow", retry=AGAIN)
async def slow(job: Job, token: int) -> None:
    """Still runs when its worker is told to stop."""
    home.began()
    await asyncio.sleep(0.1)
    await home.awrite(token, "slow", job.attempt)


@task(name="crash.chain", retry=AGAIN)
async def chain(job: Job, token: int) -> None:
    """Has a successor: exactly one, if it completes."""
    home.began()
    await home.awrite(token, "chain", job.attempt)
    job.enqueue(follow, token)


@task(name="crash.follow", retry=AGAIN)
async def follow(job: Job, token: int) -> None:
    home.began()


def key(token: int) -> str:
    """Three keys: each has a line before it, for more jobs are kept waiting than that."""
    return f"k{token % 3}"


@task(name="crash.keyed", retry=AGAIN, lock=key)
async def keyed(job: Job, token: int) -> None:
    """Runs alone with its key: parked, admitted, in a chain, rescued with or without it."""
    home.began()
    await home.awrite(token, "keyed", job.attempt)


@task(name="crash.holds", retry=AGAIN, lock="holds")
async def holds(job: Job, token: int) -> None:
    """Keeps its key past the restart of a server. It notes its begin and its end in the file of fault_work."""
    home.began()
    with noted("locked", token):
        await home.awrite(token, "holds", job.attempt)
        await asyncio.sleep(HOLD_SECONDS)


# Exactly once: the effect is committed with the completion -----------------------------------------------------------

DEBIT = "/* debit */ UPDATE account SET balance = balance - 50 WHERE token = %s AND name = 'a'"
CREDIT = "/* credit */ UPDATE account SET balance = balance + 50 WHERE token = %s AND name = 'b'"
NOTE = "/* note */ INSERT INTO effect VALUES (%s, 'transfer', %s)"


def move(conn: psycopg.Connection[Any], job: Job, token: int) -> None:
    """A plain, unguarded transfer."""
    conn.execute(DEBIT, (token,))
    conn.execute(CREDIT, (token,))
    conn.execute(NOTE, (token, job.attempt))


@task(name="crash.transfer", retry=AGAIN, transactional=True)
def transfer(job: Job, token: int) -> None:
    home.began()
    move(job.connection, job, token)


@task(name="crash.atransfer", retry=AGAIN, transactional=True)
async def atransfer(job: Job, token: int) -> int:
    home.began()
    conn = await job.aconnection()
    await conn.execute(DEBIT, (token,))
    await conn.execute(CREDIT, (token,))
    await conn.execute(NOTE, (token, job.attempt))
    return token


@task(name="crash.tflaky", retry=AGAIN, transactional=True)
async def tflaky(job: Job, token: int) -> None:
    """Fails with its writes made, the first time: they are undone."""
    await atransfer(job, token)
    if job.attempt == 1:
        raise RuntimeError("the first attempt fails")


@task(name="crash.tchain", retry=AGAIN, transactional=True)
def tchain(job: Job, token: int) -> None:
    transfer(job, token)
    job.enqueue(follow, token)


@task(name="crash.tkeyed", retry=AGAIN, transactional=True, lock=key)
def tkeyed(job: Job, token: int) -> None:
    transfer(job, token)


@task(name="crash.own", retry=AGAIN)
def own(job: Job, token: int) -> None:
    """Completes its job in a transaction of its own."""
    home.began()
    with home.connection() as conn, conn.transaction():
        move(conn, job, token)
        job.complete(conn)


# How they come -------------------------------------------------------------------------------------------------------

KINDS = {
    plain: 5,
    sync: 3,
    flaky: 2,
    fails: 1,
    slow: 1,
    chain: 2,
    transfer: 4,
    atransfer: 4,
    tflaky: 2,
    tchain: 2,
    own: 2,
    keyed: 4,
    tkeyed: 2,
}
"""How often which comes."""
TASKS = {each.name.removeprefix("crash."): each for each in (*KINDS, holds)}
EXACTLY_ONCE = ("transfer", "atransfer", "tflaky", "tchain", "own", "tkeyed")


def enter(conn: psycopg.Connection[Any], kinds: list[str], queue: str = "default") -> list[int]:
    """Enqueue a job of each kind, with its row in the ledger, in the caller's transaction; their tokens."""
    tokens = []
    for kind in kinds:
        row = conn.execute("SELECT nextval('token')").fetchone()
        assert row is not None
        token = int(row[0])
        if kind in EXACTLY_ONCE:
            conn.execute(ACCOUNTS, {"token": token})
        conn.execute("INSERT INTO ledger VALUES (%s, %s, %s)", (token, kind, put(conn, kind, token, queue)))
        tokens.append(token)
    return tokens


ACCOUNTS = """INSERT INTO account
VALUES (%(token)s, 'a', 100), (%(token)s, 'b', 200), (%(token)s, 'c', 50)"""


def put(conn: psycopg.Connection[Any], kind: str, token: int, queue: str) -> int:
    """Enqueue one job; its id."""
    return TASKS[kind].using(queue=queue).enqueue(conn, token=token).id


def mixed(number: int) -> list[str]:
    """So many kinds of jobs, as they come."""
    names = [each.name.removeprefix("crash.") for each in KINDS]
    return random.choices(names, list(KINDS.values()), k=number)
