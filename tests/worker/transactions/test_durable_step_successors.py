"""What a durable step enqueues: written with the step, once, whatever becomes of the attempt."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from accounts import accounts
from transactional_tasks import BOTH, SOON, enqueued
from workers import Eyes, until, work

from pgqueue import Flow, Job, testing
from pgqueue.client.tasks import Task, task

__all__ = ["accounts"]

KINDS = pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])


def splitting(transactional: bool, on_loop: bool, calls: list[str]) -> list[Task[..., Any]]:
    """A task that enqueues and adds a job in a step, and one before and after it; its first attempt fails."""

    @task(name="successors.part")
    def part(of: str) -> None:
        calls.append(of)

    def split(job: Job) -> int:
        calls.append("split")
        job.enqueue(part, "enqueued")
        job.add(part.new("added"))
        return 2

    def fails(job: Job) -> None:
        job.enqueue(part, "of a step that raised")
        raise ValueError("no")

    def order(job: Job) -> None:
        job.enqueue(part, "before")
        with pytest.raises(ValueError, match="no"):
            job.step("fails", fails, job)
        assert job.step("split", split, job) == 2
        job.enqueue(part, "after")
        if job.attempt == 1:
            raise ValueError("not yet")

    async def aorder(job: Job) -> None:
        job.enqueue(part, "before")
        with pytest.raises(ValueError, match="no"):
            await job.astep("fails", fails, job)
        assert await job.astep("split", split, job) == 2
        job.enqueue(part, "after")
        if job.attempt == 1:
            raise ValueError("not yet")

    @task(name="successors.last")
    def last() -> None:
        calls.append("last")

    declared = task(name="successors.order", transactional=transactional, retry=SOON)(aorder if on_loop else order)
    return [declared, part, last]


def flow_of(order: Task[..., Any], last: Task[..., Any]) -> tuple[Flow, Any]:
    flow = Flow("split")
    return flow, flow.add(last.new(), after=[flow.add(order.new())])


@pytest.mark.promise("F360")
@KINDS
@BOTH
async def test_what_a_step_enqueues_and_adds_is_there_once_although_the_attempt_fails(
    dsn: str, accounts: Eyes, transactional: bool, on_loop: bool
) -> None:
    """The naive version writes it with the end of the job only: the next attempt does not call the step, so it is lost,
    and the node ends without the job that was added."""
    calls: list[str] = []
    order, part, last = splitting(transactional, on_loop, calls)
    flow, end = flow_of(order, last)
    with psycopg.connect(dsn) as conn:
        handle = flow.enqueue(conn)
    async with work(dsn, order, part, last):
        await until(lambda: accounts.state(handle.jobs(end)[0].id) == "completed")
        await until(lambda: accounts.one("SELECT count(*) FROM pgqueue.job_done") == 6)
    assert sorted(calls) == ["added", "after", "before", "enqueued", "last", "split"]
    assert calls.index("added") < calls.index("last")


@pytest.mark.promise("F360")
@KINDS
@BOTH
async def test_a_step_and_what_it_enqueues_are_one_commit(
    dsn: str, accounts: Eyes, transactional: bool, on_loop: bool
) -> None:
    @task(name="commit.part")
    def part(of: str) -> None: ...

    def split(job: Job) -> None:
        job.enqueue(part, "step")

    def order(job: Job) -> None:
        job.step("split", split, job)
        job.enqueue(part, "handler")
        raise ValueError("never")

    async def aorder(job: Job) -> None:
        await job.astep("split", split, job)
        job.enqueue(part, "handler")
        raise ValueError("never")

    asked = task(name="commit.order", transactional=transactional, retry=1)(aorder if on_loop else order)
    async with work(dsn, asked):
        id = enqueued(dsn, asked)
        await until(accounts.is_in(id, "failed"))
    assert accounts.all("SELECT args FROM pgqueue.job_available") == [({"of": "step"},)]
    assert accounts.one("SELECT (SELECT xmin FROM pgqueue.job_available) = (SELECT xmin FROM pgqueue.job_step)")


@pytest.mark.promise("F364")
@KINDS
def test_a_drain_enqueues_what_a_step_does(dsn: str, eyes: Eyes, transactional: bool) -> None:
    calls: list[str] = []
    order, _, last = splitting(transactional, False, calls)
    with psycopg.connect(dsn) as conn:
        flow_of(order, last)[0].enqueue(conn)
        with testing.Clock(conn) as clock:
            drained = testing.drain(conn, clock)
    assert (drained.completed, drained.retried) == (6, 1)
    assert sorted(calls) == ["added", "after", "before", "enqueued", "last", "split"]
    assert calls.index("added") < calls.index("last")


@pytest.mark.promise("F364")
@KINDS
async def test_an_async_drain_enqueues_what_a_step_does(dsn: str, eyes: Eyes, transactional: bool) -> None:
    calls: list[str] = []
    order, _, last = splitting(transactional, True, calls)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await flow_of(order, last)[0].aenqueue(conn)
        async with testing.Clock(conn) as clock:
            drained = await testing.adrain(conn, clock)
    assert (drained.completed, drained.retried) == (6, 1)
    assert sorted(calls) == ["added", "after", "before", "enqueued", "last", "split"]
