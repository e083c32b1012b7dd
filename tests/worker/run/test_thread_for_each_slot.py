"""A worker makes at most one thread for each slot, and no job waits for a thread that does not come back."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from executor_bench import Bench, made
from workers import until

from pgqueue.client.tasks import Task
from pgqueue.jobs.outcomes import COMPLETED, Cancelled
from pgqueue.worker.run.slots import Entry, SlotGroup

pytestmark = pytest.mark.promise("F225")

STOPPED = Cancelled("by hand")


def quick() -> None: ...


def hanging(go: threading.Event) -> Task[..., Any]:
    """A sync task that hangs until it is let go, however it is stopped."""

    def held() -> None:
        while not go.is_set():
            try:
                go.wait()
            except BaseException:  # as a handler that cannot be stopped
                continue

    return made(held, "held")


def living(bench: Bench) -> int:
    """How many threads there are or come."""
    threads = bench.executor._threads
    return len(threads._threads) + len(threads._coming)


async def test_a_job_that_comes_before_the_loop_has_heard_of_the_idle_thread_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slot that is given back in the thread is free before the thread is known to be idle."""
    left, take = threading.Event(), SlotGroup.take

    def leave(group: SlotGroup, is_async: bool, seconds: float) -> Entry | None:
        if (entry := take(group, is_async, seconds)) is None:
            left.set()
        return entry

    monkeypatch.setattr(SlotGroup, "take", leave)
    bench = Bench(made(quick, "quick"), slots=1)
    [first] = bench.offer("quick")
    assert left.wait(30)  # on purpose on the loop, which does not hear of the thread meanwhile
    [second] = bench.offer("quick")
    assert [await bench.outcome(first), await bench.outcome(second)] == [COMPLETED] * 2
    assert bench.executor._threads._made == 1


async def test_many_quick_jobs_have_a_thread_for_each_slot() -> None:
    bench = Bench(made(quick, "quick"), slots=4)
    for number in range(1, 9):
        for _ in range(100):
            last = bench.offer("quick", number)[-1]
            await bench.outcome(last)
    await asyncio.wait_for(bench.executor.idle(), 30)
    await until(lambda: not bench.pool.running)
    assert len(bench.outcomes) == 3600 and bench.executor._threads._made <= 4


async def come_to(bench: Bench, *, slots: int, threads: int) -> None:
    """Wait until so many slots are taken, and so many threads live."""
    await until(lambda: (bench.pool.running, living(bench)) == (slots, threads))


async def began(bench: Bench, jobs: list[int]) -> None:
    """Wait until the handlers of these jobs are called in their threads."""
    runs = bench.executor._running.runs
    await until(lambda: all(job in runs and runs[job].ident for job in jobs))


async def test_handlers_that_hang_keep_their_threads_and_the_other_slots_run_all_jobs() -> None:
    go = threading.Event()
    bench = Bench(hanging(go), made(quick, "quick"), slots=4)
    lost, kept = bench.offer("held", 2), bench.offer("held")
    await began(bench, lost + kept)
    for job in lost:
        run = bench.executor._running.runs[job]
        assert bench.executor.interrupt(job, STOPPED) and run.job is not None
        bench.executor.abandon(run.job)
    for _ in range(50):
        await bench.outcome(bench.offer("quick", 3)[-1])
    await come_to(bench, slots=3, threads=4)
    go.set()
    assert await bench.outcome(kept[0]) is COMPLETED
    await come_to(bench, slots=0, threads=2)  # those whose jobs were taken away are gone
    for _ in range(50):
        await bench.outcome(bench.offer("quick", 8)[-1])
        assert living(bench) <= 4


async def test_each_thread_that_has_ended_is_replaced_when_a_job_needs_it() -> None:
    go = threading.Event()
    bench = Bench(hanging(go), made(quick, "quick"), slots=2)
    for number in range(1, 21):
        go.clear()
        held = bench.offer("held", 2)
        bench.offer("quick", 5)
        await began(bench, held)
        assert living(bench) == 2
        assert all([bench.executor.interrupt(job, STOPPED) for job in held])
        go.set()
        await bench.until(lambda ended=7 * number: len(bench.outcomes) == ended)  # type: ignore[misc]
        assert living(bench) <= 2
    outcomes = list(bench.outcomes.values())
    assert (outcomes.count(STOPPED), outcomes.count(COMPLETED)) == (40, 100)
