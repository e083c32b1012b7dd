"""What everybody writes first. Each function spoils pgqueue in a forked child; the crash harness must notice.

Named in a plan of lives.py, called before that life begins. system/test_crashes.py says what each of them breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import sleep
from typing import Any

import psycopg

from crashes import points, tasks
from pgqueue.database import statements
from pgqueue.database.statements import Statement, integers
from pgqueue.jobs.job import Job
from pgqueue.worker.fetch.fetcher import Fetcher


def delete_then_insert() -> None:
    """Jobs are taken out in one transaction and put in by the next: in between they are in memory only."""
    real = Fetcher._claim

    async def claim(self: Fetcher, *args: Any, **how: Any) -> Any:
        [rows] = await self._session.run(Statement(TAKE_OUT, {}, list))
        if rows:
            await self._session.run(Statement(PUT_IN, {"rows": rows[0][0]}, list))
        return await real(self, *args, **how)

    Fetcher._claim = claim  # type: ignore[method-assign]


TAKE_OUT = """WITH out AS (
    DELETE FROM pgqueue.job_available WHERE ctid IN (
        SELECT ctid FROM pgqueue.job_available WHERE rank >= 0 LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING *
) SELECT json_agg(out)::text FROM out HAVING count(*) > 0"""
PUT_IN = """INSERT INTO pgqueue.job_available
SELECT * FROM json_populate_recordset(null::pgqueue.job_available, %(rows)s::text::json) RETURNING id"""


def completed_when_claimed() -> None:
    """Jobs are done with as soon as somebody has them, before they have run."""
    real = Fetcher._claim

    async def claim(self: Fetcher, *args: Any, **how: Any) -> Any:
        claimed = await real(self, *args, **how)
        if jobs := claimed.jobs:
            ids, claims = (integers(getattr(job, name) for job in jobs) for name in ("id", "claim"))
            params = {"ids": ids, "claims": claims, "worker_id": self._state.id}
            params |= {"version_tag": "naive", "notify": False}
            await self._session.run(self._session.link.statement("complete_plain", **params))
        return claimed

    Fetcher._claim = claim  # type: ignore[method-assign]


def enqueue_by_itself() -> None:
    """The job goes in by a connection of its own, whatever becomes of the application's transaction."""
    real = tasks.put

    def put(conn: psycopg.Connection[Any], kind: str, token: int, queue: str) -> int:
        with psycopg.connect(conn.info.dsn, autocommit=True, application_name="app") as own:
            return real(own, kind, token, queue)

    tasks.put = put


def complete_afterwards() -> None:
    """The handler commits its work, and the completion follows in a transaction of its own."""

    def transfer(job: Job, token: int) -> None:
        tasks.home.began()
        with tasks.home.connection() as conn, conn.transaction():
            tasks.move(conn, job, token)

    _plain(transfer)


def commit_each() -> None:
    """Every write is committed by itself."""

    def transfer(job: Job, token: int) -> None:
        tasks.home.began()
        with tasks.home.connection() as conn:
            tasks.move(conn, job, token)

    _plain(transfer)


def commit_whatever() -> None:
    """A handler's transaction commits although its job has been given to others; handlers take a while here."""
    move = tasks.move

    def slowly(conn: psycopg.Connection[Any], job: Job, token: int) -> None:
        move(conn, job, token)
        sleep(0.2)

    tasks.move = slowly
    sql, refuses = statements._file("complete"), "pgqueue.refuse_lost(%(id)s::bigint)::text"
    assert refuses in sql["complete_within"]
    sql["complete_within"] = sql["complete_within"].replace(refuses, "'0'")
    statements.text.cache_clear()
    points.NAMES[statements.text("complete_within", "pgqueue")] = "complete_within"


def _plain(transfer: Callable[[Job, int], None]) -> None:
    tasks.TASKS["transfer"] = replace(tasks.transfer, fn=transfer, transactional=False)
