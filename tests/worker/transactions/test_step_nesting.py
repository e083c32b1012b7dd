"""A durable step in the body of an iteration, and an iteration inside a step: in workers and in drains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from accounts import accounts
from transactional_tasks import BOTH, SOON, enqueued
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job, testing
from pgqueue.client.tasks import Task, task

__all__ = ["accounts"]

KINDS = pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
INSERT = "INSERT INTO effect VALUES (%s, %s)"
EFFECTS = [f"{what} {item}" for item in (1, 2, 3) for what in ("step", "batch")]


def items(cursor: int | None) -> Iterator[tuple[int, int]]:
    yield from ((item, item) for item in range((cursor or 0) + 1, 4))


def stepping(transactional: bool, on_loop: bool) -> Task[..., Any]:
    """A task with a step and a write in each batch. Its first attempt fails in the second batch, behind the step."""

    def write(job: Job, item: int) -> int:
        job.connection.execute(INSERT, [job.id, f"step {item}"])
        job.enqueue(pgqueue.remote("nesting.of_step"), item=item)
        return item

    async def awrite(job: Job, item: int) -> int:
        await (await job.aconnection()).execute(INSERT, [job.id, f"step {item}"])
        job.enqueue(pgqueue.remote("nesting.of_step"), item=item)
        return item

    def goes(job: Job) -> str:
        for batch in job.iterate(items, 1):
            job.enqueue(pgqueue.remote("nesting.of_batch"), item=batch[0])
            item = job.step(f"item {batch[0]}", write, job, batch[0])
            job.connection.execute(INSERT, [job.id, f"batch {item}"])
            if item == 2 and job.attempt == 1:
                raise ValueError("not yet")
        return str(job.step("last", lambda: "through"))

    async def agoes(job: Job) -> str:
        async for batch in job.aiterate(items, 1):
            job.enqueue(pgqueue.remote("nesting.of_batch"), item=batch[0])
            item = await job.astep(f"item {batch[0]}", awrite, job, batch[0])
            await (await job.aconnection()).execute(INSERT, [job.id, f"batch {item}"])
            if item == 2 and job.attempt == 1:
                raise ValueError("not yet")
        return str(await job.astep("last", lambda: "through"))

    declared: Task[..., Any] = task(name="nesting.goes", transactional=transactional, retry=SOON)(
        agoes if on_loop else goes
    )
    return declared


def check(conn: Any) -> None:
    assert [note for (note,) in conn.execute("SELECT note FROM effect ORDER BY note").fetchall()] == sorted(EFFECTS)
    assert conn.execute("SELECT result, attempt FROM pgqueue.job_done").fetchall() == [("through", 2)]
    left = conn.execute("SELECT task, count(*) FROM pgqueue.job_available GROUP BY task ORDER BY task").fetchall()
    assert left == [("nesting.of_batch", 3), ("nesting.of_step", 3)]


@pytest.mark.promise("F360")
@KINDS
@BOTH
async def test_a_step_in_the_body_of_an_iteration_and_its_batch_are_done_once_each(
    dsn: str, accounts: Eyes, transactional: bool, on_loop: bool
) -> None:
    """The naive version ends the iteration with the step: the batch finds its run over, in each attempt."""
    asked = stepping(transactional, on_loop)
    async with work(dsn, asked):
        id = enqueued(dsn, asked)
        await until(accounts.is_in(id, "completed"))
    check(accounts.conn)


@pytest.mark.promise("F364")
@KINDS
def test_a_drain_takes_a_step_in_the_body_of_an_iteration(dsn: str, accounts: Eyes, transactional: bool) -> None:
    asked = stepping(transactional, False)
    with psycopg.connect(dsn) as conn:
        asked.enqueue(conn)
        with testing.Clock(conn) as clock:
            drained = testing.drain(conn, clock)
        assert (drained.completed, drained.retried) == (1, 1), drained.errors
        check(conn)


@pytest.mark.promise("F364")
@KINDS
async def test_an_async_drain_takes_a_step_in_the_body_of_an_iteration(
    dsn: str, accounts: Eyes, transactional: bool
) -> None:
    asked = stepping(transactional, True)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await asked.aenqueue(conn)
        async with testing.Clock(conn) as clock:
            drained = await testing.adrain(conn, clock)
        assert (drained.completed, drained.retried) == (1, 1), drained.errors
        await conn.commit()
    check(accounts.conn)


def nested(transactional: bool, on_loop: bool) -> Task[..., Any]:
    """A task that tries to iterate inside a step; then it does both, one behind the other."""

    def iterate(job: Job) -> None:
        job.connection.execute(INSERT, [job.id, "step"])
        for _ in job.iterate(items):
            raise AssertionError("it came into the loop")

    async def aiterate(job: Job) -> None:
        await (await job.aconnection()).execute(INSERT, [job.id, "step"])
        async for _ in job.aiterate(items):
            raise AssertionError("it came into the loop")

    def goes(job: Job) -> int:
        with pytest.raises(pgqueue.Error, match="the iteration is inside the step 'outer'"):
            job.step("outer", iterate, job)
        seen = [item for batch in job.iterate(items) for item in batch]
        return int(job.step("sum", lambda: sum(seen)))

    async def agoes(job: Job) -> int:
        with pytest.raises(pgqueue.Error, match="the iteration is inside the step 'outer'"):
            await job.astep("outer", aiterate, job)
        seen = [item async for batch in job.aiterate(items) for item in batch]
        return int(await job.astep("sum", lambda: sum(seen)))

    declared: Task[..., Any] = task(name="nesting.inside", transactional=transactional, retry=1)(
        agoes if on_loop else goes
    )
    return declared


@pytest.mark.promise("F362")
@KINDS
@BOTH
async def test_an_iteration_inside_a_step_is_refused_by_a_worker(
    dsn: str, accounts: Eyes, transactional: bool, on_loop: bool
) -> None:
    asked = nested(transactional, on_loop)
    async with work(dsn, asked):
        id = enqueued(dsn, asked)
        await until(accounts.is_in(id, "completed"))
    assert accounts.one("SELECT result FROM pgqueue.job_done") == 6
    assert accounts.one("SELECT count(*) FROM effect") == 0


@pytest.mark.promise("F362", "F364")
@KINDS
def test_an_iteration_inside_a_step_is_refused_by_a_drain(dsn: str, accounts: Eyes, transactional: bool) -> None:
    asked = nested(transactional, False)
    with psycopg.connect(dsn) as conn:
        asked.enqueue(conn)
        testing.drain(conn).check()
        assert conn.execute("SELECT result FROM pgqueue.job_done").fetchone() == (6,)
        assert conn.execute("SELECT count(*) FROM effect").fetchone() == (0,)
