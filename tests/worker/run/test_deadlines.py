"""Deadlines: set at enqueue in every way, and a job claimed after its deadline is cancelled, never run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from workers import Eyes, until, work

import pgqueue
from pgqueue import InvalidOption
from pgqueue.client.tasks import task
from pgqueue.jobs.job import Job
from pgqueue.testing import Clock

ran: list[int] = []
PAST = datetime(2001, 2, 3, tzinfo=UTC)


@pytest.fixture(autouse=True)
def anew() -> None:
    ran.clear()


@task(name="deadlines.notes", deadline=timedelta(hours=1))
async def notes(job: Job) -> str | None:
    ran.append(job.id)
    return None if job.deadline is None else job.deadline.isoformat()


@task(name="deadlines.free")
def free(job: Job) -> None:
    ran.append(job.id)
    assert job.deadline is None


def test_a_deadline_counts_from_the_enqueue_or_is_a_time(conn: psycopg.Connection) -> None:
    at = datetime.now(UTC) + timedelta(days=3)
    options: list[dict[str, Any]] = [{}, {"deadline": 60}, {"deadline": timedelta(days=1)}, {"deadline": at}]
    options += [{"deadline": 60, "delay": 30}]
    expected = [3600, 60, 86_400, 3 * 86_400, 60, None]
    jobs = [notes.using(**each).new() for each in options] + [free.new()]
    one = [pgqueue.enqueue(conn, notes.using(**each)).id for each in options] + [pgqueue.enqueue(conn, free).id]
    many = [handle.id for handle in pgqueue.enqueue_many(conn, jobs)]
    for ids in (one, many):
        rows = conn.execute(
            "SELECT round(extract(epoch FROM deadline - enqueued_at))::int, state FROM pgqueue.job WHERE id = ANY (%s) "
            "ORDER BY id",
            [ids],
        ).fetchall()
        found = [seconds for seconds, _ in rows]
        assert [state for _, state in rows] == ["available"] * 4 + ["scheduled", "available"]
        assert found[5] is None
        assert all(abs(found[n] - (expected[n] or 0)) <= 20 for n in range(5))


def test_a_deadline_from_sql(conn: psycopg.Connection) -> None:
    row = conn.execute("SELECT pgqueue.enqueue('deadlines.notes', deadline => '2030-01-02 00:00Z')").fetchone()
    assert row is not None
    assert pgqueue.get(conn, row[0]).deadline == datetime(2030, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize("wrong", [-1, "soon", datetime(2030, 1, 1), True])
def test_a_deadline_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidOption):
        notes.using(deadline=wrong)


async def test_a_job_claimed_after_its_deadline_is_cancelled_and_not_run(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    late, in_time, without = (
        notes.using(deadline=PAST).enqueue(conn),
        notes.enqueue(conn),
        free.enqueue(conn),
    )
    conn.commit()
    async with work(dsn, notes, free):
        await until(lambda: len(eyes.all("SELECT FROM pgqueue.job WHERE finished_at IS NOT NULL")) == 3)
    rows = eyes.all("SELECT id, state, reason, deadline FROM pgqueue.job ORDER BY id")
    assert [row[:3] for row in rows] == [
        (late.id, "cancelled", "deadline"),
        (in_time.id, "completed", None),
        (without.id, "completed", None),
    ]
    assert rows[0][3] == PAST  # the row keeps what was asked
    assert sorted(ran) == [in_time.id, without.id]
    [(result, deadline)] = eyes.all("SELECT result, deadline FROM pgqueue.job WHERE result IS NOT NULL")
    assert datetime.fromisoformat(result) == deadline


async def test_the_clock_of_the_database_decides(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    """Not that of the worker's machine, which may be wrong."""
    job = notes.using(deadline=60).enqueue(conn)
    conn.commit()
    with Clock(eyes.conn, datetime.now(UTC) + timedelta(minutes=2)):
        async with work(dsn, notes):
            await until(lambda: eyes.all("SELECT FROM pgqueue.job WHERE state = 'cancelled'"))
    assert (ran, job.id) == ([], job.id)
