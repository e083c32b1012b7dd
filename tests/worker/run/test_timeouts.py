"""Timeouts: who is stopped when, what becomes of a job that does not stop, and of what its handler says at last."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from executor_bench import Bench, made
from workers import Eyes, until, work

import pgqueue.admin.queries
from pgqueue import InvalidOption, RetryPolicy
from pgqueue.client.tasks import task
from pgqueue.jobs.fields import claimed
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import COMPLETED, Cancelled, Completed, Failed, Retried
from pgqueue.worker.run import timeouts


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "GRACE", 0.2)


def slow(seconds: float) -> None:
    """Python steps for so long."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass


async def slow_async(seconds: float) -> None:
    await asyncio.sleep(seconds)


class Away(logging.Handler):
    """A handler of the application's whose collector is away, and that does not say so by `handleError`."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionError("collector away")


@pytest.mark.promise("F216")
async def test_a_handler_of_the_log_that_raises_keeps_no_job_from_its_timeout(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(made(slow, "slow", timeout=0.1), made(slow_async, "slow_async", timeout=0.1), slots=2)
    logger, away = logging.getLogger("pgqueue"), Away()
    caplog.set_level(logging.INFO, "pgqueue")
    logger.addHandler(away)
    try:
        for _ in range(2):
            jobs = [*bench.offer("slow", args='{"seconds": 30}'), *bench.offer("slow_async", args='{"seconds": 30}')]
            for job in jobs:
                outcome = await bench.outcome(job)
                assert isinstance(outcome, Retried) and outcome.problem.outcome == "timeout"
        logger.info("from here")
    finally:
        logger.removeHandler(away)
    assert "ConnectionError: collector away" in capsys.readouterr().err
    logger.info("from here")  # what it says of its caller is right
    assert caplog.records[-1].filename == "test_timeouts.py" and "from here" in caplog.text


@pytest.mark.parametrize("handler", [slow, slow_async])
async def test_a_job_longer_than_its_timeout_is_stopped_and_tried_again(handler: Any) -> None:
    bench = Bench(made(handler, "slow", timeout=0.1, retry=RetryPolicy(attempts=3, first=7, factor=1)))
    began = time.monotonic()
    quick, stopped = bench.job("slow", '{"seconds": 0}'), bench.job("slow", '{"seconds": 30}')
    last = bench.job("slow", '{"seconds": 30}', attempt=3)
    bench.executor.offer(bench.pool, [quick, stopped, last])
    outcome = await bench.outcome(stopped.id)
    assert isinstance(outcome, Retried)
    assert 3.5 <= outcome.delay <= 7
    assert outcome.problem.outcome == "timeout"
    assert outcome.problem.error_type == "JobTimeout"
    failed = await bench.outcome(last.id)
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.problem.outcome) == ("timeout", "timeout")
    assert await bench.outcome(quick.id) is COMPLETED
    assert 0.1 <= time.monotonic() - began < 20  # not the 30 s they would take
    assert bench.executor._running.lost == 0
    await bench.until(lambda: bench.pool.running == 0)


async def test_retry_on_sees_a_timeout_error() -> None:
    for policy, again in ((RetryPolicy(retry_on=(TimeoutError,)), True), (RetryPolicy(fail_on=(TimeoutError,)), False)):
        bench = Bench(made(slow_async, "slow", timeout=0.05, retry=policy))
        outcome = await bench.run("slow", args='{"seconds": 30}')
        assert isinstance(outcome, Retried if again else Failed)


@pytest.mark.promise("L06")
async def test_a_thread_that_hangs_loses_its_job_and_its_late_result_counts_for_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()

    def hangs() -> str:
        while not release.is_set():
            try:
                release.wait()
            except BaseException:
                continue
        return "too late"

    bench = Bench(made(hangs, "hangs", timeout=0.1), slots=4)
    [job] = bench.offer("hangs")
    outcome = await bench.outcome(job)
    assert isinstance(outcome, Retried)
    assert bench.executor._running.lost == 1
    assert f"job {job} (hangs) does not stop and is taken away" in caplog.text
    assert "in a slot that is lost (1 of 4 are)" in caplog.text
    assert not bench.executor._running.runs
    assert bench.pool.running == 1  # the slot is lost
    await asyncio.wait_for(bench.executor.idle(), 30)  # nobody waits for it at a shutdown
    assert not bench.running.half_lost
    [second] = bench.offer("hangs")
    await bench.outcome(second)
    assert (bench.running.lost, bench.running.half_lost) == (2, True)  # half of four
    assert "half of this worker's slots are lost to handlers that do not stop: it takes no more jobs" in caplog.text
    release.set()
    await until(lambda: bench.executor._running.lost == 0)
    assert bench.pool.running == 0
    assert bench.order == [job, second]  # nothing was said twice
    assert isinstance(bench.outcomes[job], Retried)
    assert await bench.run("hangs") == Completed('"too late"')


async def test_an_async_handler_that_swallows_its_cancellation_loses_its_job() -> None:
    release = asyncio.Event()

    async def hangs() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "too late"

    bench = Bench(made(hangs, "hangs", timeout=0.1), slots=4)
    [job] = bench.offer("hangs")
    assert isinstance(await bench.outcome(job), Retried)
    assert bench.executor._running.lost == bench.pool.running == 1
    release.set()
    await until(lambda: bench.executor._running.lost == 0)
    assert (bench.pool.running, bench.order) == (0, [job])
    assert await bench.run("hangs") == Completed('"too late"')


async def test_a_loop_that_stood_still_does_not_take_the_grace_away() -> None:
    cleaned: list[int] = []

    async def cleans_up() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(1)

    bench = Bench(made(cleans_up, "cleans", timeout=0.05), slots=4)
    [job] = bench.offer("cleans")
    await asyncio.sleep(0.01)  # it has begun
    slow(0.05 + 2 * timeouts.GRACE)  # as a handler beside it that blocks the loop
    assert isinstance(await bench.outcome(job), Retried)
    await bench.until(lambda: bench.pool.running == 0)
    assert (cleaned, bench.executor._running.lost) == ([1], 0)
    assert bench.order == [job]


async def test_who_was_cancelled_before_the_timeout_stays_cancelled() -> None:
    started = asyncio.Event()

    async def hangs() -> None:
        started.set()
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                if bench.executor._running.lost:
                    raise

    bench = Bench(made(hangs, "hangs", timeout=0.1), slots=4)
    [job] = bench.offer("hangs")
    await started.wait()
    assert bench.executor.interrupt(job, Cancelled("by hand"))
    assert await bench.outcome(job) == Cancelled("by hand")
    assert bench.executor._running.lost == 1
    bench.executor.cancel()
    await until(lambda: bench.executor._running.lost == 0)
    assert bench.order == [job]


async def test_moments_of_jobs_that_have_ended_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STALE_MOST", 50)
    bench = Bench(made(slow_async, "quick", timeout=3600), made(slow, "thread", timeout=timedelta(hours=1)), slots=5)
    keeper = bench.executor._timeouts
    for name in ("quick", "thread"):
        for _ in range(40):
            jobs = bench.offer(name, 20, args='{"seconds": 0}')
            for job in jobs:
                await bench.outcome(job)
            assert len(keeper._heap) + len(keeper._new) <= 200


async def test_tasks_without_a_timeout_are_called_as_they_are() -> None:
    plain = made(slow, "plain")
    keeper = Bench(plain).executor._timeouts
    jobs = [with_headers(None), with_headers('{"trace": "x"}'), with_headers('{"trace": "x", "pgqueue:timeout": 5}')]
    tasks = [task for _, task in keeper.with_tasks(jobs)]
    assert (tasks[0], tasks[1]) == (plain, plain) and tasks[2] not in (plain, None)


# Timeouts of jobs -----------------------------------------------------------------------------------------------------


def with_headers(headers: str | None, name: str = "plain", args: str = "{}", job_id: int = 1) -> Job:
    return Job(claimed(id=job_id, pos=job_id, task=name, args=args, headers=headers), claim=1)


@pytest.mark.parametrize("handler", [slow, slow_async])
async def test_a_job_has_the_timeout_of_its_own_shorter_or_longer_or_where_its_task_has_none(
    handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    once = RetryPolicy(attempts=1)
    tasks = {name: made(handler, name, timeout=timeout, retry=once) for name, timeout in TASKS.items()}
    bench = Bench(*tasks.values(), slots=8)
    jobs, ends = list[Job](), dict[int, str | None]()
    for name, headers, seconds, end in (
        ("none", '{"pgqueue:timeout": 0.1}', 30, "0.1"),
        ("none", '{"a": 1}', 0.3, None),
        ("none", None, 0.3, None),
        ("long", '{"pgqueue:timeout": 0.1}', 30, "0.1"),
        ("long", None, 0.3, None),
        ("short", '{"pgqueue:timeout": 20}', 0.3, None),
        ("short", '{"a": 1}', 30, "0.15"),
        ("short", None, 30, "0.15"),
    ):
        jobs.append(with_headers(headers, name, f'{{"seconds": {seconds}}}', len(jobs) + 1))
        ends[len(jobs)] = end
    began = time.monotonic()
    with caplog.at_level("INFO", "pgqueue"):
        bench.executor.offer(bench.pool, jobs)
        for job_id, end in ends.items():
            await bench.until(lambda job_id=job_id: job_id in bench.outcomes, 20)  # type: ignore[misc]
            outcome = bench.outcomes[job_id]
            if end is None:
                assert outcome is COMPLETED
            else:
                assert isinstance(outcome, Failed)
                assert outcome.problem.message == f"it had not ended after {end} s, its timeout"
                assert f"job {job_id} ({jobs[job_id - 1].task}) runs longer than {end} s" in caplog.text
    assert time.monotonic() - began < 20
    assert "cannot be a timeout" not in caplog.text


TASKS = {"none": None, "long": 60.0, "short": 0.15}


@pytest.mark.parametrize(("name", "stopped"), [("none", False), ("short", True)])
@pytest.mark.parametrize("headers", ['{"pgqueue:timeout": -1}', '{"pgqueue:timeout": "1"}', '["pgqueue:timeout"]'])
async def test_a_header_that_is_no_timeout_is_named_and_that_of_the_task_holds(
    name: str, stopped: bool, headers: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(made(slow_async, name, timeout=TASKS[name], retry=RetryPolicy(attempts=1)))
    seconds = 30 if stopped else 0.1
    bench.executor.offer(bench.pool, [with_headers(headers, name, f'{{"seconds": {seconds}}}')])
    assert isinstance(await bench.outcome(1), Failed) is stopped
    assert f"job 1 ({name}): its header pgqueue:timeout cannot be a timeout" in caplog.text


@pytest.mark.parametrize("timeout", [0, -1, "5", float("nan"), True])
def test_a_timeout_is_a_duration(timeout: Any) -> None:
    with pytest.raises(InvalidOption):
        made(slow, "slow", timeout=timeout)


# With a database -----------------------------------------------------------------------------------------------------

held = threading.Event()


@task(name="timekeeper.hangs", timeout=0.2, retry=RetryPolicy(attempts=2, first=0))
def hangs(job: Job) -> str:
    if job.attempt == 1:
        held.wait()
    return f"attempt {job.attempt}"


@pytest.mark.promise("L06")
async def test_a_hung_job_runs_again_while_its_thread_still_hangs(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    held.clear()
    hangs.enqueue(conn)
    conn.commit()
    async with work(dsn, hangs, poll=0.05, lease=1.0) as worker:
        await until(eyes.done(1))
        assert worker.services.executor._running.lost == 1
        await until(lambda: [each.lost for each in pgqueue.admin.queries.status(conn).workers] == [1])
        held.set()
        await until(lambda: worker.services.executor._running.lost == 0)
        await worker.services.completer.flushed()
        assert worker.services.completer.fenced == 0
    assert eyes.all("SELECT state, attempt, result FROM pgqueue.job") == [("completed", 2, "attempt 2")]
    assert eyes.all("SELECT attempt, outcome, error_type FROM pgqueue.attempt") == [(1, "timeout", "JobTimeout")]


@task(name="timekeeper.endless", retry=RetryPolicy(attempts=2, first=0))
def endless(job: Job) -> None:
    while True:
        time.sleep(0.001)


async def test_each_attempt_has_the_timeout_of_the_job_on_any_worker(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    handle = endless.using(timeout=0.2).enqueue(conn)
    conn.commit()
    async with work(dsn, endless, poll=0.05):
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.attempt") >= 1)
    async with work(dsn, endless, poll=0.05):
        await until(eyes.is_in(handle.id, "failed"))
    assert eyes.all("SELECT attempt, outcome, message FROM pgqueue.attempt WHERE outcome <> 'interrupted'") == [
        (n, "timeout", "it had not ended after 0.2 s, its timeout") for n in (1, 2)
    ]
    with pytest.raises(pgqueue.JobTimeout, match=r"after 0\.2 s, its timeout"):
        await asyncio.to_thread(_result, dsn, handle)


def _result(dsn: str, handle: Any) -> None:
    pgqueue.configure(dsn=dsn)
    handle.result(10)


async def test_headers_that_no_enqueuer_writes_harm_their_own_job_only(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """By a plain INSERT: no object, no number, numbers beyond all numbers."""

    @task(name="timekeeper.quick")
    def quick() -> None: ...

    values = ["-1", "0", '"NaN"', '"inf"', "1e400", "1e-400", "1e20000", "null", "true", "[1]", "{}"]
    bad = [f'{{"pgqueue:timeout": {value}}}' for value in values] + ['["pgqueue:timeout"]', '"pgqueue:timeout"']
    for headers in bad:
        conn.execute("INSERT INTO pgqueue.job (task, headers) VALUES ('timekeeper.quick', %s::jsonb)", [headers])
    quick.enqueue(conn)
    conn.commit()
    async with work(dsn, quick, poll=0.05):
        await until(eyes.done(len(bad) + 1))
    assert eyes.all("SELECT FROM pgqueue.attempt") == []


async def test_a_worker_with_half_its_slots_lost_takes_no_more(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    held.clear()
    hangs.enqueue(conn)
    conn.commit()
    async with work(dsn, hangs, concurrency=2, poll=0.05) as worker:
        await until(lambda: worker.state.phase == "quiet")
        held.set()
        await until(lambda: worker.services.executor._running.lost == 0)
    assert eyes.states() == {"scheduled": 1} or eyes.states() == {"available": 1}
