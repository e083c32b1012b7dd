"""A worker that can start no thread stays steerable, and runs what it can."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest
from threadless import no_threads
from workers import Eyes, until, wait_until, workers

import pgqueue
from pgqueue.worker.run import threads
from pgqueue.worker.run.threads import Threads

pytestmark = pytest.mark.promise("F40")

TASKS = """
from threadless import no_threads

@pgqueue.task(name="threads.limit")
async def limit(way: str) -> None:
    with no_threads(way):
        say("limited")
        while not os.path.exists(os.environ["GO"]):
            await asyncio.sleep(0.01)
    say("lifted")

@pgqueue.task(name="threads.sync")
def sync(job: pgqueue.Job) -> None:
    say("ran", job=job.id)

@pgqueue.task(name="threads.on_loop")
async def on_loop(job: pgqueue.Job) -> None: ...
"""


def put(dsn: str, name: str, number: int = 1, **args: object) -> None:
    with psycopg.connect(dsn) as conn:
        pgqueue.enqueue_many(conn, [pgqueue.remote(name).new(**args)] * number)


@pytest.mark.parametrize("way", [pytest.param("refused", marks=pytest.mark.second), "stillborn"])
def test_without_a_thread_heartbeats_async_jobs_and_the_shutdown_go_on(
    tmp_path: Path, dsn: str, eyes: Eyes, way: str
) -> None:
    go = tmp_path / "go"
    with workers(tmp_path, dsn, TASKS) as all_workers:
        worker = all_workers.start({"GO": str(go), "GRACE": "0.1"}, lease=1.0)
        worker.event("ready")
        put(dsn, "threads.limit", way=way)
        worker.event("limited")
        put(dsn, "threads.sync", 3)
        wait_until(lambda: eyes.states().get("running", 0) == 4, 20)
        put(dsn, "threads.on_loop", 3)
        wait_until(eyes.done(3), 20)
        beat = eyes.one("SELECT beat FROM pgqueue.worker")
        wait_until(lambda: eyes.one("SELECT beat FROM pgqueue.worker") >= beat + 4, 20)
        worker.signal(15)
        assert worker.wait(20) == 0
        assert worker.all("ran") == [] and "the database refuses it" not in worker.written()
    assert eyes.states() == {"available": 4, "completed": 3}
    assert eyes.one("SELECT count(*)::int FROM pgqueue.attempt") == 1, "of the one that was stopped"


@pytest.mark.parametrize("way", ["refused", pytest.param("stillborn", marks=pytest.mark.second)])
def test_jobs_that_wait_for_a_thread_run_when_there_is_one_again(
    tmp_path: Path, dsn: str, eyes: Eyes, way: str
) -> None:
    go = tmp_path / "go"
    with workers(tmp_path, dsn, TASKS) as all_workers:
        worker = all_workers.start({"GO": str(go)})
        worker.event("ready")
        put(dsn, "threads.limit", way=way)
        worker.event("limited")
        put(dsn, "threads.sync", 5)
        wait_until(lambda: "no thread can be started" in worker.written(), 20)
        go.touch()
        wait_until(eyes.done(6), 20)
        wait_until(lambda: len(worker.all("ran")) == 5, 20)  # its lines are read in a thread of the test
        assert worker.written().count("no thread can be started") == 1, "one line a minute"


async def test_the_loop_never_waits_and_the_threads_there_are_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "AGAIN_SECONDS", 0.05)
    go, did = threading.Event(), list[int]()

    def work(number: int) -> bool:
        assert go.wait(60)
        did.append(number)
        return True

    pool = Threads(work)
    done = list[None]()
    pool.start(0, done=lambda: done.append(None))
    await until(lambda: pool._threads)
    # Short only while no thread can come: on a busy machine a thread that comes takes longer, and counts as missing.
    with no_threads("stillborn"), monkeypatch.context() as short:
        short.setattr(threads, "START_SECONDS", 0.05)
        for number in (1, 2, 3):
            pool.start(number, done=lambda: done.append(None))
        await until(lambda: pool._missing)
        assert sorted(args for (args,) in pool.take_back()) == [1, 2, 3]
        pool.start(4, done=lambda: done.append(None))
        go.set()
        await until(lambda: len(done) == 2)
        assert did == [0, 4]
    await settled(pool)
    for number in range(5, 10):
        pool.start(number, done=lambda: done.append(None))
    await until(lambda: len(done) == 7)
    await settled(pool)
    pool.close()


async def settled(pool: Threads) -> None:
    """Wait until no thread is coming or missing. Then each that is there has nothing to do."""
    await until(lambda: not pool._missing and not pool._coming)
    assert pool._idle == len(pool._threads)
