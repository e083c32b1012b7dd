"""Handlers that are stopped: at whatever step, and whether they heed it or not, nothing of theirs stays."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import bodies
import psycopg
import pytest
from accounts import accounts, balances
from handler_pools import SESSIONS, free, restless, tidied
from transactional_tasks import BOTH, declared, enqueued
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job
from pgqueue.client.tasks import task
from pgqueue.database.sessions import Link
from pgqueue.jobs.outcomes import Cancelled
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.run.run import Run
from pgqueue.worker.transactions.handler_connection import HandlerConnection
from pgqueue.worker.transactions.handler_pool import HandlerPool, Side
from pgqueue.worker.transactions.transaction import Transaction

__all__ = ["accounts", "restless"]

THRICE = RetryPolicy(attempts=3, first=0.01, most=0.02)


# Interruption --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (HandlerPool, "_configure"),
        (Side, "acquire"),
        (HandlerConnection, "begin"),
        (Transaction, "undo"),
        (HandlerConnection, "hand_over"),
        (Side, "release"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_a_thread_that_is_stopped_at_any_step_leaves_nothing_behind(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    """While it waits in the pool (a connection is being made), begins, or gives the connection back."""
    come, told = threading.Event(), threading.Event()
    real = getattr(owner, step)

    def stopping(self: Any, *args: Any, **how: Any) -> Any:
        if not come.is_set():
            come.set()
            assert told.wait(30)
        return real(self, *args, **how)

    monkeypatch.setattr(owner, step, stopping)

    def fails(job: Job) -> None:
        job.connection.execute("UPDATE account SET balance = 1 WHERE id = 1")
        raise ValueError

    def succeeds(job: Job) -> None:
        job.connection.execute("UPDATE account SET balance = balance + 1 WHERE id = 1")

    failing, succeeding = declared(fails), declared(succeeds)
    async with work(dsn, failing, succeeding, concurrency=1) as worker:
        stopped = enqueued(dsn, failing)
        await until(come.is_set)
        assert worker.services.executor.interrupt(stopped, Cancelled("stopped by the test"))
        told.set()
        await until(accounts.is_in(stopped, "cancelled"))
        await tidied(worker, accounts)
        await until(accounts.is_in(enqueued(dsn, succeeding), "completed"))
        await tidied(worker, accounts)
    assert balances(accounts)[0] == 101


@pytest.mark.second
@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("jobs", [200, pytest.param(2_000, marks=pytest.mark.long)])
@BOTH
async def test_timeouts_at_any_moment_lose_no_connection(dsn: str, accounts: Eyes, jobs: int, on_loop: bool) -> None:
    """Three attempts of 50 ms each, with 16 slots: timeouts come in every step, from the first connection on."""

    def writes(job: Job) -> None:
        time.sleep(random.random() * 0.03)
        job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])
        job.connection.execute("SELECT pg_sleep(%s)", [random.random() * 0.03])
        if random.random() < 0.3:
            raise ValueError

    async def awrites(job: Job) -> None:
        await asyncio.sleep(random.random() * 0.03)
        conn = await job.aconnection()
        await conn.execute("INSERT INTO effect VALUES (%s)", [job.id])
        await conn.execute("SELECT pg_sleep(%s)", [random.random() * 0.03])
        if random.random() < 0.3:
            raise ValueError

    writing = task(name=f"lending.fuzz.{on_loop}", transactional=True, retry=THRICE, timeout=0.05)(
        awrites if on_loop else writes
    )
    ended = "SELECT count(*) FROM pgqueue.job WHERE state IN ('completed', 'failed')"
    async with work(dsn, writing, concurrency=16) as worker:
        with psycopg.connect(dsn) as conn:
            writing.enqueue_many(conn, [()] * jobs)
        await until(lambda: accounts.one(ended) == jobs, 120 + jobs / 5)  # on a busy machine each takes a second
        await tidied(worker, accounts)
        assert worker.services.completer.fenced == 0
    assert accounts.one("SELECT count(*) FROM pgqueue.attempt WHERE outcome = 'timeout'") > 0
    per_job = (
        "SELECT j.state, count(e.job) FROM pgqueue.job j LEFT JOIN effect e ON e.job = j.id GROUP BY j.id, j.state"
    )
    assert set(accounts.all(per_job)) <= {("completed", 1), ("failed", 0)}


def there(lender: HandlerPool) -> bool:
    assert lender.on_loop.pool is not None
    stats = lender.on_loop.pool.get_stats()
    return bool(stats["pool_available"] == stats["pool_size"])


async def test_who_is_stopped_while_he_puts_back_what_was_begun_ahead_loses_no_connection(dsn: str) -> None:
    """Beside a session that has to be ended first, nobody gets a transaction that was begun ahead: it is undone, and
    that is a round trip, in which a timeout may come."""

    async def listed() -> None: ...

    lender = HandlerPool(Link(dsn, "pgqueue"), 2, listed)
    for steps in range(1, 4):
        conn = await lender.on_loop.acquire()
        await conn.begin(1)
        await conn.end(None, 1)
        await lender.on_loop.release(conn)
        assert conn.early is not None and lender.on_loop.early == [conn]
        lender.orphans.add((0, "2026-01-01"))  # no worker's
        taking = asyncio.create_task(lender.on_loop.acquire())
        for _ in range(steps):
            await asyncio.sleep(0)
        assert not taking.done()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert lender.on_loop.early == []
        await until(lambda: there(lender))
        await lender.on_loop.release(await lender.on_loop.acquire())
        assert lender.orphans == set()
    await lender.close()


async def test_who_is_stopped_while_the_pool_takes_a_connection_back_loses_none(dsn: str) -> None:
    """The pool has a lock of its own: who has to wait for it can be cancelled there."""

    async def listed() -> None: ...

    lender = HandlerPool(Link(dsn, "pgqueue"), 2, listed, size=1)
    conn = await lender.on_loop.acquire()
    assert lender.on_loop.pool is not None
    await lender.on_loop.pool._lock.acquire()
    giving = asyncio.create_task(lender.on_loop.release(conn))
    for _ in range(3):
        await asyncio.sleep(0)
        giving.cancel()
    assert not giving.done()
    lender.on_loop.pool._lock.release()
    with pytest.raises(asyncio.CancelledError):
        await giving
    async with asyncio.timeout(30):  # there is one place, and one connection
        await lender.on_loop.release(await lender.on_loop.acquire())
    await until(lambda: there(lender))
    await lender.close()


async def test_a_cancellation_that_is_swallowed_in_the_pool_is_heard_all_the_same(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.11's `wait_for` does when what it waits for comes at the same moment."""
    asked, never, went_on = asyncio.Event(), asyncio.Event(), list[int]()
    _, real = bodies.real(Side, "acquire")

    async def swallowing(self: Side[Any], **how: Any) -> Any:
        if not asked.is_set():
            asked.set()
            with suppress(asyncio.CancelledError):
                await never.wait()
        return await real(self, **how)

    bodies.replace(monkeypatch, Side, "acquire", None, swallowing)

    async def waits(job: Job) -> None:
        await job.aconnection()
        went_on.append(job.id)
        await never.wait()

    async def succeeds(job: Job) -> None:
        await (await job.aconnection()).execute("UPDATE account SET balance = balance + 1 WHERE id = 1")

    waiting, succeeding = declared(waits), declared(succeeds)
    async with work(dsn, waiting, succeeding, concurrency=1) as worker:
        stopped = enqueued(dsn, waiting)
        await until(asked.is_set)
        assert worker.services.executor.interrupt(stopped, Cancelled("stopped by the test"))
        await until(accounts.is_in(stopped, "cancelled"))
        await until(accounts.is_in(enqueued(dsn, succeeding), "completed"))
        await tidied(worker, accounts)
    assert went_on == [] and balances(accounts)[0] == 101


TRACED = (
    "transaction.py",
    "commit.py",
    "steps.py",
    "in_doubt.py",
    "transactional.py",
    "handler_connection.py",
    "iteration.py",
    "pool.py",
)
"""Where a connection is taken, used and given back: ours, and the pool's."""


class Tracer:
    """Stops the job in whose thread it begins, when that has come to its n-th instruction in the files that count."""

    def __init__(self, run: Run, job: Job, number: int) -> None:
        self.left, self.run, self.job = number, run, job
        self.at = ""

    def begin(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # those we are called from are to be left one after another
            if frame.f_code.co_filename.endswith(TRACED):
                frame.f_trace, frame.f_trace_opcodes = self, True
            frame = frame.f_back
        sys.settrace(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if self.left <= 0 or not frame.f_code.co_filename.endswith(TRACED):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                self.at = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                self.run.interrupt(self.job, Cancelled("stopped by the test"))
        return self


@pytest.mark.second
@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
async def test_a_thread_can_be_stopped_at_every_instruction(dsn: str, accounts: Eyes, raises: bool, step: int) -> None:
    """Either it was committed and completed or neither, and its connection is back, wherever it was."""
    tracers: dict[int, Tracer] = {}

    def writes(job: Job, number: int) -> None:
        tracers[job.id] = Tracer(worker.services.executor._running.runs[job.id], job, number)
        tracers[job.id].begin()
        job.connection.execute("UPDATE account SET balance = balance + 1 WHERE id = 1")
        if raises:
            raise ValueError

    writing = declared(writes)
    number = done = 0
    async with work(dsn, writing, concurrency=TOGETHER) as worker:
        while all(tracer.at for tracer in tracers.values()):
            asked = [writing.using(retry=1).new(number + step * n) for n in range(1, TOGETHER + 1)]
            number += step * TOGETHER
            jobs = together(accounts, asked)
            states = await until(lambda jobs=jobs: ended(accounts, jobs))  # type: ignore[misc]
            done += list(states.values()).count("completed")
            assert balances(accounts)[0] == 100 + done, [tracers[job_id].at for job_id in jobs]
            await tidied(worker, accounts)
    assert number > 300


@pytest.mark.second
@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["through", "left", "raises"])
async def test_a_thread_that_iterates_can_be_stopped_at_every_instruction(
    dsn: str, accounts: Eyes, how: str, step: int
) -> None:
    """Its batches are there from the first on, each whole; and its connection is back, wherever it was."""
    tracers: dict[int, Tracer] = {}

    def goes(job: Job, number: int) -> None:
        tracers[job.id] = Tracer(worker.services.executor._running.runs[job.id], job, number)
        tracers[job.id].begin()
        for batch in job.iterate(lambda cursor: ((n, n) for n in range(cursor or 0, 6)), 2):
            for n in batch:
                job.connection.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, str(n)])
            if batch[0] == 4 and how == "left":
                break
            if batch[0] == 4 and how == "raises":
                raise ValueError

    going = task(name="tx.goes", retry=1)(goes)
    number = 0
    most, at_the_end = (6, "completed") if how == "through" else (4, "failed")
    async with work(dsn, going, concurrency=TOGETHER) as worker:
        while all(tracer.at for tracer in tracers.values()):
            jobs = together(accounts, [going.new(number + step * n) for n in range(1, TOGETHER + 1)])
            number += step * TOGETHER
            states = await until(lambda jobs=jobs: ended(accounts, jobs))  # type: ignore[misc]
            for job_id, state in states.items():
                at = tracers[job_id].at
                rows = accounts.all("SELECT note FROM effect WHERE job = %s ORDER BY note", job_id)
                written = [int(note) for (note,) in rows]
                assert written == list(range(len(written))) and len(written) in (0, 2, 4, 6), at
                assert len(written) == most if state == at_the_end else len(written) <= most, at
                assert state in (at_the_end, "cancelled"), at
            await tidied(worker, accounts)
    assert number > 1000


TOGETHER = 8
"""So many jobs are stopped at once, each in its own thread and at its own instruction."""


def together(eyes: Eyes, jobs: list[Any]) -> list[int]:
    return [handle.id for handle in pgqueue.enqueue_many(eyes.conn, jobs)]


def ended(eyes: Eyes, jobs: list[int]) -> dict[int, str]:
    """How each of these jobs has ended; empty while one has not."""
    ends = "SELECT id, state FROM pgqueue.job WHERE id = ANY (%s) AND state IN ('completed', 'failed', 'cancelled')"
    states = dict(eyes.all(ends, jobs))
    return states if len(states) == len(jobs) else {}


# Handlers that do not stop -------------------------------------------------------------------------------------------


class Stuck:
    """A sync handler in one call into C, which no exception leaves; afterwards it tries to write."""

    def __init__(self, eyes: Eyes) -> None:
        self.began, self.go_on, self.left = threading.Event(), threading.Event(), threading.Event()
        self.refused: list[BaseException] = []
        self.eyes = eyes

    def __call__(self, job: Job) -> None:
        conn = job.connection
        conn.execute("UPDATE account SET balance = 1 WHERE id = 1")
        self.began.set()
        try:
            assert self.go_on.wait(30)
        finally:
            try:
                conn.execute("UPDATE account SET balance = 2 WHERE id = 1")
            except psycopg.Error as error:
                self.refused.append(error)
            finally:
                self.left.set()


async def test_an_abandoned_handler_holds_no_locks(dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgqueue.worker.run.timeouts.GRACE", 0.2)
    stuck = Stuck(accounts)

    @task(name="lending.stuck", transactional=True, timeout=0.2, retry=RetryPolicy(attempts=1))
    def hangs(job: Job) -> None:
        stuck(job)

    async with work(dsn, hangs) as worker:
        job_id = enqueued(dsn, hangs)
        await until(stuck.began.is_set)
        await until(accounts.is_in(job_id, "failed"))
        await until(lambda: free(accounts))
        assert worker.services.executor._running.lost == 1
        stuck.go_on.set()
        await until(lambda: worker.services.executor._running.lost == 0)
        await tidied(worker, accounts)
    assert [type(error) for error in stuck.refused] == [psycopg.OperationalError]
    assert balances(accounts)[0] == 100


@pytest.mark.second
async def test_a_handler_that_outlives_its_worker_holds_no_locks(dsn: str, accounts: Eyes) -> None:
    stuck = Stuck(accounts)

    @task(name="lending.outlives", transactional=True)
    def hangs(job: Job) -> None:
        stuck(job)

    async with work(dsn, hangs):
        enqueued(dsn, hangs)
        await until(stuck.began.is_set)
    assert not stuck.left.is_set()
    await until(lambda: free(accounts))
    stuck.go_on.set()
    await until(stuck.left.is_set)
    await until(lambda: accounts.one(f"SELECT count(*) {SESSIONS}") == 0)
    assert [type(error) for error in stuck.refused] == [psycopg.OperationalError]
    assert balances(accounts)[0] == 100


@pytest.mark.second
@BOTH
async def test_whoever_asks_when_the_worker_has_stopped_gets_nothing(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    began, go_on = threading.Event(), threading.Event()
    refused: list[BaseException] = []

    def asks(job: Job) -> None:
        began.set()
        try:
            assert go_on.wait(30)
        finally:
            try:
                job.connection.execute("UPDATE account SET balance = 2 WHERE id = 1")
            except BaseException as error:
                refused.append(error)

    async def aasks(job: Job) -> None:
        began.set()
        while not go_on.is_set():
            try:
                await asyncio.to_thread(go_on.wait, 30)
            except asyncio.CancelledError:
                continue
        try:
            await (await job.aconnection()).execute("UPDATE account SET balance = 2 WHERE id = 1")
        except BaseException as error:
            refused.append(error)

    asking = declared(aasks if on_loop else asks)
    async with work(dsn, asking):
        enqueued(dsn, asking)
        await until(began.is_set)
    assert refused == []
    go_on.set()
    await until(lambda: refused)
    assert accounts.one(f"SELECT count(*) {SESSIONS}") == 0
    assert balances(accounts)[0] == 100
