"""JobHandle: what it says of its job, and from where it sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

import psycopg
import pytest

import pgqueue


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
