"""Spans around handlers of every kind: in middleware, in transactions, called again, cancelled, iterating."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from time import sleep
from typing import Any

import psycopg
import pytest
from opentelemetry.trace import StatusCode
from traces import Spans, current, span_id, told, traceparent
from workers import Eyes, until, work

import pgqueue
from pgqueue.client import middleware as middleware_module
from pgqueue.database import migrations
from pgqueue.testing import drain

seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


@pgqueue.task(name="traced_runs.plain")
def plain(n: int = 0) -> int:
    seen.append(current())
    return n


@pgqueue.task(name="traced_runs.on_loop")
async def on_loop(n: int = 0) -> int:
    seen.append(current())
    return n


@pytest.fixture
def hooks() -> Iterator[None]:
    declared_here = (middleware_module._on_start, middleware_module._on_finish, middleware_module._middleware)
    kept = [list(each) for each in declared_here]
    yield
    for each, before in zip(declared_here, kept, strict=True):
        each[:] = before  # type: ignore[index]


@pytest.mark.promise("F172")
@pytest.mark.parametrize("each", [plain, on_loop])
async def test_middleware_and_hooks_of_the_application_are_inside_of_the_span(
    each: pgqueue.Task[..., Any], dsn: str, spans: Spans, hooks: None
) -> None:
    @pgqueue.middleware
    def around(job: pgqueue.Job, call: Callable[[], Any]) -> Any:
        seen.append(current())
        return call()

    @pgqueue.middleware
    async def around_async(job: pgqueue.Job, call: Callable[[], Any]) -> Any:
        seen.append(current())
        return await call()

    @pgqueue.on_start
    def starts(job: pgqueue.Job) -> None:
        seen.append(current())

    @pgqueue.on_finish
    def finishes(job: pgqueue.Job, outcome: pgqueue.JobOutcome) -> None:
        seen.append(current())

    with psycopg.connect(dsn) as conn:
        each.enqueue(conn)
    async with work(dsn, each):
        await until(lambda: spans.named(f"run {each.name}"))
    assert seen == [span_id(spans.one(f"run {each.name}"))] * 4


@pytest.mark.promise("F172")
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_transactional_task_is_told_as_what_was_committed(
    is_async: bool, dsn: str, eyes: Eyes, spans: Spans
) -> None:
    @pgqueue.task(name="traced_runs.writes", transactional=True)
    def writes(job: pgqueue.Job, again: bool) -> Any:
        job.connection.execute("SELECT 1")
        return pgqueue.Snooze(60) if again else None

    @pgqueue.task(name="traced_runs.writes_async", transactional=True)
    async def writes_async(job: pgqueue.Job, again: bool) -> Any:
        await (await job.aconnection()).execute("SELECT 1")
        return pgqueue.Snooze(60) if again else None

    each = writes_async if is_async else writes
    with psycopg.connect(dsn) as conn:
        each.enqueue(conn, False)
        each.enqueue(conn, True)
    async with work(dsn, writes, writes_async):
        await until(lambda: len(spans.named(f"run {each.name}")) == 2)
    assert eyes.states() == {"completed": 1, "scheduled": 1}
    assert {told(span)["pgqueue.outcome"] for span in spans.named(f"run {each.name}")} == {"completed", "snoozed"}
    header = eyes.one("SELECT headers ->> 'pgqueue:attempt' FROM pgqueue.job_scheduled")
    assert header in [traceparent(span) for span in spans.named(f"run {each.name}")]


@pytest.mark.promise("F172")
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_handler_that_is_called_again_has_one_span(is_async: bool, dsn: str, eyes: Eyes, spans: Spans) -> None:
    """If the database aborts a handler, it is called again within the same attempt."""

    def aborts_once() -> None:
        seen.append(current())
        if len(seen) == 1:
            raise psycopg.errors.SerializationFailure("could not serialize access")

    @pgqueue.task(name="traced_runs.aborted")
    def aborted() -> None:
        aborts_once()

    @pgqueue.task(name="traced_runs.aborted_on_loop")
    async def aborted_on_loop() -> None:
        aborts_once()

    each = aborted_on_loop if is_async else aborted
    with psycopg.connect(dsn) as conn:
        each.enqueue(conn)
    async with work(dsn, aborted, aborted_on_loop):
        await until(lambda: spans.named(f"run {each.name}"))
    span = spans.one(f"run {each.name}")
    assert seen == [span_id(span)] * 2
    assert told(span)["pgqueue.outcome"] == "completed" and list(span.events) == []


@pytest.mark.promise("F173")
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_cancelled_job_leaves_nothing_behind_for_the_next(
    is_async: bool, dsn: str, eyes: Eyes, spans: Spans
) -> None:
    began = threading.Event()

    @pgqueue.task(name="traced_runs.endless")
    def endless(job: pgqueue.Job) -> None:
        began.set()
        while True:
            job.checkpoint()
            sleep(0.001)

    @pgqueue.task(name="traced_runs.endless_on_loop")
    async def endless_on_loop() -> None:
        began.set()
        await asyncio.sleep(600)

    each = endless_on_loop if is_async else endless
    then = on_loop if is_async else plain
    with psycopg.connect(dsn) as conn:
        handle = each.enqueue(conn)
    async with work(dsn, endless, endless_on_loop, plain, on_loop, concurrency=1):
        await until(began.is_set)
        pgqueue.cancel(eyes.conn, handle.id)
        await until(lambda: spans.named(f"run {each.name}"))
        with psycopg.connect(dsn) as conn:
            then.enqueue(conn)
        await until(lambda: spans.named(f"run {then.name}"))
    cancelled, following = spans.one(f"run {each.name}"), spans.one(f"run {then.name}")
    assert told(cancelled)["pgqueue.outcome"] == "cancelled"
    assert cancelled.status.status_code is StatusCode.UNSET
    assert following.parent is None and seen == [span_id(following)]


@pytest.mark.promise("F172")
def test_an_iterating_job_is_one_span_with_the_jobs_of_its_batches(conn: psycopg.Connection[Any], spans: Spans) -> None:
    @pgqueue.task(name="traced_runs.iterates")
    def iterates(job: pgqueue.Job) -> None:
        for batch in job.iterate(lambda cursor: ((n, n) for n in range(cursor or 0, 4)), size=2):
            job.enqueue(plain, batch[0])

    iterates.enqueue(conn)
    drain(conn)
    run = spans.one("run traced_runs.iterates")
    producers = spans.named("enqueue traced_runs.plain")
    assert len(producers) == 2
    assert {span.parent and span.parent.span_id for span in producers} == {span_id(run)}


@pytest.mark.promise("F172")
def test_a_staged_job_brings_its_context(empty_dsn: str, spans: Spans) -> None:
    migrations.migrate(empty_dsn, line=migrations.OUTBOX)
    with psycopg.connect(empty_dsn) as conn:
        handle = plain.enqueue(pgqueue.Outbox(conn), 1)
        [(options,)] = conn.execute("SELECT options FROM pgqueue.outbox").fetchall()
    span = spans.one("enqueue traced_runs.plain")
    assert told(span)["pgqueue.staged_id"] == handle.staged_id
    assert options["headers"] == {"traceparent": traceparent(span)}
