"""Stopping one job in the middle: on the loop, in a thread, while it waits; and never the job that comes after it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest
from test_executor import Bench, made, plain

from pgqueue.outcome import COMPLETED, RELEASED, Cancelled, Completed
from pgqueue.tasks import Task

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
                while not self.end.is_set():
                    pass
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
    assert job in bench.executor.running
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
    await asyncio.wait_for(bench.executor.idle(), 5)
    assert bench.outcomes[stopped] == STOPPED
    assert bench.outcomes[released] is RELEASED


# An exception raised into a thread may land in a destructor or a weak reference's callback: the interpreter reports it
# and goes on, the handler ends by itself. What is proven here does not depend on where it lands.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("steps", [0, 30, 300])
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
            for job in list(bench.executor.running.values()):
                for _ in range(dice.randrange(50)):
                    pass
                if job.id not in hit and bench.executor.interrupt(job.id, STOPPED):
                    hit.add(job.id)
            await asyncio.sleep(0)
        for number, job in enumerate(jobs):
            expected = STOPPED if job.id in hit else Completed(str(number))
            assert await bench.outcome(job.id) == expected
        hits += len(hit)
    assert hits > 20
    await bench.until(lambda: bench.pool.running == 0)
    assert len(bench.outcomes) == len(bench.order)  # each ended once
