"""What is put around jobs: middleware in its order, hooks at both ends, and nothing where nothing was declared."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import psycopg
import pytest
from workers import Eyes, until, work

import pgqueue.testing
from pgqueue.client import middleware as hook_module
from pgqueue.client.job_outcome import JobOutcome
from pgqueue.client.middleware import Hooks, middleware, on_finish, on_start
from pgqueue.client.tasks import Task, task
from pgqueue.errors import InvalidOption
from pgqueue.jobs.context import JobContext
from pgqueue.jobs.fields import claimed
from pgqueue.jobs.job import Job, current_job, running_job
from pgqueue.jobs.outcomes import (
    COMPLETED,
    RELEASED,
    WRITTEN,
    Cancelled,
    Completed,
    Failed,
    Outcome,
    Problem,
    Retried,
    interrupted,
)
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.run import timeouts
from pgqueue.worker.run.run import Interrupted

order: list[Any] = []
shade: ContextVar[str] = ContextVar("shade", default="none")


@pytest.fixture(autouse=True)
def nothing_declared() -> Iterator[None]:
    order.clear()
    kept = [list(each) for each in (hook_module._on_start, hook_module._on_finish, hook_module._middleware)]
    for each in (hook_module._on_start, hook_module._on_finish, hook_module._middleware):
        each.clear()
    yield
    hook_module._on_start[:], hook_module._on_finish[:], hook_module._middleware[:] = kept  # type: ignore[assignment]


@task(name="hooks.on_loop")
async def on_loop(n: int) -> int:
    order.append(("handler", threading.get_ident()))
    return n


@task(name="hooks.in_thread")
def in_thread(n: int) -> int:
    order.append(("handler", threading.get_ident()))
    return n


@task(name="hooks.fails", retry=1)
def fails() -> None:
    raise KeyError("sku")


@task(name="hooks.fails_on_loop", retry=RetryPolicy(attempts=2, first=60, factor=1))
async def fails_on_loop() -> None:
    raise KeyError("sku")


@task(name="hooks.slow", timeout=0.1, retry=1)
async def slow() -> None:
    await asyncio.sleep(60)


@task(name="hooks.waits")
async def waits() -> None:
    order.append("began")
    await asyncio.sleep(60)


def a_job(number: int = 1) -> Job:
    return Job(claimed(id=number, pos=number, task="hooks.made_up"), claim=1)


def call(task: Task[..., Any], *args: Any) -> Any:
    """As the executor would, with a job that runs."""
    token = running_job.set(a_job())
    try:
        return asyncio.run(task.fn(*args)) if task.is_async else task.fn(*args)
    finally:
        running_job.reset(token)


def hooked(task: Task[..., Any]) -> Task[..., Any]:
    return hook_module.wrapped(task, hook_module.declared())


def enqueue(dsn: str, *jobs: Any) -> list[int]:
    with psycopg.connect(dsn) as conn:
        return [handle.id for handle in pgqueue.enqueue_many(conn, jobs)]


# Nothing declared ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [on_loop, in_thread])
def test_a_task_without_hooks_is_left_as_it_is(each: Task[..., Any]) -> None:
    made = hook_module.declared()
    finish: Callable[[Job, Outcome], None] = lambda job, outcome: None  # noqa: E731
    assert hook_module.wrapped(each, made) is each
    assert made.finishing(finish) is finish


def test_middleware_of_the_other_kind_changes_nothing() -> None:
    @middleware
    async def trace(job: Job, call: Callable[[], Any]) -> Any:
        return await call()

    assert hooked(in_thread) is in_thread
    assert hooked(on_loop) is not on_loop


# Middleware ----------------------------------------------------------------------------------------------------------


def declare_two() -> None:
    @middleware
    def first(job: Job, call: Callable[[], Any]) -> Any:
        order.append(("first", job.id, current_job().id))
        value = call()
        order.append("first after")
        return value

    @middleware
    def second(job: Job, call: Callable[[], Any]) -> Any:
        order.append("second")
        return call() + 1

    @middleware
    async def first_async(job: Job, call: Callable[[], Any]) -> Any:
        order.append(("first", job.id, current_job().id))
        value = await call()
        order.append("first after")
        return value

    @middleware
    async def second_async(job: Job, call: Callable[[], Any]) -> Any:
        order.append("second")
        return await call() + 1


@pytest.mark.parametrize("each", [on_loop, in_thread])
def test_the_first_declared_is_the_outermost_and_what_it_returns_counts(each: Task[..., Any]) -> None:
    declare_two()
    assert call(hooked(each), 7) == 8
    assert [entry if isinstance(entry, str) else entry[0] for entry in order] == [
        "first", "second", "handler", "first after",
    ]  # fmt: skip
    assert order[0] == ("first", 1, 1)


@pytest.mark.parametrize("each", [on_loop, in_thread])
def test_a_result_that_is_not_to_be_stored_is_not_made_by_middleware_either(each: Task[..., Any]) -> None:
    declare_two()
    assert call(hooked(replace(each, store_result=False)), 7) is None


def test_a_handler_that_is_not_called_does_not_run() -> None:
    @middleware
    def instead(job: Job, call: Callable[[], Any]) -> Any:
        return "instead"

    assert call(hooked(in_thread), 7) == "instead"
    assert order == []


@pytest.mark.parametrize("each", [fails, fails_on_loop])
def test_middleware_sees_what_the_handler_raises_and_may_raise_itself(each: Task[..., Any]) -> None:
    @middleware
    def translate(job: Job, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except KeyError as error:
            raise LookupError("translated") from error

    @middleware
    async def translate_async(job: Job, call: Callable[[], Any]) -> Any:
        try:
            return await call()
        except KeyError as error:
            raise LookupError("translated") from error

    with pytest.raises(LookupError, match="translated"):
        call(hooked(each))


def decided(is_async: bool, outcome: Outcome) -> Task[..., Any]:
    """A task whose outcome is decided inside of middleware, as that of a transactional one is."""
    if is_async:

        async def handler() -> Any:
            order.append("handler")
            return outcome

        return Task("hooks.written", handler, on_loop.codec, is_async=True)

    def handler_in_thread() -> Any:
        order.append("handler")
        return outcome

    return Task("hooks.written", handler_in_thread, in_thread.codec)


@pytest.mark.parametrize("outcome", [WRITTEN, Completed('"sent"')])
@pytest.mark.parametrize("is_async", [True, False])
def test_what_is_decided_inside_stays_so_whatever_middleware_makes_of_it(
    is_async: bool, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    @middleware
    def spoils(job: Job, call: Callable[[], Any]) -> Any:
        order.append(call())
        return "another value"

    @middleware
    async def spoils_async(job: Job, call: Callable[[], Any]) -> Any:
        order.append(await call())
        return "another value"

    assert call(hooked(decided(is_async, outcome))) is outcome
    assert order == ["handler", None]
    assert caplog.records == []


@pytest.mark.parametrize("is_async", [True, False])
def test_an_exception_after_the_commit_is_logged_and_no_failure(
    is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @middleware
    def spoils(job: Job, call: Callable[[], Any]) -> Any:
        call()
        raise ValueError("too late")

    @middleware
    async def spoils_async(job: Job, call: Callable[[], Any]) -> Any:
        await call()
        raise ValueError("too late")

    with pytest.raises(ValueError, match="too late"):  # nothing is committed yet
        call(hooked(decided(is_async, Completed("1"))))
    assert call(hooked(decided(is_async, WRITTEN))) is WRITTEN
    [record] = caplog.records
    assert "committed" in record.getMessage() and record.exc_info
    assert record.__dict__["job_id"] == 1


@pytest.mark.parametrize("is_async", [True, False])
async def test_middleware_sees_the_commit_of_a_transactional_task_fail(dsn: str, eyes: Eyes, is_async: bool) -> None:
    eyes.do("CREATE TABLE parent (id int PRIMARY KEY)")
    eyes.do("CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")

    @middleware
    def sees(job: Job, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except psycopg.errors.ForeignKeyViolation:
            order.append("seen")
            raise pgqueue.Cancel("no parent") from None

    @middleware
    async def sees_async(job: Job, call: Callable[[], Any]) -> Any:
        try:
            return await call()
        except psycopg.errors.ForeignKeyViolation:
            order.append("seen")
            raise pgqueue.Cancel("no parent") from None

    @task(name="hooks.writes", transactional=True)
    def writes(job: Job) -> None:
        job.connection.execute("INSERT INTO child VALUES (1)")

    @task(name="hooks.writes_async", transactional=True)
    async def writes_async(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute("INSERT INTO child VALUES (1)")

    new = writes_async.new() if is_async else writes.new()
    enqueue(dsn, new)
    async with work(dsn, writes, writes_async):
        await until(lambda: eyes.states() == {"cancelled": 1})
    assert order == ["seen"]
    assert eyes.all("SELECT reason FROM pgqueue.job_dead") == [("no parent",)]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_transactional_task_is_told_as_what_was_committed(dsn: str, eyes: Eyes, is_async: bool) -> None:
    declare_two()
    declare_ends()

    def answer(what: str) -> Any:
        return {"snooze": pgqueue.Snooze(60), "cancel": pgqueue.Cancel("not wanted")}.get(what, what)

    @task(name="hooks.commits", transactional=True)
    def commits(job: Job, what: str) -> Any:
        job.connection.execute("SELECT 1")
        return answer(what)

    @task(name="hooks.commits_async", transactional=True)
    async def commits_async(job: Job, what: str) -> Any:
        await (await job.aconnection()).execute("SELECT 1")
        return answer(what)

    each = commits_async if is_async else commits

    @middleware
    def swallows(job: Job, call: Callable[[], Any]) -> Any:
        call()
        return 7

    @middleware
    async def swallows_async(job: Job, call: Callable[[], Any]) -> Any:
        await call()
        return 7

    async with work(dsn, each) as worker:
        for number, what in enumerate(("sent", "snooze", "cancel"), 1):
            enqueue(dsn, each.new(what))
            await until(partial(lambda wanted: len(finishes()) == wanted, number))
        await until(lambda: not worker.state.held)
        assert worker.services.completer.fenced == 0
    assert [(told.name, told.reason, told.delay) for told in finishes()] == [
        ("completed", None, None), ("snoozed", None, 60.0), ("cancelled", "not wanted", None),
    ]  # fmt: skip
    assert eyes.states() == {"completed": 1, "scheduled": 1, "cancelled": 1}
    assert eyes.one("SELECT result FROM pgqueue.job_done") == "sent"


# Hooks ---------------------------------------------------------------------------------------------------------------


def declare_ends() -> None:
    @on_start
    def started(job: Job) -> None:
        order.append(("start", job.id, threading.get_ident()))

    @on_finish
    def finished(job: Job, outcome: JobOutcome) -> None:
        order.append(("finish", job.id, outcome, threading.get_ident()))


def finishes() -> list[JobOutcome]:
    return [entry[2] for entry in order if entry[0] == "finish"]


async def test_hooks_are_called_where_the_job_runs_on_both_ends_of_it(dsn: str, eyes: Eyes) -> None:
    declare_ends()
    here = threading.get_ident()
    for each in (on_loop, in_thread):
        order.clear()
        [id] = enqueue(dsn, each.new(1))
        async with work(dsn, on_loop, in_thread):
            await until(lambda: len(order) == 3)
        start, handler, finish = order
        assert start[:2] == ("start", id)
        assert finish[:2] == ("finish", id)
        assert (finish[2].name, finish[2].reason, finish[2].error) == ("completed", None, None)
        assert 0 < finish[2].seconds < 60
        assert start[2] == handler[1] == finish[3]
        assert (start[2] == here) is each.is_async
    assert eyes.all("SELECT result FROM pgqueue.job_done") == [(1,), (1,)]


async def test_on_finish_is_told_whatever_became_of_the_job(dsn: str, eyes: Eyes) -> None:
    declare_ends()

    @task(name="hooks.asks")
    async def asks(what: str) -> Any:
        match what:
            case "snooze":
                return pgqueue.Snooze(60)
            case "retry":
                raise pgqueue.Retry(60) from KeyError("sku")
            case "cancel":
                return pgqueue.Cancel("not wanted")
            case _:
                return pgqueue.Fail("cannot be")

    told: dict[str, JobOutcome] = {}
    async with work(dsn, asks, fails, fails_on_loop, slow):
        for name, new in {
            "gives up": fails.new(),
            "again": fails_on_loop.new(),
            "timeout": slow.new(),
            **{what: asks.new(what) for what in ("snooze", "retry", "cancel", "fail")},
        }.items():
            order.clear()
            enqueue(dsn, new)
            await until(lambda: len(finishes()) == 1)
            [told[name]] = finishes()
            assert order[0][0] == "start"

    def facts(name: str) -> tuple[Any, ...]:
        one = told[name]
        return (one.name, one.reason, one.error_type, one.error, one.delay is not None)

    assert facts("gives up") == ("failed", "error", "KeyError", "'sku'", False)
    assert facts("again") == ("retried", "error", "KeyError", "'sku'", True)
    assert facts("timeout")[:3] == ("failed", "timeout", "JobTimeout")
    assert told["timeout"].seconds >= 0.1
    assert facts("snooze") == ("snoozed", None, None, None, True)
    assert told["snooze"].delay == 60
    assert facts("retry") == ("retried", "error", "KeyError", "'sku'", True)
    assert facts("cancel") == ("cancelled", "not wanted", None, None, False)
    assert facts("fail") == ("failed", "error", "Fail", "cannot be", False)


@task(name="hooks.waits_in_thread")
def waits_in_thread() -> None:
    order.append("began")
    ends = monotonic() + 60
    while monotonic() < ends:
        pass


@pytest.mark.parametrize("waits", [waits, waits_in_thread])
async def test_a_job_that_is_cancelled_or_interrupted_in_the_middle_is_told_once(
    dsn: str, eyes: Eyes, waits: Task[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    declare_ends()
    [first] = enqueue(dsn, waits.new())
    async with work(dsn, waits) as worker:
        await until(lambda: "began" in order)
        with psycopg.connect(dsn) as conn:
            pgqueue.cancel(conn, first, reason="not wanted")
        await until(lambda: finishes())
        assert [(each.name, each.reason) for each in finishes()] == [("cancelled", "not wanted")]
        order.clear()
        [second] = enqueue(dsn, waits.new())
        await until(lambda: "began" in order)
        await worker.stop(0.0)
        assert [(each.name, each.reason) for each in finishes()] == [("released", "interrupted")]
    assert eyes.state(second) == "available"
    lines = [record for record in caplog.records if record.name == "pgqueue.job"]
    assert [(line.levelname, line.__dict__["outcome"]) for line in lines] == [
        ("WARNING", "cancelled"), ("WARNING", "released"),
    ]  # fmt: skip


async def test_a_job_taken_away_from_its_handler_is_told_once(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "GRACE", 0.1)
    declare_ends()
    release = threading.Event()

    @task(name="hooks.hangs", timeout=0.1, retry=1)
    def hangs() -> None:
        while not release.is_set():
            try:
                release.wait()
            except BaseException:
                continue
        order.append("late end")

    enqueue(dsn, hangs.new())
    async with work(dsn, hangs) as worker:
        await until(lambda: finishes())
        release.set()
        await until(lambda: worker.services.executor._running.lost == 0)
    assert [each.reason for each in finishes()] == ["timeout"]


async def test_jobs_whose_handler_never_started_are_not_told(dsn: str, eyes: Eyes) -> None:
    declare_ends()
    with psycopg.connect(dsn) as conn:
        conn.execute("""SELECT pgqueue.enqueue('hooks.on_loop', '{"n": "seven"}')""")  # refused by the signature
        conn.execute("SELECT pgqueue.enqueue('hooks.of_another_version')")
        on_loop.using(deadline=1e-6).enqueue(conn, 1)
    async with work(dsn, on_loop):
        await until(lambda: eyes.states() == {"scheduled": 1, "available": 1, "cancelled": 1})
    assert order == []


@pytest.mark.promise("F216")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException])
async def test_what_a_hook_raises_is_logged_with_its_name_and_changes_nothing(
    kind: type[BaseException], dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    @on_start
    def broken_start(job: Job) -> None:
        raise kind

    @on_finish
    def broken_finish(job: Job, outcome: JobOutcome) -> None:
        raise kind

    declare_ends()
    enqueue(dsn, on_loop.new(1), in_thread.new(1), on_loop.new(2), in_thread.new(2))
    async with work(dsn, on_loop, in_thread, concurrency=2):
        await until(eyes.done(4))
        await until(lambda: len(finishes()) == 4)  # the others are called all the same
    records = [record for record in caplog.records if "hook" in record.__dict__]
    assert sorted({record.__dict__["hook"].rpartition(".")[2] for record in records}) == [
        "broken_finish", "broken_start",
    ]  # fmt: skip
    assert len(records) == 8
    assert all(
        record.levelno == logging.ERROR and record.exc_info and "job_id" in record.__dict__ for record in records
    )
    assert all(record.__dict__["hook"] in record.getMessage() for record in records)


async def test_context_variables_of_on_start_are_seen_by_the_handler_and_by_on_finish_and_by_no_other_job(
    dsn: str, eyes: Eyes
) -> None:
    @on_start
    def sets(job: Job) -> None:
        order.append(("before", shade.get()))
        shade.set(f"{job.id}")

    @on_finish
    def sees(job: Job, outcome: JobOutcome) -> None:
        order.append(("after", shade.get() == str(job.id) == str(current_job().id)))

    @task(name="hooks.looks")
    async def looks() -> str:
        return shade.get()

    @task(name="hooks.looks_in_thread")
    def looks_in_thread() -> str:
        return shade.get()

    ids = enqueue(dsn, looks.new(), looks_in_thread.new(), looks.new(), looks_in_thread.new())
    async with work(dsn, looks, looks_in_thread, concurrency=1):
        await until(eyes.done(4))
    assert order == [("before", "none"), ("after", True)] * 4
    assert sorted(eyes.all("SELECT result #>> '{}' FROM pgqueue.job_done")) == sorted((str(id),) for id in ids)


def test_a_handler_called_again_within_its_attempt_is_one_start_and_one_end() -> None:
    declare_ends()
    made, job = hook_module.declared(), a_job()
    again = hook_module.wrapped(in_thread, made)
    outcomes: list[Outcome] = []
    finish = made.finishing(lambda job, outcome: outcomes.append(outcome))
    token = running_job.set(job)
    again.fn(1)
    again.fn(1)
    running_job.reset(token)
    finish(job, COMPLETED)
    finish(job, RELEASED)
    assert [entry[0] for entry in order] == ["start", "handler", "handler", "finish"]
    assert outcomes == [COMPLETED, RELEASED]
    assert not made._begun


def test_one_that_is_stopped_in_the_middle_of_its_hooks_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobContext, "stopping", lambda self, job: True)

    @on_start
    def is_interrupted(job: Job) -> None:
        raise Interrupted

    declare_ends()
    made, job = hook_module.declared(), a_job()
    token = running_job.set(job)
    with pytest.raises(Interrupted):
        hook_module.wrapped(in_thread, made).fn(1)
    running_job.reset(token)
    made.finished(job, Cancelled("by hand"))
    assert [entry[0] for entry in order] == ["finish"]


def test_the_outcome_is_handed_on_before_the_hooks_are_called() -> None:
    @on_finish
    def last(job: Job, outcome: JobOutcome) -> None:
        order.append("hook")

    made, job = hook_module.declared(), a_job()
    token = running_job.set(job)
    hook_module.wrapped(in_thread, made).fn(1)
    running_job.reset(token)
    made.finishing(lambda job, outcome: order.append("written"))(job, COMPLETED)
    assert order[1:] == ["written", "hook"]


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Completed("1"), JobOutcome("completed", 1.0)),
        (WRITTEN, JobOutcome("completed", 1.0)),
        (RELEASED, JobOutcome("released", 1.0)),
        (interrupted("it stops"), JobOutcome("released", 1.0, "interrupted", None, "it stops")),
        (Cancelled("why"), JobOutcome("cancelled", 1.0, "why")),
        (Failed("timeout", Problem("timeout", "T", "m")), JobOutcome("failed", 1.0, "timeout", "T", "m")),
        (Retried(5.0, Problem("timeout", "T", "m")), JobOutcome("retried", 1.0, "timeout", "T", "m", 5.0)),
        (Retried(5.0, Problem("failed", "T", "m")), JobOutcome("retried", 1.0, "error", "T", "m", 5.0)),
        (Retried(5.0, Problem("odd"), spent=False), JobOutcome("retried", 1.0, "odd", delay=5.0)),
        (Retried(5.0, Problem("snoozed"), spent=False, snoozed=True), JobOutcome("snoozed", 1.0, delay=5.0)),
    ],
)
def test_every_outcome_has_its_public_side(outcome: Outcome, told: JobOutcome) -> None:
    assert JobOutcome.of(outcome, 1.0) == told


# At the declaration --------------------------------------------------------------------------------------------------


def test_what_cannot_be_a_hook_is_refused_at_the_declaration() -> None:
    async def of_nobody(*args: Any) -> None: ...

    def generator(*args: Any) -> Iterator[None]:
        yield

    async def async_generator(*args: Any) -> AsyncIterator[None]:
        yield

    def nothing() -> None: ...

    decorators: dict[str, Any] = {"job": on_start, "job, outcome": on_finish, "job, call": middleware}
    for decorator in (on_start, on_finish):
        with pytest.raises(InvalidOption, match="async"):
            decorator(of_nobody)  # type: ignore[type-var]
    for given, decorator in decorators.items():
        for function in (generator, async_generator, partial(nothing), 7, on_loop):
            with pytest.raises(InvalidOption, match="must be a function"):
                decorator(function)
        with pytest.raises(InvalidOption, match=rf"test_what_.*\.nothing is called with \({given}\)"):
            decorator(nothing)
    assert hook_module.declared() == Hooks()


def test_the_same_one_imported_again_takes_the_place_of_the_first() -> None:
    declare_two()
    first = hook_module.declared()
    declare_two()
    second = hook_module.declared()
    assert [each.__name__ for each in second.middleware] == [each.__name__ for each in first.middleware]
    assert not set(first.middleware) & set(second.middleware)


# In tests of applications --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [on_loop, in_thread])
def test_run_and_drain_honour_all_of_it(conn: psycopg.Connection[Any], each: Task[..., Any]) -> None:
    declare_two()
    declare_ends()
    assert pgqueue.testing.run(each, 7) == 8
    names = [entry if isinstance(entry, str) else entry[0] for entry in order]
    assert names == ["start", "first", "second", "handler", "first after", "finish"]
    order.clear()
    job = each.enqueue(conn, 7)
    pgqueue.testing.drain(conn).check()
    assert pgqueue.get(conn, job.id).result == 8
    assert [entry if isinstance(entry, str) else entry[0] for entry in order] == names
    assert [told.name for told in finishes()] == ["completed"]


async def test_arun_and_adrain_honour_all_of_it(aconn: psycopg.AsyncConnection) -> None:
    declare_ends()
    with pytest.raises(KeyError):
        await pgqueue.testing.arun(fails_on_loop)
    assert [told.name for told in finishes()] == ["retried"]
    order.clear()
    await fails.aenqueue(aconn)
    drained = await pgqueue.testing.adrain(aconn)
    assert drained.failed == 1
    assert [told.name for told in finishes()] == ["failed"]


async def test_what_middleware_gives_is_what_becomes_of_the_job(dsn: str, eyes: Eyes) -> None:
    declare_two()

    @middleware
    def refuses(job: Job, call: Callable[[], Any]) -> Any:
        if job.task == "hooks.fails":
            raise pgqueue.Cancel("not today")
        return call()

    ids = enqueue(dsn, on_loop.new(1), in_thread.new(1), fails.new())
    async with work(dsn, on_loop, in_thread, fails):
        await until(lambda: eyes.states() == {"completed": 2, "cancelled": 1})
    assert eyes.all("SELECT result FROM pgqueue.job_done") == [(2,), (2,)]
    assert eyes.all("SELECT id, reason FROM pgqueue.job_dead") == [(ids[2], "not today")]
