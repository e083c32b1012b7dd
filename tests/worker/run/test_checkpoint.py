"""`job.checkpoint()`: leaves the handler of a job that was told to stop, where nothing else would."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from executor_bench import Bench, made, plain
from workers import Eyes, until, work

import pgqueue
from pgqueue import testing
from pgqueue.client.tasks import Task, task
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import COMPLETED, Cancelled
from pgqueue.worker.run.run import Interrupted, Run

STOPPED = Cancelled("no longer wanted")


def put(dsn: str, made: Task[..., Any]) -> int:
    with psycopg.connect(dsn) as conn:
        return made.enqueue(conn).id


def cancel(dsn: str, job: int) -> None:
    with psycopg.connect(dsn) as conn:
        pgqueue.cancel(conn, job)


async def test_a_helper_thread_of_a_sync_handler_leaves_at_its_checkpoint(dsn: str, eyes: Eyes) -> None:
    """Nothing is raised into that thread by itself, and the handler waits for it in C."""
    began = threading.Event()
    ended: list[type[BaseException]] = []

    def steps(job: Job) -> None:
        try:
            while True:
                began.set()
                job.checkpoint()
        except BaseException as error:
            ended.append(type(error))
            raise

    @task(name="checkpoint.helper")
    def helped(job: Job) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(steps, job).result()

    async with work(dsn, helped):
        job = put(dsn, helped)
        await until(began.is_set)
        cancel(dsn, job)
        await until(eyes.is_in(job, "cancelled"))
    assert ended == [Interrupted]


async def test_a_handler_can_ask_whether_it_was_told_to_stop_and_when_it_began(dsn: str, eyes: Eyes) -> None:
    said: list[bool] = []
    times: list[datetime] = []
    began, never = threading.Event(), threading.Event()

    def steps(job: Job) -> None:
        said.append(job.cancelled)
        times.extend((job.started_at, job.started_at))
        began.set()
        while not job.cancelled:
            never.wait(0.01)
        said.append(job.cancelled)
        times.append(job.started_at)

    @task(name="checkpoint.asks")
    def asks(job: Job) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(steps, job).result()

    async with work(dsn, asks):
        before = datetime.now(UTC)
        job = put(dsn, asks)
        await until(began.is_set)
        after = datetime.now(UTC)
        cancel(dsn, job)
        await until(eyes.is_in(job, "cancelled"))
    assert said == [False, True]
    assert len(set(times)) == 1
    assert before <= times[0] <= after


async def test_a_thread_of_an_async_handler_leaves_at_its_checkpoint(dsn: str, eyes: Eyes) -> None:
    began, ended = threading.Event(), threading.Event()

    def steps(job: Job) -> None:
        try:
            while True:
                began.set()
                job.checkpoint()
        except (asyncio.CancelledError, Interrupted):  # the one while its run lasts, the other when it is gone
            ended.set()
            raise

    @task(name="checkpoint.to_thread")
    async def threaded(job: Job) -> None:
        await asyncio.to_thread(steps, job)

    async with work(dsn, threaded):
        job = put(dsn, threaded)
        await until(began.is_set)
        cancel(dsn, job)
        await until(eyes.is_in(job, "cancelled"))
        await until(ended.is_set)


async def test_an_async_handler_that_swallowed_the_cancellation_leaves_at_its_checkpoint() -> None:
    began = asyncio.Event()
    passed: list[int] = []

    async def stubborn(job: Job) -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            passed.append(1)
        bench.executor._running.checkpoint(job)
        passed.append(2)

    bench = Bench(made(stubborn, "stubborn"), plain, slots=1)
    [job] = bench.offer("stubborn")
    await began.wait()
    assert bench.executor.interrupt(job, STOPPED)
    assert await bench.outcome(job) == STOPPED
    assert passed == [1]
    [after] = bench.offer(plain)
    assert await bench.outcome(after) is COMPLETED


async def test_a_sync_handler_that_swallowed_the_exception_leaves_at_its_checkpoint() -> None:
    began = threading.Event()
    passed: list[int] = []

    def stubborn(job: Job) -> None:
        try:
            while True:
                began.set()
        except BaseException:
            passed.append(1)
        bench.executor._running.checkpoint(job)
        passed.append(2)

    bench = Bench(made(stubborn, "stubborn"), slots=1)
    [job] = bench.offer("stubborn")
    await until(began.is_set)
    assert bench.executor.interrupt(job, STOPPED)
    assert await bench.outcome(job) == STOPPED
    assert passed == [1]


@pytest.mark.second
@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_handler_that_holds_the_interpreter_lock_between_steps_is_stopped(
    dsn: str, eyes: Eyes, how: str
) -> None:
    """Steps of 100 ms in C, 25 s of them, that let no other thread of Python run."""
    usleep = ctypes.PyDLL(None).usleep
    began = threading.Event()
    steps: list[float] = []

    @task(name=f"checkpoint.c.{how}", timeout=0.5 if how == "timeout" else None, retry=1)
    def in_c(job: Job) -> None:
        while len(steps) < 250:
            usleep(100_000)
            steps.append(time.monotonic())
            began.set()
            job.checkpoint()

    async with work(dsn, in_c):
        job = put(dsn, in_c)
        await until(began.is_set)
        if how == "cancel":
            cancel(dsn, job)
        await until(eyes.is_in(job, "cancelled" if how == "cancel" else "failed"), 30)
    assert len(steps) < 250


async def test_a_stopping_worker_and_a_lost_job_are_reasons_too() -> None:
    began, let = threading.Event(), threading.Event()
    seen: list[type[BaseException]] = []

    def spin(job: Job) -> None:
        began.set()
        let.wait()
        try:
            bench.executor._running.checkpoint(job)
        except BaseException as error:
            seen.append(type(error))

    bench = Bench(made(spin, "spin"), slots=1)
    [job] = bench.offer("spin")
    await until(began.is_set)
    kept: Run = bench.executor._running.runs.pop(job)  # as when it is abandoned
    let.set()
    await until(lambda: seen)
    assert seen == [Interrupted]
    assert kept.stop_outcome is None


async def test_it_is_nothing_while_nobody_wants_the_job_to_stop() -> None:
    def steps(job: Job) -> int:
        for _ in range(1000):
            bench.executor._running.checkpoint(job)
        return 1

    async def asteps(job: Job) -> int:
        return steps(job)

    bench = Bench(made(steps, "steps"), made(asteps, "asteps"))
    for name in ("steps", "asteps"):
        [job] = bench.offer(name)
        assert getattr(await bench.outcome(job), "result", None) == "1"


def test_without_a_worker_it_does_nothing() -> None:
    @task(name="checkpoint.alone")
    def steps(job: Job) -> int:
        job.checkpoint()
        job.progress(1, 2)
        return 1

    assert testing.run(steps) == 1


async def test_a_reopening_seal_keeps_what_comes_meanwhile() -> None:
    """Threads that seal and unseal again and again, interrupted at every moment: each is stopped, outside of a seal."""
    wrong: list[int] = []
    inside: dict[int, bool] = {}

    def seals(job: Job) -> None:
        while True:
            bench.executor._running.uninterruptible(job, reopens=True)
            try:
                inside[job.id] = True
                for _ in range(50):
                    pass
                inside[job.id] = False
            except BaseException:
                wrong.append(job.id)
                raise
            finally:
                bench.executor._running.interruptible(job)

    bench = Bench(made(seals, "seals"), slots=2)
    stopped: list[int] = []
    ends = time.monotonic() + 1.0
    while time.monotonic() < ends or len(stopped) <= 10:
        jobs = bench.offer("seals", 2)
        await until(lambda jobs=jobs: all(job in inside for job in jobs))  # type: ignore[misc]
        for job in jobs:
            assert bench.executor.interrupt(job, STOPPED)
            assert await bench.outcome(job) == STOPPED
        stopped += jobs
    assert len(stopped) > 10
    assert wrong == []
