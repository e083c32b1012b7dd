"""Jobs that must never overlap leave before others can start them; all others run on and keep what they have done."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from executor_bench import Bench, made
from loop_thread import LoopThread
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from workers import Eyes, until, wait_until, work, workers

import pgqueue
from pgqueue.client.middleware import wrapped
from pgqueue.client.tasks import Task, task
from pgqueue.jobs.outcomes import COMPLETED, RELEASED, Outcome, Released
from pgqueue.worker.liveness.lease_guard import EDGE, LeaseGuard

# One worker's guard, with a lease that we end -----------------------------------------------------------------------


class Guarded(Bench):
    """A bench whose tasks are guarded; its last beat went through `ago` seconds before it was made.

    Leases are long, so that a moment without a processor is shorter than from the edge to the end; `ago` is long too.
    """

    def __init__(self, *tasks: Task[..., Any], lease: float = 1.0, ago: float = 0.5, slots: int = 2) -> None:
        self.beat = time.monotonic() - ago
        self.edge, self.over = self.beat + EDGE * lease, self.beat + lease
        self.guard = LeaseGuard(
            lease, last_beat=lambda: self.beat, stop=lambda job, outcome: self.executor.interrupt_run(job, outcome)
        )
        super().__init__(*(wrapped(task, self.guard) for task in tasks), slots=slots)
        self.guard.start()


Guard = Callable[..., Guarded]


@pytest.fixture
def guard() -> Iterator[Guard]:
    benches: list[Guarded] = []

    def make(*tasks: Task[..., Any], **options: Any) -> Guarded:
        benches.append(Guarded(*tasks, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.guard.close()


def spinning(left: list[float]) -> Callable[[], None]:
    def spin() -> None:
        try:
            while True:
                pass
        finally:
            left.append(time.monotonic())

    return spin


def waiting(left: list[float]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            left.append(time.monotonic())

    return wait


def was_interrupted(outcome: Outcome) -> bool:
    return isinstance(outcome, Released) and outcome.problem is not None and outcome.problem.outcome == "interrupted"


@pytest.mark.promise("F06")
@pytest.mark.each_value
@pytest.mark.parametrize("lease", [3.0, 5.0])
@pytest.mark.parametrize("handler", [spinning, waiting])
async def test_a_handler_leaves_between_the_edge_and_the_end_of_the_lease(
    handler: Any, lease: float, guard: Guard
) -> None:
    left: list[float] = []
    bench = guard(made(handler(left), "h", on_lost_lease="cancel"), lease=lease, ago=EDGE * lease - 0.6)
    [job] = bench.offer("h")
    assert was_interrupted(await bench.outcome(job))
    assert bench.edge <= left[0] < bench.over


@pytest.mark.second
@pytest.mark.promise("F06")
async def test_a_thread_is_stopped_in_time_although_the_loop_is_blocked(guard: Guard) -> None:
    left: list[float] = []

    async def blocks() -> None:
        while time.monotonic() < bench.over + 0.1:
            pass

    spins = made(spinning(left), "spins", on_lost_lease="cancel")
    bench = guard(spins, made(blocks, "blocks"), lease=5.0, ago=3.2)
    [job] = bench.offer("spins")
    await until(lambda: bench.guard._running)
    bench.offer("blocks")
    assert was_interrupted(await bench.outcome(job))
    assert bench.edge <= left[0] < bench.over


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_job_does_not_start_from_the_edge_on_until_beats_go_through(kind: str, guard: Guard) -> None:
    ran: list[float] = []

    def notes() -> None:
        ran.append(time.monotonic())

    async def notes_async() -> None:
        notes()

    bench = guard(made(notes if kind == "sync" else notes_async, "n", on_lost_lease="cancel"), lease=10.0, ago=8.0)
    assert await bench.run("n") is RELEASED  # it had not started: no row says that it was interrupted
    assert not ran
    bench.beat = time.monotonic()
    assert await bench.run("n") is COMPLETED
    assert len(ran) == 1
    assert not bench.guard._running


@pytest.mark.second
async def test_it_is_watched_anew_after_beats_went_through_again(guard: Guard) -> None:
    left: list[float] = []
    bench = guard(made(spinning(left), "spins", on_lost_lease="cancel"), lease=2.0, ago=1.0)
    [first] = bench.offer("spins")
    assert was_interrupted(await bench.outcome(first))
    bench.beat = time.monotonic()
    [second] = bench.offer("spins")
    await until(lambda: bench.guard._running)
    assert was_interrupted(await bench.outcome(second))
    assert len(left) == 2
    assert left[1] >= bench.beat + EDGE * 2.0


@pytest.mark.second
async def test_beats_that_go_through_stop_nothing(guard: Guard) -> None:
    ends = time.monotonic() + 2.5

    def works() -> None:
        while time.monotonic() < ends:
            pass

    bench = guard(made(works, "works", on_lost_lease="cancel"), lease=2.0, ago=0.0)
    [job] = bench.offer("works")
    while job not in bench.outcomes:
        bench.beat = time.monotonic()
        await asyncio.sleep(0.02)
    assert bench.outcomes[job] is COMPLETED


async def test_a_job_that_looks_at_the_clock_while_the_others_are_stopped_is_stopped_too(guard: Guard) -> None:
    """Between its look and its first step the edge passes: it must be on the list before it looks."""
    ran: list[int] = []
    stopped, looks = threading.Event(), threading.Event()

    def slow_look() -> float:
        if threading.current_thread().name.startswith("pgqueue-") and "lease" not in threading.current_thread().name:
            looks.set()
            stopped.wait(30)
        return bench.beat

    def notes() -> None:
        ran.append(1)

    bench = guard(made(notes, "notes", on_lost_lease="cancel"), ago=0.3)
    bench.guard._last_beat = slow_look
    real = bench.guard._stop_all

    def stop_all(why: str) -> None:
        real(why)
        stopped.set()

    bench.guard._stop_all = stop_all  # type: ignore[method-assign]
    [job] = bench.offer("notes")
    await asyncio.to_thread(looks.wait)
    assert isinstance(await bench.outcome(job), Released)
    assert not ran


async def test_a_call_into_c_is_named_when_the_lease_is_over(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Lock()
    release.acquire()
    bench = guard(made(lambda: release.acquire() and None, "in_c", on_lost_lease="cancel"))
    [job] = bench.offer("in_c")
    await until(lambda: [line for line in caplog.records if line.levelno == logging.CRITICAL])
    assert time.monotonic() >= bench.over
    assert f"job {job} (in_c) could not be stopped before this worker's lease was over" in caplog.text
    release.release()
    assert was_interrupted(await bench.outcome(job))


async def test_tasks_that_may_overlap_are_called_as_they_are(guard: Guard) -> None:
    plain = made(lambda: None, "plain")
    bench = Bench(plain)
    unguarded = LeaseGuard(1.0, last_beat=lambda: 0.0, stop=bench.executor.interrupt_run)
    assert wrapped(plain, unguarded) is plain
    unguarded.start()
    assert not unguarded._thread.is_alive()


# Workers whose database is cut off ----------------------------------------------------------------------------------


class Cut:
    """A port that leads to the server; while it is `cut` nothing passes either way, and nothing is closed."""

    def __init__(self, dsn: str) -> None:
        self._target = conninfo_to_dict(dsn)
        self._loop = LoopThread()
        self._open = asyncio.Event()
        self._open.set()
        port = self._loop.listen(self._join)
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")

    def cut(self) -> None:
        """Nothing passes from now on."""
        self._loop.soon(self._open.clear)

    def mend(self) -> None:
        self._loop.soon(self._open.set)

    def close(self) -> None:
        self._loop.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        theirs, ours = await self._loop.connect(self._target)
        self._loop.start(self._pump(reader, ours))
        self._loop.start(self._pump(theirs, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                await self._open.wait()
                writer.write(data)
        except OSError:
            pass  # one side has gone: the other is told
        finally:
            writer.close()


@pytest.fixture
def cut(dsn: str) -> Iterator[Cut]:
    made = Cut(dsn)
    yield made
    made.close()


TASKS = """
def steps(job, kind):
    say("started", job=job.id, kind=kind, attempt=job.attempt)
    try:
        while True:  # not `while not …`: in Python 3.13 the jump back of such a loop is in no `try`
            if os.path.exists(os.environ["GO"]):
                break
            time.sleep(0.01)
        say("finished", job=job.id)
    except BaseException:
        say("left", job=job.id)
        raise

@pgqueue.task(name="never_twice", on_lost_lease="cancel")
def never_twice(job: pgqueue.Job) -> None:
    steps(job, "sync")

@pgqueue.task(name="never_twice_async", on_lost_lease="cancel")
async def never_twice_async(job: pgqueue.Job) -> None:
    say("started", job=job.id, kind="async", attempt=job.attempt)
    try:
        while not os.path.exists(os.environ["GO"]):
            await asyncio.sleep(0.01)
        say("finished", job=job.id)
    except BaseException:
        say("left", job=job.id)
        raise

@pgqueue.task(name="may_overlap")
def may_overlap(job: pgqueue.Job) -> None:
    steps(job, "kept")
"""
never_twice, never_twice_async = pgqueue.remote("never_twice"), pgqueue.remote("never_twice_async")
may_overlap = pgqueue.remote("may_overlap")
LEASE = 3.0


@pytest.mark.second
@pytest.mark.promise("F06")
@pytest.mark.parametrize("guarded", [never_twice, never_twice_async], ids=["sync", "async"])
def test_a_second_worker_starts_the_job_only_after_the_handler_has_left(
    guarded: Any, tmp_path: Path, dsn: str, eyes: Eyes, cut: Cut, conn: psycopg.Connection
) -> None:
    go = tmp_path / "go"
    env = {"GO": str(go)}
    job = guarded.enqueue(conn).id
    conn.commit()
    with workers(tmp_path, dsn, TASKS) as fleet:
        one = fleet.start(env, dsn=cut.dsn, lease=LEASE, poll=0.1)
        one.event("started", job=job)
        other = fleet.start(env, lease=LEASE, poll=0.1)
        other.event("ready")
        cut.cut()
        started = other.event("started", job=job)
        assert one.event("left", job=job)["at"] < started["at"]
        go.touch()
        wait_until(eyes.done(1))
        assert not one.all("finished")
        cut.mend()
        wait_until(lambda: "was taken for dead" in one.written())
        one.stop()
    assert eyes.states() == {"completed": 1}


@pytest.mark.second
@pytest.mark.promise("F06")
def test_after_an_outage_shorter_than_the_lease_what_was_stopped_runs_again_and_all_else_is_kept(
    tmp_path: Path, dsn: str, eyes: Eyes, cut: Cut, conn: psycopg.Connection
) -> None:
    go = tmp_path / "go"
    env = {"GO": str(go)}
    stopped = [never_twice.enqueue(conn).id, never_twice_async.enqueue(conn).id]
    kept = may_overlap.enqueue(conn).id
    conn.commit()
    with workers(tmp_path, dsn, TASKS) as fleet:
        one = fleet.start(env, dsn=cut.dsn, lease=LEASE, poll=0.1)
        for job in [*stopped, kept]:
            one.event("started", job=job)
        eyes.do(
            "UPDATE pgqueue.worker SET lease = interval '1 minute'"
        )  # judged by the second worker: it gives us time
        other = fleet.start(env, lease=LEASE, poll=0.1)
        other.event("ready")
        cut.cut()
        for job in stopped:
            one.event("left", job=job)
        cut.mend()
        wait_until(lambda: len(one.all("started") + other.all("started")) == 5)
        go.touch()
        wait_until(eyes.done(3))
        assert [event["job"] for event in one.all("started") + other.all("started")].count(kept) == 1
        assert one.event("finished", job=kept)
    assert set(eyes.all("SELECT attempt, crashes, snoozes FROM pgqueue.job")) == {(1, 0, 0)}
    rows = eyes.all("SELECT job_id, attempt, outcome, message FROM pgqueue.attempt ORDER BY 1")
    assert [row[:3] for row in rows] == [(job, 1, "interrupted") for job in stopped]
    assert "no sign of life" in rows[0][3]


held = threading.Event()


@task(name="lost_lease.holds", on_lost_lease="cancel")
def holds() -> None:
    held.set()
    while True:
        pass


@pytest.mark.promise("F01")
async def test_a_worker_taken_for_dead_stops_at_once_what_must_not_overlap(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """It was stopped, say, and its clock says nothing: it learns of it by its next beat."""
    held.clear()
    holds.enqueue(conn)
    conn.commit()
    async with work(dsn, holds, lease=1.5) as worker:
        await asyncio.to_thread(held.wait)
        [run] = worker.services.executor._running.runs.values()
        eyes.do("UPDATE pgqueue.worker SET dead_at = now()")
        await until(lambda: run.stopped)
