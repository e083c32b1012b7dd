"""What type checkers make of tasks. Never run: `test_typing.py` gives it to mypy and pyright.

Both must accept every line, but for those marked with an ignore comment: there both must complain.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import psycopg

from pgqueue.admin.actions import acancel, cancel, retry
from pgqueue.admin.answers import Answer
from pgqueue.admin.depth import QueueInfo, aqueues, queues
from pgqueue.admin.history import HistoryRow, ahistory
from pgqueue.admin.queries import JobInfo
from pgqueue.admin.queues import apause, pause
from pgqueue.client import schedules
from pgqueue.client.enqueue import aenqueue, enqueue, enqueue_many
from pgqueue.client.flow import Flow
from pgqueue.client.flow_enqueue import FlowHandle
from pgqueue.client.handle import JobHandle
from pgqueue.client.job_outcome import JobOutcome
from pgqueue.client.middleware import middleware, on_finish, on_start
from pgqueue.client.tasks import Task, declared, find, remote, task
from pgqueue.jobs.concurrency import Limit, Rate
from pgqueue.jobs.cron import Every
from pgqueue.jobs.job import Job, NewJob
from pgqueue.jobs.nodes import Node
from pgqueue.jobs.outcomes import Snooze
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.testing.wait import aenqueued, enqueued


@task
def charge(customer: int, note: str = "") -> float:
    return 1.0


@task
async def send(address: str, *, copy: bool = False) -> bytes:
    return b""


@task(name="count", queue="slow", priority=0, aliases=["tally"], retry=3)
def count(job: Job, start: int) -> str:
    return ""


@task(retry=RetryPolicy(attempts=3, first=timedelta(minutes=1)))
async def watch(job: Job, start: int) -> int:
    return 1


@task(retry=lambda attempt, exc: 5.0 if attempt < 3 else None)
def nothing() -> None: ...


@task
def listed(order: int, texts: list[str]) -> None: ...


@task(limit=5, rate="100/minute")
def slow(start: int) -> int:
    return 1


@task(limit=Limit(5, name="api"), rate=Rate("5/10s", key="customer:{start}", burst=5))
def shared(start: int) -> int:
    return 1


def customer_of(start: int) -> str | None:
    return str(start) if start else None


@task(rate=Rate("5/second", key=customer_of))
async def by_function(start: int) -> int:
    return 1


@task
def later(start: int) -> int | Snooze:
    return start or Snooze(60)


@task
def anything(value: Any) -> int:  # cannot be told from a Job, so its parameters are not known
    return 1


@middleware
def trace(job: Job, call: Callable[[], Any]) -> Any:
    return call()


@middleware
async def trace_async(job: Job, call: Callable[[], Awaitable[Any]]) -> Any:
    return await call()


@on_start
def announce(job: Job) -> None: ...


@on_finish
def measure(job: Job, outcome: JobOutcome) -> None:
    assert_type(outcome.seconds, float)
    assert_type(outcome.error, str | None)


async def good_hooks() -> None:
    assert_type(trace(find_job(), lambda: 1), Any)
    assert_type(await trace_async(find_job(), find_awaitable), Any)
    assert_type(announce(find_job()), None)


def bad_hooks(outcome: JobOutcome) -> None:
    on_start(measure)  # type: ignore
    on_finish(trace)  # type: ignore
    on_start(trace_async)  # type: ignore
    middleware(announce)  # type: ignore
    middleware(good)  # type: ignore
    on_start(send)  # type: ignore
    outcome.seconds = 1.0  # type: ignore


async def find_awaitable() -> int:
    return 1


def good(conn: psycopg.Connection) -> None:
    assert_type(charge(1, note="x"), float)
    assert_type(count(find_job(), 1), str)
    assert_type(charge.new(1, "x"), NewJob[float])
    assert_type(charge.enqueue(conn, customer=1), JobHandle[float])
    assert_type(charge.using(delay=5).enqueue(conn, 1), JobHandle[float])
    assert_type(
        charge.using(run_at=datetime.now(UTC), queue="q", priority=1, retry=2, headers={"a": 1}).new(1).args, str
    )
    assert_type(charge.using(timeout=5).using(timeout=timedelta(minutes=5)).new(1), NewJob[float])
    assert_type(charge.using(delay="5m", retry=RetryPolicy(first="1m"), limit=5, rate="5/s").new(1), NewJob[float])
    assert_type(send.new("a", copy=True), NewJob[bytes])
    assert_type(count.new(1), NewJob[str])
    assert_type(count.enqueue(conn, start=1), JobHandle[str])
    assert_type(watch.enqueue(conn, 1), JobHandle[int])
    assert_type(nothing.enqueue(conn), JobHandle[None])
    assert_type(later.enqueue(conn, 1), JobHandle[int | Snooze])
    assert_type(enqueue(conn, charge, 1, note="x"), JobHandle[float])
    assert_type(enqueue(conn, count.using(priority=1), 1), JobHandle[str])
    assert_type(charge.enqueue_many(conn, [(1, "x"), {"customer": 2}]), list[JobHandle[float]])
    enqueue_many(conn, [charge.new(1), send.new("a"), count.new(1)])
    anything.enqueue(conn, {"a": 1})
    remote("billing.charge", queue="billing").enqueue(conn, customer=1)
    every: list[Task[..., Any]] = [charge, send, count, remote("x"), *declared()]
    assert_type(every[0], Task[..., Any])
    assert_type(find("count"), Task[..., Any] | None)
    assert_type(cancel(conn, 1, 2, reason="no more"), list[Answer])
    assert_type(retry(conn, state="failed", queue=None, limit=10), list[Answer])
    assert_type(queues(conn), list[QueueInfo])
    assert_type(queues(conn=conn), list[QueueInfo])
    assert_type(pause(conn, "mail", actor="ann"), bool)
    assert_type(pause(conn, task="count"), bool)
    assert_type(schedules.add(conn, "each", Every("1m"), count, start=1), bool)
    assert_type(schedules.run(conn, "each"), JobHandle[Any])
    assert_type(enqueued(conn, count, start=1), list[JobInfo])


async def good_async(conn: psycopg.AsyncConnection) -> None:
    assert_type(await send("a"), bytes)
    assert_type(await watch(find_job(), 1), int)
    assert_type(await send.aenqueue(conn, "a"), JobHandle[bytes])
    assert_type(await aenqueue(conn, watch, 1), JobHandle[int])
    assert_type(await charge.aenqueue_many(conn, [(1,)]), list[JobHandle[float]])
    assert_type(await acancel(conn, state="available", reason="no more"), list[Answer])
    assert_type(await aqueues(conn), list[QueueInfo])
    assert_type(await apause(conn, "mail"), bool)
    assert_type(await apause(conn, task="count", actor="ann"), bool)
    assert_type(await ahistory(conn, task="count", step="hour"), list[HistoryRow])
    assert_type(await schedules.aadd(conn, "each", Every("1m"), count, start=1), bool)
    assert_type(await schedules.aadd(conn, "each", Every("1m"), "count", start=1), bool)
    assert_type(await schedules.aremove(conn, "each"), None)
    assert_type(await aenqueued(conn, count, start=1), list[JobInfo])


def bad(conn: psycopg.Connection) -> None:
    charge("1")  # type: ignore
    charge.new("1")  # type: ignore
    charge.new()  # type: ignore
    charge.new(1, 2)  # type: ignore
    charge.new(1, nota="x")  # type: ignore
    charge.enqueue(conn)  # type: ignore
    charge.enqueue(conn, "1")  # type: ignore
    charge.enqueue()  # type: ignore
    charge.using(delay=5).enqueue(conn, "1")  # type: ignore
    count.new(find_job(), 1)  # type: ignore
    count.enqueue(conn, find_job(), 1)  # type: ignore
    count(1)  # type: ignore
    watch.new("1")  # type: ignore
    nothing.enqueue(conn, 1)  # type: ignore
    enqueue(conn, charge, "1")  # type: ignore
    enqueue(conn, send, "a", True)  # type: ignore
    enqueue(conn, good, conn)  # type: ignore
    wrong: JobHandle[str] = charge.enqueue(conn, 1)  # type: ignore
    print(wrong)
    charge.enqueue_many(conn, [1, 2])  # type: ignore
    charge.using(priority="high")  # type: ignore
    charge.using(lock=7)  # type: ignore
    charge.using(timeout=[5])  # type: ignore
    charge.using(retry="often")  # type: ignore
    task(queue=5)  # type: ignore
    task(lock=7)  # type: ignore
    task(limit="5")  # type: ignore
    task(rate=5)  # type: ignore
    Rate("5/s", key=5)  # type: ignore
    charge.using(limit="5")  # type: ignore
    task("name")  # type: ignore
    task(retry="often")  # type: ignore
    remote("x", lock=1)  # type: ignore
    charge.queue = "other"  # type: ignore
    cancel(conn, 1, queue="mail")  # type: ignore
    cancel(conn, "1")  # type: ignore
    cancel(conn, name="mail")  # type: ignore
    retry(conn, 1, limit=1)  # type: ignore
    retry(conn, task=charge)  # type: ignore
    queues()  # type: ignore
    queues(conn, "mail")  # type: ignore
    pause(conn, "mail", task="count")  # type: ignore
    pause(conn)  # type: ignore
    schedules.add(conn, "each", Every("1m"), count, start="1")  # type: ignore


async def bad_async(conn: psycopg.AsyncConnection) -> None:
    await aqueues(conn, "mail")  # type: ignore
    await apause(conn, "mail", task="count")  # type: ignore
    await apause(conn)  # type: ignore
    await ahistory(conn, step="day")  # type: ignore
    await schedules.aadd(conn, "each", Every("1m"), count, start="1")  # type: ignore
    await schedules.apause(conn, "each", actr="ann")  # type: ignore
    paused: str = await apause(conn, "mail")  # type: ignore
    print(paused)


def find_job() -> Job:
    raise NotImplementedError


def orders(conn: psycopg.Connection) -> None:
    flow = Flow("order 7")
    paid = flow.add(charge.new(7))
    assert_type(paid, Node[float])
    assert_type(paid.result, float)
    counted = flow.add_many((count.new(i) for i in range(3)), after=[paid])
    assert_type(counted, Node[list[str]])
    mail = flow.add(listed.new(7, texts=counted.result), name="mail")
    flow.add(charge.new(7, counted.result))  # type: ignore
    flow.add(watch.new(7), after=[mail.failed, paid.ended])
    flow.add(watch.new(7), after=paid)  # type: ignore
    flow.add(watch.new(7), after=["paid"])  # type: ignore
    flow.add(watch)  # type: ignore
    flow.add_many(watch.new(7))  # type: ignore
    handle = flow.enqueue(conn)
    assert_type(handle, FlowHandle)
    assert_type(handle.jobs(paid), list[JobHandle[Any]])


async def aorders(conn: object) -> None:
    assert_type(await Flow("order 7").aenqueue(conn), FlowHandle)
