"""Workers go on with operations by filter: told by NOTIFY or not, after whichever process has died."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import psycopg
import pytest
from commands import working
from workers import Eyes, until, wait_until, work

import pgqueue
from pgqueue.admin.bulk import runner
from pgqueue.client.tasks import task
from pgqueue.worker.leader import bulks

FAILED = """
    INSERT INTO pgqueue.job (task, queue, state, finished_at, reason, bin, max_attempts, attempt)
    SELECT 'bulk.fails', 'bulk', 'failed', pgqueue.now(), 'error', 0, 1, 1 FROM generate_series(1, %s)
"""
TASKS = """
import pgqueue

@pgqueue.task(name="bulk.fails", queue="bulk", retry=1)
def fails() -> None:
    raise ValueError("each time")

@pgqueue.task(name="bulk.other", queue="other")
def other() -> None: ...
"""


JOBS, PACE = 5_000, "500/s"


@task(name="bulk.other")
def other() -> None: ...


def begin(dsn: str, action: str = "retry", **options: Any) -> int:
    with psycopg.connect(dsn) as conn:
        return pgqueue.bulk(conn, action, task="bulk.fails", **options).id


def seen(eyes: Eyes, id: int) -> pgqueue.Bulk:
    return pgqueue.get_bulk(eyes.conn, id)


@pytest.mark.promise("F87")
@pytest.mark.parametrize("notify", [True, False])
async def test_the_leader_hears_of_a_new_operation_or_finds_it(
    notify: bool, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not notify:
        monkeypatch.setattr(bulks, "LOOK_SECONDS", 0.1)
        monkeypatch.setenv("PGQUEUE_NOTIFY", "off")
    eyes.do(FAILED, 2_500)
    async with work(dsn, other) as worker:
        await until(worker.services.election.leads)
        id = begin(dsn)
        await until(lambda: seen(eyes, id).state == "done")
    assert seen(eyes, id).counts == {"retried": 2_500} and eyes.states() == {"available": 2_500}


@pytest.mark.promise("F87")
async def test_several_operations_have_their_turns_and_a_pace_holds_up_no_other(dsn: str, eyes: Eyes) -> None:
    eyes.do(FAILED, 50)
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 'bulk.waits' FROM generate_series(1, 1000)")
    async with work(dsn, other):
        slow = begin(dsn, pace="20/s")
        with psycopg.connect(dsn) as conn:
            quick = pgqueue.bulk(conn, "cancel", task="bulk.waits").id
        await until(lambda: seen(eyes, quick).state == "done")
        assert seen(eyes, slow).state == "running"
        started = monotonic()
        await until(lambda: seen(eyes, slow).state == "done")
        assert monotonic() - started < 10
    done = seen(eyes, slow)
    assert done.ended_at is not None and (done.ended_at - done.started_at).total_seconds() >= 1.9
    assert done.counts == {"retried": 50}


@pytest.mark.promise("F87")
async def test_a_worker_that_does_not_lead_goes_on_when_an_operation_is_overdue(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader may hang."""
    eyes.do(FAILED, 10)
    async with work(dsn, other) as worker:
        await until(worker.services.election.leads)
        duty = worker.services.bulks
        monkeypatch.setattr(duty, "_leads", lambda: False)
        id = begin(dsn)
        assert await duty.round() > 0 and seen(eyes, id).counts == {}
        eyes.do("UPDATE pgqueue.bulk SET next_at = pgqueue.now() - interval '61 seconds'")
        await duty.round()
        assert seen(eyes, id).counts == {"retried": 10}


@pytest.mark.promise("F87")
async def test_a_worker_leaves_an_operation_to_the_process_that_has_it_and_takes_it_when_that_is_gone(
    dsn: str, eyes: Eyes
) -> None:
    eyes.do(FAILED, 10)
    id = begin(dsn)
    made = runner.take(eyes.conn, "command", id)
    assert made is not None
    async with work(dsn, other) as worker:
        await until(worker.services.election.leads)
        assert await worker.services.bulks.round() > 0 and seen(eyes, id).counts == {}
        runner.release(eyes.conn, made)
        await worker.services.bulks.round()
        assert seen(eyes, id).counts == {"retried": 10}


@pytest.mark.promise("F86")
@pytest.mark.parametrize("turn", [1.0, 0.0])
async def test_what_the_server_refuses_is_left_out_and_named(
    turn: float, dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the tries take longer than a turn: the next turn would begin with all of them again."""
    monkeypatch.setattr(bulks, "TURN_SECONDS", turn)
    eyes.do(FAILED, 30)
    bad = eyes.one("SELECT min(id) + 7 FROM pgqueue.job")
    eyes.do(f"ALTER TABLE pgqueue.job_available ADD CONSTRAINT no CHECK (id <> {bad})")
    async with work(dsn, other):
        id = begin(dsn)
        await until(lambda: seen(eyes, id).state == "done")
    done = seen(eyes, id)
    assert done.counts == {"retried": 29, "refused": 1} and done.ids["refused"] == (bad,)
    assert f"operation {id}: job {bad} was left out" in caplog.text and "no" in caplog.text


# Processes that die --------------------------------------------------------------------------------------------------


@contextmanager
def failing(dsn: str) -> Iterator[None]:
    """Each job that was retried fails again at once: an operation that visits a job twice retries it twice."""
    end = Event()

    def fail() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not end.wait(0.01):
                conn.execute(
                    "WITH gone AS (DELETE FROM pgqueue.job_available WHERE queue = 'bulk' RETURNING *) "
                    "INSERT INTO pgqueue.job "
                    "(id, enqueued_at, state, task, queue, attempt, max_attempts, finished_at, reason, bin) "
                    "SELECT id, enqueued_at, 'failed', task, queue, attempt + 1, 1, now(), 'error', 0 FROM gone"
                )

    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(fail)
        try:
            yield
        finally:
            end.set()
        thread.result()


def goes_on(eyes: Eyes, id: int) -> None:
    """Wait for a step."""
    before = seen(eyes, id).changed
    wait_until(lambda: seen(eyes, id).changed > before)


@pytest.mark.second
@pytest.mark.promise("F87")
def test_workers_that_are_killed_leave_each_job_retried_once(dsn: str, eyes: Eyes, tmp_path: Path) -> None:
    """kill -9 in the middle of it, four times; the lease of the dead worker is over when the next one starts."""
    (tmp_path / "tasks.py").write_text(TASKS)
    eyes.do(FAILED, JOBS)
    id = begin(dsn, pace=PACE)
    with failing(dsn):
        for _ in range(4):
            with working("tasks", "-q", "other", dsn=dsn, cwd=tmp_path) as worker:
                goes_on(eyes, id)
                worker.process.kill()
                worker.ends()
            assert seen(eyes, id).state == "running"
            eyes.do("UPDATE pgqueue.bulk SET leased_until = pgqueue.now()")
        with working("tasks", "-q", "other", dsn=dsn, cwd=tmp_path):
            wait_until(lambda: seen(eyes, id).state == "done")
        wait_until(lambda: eyes.states() == {"failed": JOBS})
    each_once(eyes, id)


def each_once(eyes: Eyes, id: int) -> None:
    assert eyes.all("SELECT attempt, count(*) FROM pgqueue.job GROUP BY 1") == [(2, JOBS)]
    done = seen(eyes, id)
    assert done.counts == {"retried": JOBS} and done.changed == JOBS and len(done.ids["retried"]) == 1_000
    [entry] = pgqueue.audit(eyes.conn)
    assert entry.count == JOBS
