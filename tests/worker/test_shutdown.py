"""The end of a worker: what runs past the deadline is stopped, given back and noted; what is done is written."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import working
from workers import Eyes, Stalls, until, wait_until, work, workers

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.jobs.job import Job
from pgqueue.worker import worker

ATTEMPTS = "SELECT attempt, outcome, message FROM pgqueue.attempt ORDER BY finished_at"


class Stage:
    def __init__(self) -> None:
        self.started = threading.Event()
        self.release = threading.Event()
        self.left: list[str] = []


stage = Stage()


@pytest.fixture(autouse=True)
def anew() -> None:
    stage.__init__()  # type: ignore[misc]


@task(name="shutdown.spins")
def spins(job: Job) -> str:
    if job.headers:
        return "at last"
    try:
        stage.started.set()  # in here: whoever waits for it may stop us before the next line
        while True:
            pass
    finally:
        stage.left.append("cleaned up")


@task(name="shutdown.waits")
async def waits() -> None:
    stage.started.set()
    try:
        await asyncio.sleep(60)
    finally:
        stage.left.append("cleaned up")


@task(name="shutdown.in_c")
def in_c() -> None:
    stage.started.set()
    stage.release.wait()


@task(name="shutdown.swallows")
def swallows() -> str:
    for _ in range(2):
        try:
            stage.started.set()
            while True:  # not `while not …`: in Python 3.13 the jump back of such a loop is in no `try`
                if stage.left:
                    break
        except BaseException:
            stage.left.append("went on")
    return "half of it"


async def begin(dsn: str, *tasks: Any) -> None:
    with psycopg.connect(dsn) as conn:
        for each in tasks:
            each.enqueue(conn)
    stage.started.clear()


@pytest.mark.promise("S11")
@pytest.mark.parametrize("handler", [spins, waits], ids=lambda each: each.name)
async def test_what_runs_past_the_deadline_is_stopped_given_back_and_noted(handler: Any, dsn: str, eyes: Eyes) -> None:
    await begin(dsn, handler)
    async with work(dsn, handler) as one:
        await asyncio.to_thread(stage.started.wait)
        assert await one.stop(0.1) == 1
    assert stage.left == ["cleaned up"]
    assert eyes.all("SELECT state, attempt, rank FROM pgqueue.job") == [("available", 0, 10)]
    assert eyes.all(ATTEMPTS) == [(1, "interrupted", "its worker was shut down")]
    assert eyes.all("SELECT id FROM pgqueue.worker") == []  # nothing is left to rescue


@pytest.mark.promise("S11")
async def test_a_sync_handler_that_swallows_it_runs_again_for_it_may_have_left_out_a_half(dsn: str, eyes: Eyes) -> None:
    await begin(dsn, swallows)
    async with work(dsn, swallows) as one:
        await asyncio.to_thread(stage.started.wait)
        await one.stop(0.1)
    assert stage.left == ["went on"]
    assert eyes.all("SELECT state, attempt FROM pgqueue.job") == [("available", 0)]
    assert eyes.all(ATTEMPTS) == [(1, "interrupted", "its worker was shut down")]


@pytest.mark.second
@pytest.mark.promise("S11")
async def test_a_call_into_c_is_named_and_its_job_given_back_when_the_lease_is_over(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    await begin(dsn, in_c)
    one = worker.Worker(dsn=dsn, tasks=[in_c], lease=1.0)
    await one.start()
    await asyncio.to_thread(stage.started.wait)
    assert await one.stop(0.1) == 1
    assert "job 1 (shutdown.in_c) could not be stopped" in caplog.text
    assert eyes.all("SELECT state, attempt FROM pgqueue.job") == [("running", 1)]
    assert eyes.all(ATTEMPTS) == [(1, "interrupted", "its worker was shut down, and could not stop it")]
    stage.started.clear()
    async with work(dsn, in_c, lease=1.0):
        await asyncio.to_thread(stage.started.wait, 30)
        stage.release.set()
        await until(eyes.done(1))
    assert eyes.all("SELECT attempt, crashes FROM pgqueue.job") == [(1, 0)]
    assert len(eyes.all(ATTEMPTS)) == 1


async def test_what_had_not_started_is_given_back_without_a_row(dsn: str, eyes: Eyes) -> None:
    await begin(dsn, spins, *[spins] * 5, *[waits] * 5)
    async with work(dsn, spins, waits, concurrency=1) as one:
        one.services.executor._running.groups[0].prefetch = 20
        await asyncio.to_thread(stage.started.wait)
        await one.stop(0.1)
    assert eyes.states() == {"available": 11}
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job") == [(0,)]
    assert len(eyes.all(ATTEMPTS)) == 1


@pytest.mark.second
@pytest.mark.promise("S11")
@pytest.mark.parametrize("grace", [0.0, 0.7])
async def test_there_is_one_deadline(grace: float, dsn: str, eyes: Eyes) -> None:
    await begin(dsn, in_c, spins, waits)
    one = worker.Worker(dsn=dsn, tasks=[in_c, spins, waits])
    await one.start()
    runs = one.services.executor._running.runs
    await until(lambda: len(runs) == 3 and all(run.task or run.ident for run in runs.values()))  # threads have begun
    with Stalls() as stalls:
        began = time.monotonic()
        assert await one.stop(grace) == 3
        took = time.monotonic() - began
    print(f"stopped after {took:.2f} s, {stalls.seconds:.2f} s of them without a processor")
    assert grace <= took and took - stalls.seconds < grace + worker.STOP_SECONDS + 1.5
    assert eyes.states() == {"available": 2, "running": 1}
    stage.release.set()


SOURCE = """
@pgqueue.task(name="short")
def short(job: pgqueue.Job) -> None:
    ends = time.monotonic() + 0.002
    while time.monotonic() < ends:
        pass
    say("returned", job=job.id)

@pgqueue.task(name="short_async")
async def short_async(job: pgqueue.Job) -> None:
    await asyncio.sleep(0.002)
    say("returned", job=job.id)

@pgqueue.task(name="life")
def life(job: pgqueue.Job) -> None:
    with open(os.environ["RUNS"], "a+") as runs:
        runs.write(".")
        run = runs.tell()
    say("run", seen=[run, job.attempt, job.snoozes, job.crashes])
    if run == 1:
        raise pgqueue.Snooze(0)
    if run == 2:
        raise pgqueue.Retry(0)
    if run == 3:
        listed = "SELECT FROM pgqueue.worker WHERE %s = ANY (running)"
        with pgqueue.connect() as conn:  # a crash counts for what the last heartbeat has listed
            while not conn.execute(listed, [job.id]).fetchall():
                time.sleep(0.01)
        os._exit(9)
    if run == 4:
        while True:
            time.sleep(0.01)
"""


@pytest.mark.second
@pytest.mark.promise("S11")
@pytest.mark.parametrize("moment", range(3))
def test_everything_that_has_returned_is_written(
    moment: int, tmp_path: Path, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """Stopped without patience in the middle of two thousand short jobs."""
    with workers(tmp_path, dsn, SOURCE) as fleet:
        [one] = fleet.ready(1, concurrency=4)
        tasks = pgqueue.remote("short"), pgqueue.remote("short_async")
        pgqueue.enqueue_many(conn, [tasks[number % 2].new() for number in range(2_000)])
        conn.commit()
        wait_until(lambda: len(one.all("returned")) > 100 * moment)
        one.process.send_signal(signal.SIGTERM)
        assert one.wait() == 0
        returned = [event["job"] for event in one.all("returned")]
    assert 0 < len(returned) < 2_000
    assert len(set(returned)) == len(returned)
    completed = {job for (job,) in eyes.all("SELECT id FROM pgqueue.job WHERE state = 'completed'")}
    interrupted = {job for (job,) in eyes.all("SELECT job_id FROM pgqueue.attempt")}
    assert completed - set(returned) == set()
    assert set(returned) - completed <= interrupted  # stopped between its last line and its return
    assert eyes.states() == {"completed": len(completed), "available": 2_000 - len(completed)}
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job WHERE state = 'available'") == [(0,)]


@pytest.mark.second
@pytest.mark.promise("F14", "S11")
def test_attempts_snoozes_crashes_and_interruptions_are_counted_apart(
    tmp_path: Path, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """One job goes through all of it: it snoozes, fails, dies with its worker, is interrupted, and completes."""
    pgqueue.remote("life").enqueue(conn)
    conn.commit()
    environment = {"RUNS": str(tmp_path / "runs"), "GRACE": "0.1", "PGQUEUE_DSN": dsn}
    with workers(tmp_path, dsn, SOURCE) as fleet:
        first = fleet.start(environment, lease=1.0, poll=0.05)
        assert first.wait() == 9
        second = fleet.start(environment, lease=1.0, poll=0.05)
        second.event("run", seen=[4, 3, 1, 1])
        second.stop()
        third = fleet.start(environment, lease=1.0, poll=0.05)
        wait_until(eyes.done(1))
        seen = [event["seen"] for one in (first, second, third) for event in one.all("run")]
    assert seen == [[1, 1, 0, 0], [2, 1, 1, 0], [3, 2, 1, 0], [4, 3, 1, 1], [5, 3, 1, 1]]
    rows = [(attempt, outcome) for attempt, outcome, _ in eyes.all(ATTEMPTS)]
    assert rows == [(1, "snoozed"), (1, "retried"), (2, "crashed"), (3, "interrupted")]
    assert eyes.all("SELECT attempt, snoozes, crashes FROM pgqueue.job") == [(3, 1, 1)]


APP = """
import pathlib
import pgqueue

@pgqueue.task
def spins() -> None:
    pathlib.Path("started").touch()
    while True:
        pass
"""


@pytest.mark.promise("S11")
def test_the_command_ends_with_5_and_leaves_nothing_running(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    (tmp_path / "shop.py").write_text(APP)
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('shop.spins')")
    with working("shop", "--grace", "200ms", dsn=dsn, cwd=tmp_path) as command:
        wait_until((tmp_path / "started").exists)
        command.signal(signal.SIGTERM)
        assert command.ends() == 5
    assert eyes.all("SELECT state, attempt FROM pgqueue.job") == [("available", 0)]
    assert [row[:2] for row in eyes.all(ATTEMPTS)] == [(1, "interrupted")]


async def test_who_is_stopped_while_it_registers_leaves_no_row(
    dsn: str, eyes: Eyes, conn: psycopg.Connection[Any]
) -> None:
    """The thread that registers goes on when whoever waits for it is cancelled."""
    conn.execute("LOCK TABLE pgqueue.worker IN ACCESS EXCLUSIVE MODE")
    starting = asyncio.create_task(worker.Worker(dsn=dsn).prepare())
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    await until(lambda: eyes.one(waits) == 1, 30)
    starting.cancel()
    await asyncio.wait([starting], timeout=0.1)
    conn.rollback()
    await asyncio.wait([starting])
    assert starting.cancelled()
    await until(lambda: eyes.backends("pgqueue start") == [], 30)
    assert eyes.all("SELECT state FROM pgqueue.worker") == []
