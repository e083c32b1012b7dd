"""JobHandle: what it says of its job, and from where it sees it."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from workers import Eyes, until, work, workers

import pgqueue
from pgqueue.tasks import task


@pytest.fixture
def configured(dsn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PGQUEUE_DSN", dsn)
    return dsn


@pytest.mark.usefixtures("configured")
def test_the_state_is_what_other_sessions_see(conn: psycopg.Connection[Any]) -> None:
    now = pgqueue.enqueue(conn, "shop.mail")
    later = pgqueue.enqueue(conn, pgqueue.remote("shop.mail").using(delay=60))
    with pytest.raises(pgqueue.JobNotFound, match=f"job {now.id} is not there") as missing:
        _ = now.state
    assert missing.value.job_id == now.id
    conn.commit()
    assert (now.state, later.state) == ("available", "scheduled")


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize("state", ["running", "completed", "skipped", "failed", "cancelled", "blocked"])
def test_a_job_is_found_in_every_state(conn: psycopg.Connection[Any], state: str) -> None:
    row = conn.execute(
        """INSERT INTO pgqueue.job (state, task, worker_id, claim, started_at, finished_at, reason, key)
           SELECT %(s)s, 'shop.mail',
                  CASE WHEN %(s)s = 'running' THEN 1 END, CASE WHEN %(s)s = 'running' THEN 1 END,
                  CASE WHEN %(s)s = 'running' THEN pgqueue.now() END,
                  CASE WHEN %(s)s NOT IN ('running', 'blocked') THEN pgqueue.now() END,
                  CASE WHEN %(s)s IN ('failed', 'cancelled') THEN 'error' END,
                  CASE WHEN %(s)s = 'blocked' THEN 'key' END
           RETURNING id""",
        {"s": state},
    ).fetchone()
    assert row is not None
    conn.commit()
    assert pgqueue.JobHandle(row[0]).state == state


@pytest.mark.usefixtures("configured")
def test_a_job_that_never_was_is_not_found() -> None:
    with pytest.raises(LookupError, match="job 4711"):
        _ = pgqueue.JobHandle(4711).state


def test_the_state_needs_a_configured_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGQUEUE_DSN", raising=False)
    with pytest.raises(pgqueue.NotConfigured, match="PGQUEUE_DSN"):
        _ = pgqueue.JobHandle(1).state


def test_a_database_without_the_schema_says_so(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", empty_dsn)
    with pytest.raises(pgqueue.SchemaMissing, match="pgqueue migrate"):
        _ = pgqueue.JobHandle(1).state


def test_handles_are_values() -> None:
    assert pgqueue.JobHandle(1) == pgqueue.JobHandle(1, created=True) != pgqueue.JobHandle(2)
    assert len({pgqueue.JobHandle(1), pgqueue.JobHandle(1)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        pgqueue.JobHandle(1).id = 2  # type: ignore[misc]


# Results -------------------------------------------------------------------------------------------------------------


@task(name="handle.value")
async def value(it: Any = None) -> Any:
    return it


@task(name="handle.fails", retry=pgqueue.RetryPolicy(attempts=2, first=0.01))
async def fails(job: pgqueue.Job) -> None:
    raise ValueError(f"attempt {job.attempt} went wrong")


@task(name="handle.waits")
async def waits() -> None:
    await asyncio.Event().wait()


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize("it", [None, 7, "é", [1, {"a": None}], 2**70, True])
async def test_a_result_comes_back_as_json(dsn: str, it: Any) -> None:
    with psycopg.connect(dsn) as conn:
        job = value.enqueue(conn, it)
    async with work(dsn, value):
        assert await job.aresult(10) == it
        assert await asyncio.to_thread(job.result, timedelta(seconds=10)) == it


@pytest.mark.usefixtures("configured")
def test_it_is_waited_for_while_another_process_runs_the_job(
    dsn: str, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    source = "@pgqueue.task(name='handle.other')\ndef other():\n    time.sleep(0.3)\n    return {'from': 'there'}\n"
    with workers(tmp_path, dsn, source) as processes:
        processes.ready()
        job = pgqueue.enqueue(conn, "handle.other")
        conn.commit()
        assert job.result(20) == {"from": "there"}


@pytest.mark.usefixtures("configured")
async def test_a_failed_job_says_what_its_last_attempt_said(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        job = fails.enqueue(conn)
    async with work(dsn, fails):
        with pytest.raises(pgqueue.JobFailed, match=r"failed \(error\): ValueError: attempt 2 went wrong") as failed:
            await job.aresult(20)
    assert failed.value.job_id == job.id
    assert "in fails" in failed.value.__notes__[0]


@pytest.mark.usefixtures("configured")
async def test_a_cancelled_job_says_why_also_while_it_is_waited_for(dsn: str, eyes: Eyes) -> None:
    with psycopg.connect(dsn) as conn:
        job = waits.enqueue(conn)
    async with work(dsn, waits):
        waiting = asyncio.create_task(job.aresult())
        await until(eyes.is_in(job.id, "running"))
        pgqueue.cancel(eyes.conn, job.id, reason="no more")
        with pytest.raises(pgqueue.JobCancelled, match=f"job {job.id} was cancelled: no more"):
            await waiting


@pytest.mark.usefixtures("configured")
async def test_patience_ends_and_the_job_goes_on(conn: psycopg.Connection[Any]) -> None:
    job = pgqueue.enqueue(conn, "nobody.runs")
    conn.commit()
    for patience, most in ((0, 1.0), (0.2, 2.0)):
        began = monotonic()
        with pytest.raises(pgqueue.ResultTimeout) as over:
            job.result(patience)
        assert (over.value.job_id, isinstance(over.value, TimeoutError)) == (job.id, True)
        with pytest.raises(pgqueue.ResultTimeout):
            await job.aresult(patience)
        assert 2 * patience <= monotonic() - began < 2 * patience + most
    assert job.state == "available"


@pytest.mark.usefixtures("configured")
async def test_while_its_transaction_is_open_there_is_nothing_to_wait_for(conn: psycopg.Connection[Any]) -> None:
    job = pgqueue.enqueue(conn, "shop.mail")
    with pytest.raises(pgqueue.JobNotFound, match="its transaction is open"):
        job.result(60)
    with pytest.raises(pgqueue.JobNotFound, match="its transaction is open"):
        await job.aresult()
    with pytest.raises(pgqueue.InvalidOption, match="timeout -1"):
        job.result(-1)
