"""The log of psycopg's pools: nothing of a connection that the worker has closed, one warning a minute, no other's."""

from __future__ import annotations

import logging
from typing import Any

import psycopg
import pytest
from accounts import accounts
from psycopg_pool import ConnectionPool
from transactional_tasks import BOTH, declared, enqueued, outcomes
from workers import Eyes, until, work

from pgqueue import Job
from pgqueue.database import pool_log
from pgqueue.database.pool_log import PoolLog

__all__ = ["accounts"]

NAME = "pgqueue job"


@BOTH
async def test_a_handler_whose_statement_fails_is_no_warning_of_the_pool(
    dsn: str, accounts: Eyes, caplog: pytest.LogCaptureFixture, on_loop: bool
) -> None:
    def fails(job: Job) -> None:
        job.connection.execute("SELECT 1 / 0")

    async def afails(job: Job) -> None:
        await (await job.aconnection()).execute("SELECT 1 / 0")

    failing = declared(afails if on_loop else fails)
    enqueued(dsn, failing)
    async with work(dsn, failing):
        await until(lambda: len(outcomes(accounts)) >= 2)
    assert [record for record in caplog.records if record.name == "psycopg.pool"] == []


def test_a_pool_of_the_application_warns_as_ever(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    pool_log.quieten("pgqueue web")
    with ConnectionPool(dsn, min_size=1, max_size=1, open=True) as pool, pool.connection() as conn:
        conn.close()
    assert "discarding closed connection" in caplog.text


def test_each_warning_of_our_pool_comes_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pool_log, "monotonic", lambda: now)
    log = PoolLog(NAME)

    def passes(level: int, message: str, *args: Any) -> bool:
        return log.filter(logging.LogRecord("psycopg.pool", level, "", 0, message, args, None))

    refused = psycopg.OperationalError("refused")
    for now, passed in ((0.0, True), (0.1, False), (59.9, False), (60.0, True), (61.0, False)):
        assert passes(logging.WARNING, "error connecting in %r: %s", NAME, refused) is passed, now
    assert passes(logging.WARNING, "reconnection attempt in pool %r failed after %s sec", NAME, 300.0)
    assert passes(logging.WARNING, "error connecting in %r: %s", "the application's", refused)
    assert passes(logging.INFO, "growing pool %r to %s", NAME, 2)
    assert passes(logging.WARNING, "no arguments")
