"""What is asked of running jobs: they stop soon, whoever runs them by then; no request is forgotten or left over."""

from __future__ import annotations

import asyncio
import threading
from time import sleep
from typing import Any

import psycopg
import pytest
from duty_loops import looping
from worker_states import worker_state
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database.sessions import Link, Session
from pgqueue.jobs.outcomes import Cancelled, Outcome
from pgqueue.worker.run import cancellation
from pgqueue.worker.run.cancellation import SETTLED_MOST, Cancellation

REQUESTS = "SELECT count(*) FROM pgqueue.job_signal"
begun: list[str] = []
stopped: list[str] = []


@pytest.fixture(autouse=True)
def anew() -> None:
    begun.clear()
    stopped.clear()


@task(name="signals.wait")
async def wait() -> None:
    begun.append("async")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        stopped.append("async")
        raise


@task(name="signals.spin")
def spin() -> None:
    begun.append(threading.current_thread().name)
    try:
        while True:
            sleep(0.005)
    except BaseException:
        stopped.append(threading.current_thread().name)
        raise


async def cancelled(dsn: str, eyes: Eyes, job: int, reason: str = "enough") -> None:
    """Cancel a job whose handler has begun, and wait until it has ended."""
    await until(lambda: begun)  # a job that is taken has not begun yet
    with psycopg.connect(dsn) as conn:
        assert [answer.did for answer in pgqueue.cancel(conn, job, reason=reason)] == ["requested"]
    await until(eyes.is_in(job, "cancelled"))


@pytest.mark.parametrize("handler", [wait, spin])
async def test_a_running_job_is_stopped_at_once_and_ends_as_cancelled(
    dsn: str, eyes: Eyes, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "LOOK_SECONDS", 600.0)  # it is told
    with psycopg.connect(dsn) as conn:
        job = handler.enqueue(conn).id
    async with work(dsn, wait, spin):
        await cancelled(dsn, eyes, job)
    assert len(stopped) == 1
    found = pgqueue.get(eyes.conn, job)
    assert (found.reason, [attempt.outcome for attempt in found.attempts]) == ("enough", ["cancelled"])


async def test_without_notify_it_is_stopped_at_the_next_look(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "LOOK_SECONDS", 0.1)
    with psycopg.connect(dsn) as conn:
        job = wait.enqueue(conn).id
    async with work(dsn, wait, listen_dsn="off"):
        await cancelled(dsn, eyes, job)
        await until(lambda: eyes.one(REQUESTS) == 0)
    assert stopped == ["async"]


class Heard:
    """The service by itself: a worker's id, and what it was asked to stop."""

    def __init__(self, dsn: str, worker_id: int = 1) -> None:
        self.session = Session(Link(dsn, "pgqueue"), "t")
        self.stopped: list[tuple[int, Outcome]] = []
        self.here = True
        state = worker_state(self.session.link, worker_id)
        state.held = {1: None}  # type: ignore[dict-item]
        self.service = Cancellation(self.session, self.session, state, interrupt=self._stop)

    def _stop(self, job: int, outcome: Outcome) -> bool:
        if self.here:
            self.stopped.append((job, outcome))
        return self.here


@pytest.fixture
async def heard(dsn: str) -> Any:
    made = Heard(dsn)
    yield made
    await made.session.close()


def running(eyes: Eyes, worker: int = 1, claim: int = 1) -> int:
    found: int = eyes.one(
        "INSERT INTO pgqueue.job (state, task, worker_id, claim, started_at) "
        "VALUES ('running', 't', %s, %s, pgqueue.now()) RETURNING id",
        worker,
        claim,
    )
    return found


async def test_only_our_own_jobs_are_stopped_and_each_once(heard: Heard, eyes: Eyes) -> None:
    ours, theirs, untouched = running(eyes), running(eyes, worker=2), running(eyes)
    pgqueue.cancel(eyes.conn, ours, theirs, reason="a")
    pgqueue.cancel(eyes.conn, ours, reason="b")
    for _ in range(3):
        await heard.service._read()
    assert [job for job, _ in heard.stopped] == [ours]
    assert heard.stopped[0][1] in (Cancelled("a"), Cancelled("b"))
    assert eyes.one(REQUESTS) == 3  # it has not ended: whoever gets it next must find the request
    assert eyes.state(untouched) == "running"


async def test_a_request_whose_reading_fails_is_read_at_the_next_round(
    heard: Heard, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive is to forget the word before the reading: a worker that holds no job just now looks no second time."""
    job = running(eyes)
    pgqueue.cancel(eyes.conn, job)
    heard.service._state.held.clear()
    heard.service.wake()

    async def away() -> None:
        raise psycopg.OperationalError("away")

    with monkeypatch.context() as lost:
        lost.setattr(heard.service, "_read", away)
        with pytest.raises(psycopg.OperationalError):
            await heard.service.round()
    assert not heard.stopped
    await heard.service.round()
    assert [stopped for stopped, _ in heard.stopped] == [job]


async def test_a_job_not_at_hand_yet_is_looked_for_again_soon(heard: Heard, eyes: Eyes) -> None:
    """Its claim has been committed, and the answer is still on its way to us."""
    job = running(eyes)
    pgqueue.cancel(eyes.conn, job)
    heard.here = False
    looking = looping(heard.service.round, heard.session, others=None, woken=heard.service.woken)
    heard.service.wake()
    await until(lambda: heard.service._misses > 2)
    heard.here = True
    await until(lambda: heard.stopped)
    looking.cancel()
    assert [job for job, _ in heard.stopped] == [job]


@pytest.mark.promise("F30")
@pytest.mark.parametrize("misses", [1_022, 1_023, 1_024, 10_000, 10**9])
async def test_a_job_is_looked_for_however_often_it_was_missed(heard: Heard, eyes: Eyes, misses: int) -> None:
    """A trigger of the application may refuse the end of a job for hours: the request stays, and finds no job."""
    job = running(eyes)
    pgqueue.cancel(eyes.conn, job)
    heard.here = False
    await heard.service._read()
    assert heard.service._pause == pytest.approx(2 * cancellation.SOON_FIRST)
    heard.service._misses = misses
    await heard.service._read()
    assert (heard.service._pause, heard.service._misses) == (cancellation.LOOK_SECONDS, misses + 1)
    heard.here = True
    await heard.service._read()
    assert [found for found, _ in heard.stopped] == [job]


async def test_a_job_claimed_anew_is_stopped_anew(heard: Heard, eyes: Eyes) -> None:
    """Its worker was taken for dead, or gave it back: the request outlives the first run."""
    job = running(eyes)
    pgqueue.cancel(eyes.conn, job)
    await heard.service._read()
    eyes.do("CREATE TABLE gone AS SELECT id, enqueued_at FROM pgqueue.job_running")
    eyes.do("DELETE FROM pgqueue.job_running")
    eyes.do(
        "INSERT INTO pgqueue.job (state, id, enqueued_at, task, worker_id, claim, started_at) "
        "SELECT 'running', id, enqueued_at, 't', 1, 2, pgqueue.now() FROM gone"
    )
    await heard.service._read()
    assert [found for found, _ in heard.stopped] == [job, job]


@pytest.mark.promise("F25")
@pytest.mark.parametrize("state", ["available", "scheduled", "blocked"])
async def test_a_request_that_came_too_late_cancels_the_waiting_job(heard: Heard, eyes: Eyes, state: str) -> None:
    """Its attempt failed while the request was on its way: without this it would run again in hours, uncancelled."""
    job = running(eyes)
    pgqueue.cancel(eyes.conn, job, reason="enough")
    eyes.do("CREATE TABLE gone AS SELECT id, enqueued_at FROM pgqueue.job_running")
    eyes.do("DELETE FROM pgqueue.job_running")
    eyes.do(
        "INSERT INTO pgqueue.job (state, id, enqueued_at, task, run_at, key) SELECT %s, id, enqueued_at, 't', "
        "CASE %s WHEN 'scheduled' THEN pgqueue.now() + interval '6 hours' END, 'k' FROM gone",
        state,
        state,
    )
    await heard.service.settle()
    assert (eyes.state(job), pgqueue.get(eyes.conn, job).reason, eyes.one(REQUESTS)) == ("cancelled", "enough", 0)


async def test_requests_to_what_has_ended_are_deleted_and_no_others(heard: Heard, eyes: Eyes) -> None:
    ended, runs = running(eyes), running(eyes)
    for _ in range(2):
        pgqueue.cancel(eyes.conn, ended, runs)
    eyes.do("DELETE FROM pgqueue.job_running WHERE id = %s", ended)
    await heard.service.settle()
    assert eyes.all("SELECT DISTINCT job_id FROM pgqueue.job_signal") == [(runs,)]


async def test_a_waiting_job_that_somebody_holds_keeps_its_request(heard: Heard, eyes: Eyes, dsn: str) -> None:
    job = eyes.one("INSERT INTO pgqueue.job (task) VALUES ('t') RETURNING id")
    ask = "INSERT INTO pgqueue.job_signal (job_id, enqueued_at, kind, reason) SELECT id, enqueued_at, 'cancel', 'r' "
    eyes.do(ask + "FROM pgqueue.job WHERE id = %s", job)
    with psycopg.connect(dsn) as claiming:
        claiming.execute("SELECT 1 FROM pgqueue.job_available FOR UPDATE")
        await heard.service.settle()
        assert (eyes.state(job), eyes.one(REQUESTS)) == ("available", 1)
    await heard.service.settle()
    assert (eyes.state(job), eyes.one(REQUESTS)) == ("cancelled", 0)


async def test_a_round_is_bounded(heard: Heard, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job_signal (job_id, enqueued_at, kind, reason) "
        "SELECT g, now(), 'cancel', 'r' FROM generate_series(1, %s) g",
        SETTLED_MOST + 5,
    )
    await heard.service.settle()
    assert eyes.one(REQUESTS) == 5
    await heard.service.settle()
    assert eyes.one(REQUESTS) == 0


async def test_a_worker_that_stopped_a_job_clears_its_request_away(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "LOOK_SECONDS", 0.1)
    with psycopg.connect(dsn) as conn:
        job = wait.enqueue(conn).id
    async with work(dsn, wait):
        await cancelled(dsn, eyes, job)
        await until(lambda: eyes.one(REQUESTS) == 0)
    assert stopped == ["async"]
