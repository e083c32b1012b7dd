"""Stopping one job in the middle: on the loop, in a thread, while it waits; and never the job that comes after it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import weakref
from typing import Any

import pytest
from executor_bench import Bench, made, plain

from pgqueue.client.tasks import Task
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import COMPLETED, WRITTEN, Cancelled, Completed, Outcome, Written
from pgqueue.worker.run import executor
from pgqueue.worker.run import run as run_module
from pgqueue.worker.run.run import Interrupted, Run

STOPPED = Cancelled("no longer wanted")


class Spinner:
    """A sync handler that runs Python steps until it is stopped or told to end."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.end = threading.Event()
        self.caught: list[type[BaseException]] = []

    def task(self, *, swallow: bool = False) -> Task[..., Any]:
        def spin() -> None:
            try:
                self.started.set()
                while True:  # not `while not …`: the jump back of such a loop is in no `try` in Python 3.13
                    if self.end.is_set():
                        return
            except BaseException as error:
                self.caught.append(type(error))
                if not swallow:
                    raise

        return made(spin, "spin")


async def test_an_async_handler_is_cancelled_and_ends_with_the_outcome_given() -> None:
    started = asyncio.Event()
    seen: list[str] = []

    async def waits() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("cleaned up")

    bench = Bench(made(waits, "waits"), plain, slots=1)
    [job] = bench.offer("waits")
    await started.wait()
    assert bench.executor.interrupt(job, STOPPED)
    assert await bench.outcome(job) == STOPPED
    assert seen == ["cleaned up"]
    assert await bench.run(plain) is COMPLETED


@pytest.mark.parametrize("ending", ["returns", "raises", "uncancels"])
async def test_what_an_interrupted_async_handler_says_does_not_count(ending: str) -> None:
    started = asyncio.Event()

    async def stubborn() -> str:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if ending == "raises":
                raise ValueError("not the reason") from None
            if ending == "uncancels":
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                await asyncio.sleep(0)
        return "all the same"

    bench = Bench(made(stubborn, "stubborn"), plain, slots=1)
    [job] = bench.offer("stubborn")
    await started.wait()
    assert bench.executor.interrupt(job, STOPPED)
    assert bench.executor.interrupt(job, Cancelled("again"))  # the first one counts
    after = bench.offer(plain, 3)
    assert await bench.outcome(job) == STOPPED
    assert [await bench.outcome(each) for each in after] == [COMPLETED] * 3


async def test_a_sync_handler_gets_an_exception_in_its_thread() -> None:
    spinner = Spinner()
    bench = Bench(spinner.task(), plain, slots=1)
    [job] = bench.offer("spin")
    await asyncio.to_thread(spinner.started.wait)
    assert bench.executor.interrupt(job, STOPPED)
    assert await bench.outcome(job) == STOPPED
    [caught] = spinner.caught
    assert not issubclass(caught, Exception)  # `except Exception` in a handler must let it pass
    await bench.until(lambda: bench.pool.running == 0)
    spinner.end.set()
    assert [await bench.run("spin"), await bench.run(plain)] == [COMPLETED] * 2


async def test_a_sync_handler_that_swallows_the_interruption_ends_with_the_outcome_all_the_same() -> None:
    spinner = Spinner()
    bench = Bench(spinner.task(swallow=True), slots=1)
    [job] = bench.offer("spin")
    await asyncio.to_thread(spinner.started.wait)
    assert bench.executor.interrupt(job, STOPPED)
    assert await bench.outcome(job) == STOPPED
    assert len(spinner.caught) == 1


async def test_a_call_into_c_is_not_left_before_it_returns() -> None:
    started, release = threading.Event(), threading.Lock()
    release.acquire()

    def waits() -> None:
        started.set()
        release.acquire()

    bench = Bench(made(waits, "waits"), slots=1)
    [job] = bench.offer("waits")
    await asyncio.to_thread(started.wait)
    assert bench.executor.interrupt(job, STOPPED)
    assert job in bench.executor._running.runs
    release.release()
    assert await bench.outcome(job) == STOPPED


async def test_a_waiting_job_ends_at_once_and_never_runs() -> None:
    ran: list[int] = []

    async def notes() -> None:
        ran.append(1)

    bench = Bench(made(notes, "notes"), slots=1)
    jobs = bench.offer("notes", 3)  # the first has its run, which has not begun
    assert [bench.executor.interrupt(job, STOPPED) for job in jobs] == [True] * 3
    assert [await bench.outcome(job) for job in jobs] == [STOPPED] * 3
    assert not ran
    await bench.until(lambda: bench.pool.running == 0)
    assert await bench.run("notes") is COMPLETED


async def test_a_job_on_its_way_to_a_thread_never_runs() -> None:
    ran: list[int] = []
    bench = Bench(made(lambda: ran.append(1), "notes"), slots=1)
    for _ in range(200):
        [job] = bench.offer("notes")
        known = bench.executor.interrupt(job, STOPPED)
        outcome = await bench.outcome(job)
        assert outcome == (STOPPED if known else COMPLETED)
    await bench.until(lambda: bench.pool.running == 0)


async def test_a_job_that_is_not_here_is_not_interrupted() -> None:
    bench = Bench(plain)
    assert not bench.executor.interrupt(99, STOPPED)
    [job] = bench.offer(plain)
    await bench.outcome(job)
    assert not bench.executor.interrupt(job, STOPPED)
    assert bench.outcomes[job] is COMPLETED


async def test_a_shutdown_still_releases_what_nobody_interrupted() -> None:
    started = asyncio.Event()

    async def waits() -> None:
        started.set()
        await asyncio.sleep(60)

    bench = Bench(made(waits, "waits"), slots=2)
    stopped, released = bench.offer("waits")[0], bench.offer("waits")[0]
    await started.wait()
    assert bench.executor.interrupt(stopped, STOPPED)
    bench.executor.cancel()
    await asyncio.wait_for(bench.executor.idle(), 30)
    assert bench.outcomes[stopped] == STOPPED
    assert bench.outcomes[released] is executor.STOPPED


# Sealed: about to commit ---------------------------------------------------------------------------------------------


async def test_a_sealed_async_run_is_stopped_by_nobody_and_ends_as_written() -> None:
    sealed, answer = asyncio.Event(), asyncio.Event()

    async def commits(job: Job) -> Written:
        await bench.executor._running.auninterruptible(job)
        sealed.set()
        await answer.wait()
        return WRITTEN

    bench = Bench(made(commits, "commits"), plain, slots=1)
    [job] = bench.offer("commits")
    await sealed.wait()
    assert not bench.executor.interrupt(job, STOPPED)
    run = bench.executor._running.runs[job]
    assert run.job is not None
    bench.executor.abandon(run.job)
    bench.executor.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert job not in bench.outcomes
    answer.set()
    assert await bench.outcome(job) is WRITTEN
    assert await bench.run(plain) is COMPLETED


async def test_a_sealed_thread_is_stopped_by_nobody_and_ends_as_written() -> None:
    sealed, answer = threading.Event(), threading.Event()

    def commits(job: Job) -> Written:
        bench.executor._running.uninterruptible(job)
        sealed.set()
        while not answer.is_set():
            pass
        return WRITTEN

    bench = Bench(made(commits, "commits"), slots=1)
    [job] = bench.offer("commits")
    await asyncio.to_thread(sealed.wait)
    assert not bench.executor.interrupt(job, STOPPED)
    answer.set()
    assert await bench.outcome(job) is WRITTEN


@pytest.mark.parametrize("way", ["interrupt", "shutdown"])
@pytest.mark.parametrize("swallow", [False, True])
async def test_an_async_run_that_was_stopped_is_not_sealed_any_more(way: str, swallow: bool) -> None:
    committed: list[int] = []
    calm: list[bool] = []
    started = asyncio.Event()

    async def commits(job: Job) -> None:
        started.set()
        try:
            if swallow:
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.sleep(60)
            else:
                stop()  # in this very step: the cancellation has not come yet
            assert bench.executor._running.stopping(job)
            await bench.executor._running.auninterruptible(job)
            committed.append(job.id)
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # the rollback: undisturbed
            calm.append(True)
            raise

    def stop() -> None:
        if way == "interrupt":
            assert bench.executor.interrupt(job, STOPPED)
        else:
            bench.executor.cancel()

    bench = Bench(made(commits, "commits"), slots=1)
    [job] = bench.offer("commits")
    if swallow:
        await started.wait()
        stop()
    assert await bench.outcome(job) == (STOPPED if way == "interrupt" else executor.STOPPED)
    assert (committed, calm) == ([], [True])


async def test_a_thread_that_was_stopped_is_not_sealed_and_its_rollback_is_left_in_peace() -> None:
    started, stopped = threading.Event(), threading.Lock()
    stopped.acquire()
    committed: list[int] = []
    calm: list[bool] = []

    def commits(job: Job) -> None:
        try:
            try:
                started.set()  # in here: the stop may come before the next line
                stopped.acquire()
            finally:
                bench.executor._running.uninterruptible(job)
                committed.append(job.id)
        except Interrupted:
            for _ in range(10_000):
                pass
            calm.append(True)
            raise

    bench = Bench(made(commits, "commits"), slots=1)
    [job] = bench.offer("commits")
    await asyncio.to_thread(started.wait)
    assert bench.executor.interrupt(job, STOPPED)
    stopped.release()
    assert await bench.outcome(job) == STOPPED
    assert (committed, calm) == ([], [True])


async def test_an_interruption_that_comes_while_the_thread_waits_to_seal_comes_once() -> None:
    about = threading.Event()
    outcomes: list[str] = []

    def commits(job: Job) -> None:
        try:
            about.set()
            bench.executor._running.uninterruptible(job)
            outcomes.append("committed")
        except Interrupted:
            try:
                for _ in range(1000):
                    pass
                outcomes.append("rolled back")
            except Interrupted:
                outcomes.append("disturbed")
            raise

    bench = Bench(made(commits, "commits"), slots=1)
    for _ in range(50):
        about.clear()
        [job] = bench.offer("commits")
        run = bench.executor._running.runs[job]
        assert run.lock is not None
        with run.lock:  # as whoever stops it does
            await asyncio.to_thread(about.wait)
            run.stop_outcome = (run.job or pytest.fail(), STOPPED)
            run_module._raise_in(run.ident, Interrupted)
        assert await bench.outcome(job) == STOPPED
        await bench.until(lambda: bench.pool.running == 0)
    assert set(outcomes) == {"rolled back"}


async def test_every_job_is_either_sealed_or_stopped_never_both() -> None:
    """Threads that seal after a few steps, interrupted at every moment: what was sealed ends as written."""
    committed: set[int] = set()

    def commits(job: Job) -> Written:
        for _ in range(job.id % 50):
            pass
        bench.executor._running.uninterruptible(job)
        committed.add(job.id)
        return WRITTEN

    bench = Bench(made(commits, "commits"), slots=2)
    ends, stopped = time.monotonic() + 1.0, set[int]()
    while time.monotonic() < ends or not (stopped and committed):
        jobs = bench.offer("commits", 20)
        while not all(job in bench.outcomes for job in jobs):
            for job in list(bench.executor._running.runs):
                if job not in stopped and bench.executor.interrupt(job, STOPPED):
                    stopped.add(job)
            await asyncio.sleep(0)
    await bench.until(lambda: bench.pool.running == 0)
    assert stopped
    assert committed
    assert not committed & stopped
    assert committed == {job for job, outcome in bench.outcomes.items() if outcome is WRITTEN}
    assert stopped == {job for job, outcome in bench.outcomes.items() if outcome == STOPPED}


@pytest.mark.parametrize("steps", [30, *(pytest.param(steps, marks=pytest.mark.second) for steps in (0, 300))])
async def test_an_interruption_never_reaches_the_next_job_of_the_thread(steps: int) -> None:
    """Short jobs back to back in two threads, interrupted at every moment of their lives."""

    def brief(number: int) -> int:
        for _ in range(steps):
            pass
        return number

    bench = Bench(made(brief, "brief"), slots=2)
    dice = random.Random(steps)
    ends, hits = time.monotonic() + 1.0, 0
    while time.monotonic() < ends:
        bench.executor.offer(bench.pool, jobs := [bench.job("brief", f'{{"number": {n}}}') for n in range(20)])
        hit: set[int] = set()
        while len(hit) < 5 and not all(job.id in bench.outcomes for job in jobs):
            for job_id in list(bench.executor._running.runs):
                for _ in range(dice.randrange(50)):
                    pass
                if job_id not in hit and bench.executor.interrupt(job_id, STOPPED):
                    hit.add(job_id)
            await asyncio.sleep(0)
        for number, job in enumerate(jobs):
            expected = STOPPED if job.id in hit else Completed(str(number))
            assert await bench.outcome(job.id) == expected
        hits += len(hit)
    assert hits > 20
    await bench.until(lambda: bench.pool.running == 0)
    assert len(bench.outcomes) == len(bench.order)  # each ended once


async def test_an_interruption_that_lands_after_the_handler_has_returned_takes_no_thread_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in Python 3.13, which looks for it before it gives another thread a turn, so raises it one step later."""
    started, go_on, late = threading.Event(), threading.Event(), []

    def swallows() -> None:
        try:
            started.set()  # in here: the interruption may come before the next line
            while True:
                if go_on.is_set():
                    return
        except Interrupted:
            pass

    settle = Run.settle

    def first_raises(run: Run, outcome: Outcome) -> Outcome:
        late.append(run)
        if len(late) == 1:
            raise Interrupted
        return settle(run, outcome)

    monkeypatch.setattr(Run, "settle", first_raises)
    bench = Bench(made(swallows, "swallows"), slots=1)
    [job] = bench.offer("swallows")
    await asyncio.to_thread(started.wait)
    assert bench.executor.interrupt(job, STOPPED)
    assert await bench.outcome(job) == STOPPED
    await bench.until(lambda: bench.pool.running == 0)
    go_on.set()
    assert await bench.run("swallows") is COMPLETED


# Landed in a destructor -----------------------------------------------------------------------------------------------


class Slow:
    """An object that takes its time to go."""

    def __del__(self) -> None:
        for _ in range(1_000):
            pass


def weakly() -> None:
    """The same with the callback of a weak reference."""

    def callback(_: object) -> None:
        for _ in range(1_000):
            pass

    one: set[int] = {1, 2, 3}
    kept = weakref.ref(one, callback)
    del one
    assert kept() is None


@pytest.mark.parametrize("way", ["destructor", "weak reference"])
async def test_an_interruption_that_a_destructor_has_swallowed_is_raised_again(way: str) -> None:
    """Most of its time it is in destructors; what lands there is lost, and stops nothing."""
    started = threading.Event()
    left: list[int] = []

    def churns() -> None:
        started.set()  # not in the loop: an Event that is left in the middle of set() stays locked
        try:
            while True:
                Slow() if way == "destructor" else weakly()
                for _ in range(500):
                    pass
        finally:
            for _ in range(100_000):  # nothing comes in here
                pass
            left.append(1)

    bench = Bench(made(churns, "churns"), slots=1)
    for number in range(5):
        started.clear()
        [job] = bench.offer("churns")
        await asyncio.to_thread(started.wait)
        assert bench.executor.interrupt(job, STOPPED)
        assert await bench.outcome(job) == STOPPED
        assert len(left) == number + 1
    await bench.until(lambda: bench.pool.running == 0)
    assert not run_module._raised


async def test_a_cleanup_is_not_disturbed_however_long_it_takes() -> None:
    started = threading.Event()
    calm: list[bool] = []

    def cleans() -> None:
        try:
            started.set()  # in here: the stop may come before the next line
            while True:
                pass
        finally:
            ends = time.monotonic() + 0.3
            while time.monotonic() < ends:
                pass
            calm.append(True)

    bench = Bench(made(cleans, "cleans"), slots=1)
    [job] = bench.offer("cleans")
    await asyncio.to_thread(started.wait)
    bench.executor.cancel()
    await bench.outcome(job)
    assert calm == [True]


def test_other_unraisable_exceptions_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(run_module, "_report", reported.append)

    class Lost:
        exc_type: Any = ValueError

    run_module._unraisable(Lost)
    Lost.exc_type = Interrupted
    run_module._unraisable(Lost)  # raised by nobody of ours in this thread
    assert reported == [Lost, Lost]
