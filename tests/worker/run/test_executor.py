"""Running jobs: on the loop and in threads, whatever a handler does to us, and how outcomes are made of it.

The executor alone, without a database: jobs are made up, outcomes collected.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import psycopg
import pytest
from executor_bench import Bench, made, plain
from workers import until

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.jobs.job import Job, current_job
from pgqueue.jobs.outcomes import (
    COMPLETED,
    MESSAGE_MOST,
    RELEASED,
    TRACEBACK_MOST,
    Completed,
    Failed,
    Outcome,
    Retried,
)
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.jobs.sizes import JSON_MOST
from pgqueue.worker.run.executor import STOPPED, TURN_SECONDS
from pgqueue.worker.run.slots import PREFETCH_MOST, SlotGroup

setting: ContextVar[str] = ContextVar("setting", default="clean")


@task(name="executor.adds")
async def adds(a: int, b: int = 1) -> int:
    return a + b


@task(name="executor.adds_in_thread")
def adds_in_thread(a: int, b: int = 1) -> int:
    return a + b


async def test_results_and_none() -> None:
    bench = Bench(plain, adds, adds_in_thread)
    assert await bench.run(plain) is COMPLETED
    assert await bench.run(adds, args='{"a": 2}') == Completed("3")
    assert await bench.run(adds_in_thread, args='{"a": 2, "b": 5}') == Completed("7")


async def test_the_job_its_resources_and_current_job_on_the_loop_and_in_a_thread() -> None:
    async def on_loop(job: Job) -> list[Any]:
        await asyncio.sleep(0)
        return [job.id, current_job().id, job.resources]

    def in_thread(job: Job) -> list[Any]:
        return [job.id, current_job().id, job.resources]

    bench = Bench(made(on_loop, "on_loop"), made(in_thread, "in_thread"))
    assert await bench.run("on_loop") == Completed('[1,1,"the lifespan\'s"]')
    assert await bench.run("in_thread") == Completed('[2,2,"the lifespan\'s"]')
    with pytest.raises(RuntimeError, match="inside a task's handler"):
        current_job()


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_context_variable_does_not_leak_into_the_next_job(kind: str) -> None:
    seen: list[str] = []

    def change() -> None:
        seen.append(setting.get())
        setting.set("changed")

    async def achange() -> None:
        change()

    bench = Bench(made(achange if kind == "async" else change, "change"), slots=1)
    jobs = bench.offer("change", 5)
    await bench.outcome(jobs[-1])
    assert seen == ["clean"] * 5
    assert setting.get() == "clean"


class Incomparable:
    """As an array of numpy: it does not say whether it equals another."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


async def test_a_context_variable_that_cannot_be_compared_costs_no_slot() -> None:
    table: ContextVar[object] = ContextVar("table")

    async def change() -> None:
        table.set(Incomparable())

    token = table.set(Incomparable())
    bench = Bench(made(change, "change"), slots=1)
    table.reset(token)
    jobs = bench.offer("change", 5)
    for job in jobs:
        assert await asyncio.wait_for(bench.outcome(job), 10) is COMPLETED


@pytest.mark.parametrize("ending", ["returns", "raises", "is taken away"])
@pytest.mark.parametrize("kind", ["loop", "thread"])
async def test_what_is_said_when_the_run_is_over_is_not_dropped_without_a_word(kind: str, ending: str) -> None:
    jobs: list[Job] = []
    release = threading.Event()

    def ends(job: Job) -> None:
        jobs.append(job)
        job.enqueue(plain)
        if ending == "raises":
            raise ValueError
        while ending == "is taken away" and not release.is_set():
            with suppress(BaseException):
                release.wait(20)

    async def aends(job: Job) -> None:
        jobs.append(job)
        job.enqueue(plain)
        if ending == "raises":
            raise ValueError
        while ending == "is taken away" and not release.is_set():
            with suppress(BaseException):
                await asyncio.sleep(0.05)

    bench = Bench(made(ends if kind == "thread" else aends, "ends", retry=1))
    [job_id] = bench.offer("ends")
    try:
        if ending == "is taken away":
            await until(lambda: jobs and jobs[0].successors)
            assert bench.executor.interrupt(job_id, STOPPED)
            bench.executor.abandon(jobs[0])
        await bench.outcome(job_id)
        [job] = jobs
        for late in (
            lambda: job.enqueue(plain),
            lambda: job.progress(1),
            lambda: job.connection,
            lambda: job.session(),
            lambda: job.complete(None),
        ):
            with pytest.raises(pgqueue.Error, match=r"job \d+ \(ends\): job\.\w+.* after its run is over") as refused:
                late()
            assert refused.value.job_id == job.id
        assert job.resources == "the lifespan's"
    finally:
        release.set()
    await bench.until(lambda: bench.pool.running == 0)


async def test_a_thread_that_waits_for_the_loop_outlives_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of a worker that is stopped cancels what still runs on it: whether to run again is then not decided."""

    def aborted() -> None:
        raise psycopg.errors.DeadlockDetected

    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    bench = Bench(made(aborted, "aborted"), adds_in_thread, slots=1)
    monkeypatch.setattr(bench.executor._retries, "again", cancelled)
    assert await bench.run("aborted") == RELEASED
    assert await bench.run(adds_in_thread, args='{"a": 1}') == Completed("2")  # the slot is free again


async def test_handlers_see_the_context_the_worker_was_started_in() -> None:
    async def look() -> str:
        return setting.get()

    token = setting.set("outer")
    bench = Bench(made(look, "look"))
    setting.reset(token)
    assert await bench.run("look") == Completed('"outer"')


async def test_the_loop_and_threads_run_at_the_same_time_and_slots_bound_both() -> None:
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Event()

    def enter(by: int) -> None:
        nonlocal running, most
        with lock:
            running += by
            most = max(most, running)
            if running == 4:
                together.set()

    def in_thread() -> None:
        enter(1)
        together.wait(30)
        enter(-1)

    async def on_loop() -> None:
        enter(1)
        while not together.is_set():  # noqa: ASYNC110 (the event is the threads')
            await asyncio.sleep(0)
        enter(-1)

    bench = Bench(made(in_thread, "in_thread"), made(on_loop, "on_loop"), slots=4)
    for _ in range(10):
        bench.offer("in_thread")
        bench.offer("on_loop")
    await bench.until(lambda: len(bench.outcomes) == 20)
    assert most == 4
    await bench.executor.idle()
    await bench.until(lambda: bench.pool.running == 0)  # the loop gives back the slot of a thread, a turn later


# What handlers do to us ----------------------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Other(BaseException):
    """Neither an Exception nor one of Python's own."""


class Hides(Exception):
    def __getattr__(self, name: str) -> object:
        raise KeyError(name)


class Deep(Exception):
    def __getattr__(self, name: str) -> object:
        return getattr(self, name + "x")


class Interrupting(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class NoError(Exception):
    def __getattribute__(self, name: str) -> object:
        raise OSError(name)


class Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__qualname__":
            raise LookupError("no name")
        return super().__getattribute__(name)


class OfNoName(Exception, metaclass=Nameless):
    pass


class Classless(Exception):
    @property
    def __class__(self) -> Any:
        raise KeyboardInterrupt

    @__class__.setter
    def __class__(self, value: Any) -> None: ...


class Slippery(str):
    """A text of which nothing can be taken."""

    def __getitem__(self, key: object) -> str:
        raise KeyboardInterrupt

    def replace(self, *args: Any) -> str:
        raise GeneratorExit


class Slips(Exception):
    def __str__(self) -> str:
        return Slippery("slips")


def telling(answer: BaseException) -> Exception:
    """An exception that raises another one when its text or its SQLSTATE is asked for."""

    def ask(self: object) -> Any:
        raise answer

    kind: type[Exception] = type("Telling", (Exception,), {"__str__": ask, "sqlstate": property(ask)})
    return kind("hidden")


def caused(error: BaseException, by: BaseException) -> BaseException:
    error.__cause__ = by
    return error


def raising(error: Callable[[], BaseException], kind: str) -> Callable[..., Any]:
    def handler() -> None:
        raise error()

    async def ahandler() -> None:
        raise error()

    return ahandler if kind == "async" else handler


ERRORS: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "CancelledError": lambda: asyncio.CancelledError(),
    "Other": lambda: Other("stop"),
    "Unprintable": lambda: Unprintable(),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("many", [asyncio.CancelledError()]),
    "RecursionError": lambda: RecursionError("deep"),
    "NUL": lambda: ValueError("a\0b\ud800"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(),
    "GeneratorExit": lambda: GeneratorExit(),
    "Hides": lambda: Hides("all"),
    "Deep": lambda: Deep("deep"),
    "Interrupting": lambda: Interrupting(),
    "NoError": lambda: NoError(),
    "OfNoName": lambda: OfNoName("x"),
    "bytes in a SyntaxError": lambda: SyntaxError("bad", ("f", 3, 2, b"bytes")),  # type: ignore[arg-type]
    "a group of those": lambda: BaseExceptionGroup("many", [Hides("all"), KeyboardInterrupt()]),
    "StopIteration": lambda: StopIteration(1),
    "StopAsyncIteration": lambda: StopAsyncIteration(1),
    "its text raises GeneratorExit": lambda: telling(GeneratorExit()),
    "its text raises CancelledError": lambda: telling(asyncio.CancelledError()),
    "its text raises itself": lambda: telling(Other("again")),
    "its cause raises": lambda: caused(RuntimeError("outer"), telling(GeneratorExit())),
    "a member raises": lambda: ExceptionGroup("many", [ValueError("one"), telling(GeneratorExit())]),
    "the cause of Retry raises": lambda: caused(pgqueue.Retry(1), telling(asyncio.CancelledError())),
    "Classless": lambda: Classless("x"),
    "Slips": lambda: Slips("x"),
    "InvalidArguments": lambda: pgqueue.InvalidArguments("ours, but from the handler"),
}


@pytest.mark.promise("F48", "F215")
@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("name", ERRORS)
async def test_whatever_a_handler_raises_is_a_failed_attempt_and_the_slot_is_free_again(name: str, kind: str) -> None:
    bench = Bench(made(raising(ERRORS[name], kind), "bad"), plain, adds_in_thread, slots=1)
    outcome = await bench.run("bad")
    assert isinstance(outcome, Retried | Failed), outcome
    assert outcome.problem.outcome in ("failed", "retried")
    (outcome.problem.message or "").encode()  # what PostgreSQL can store
    assert "\0" not in (outcome.problem.message or "") + (outcome.problem.traceback or "")
    assert await bench.run(plain) is COMPLETED
    assert await bench.run(adds_in_thread, args='{"a":1}') == Completed("2")
    await bench.until(lambda: bench.pool.running == 0)
    assert not bench.executor._running.runs


@pytest.mark.promise("F216")
@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("error", [ValueError, GeneratorExit, asyncio.CancelledError])
async def test_whatever_ends_a_run_gives_back_its_slot_and_its_job_has_failed(
    error: type[BaseException], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of ours stands for all that was not thought of: the end of the task, or of the call, counts."""
    bench = Bench(plain, adds_in_thread, slots=1)
    name, args = ("executor.plain", "{}") if kind == "async" else ("executor.adds_in_thread", '{"a": 1}')
    real, broken = bench.executor._finish, [error()]

    def finish(job: Job, outcome: Outcome) -> None:
        if broken:
            raise broken.pop()
        real(job, outcome)

    monkeypatch.setattr(bench.executor, "_finish", finish)
    outcome = await bench.run(name, args=args)
    assert isinstance(outcome, Retried) and outcome.problem.error_type == error.__name__
    assert await bench.run(name, args=args) in (COMPLETED, Completed("2"))
    await asyncio.wait_for(bench.executor.idle(), 10)
    await bench.until(lambda: bench.pool.running == 0)


def of_the_old_form(loop: asyncio.AbstractEventLoop, call: Any) -> Any:
    return asyncio.Task(call, loop=loop)


@pytest.mark.promise("F216")
@pytest.mark.parametrize("factory", [of_the_old_form, getattr(asyncio, "eager_task_factory", None)])
async def test_a_task_factory_of_the_application_keeps_no_job_waiting(factory: Any) -> None:
    if factory is None:
        pytest.skip("tasks that start eagerly came with Python 3.12")

    async def waits() -> str:
        await asyncio.sleep(0.001)
        return setting.get()

    bench = Bench(made(waits, "waits"), plain, slots=2)
    asyncio.get_running_loop().set_task_factory(factory)
    try:
        jobs = [*bench.offer("waits", 3), *bench.offer(plain, 3)]
        outcomes = [await bench.outcome(job) for job in jobs]
    finally:
        asyncio.get_running_loop().set_task_factory(None)
    assert outcomes == [Completed('"clean"')] * 3 + [COMPLETED] * 3


@pytest.mark.promise("F48")
@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("store_result", [False, True])
@pytest.mark.parametrize("kind", ["coroutine", "generator", "async generator", "future"])
async def test_a_body_that_never_ran_is_no_success(kind: str, store_result: bool, on_loop: bool) -> None:
    """A decorator may hide that a handler is async, or a generator."""

    async def coroutine() -> None: ...

    def generator() -> Iterator[None]:
        yield

    async def async_generator() -> AsyncIterator[None]:
        yield

    bodies: dict[str, Callable[[], Any]] = {
        "coroutine": coroutine,
        "generator": generator,
        "async generator": async_generator,
    }
    body: Any = bodies.get(kind, asyncio.get_running_loop().create_future)

    @functools.wraps(body)
    def hides() -> Any:
        return body()

    async def ahides() -> Any:
        return body()

    hides.__name__ = hides.__qualname__ = "hides"
    vars(hides).pop("__wrapped__", None)
    bench = Bench(made(ahides if on_loop else hides, "hides", store_result=store_result), slots=1)
    outcome = await bench.run("hides")
    assert isinstance(outcome, Retried) and "its body has not run" in (outcome.problem.message or "")


async def test_a_handler_that_cancels_itself_spends_its_attempt_and_harms_no_other() -> None:
    async def cancels_itself() -> None:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        await asyncio.sleep(1)

    async def cancels_and_returns() -> None:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()

    async def waits() -> str:
        await asyncio.sleep(0)
        return "not cancelled"

    tasks = made(cancels_itself, "one"), made(cancels_and_returns, "two"), made(waits, "waits")
    bench = Bench(*tasks, slots=1)
    jobs = [bench.job(name) for name in ("one", "waits", "two", "waits")]
    bench.executor.offer(bench.pool, jobs)
    await bench.until(lambda: len(bench.outcomes) == 4)
    one, second, two, fourth = (bench.outcomes[job.id] for job in jobs)
    assert isinstance(one, Retried | Failed)  # released, it would run again at once, for ever, its attempt unspent
    assert second == fourth == Completed('"not cancelled"')
    assert two is COMPLETED
    await bench.until(lambda: bench.pool.running == 0)


async def test_cancel_at_shutdown_releases_what_waits_and_keeps_what_finishes_anyway() -> None:
    started = asyncio.Event()

    async def waits() -> None:
        started.set()
        await asyncio.sleep(60)

    async def swallows() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "cleaned up"
        return "never"

    async def fails_in_cleanup() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("in the cleanup")

    bench = Bench(made(waits, "waits"), made(swallows, "swallows"), made(fails_in_cleanup, "fails"), slots=3)
    names = ["swallows", "fails", "waits"]
    jobs = [bench.offer(name)[0] for name in names]
    await started.wait()
    bench.executor.cancel()
    await asyncio.wait_for(bench.executor.idle(), 30)
    swallowed, failed, waited = (bench.outcomes[job] for job in jobs)
    assert swallowed == Completed('"cleaned up"')
    assert isinstance(failed, Retried)
    assert waited is STOPPED


async def test_cancel_before_the_first_step_of_a_run_loses_no_job() -> None:
    bench = Bench(plain, slots=1)
    [job] = bench.offer(plain)  # its run exists, and has not begun
    bench.executor.cancel()
    assert await bench.outcome(job) in (RELEASED, COMPLETED)
    await bench.until(lambda: bench.pool.running == 0)


async def test_a_timeout_inside_a_handler_is_not_a_shutdown() -> None:
    async def slow() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    bench = Bench(made(slow, "slow"))
    outcome = await bench.run("slow")
    assert isinstance(outcome, Retried)
    assert outcome.problem.error_type == "TimeoutError"


# Decisions -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F18")
async def test_arguments_that_cannot_be_decoded_are_tried_again_and_spend_no_attempt() -> None:
    bench = Bench(adds, adds_in_thread)
    for name in (adds, adds_in_thread):
        for args in ('{"a": "x"}', "{}", '{"a": 1, "c": 2}'):
            outcome = await bench.run(name, args=args)
            assert isinstance(outcome, Retried), outcome
            assert not outcome.spent
            assert outcome.problem.error_type == "InvalidArguments"
            assert outcome.problem.traceback is None


@pytest.mark.parametrize(
    ("policy", "attempt", "max_attempts", "again"),
    [
        (3, 2, None, True),
        (3, 3, None, False),
        (3, 3, 5, True),  # what the enqueuer said goes before
        (3, 5, 5, False),
        (3, 1, 1, False),
        (RetryPolicy(fail_on=(ValueError,)), 1, None, False),
        (lambda attempt, error: None, 1, None, False),
        (lambda attempt, error: 5, 9, None, True),
        (lambda attempt, error: 5, 9, 9, False),
        (lambda attempt, error: 1 / 0, 1, None, False),  # its own error must not take the executor down
        (lambda attempt, error: "soon", 1, None, False),
        (lambda attempt, error: float("inf"), 1, None, False),
    ],
)
async def test_who_is_tried_again(policy: Any, attempt: int, max_attempts: int | None, again: bool) -> None:
    def fails() -> None:
        raise ValueError("no")

    bench = Bench(made(fails, "fails", retry=policy), plain, slots=1)
    outcome = await bench.run("fails", attempt=attempt, max_attempts=max_attempts)
    assert isinstance(outcome, Retried if again else Failed), outcome
    assert await bench.run(plain) is COMPLETED


async def test_a_result_that_cannot_be_stored_is_an_error_that_says_so() -> None:
    circle: list[Any] = []
    circle.append(circle)
    values: dict[str, Any] = {
        "set": object(),
        "NUL": "a\0b",
        "surrogate": "\ud800",
        "huge": "x" * (JSON_MOST + 1),
        "many bytes": "é" * (JSON_MOST // 2 + 1),
        "circle": circle,
    }
    for name, value in values.items():
        bench = Bench(made(lambda value=value: value, "returns"), plain, slots=1)
        outcome = await bench.run("returns")
        assert isinstance(outcome, Failed | Retried), name
        assert outcome.problem.message, name
        assert await bench.run(plain) is COMPLETED


async def test_a_result_with_a_backslash_u0000_in_it_is_text_like_any_other() -> None:
    async def returns() -> str:
        return r"\u0000"

    assert await Bench(made(returns, "returns")).run("returns") == Completed(r'"\\u0000"')


async def test_a_long_message_and_a_long_traceback_are_cut() -> None:
    async def deep(n: int = 400) -> None:
        if n:
            await deep(n - 1)
        raise ValueError("x" * 100_000)

    outcome = await Bench(made(deep, "deep", retry=1)).run("deep")
    assert isinstance(outcome, Failed)
    assert outcome.problem.message is not None and outcome.problem.traceback is not None
    assert len(outcome.problem.message) == MESSAGE_MOST
    assert len(outcome.problem.traceback) < TRACEBACK_MOST + 100


# Room ----------------------------------------------------------------------------------------------------------------


def test_prefetch_follows_how_long_jobs_last() -> None:
    pool = SlotGroup(["default"], 10)
    assert pool.room() == 10
    pool.running, pool._seconds, pool._jobs = 1, 10.0, 10  # 1 s each
    pool.adapt()
    assert pool.prefetch == 0
    pool._seconds, pool._jobs = 0.001, 100  # 10 µs each
    pool.adapt()
    assert pool.prefetch == 200  # twice what was worked off
    pool._seconds, pool._jobs = 0.1, 100_000
    pool.adapt()
    assert pool.prefetch == PREFETCH_MOST


async def test_room_is_announced_when_jobs_end_and_when_little_is_left_at_hand() -> None:
    bench = Bench(plain, slots=2)
    bench.pool.prefetch = 10
    jobs = bench.offer(plain, 12)
    await bench.outcome(jobs[-1])
    await bench.until(lambda: bench.pool.running == 0)
    assert bench.lows >= 1
    assert bench.pool.room() == 12
    assert bench.order == jobs


async def test_a_long_handler_without_await_leaves_turns_to_the_loop() -> None:
    turns = 0

    async def busy() -> None:
        end = time.perf_counter() + TURN_SECONDS * 2
        while time.perf_counter() < end:
            pass

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    bench = Bench(made(busy, "busy"), slots=4)
    counting = asyncio.ensure_future(count())
    jobs = bench.offer("busy", 20)
    await bench.outcome(jobs[-1])
    counting.cancel()
    assert turns >= 20


async def test_handing_back_takes_only_what_has_not_started() -> None:
    started = asyncio.Event()

    async def waits() -> None:
        started.set()
        await asyncio.sleep(60)

    bench = Bench(made(waits, "waits"), slots=1)
    bench.pool.prefetch = 10
    jobs = bench.offer("waits", 4)
    await started.wait()
    assert [job.id for job in bench.executor.hand_back()] == jobs[1:]
    assert list(bench.executor._running.runs) == jobs[:1]
    bench.executor.cancel()
    assert await bench.outcome(jobs[0]) is STOPPED


async def test_a_job_runs_until_its_outcome_has_been_handed_on() -> None:
    """A shutdown that sees nothing run takes all outcomes for handed on."""
    running: list[bool] = []

    async def waits() -> None:
        await asyncio.sleep(60)

    bench = Bench(plain, adds_in_thread, made(waits, "waits"), slots=4)
    real = bench.executor._finish

    def finish(job: Job, outcome: Outcome) -> None:
        running.append(job.id in bench.executor._running.runs)
        real(job, outcome)

    bench.executor._finish = finish
    await bench.run(plain)
    await bench.run(adds_in_thread, args='{"a": 2}')
    [before_its_first_step] = bench.offer("waits")
    bench.executor.cancel()
    assert await bench.outcome(before_its_first_step) is RELEASED
    await bench.executor.idle()
    assert running == [True] * 3
