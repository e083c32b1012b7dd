"""What a worker refuses a handler, drains refuse, too, and `run` and `arun` as far as they know it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import Batch, Job
from pgqueue.client.tasks import Task, task
from pgqueue.testing import adrain, arun, drain, run

BEFORE = "job.connection was asked for before the "


def items(cursor: int | None) -> Iterator[tuple[int, int]]:
    yield from [] if cursor else [(1, 1)]


def batched(said: list[str], conn: object, on_loop: bool) -> Task[..., Any]:
    """A task of batches that tries what a job of a batch has not."""

    def sends(jobs: list[Job], numbers: list[int]) -> None:
        for ask in (
            lambda: jobs[0].step("one", lambda: 1),
            lambda: jobs[0].iterate(items),
            lambda: jobs[0].complete(conn),
        ):
            with pytest.raises(pgqueue.Error) as error:
                ask()
            said.append(str(error.value))
        jobs[0].progress(1, 2)
        jobs[0].checkpoint()
        assert not jobs[0].cancelled

    async def asends(jobs: list[Job], numbers: list[int]) -> None:
        with pytest.raises(pgqueue.Error) as error:
            await jobs[0].astep("one", lambda: 1)
        said.append(str(error.value))
        with pytest.raises(pgqueue.Error) as error:
            jobs[0].aiterate(items)
        said.append(str(error.value))
        with pytest.raises(pgqueue.Error) as error:
            await jobs[0].acomplete(conn)
        said.append(str(error.value))

    declared: Task[..., Any] = task(name=f"refusals.{on_loop}", batch=Batch(5))(asends if on_loop else sends)
    return declared


def check(said: list[str], way: str) -> None:
    assert [each.partition("there is no job.")[2].partition("(")[0] for each in said] == [
        f"{way}step",
        f"{way}iterate",
        f"{way}complete",
    ]


@pytest.mark.promise("F364")
def test_a_drain_refuses_a_batch_what_a_worker_refuses(conn: psycopg.Connection[Any]) -> None:
    said: list[str] = []
    asked = batched(said, conn, False)
    asked.enqueue(conn, 1)
    drain(conn).check()
    check(said, "")
    assert conn.execute("SELECT count(*) FROM pgqueue.job_step").fetchone() == (0,)


@pytest.mark.promise("F364")
async def test_an_async_drain_refuses_a_batch_what_a_worker_refuses(dsn: str) -> None:
    said: list[str] = []
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await batched(said, conn, True).aenqueue(conn, 1)
        (await adrain(conn)).check()
        await conn.rollback()
    check(said, "a")


@pytest.mark.promise("F364")
async def test_run_and_arun_refuse_a_batch_what_a_worker_refuses() -> None:
    said: list[str] = []
    run(batched(said, None, False), 1)
    check(said, "")
    said.clear()
    await arun(batched(said, None, True), 1)
    check(said, "a")


@pytest.mark.promise("F364")
def test_a_drain_refuses_a_connection_before_a_step_or_an_iteration(conn: psycopg.Connection[Any]) -> None:
    """The naive version keeps what was written there with the step, although the attempt fails later."""
    said: list[str] = []

    @task(name="refusals.early", transactional=True)
    def early(job: Job) -> None:
        job.connection.execute("CREATE TABLE early ()")
        for ask in (lambda: job.step("one", lambda: 1), lambda: list(job.iterate(items))):
            with pytest.raises(pgqueue.Error) as error:
                ask()
            said.append(str(error.value).partition(BEFORE)[2].partition(",")[0])

    @task(name="refusals.late", transactional=True)
    def late(job: Job) -> int:
        seen = [item for batch in job.iterate(items) for item in batch]
        one = job.step("one", lambda: int(job.connection.execute("SELECT 1").fetchone()[0]))
        two = job.step("two", lambda: 2)
        job.connection.execute("SELECT 1")
        with pytest.raises(pgqueue.Error, match=f"{BEFORE}step"):
            job.step("three", lambda: 3)
        return len(seen) + one + two

    early.enqueue(conn)
    late.enqueue(conn)
    assert drain(conn).check().completed == 2
    assert said == ["step", "iteration"]
    assert conn.execute("SELECT to_regclass('early') IS NOT NULL").fetchone() == (True,)
    assert conn.execute("SELECT result FROM pgqueue.job_done WHERE task = 'refusals.late'").fetchone() == (4,)
    conn.rollback()


@pytest.mark.promise("F364")
async def test_an_async_drain_refuses_a_connection_before_a_step_or_an_iteration(dsn: str) -> None:
    said: list[str] = []

    @task(name="refusals.early", transactional=True)
    async def early(job: Job) -> int:
        one = int(await job.astep("one", lambda: 1))
        await (await job.aconnection()).execute("SELECT 1")
        with pytest.raises(pgqueue.Error) as error:
            await job.astep("two", lambda: 1)
        said.append(str(error.value).partition(BEFORE)[2].partition(",")[0])
        with pytest.raises(pgqueue.Error) as error:
            [batch async for batch in job.aiterate(items)]
        said.append(str(error.value).partition(BEFORE)[2].partition(",")[0])
        return one

    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await early.aenqueue(conn)
        (await adrain(conn)).check()
        await conn.rollback()
    assert said == ["step", "iteration"]
