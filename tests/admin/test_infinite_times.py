"""Jobs that were written by hand with an infinite time: everything that people ask of the queue still answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from commands import pgqueue as command
from dashboards import reading
from psycopg import sql

import pgqueue
from pgqueue.admin import depth
from pgqueue.admin.limits import limits, rates
from pgqueue.admin.locks import locks
from pgqueue.database import steps

TIMES = ("infinity", "-infinity", "4713-01-01 BC", "294276-12-31")
"""The last two are beyond what Python knows."""
PAGES = ("/", "/jobs", "/queues", "/limits", "/limits/jobs?limit=l", "/limits/jobs?rate=r", "/workers", "/metrics")

JOBS = """
INSERT INTO pgqueue.job (task, state, enqueued_at, run_at, started_at, key, lock_key, limit_key, rate_key,
    holds, worker_id, claim)
SELECT 'odd', j.state, CASE j.odd WHEN 'enqueued_at' THEN o.at ELSE now() END,
       CASE j.odd WHEN 'run_at' THEN o.at END, CASE j.odd WHEN 'started_at' THEN o.at END,
       j.key, j.lock, j.limit, j.rate, j.state = 'running', j.worker, j.worker
FROM (SELECT %(at)s::timestamptz AS at) AS o CROSS JOIN (VALUES
    ('available', 'enqueued_at', NULL, NULL, NULL, NULL, NULL),
    ('scheduled', 'run_at', NULL, NULL, NULL, NULL, NULL),
    ('blocked', 'enqueued_at', 'lock:k', 'k', NULL, NULL, NULL),
    ('blocked', 'run_at', 'limit:l', NULL, 'l', NULL, NULL),
    ('blocked', 'enqueued_at', 'rate:r', NULL, NULL, 'r', NULL),
    ('running', 'started_at', NULL, 'k', 'l', NULL, 1)
) AS j (state, odd, key, lock, "limit", rate, worker)
WHERE isfinite(o.at) OR j.state <> 'scheduled' -- a constraint refuses it
"""


@pytest.fixture(params=TIMES)
def odd(conn: psycopg.Connection[Any], request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    """A job of each kind that waits, with this time, and one that runs."""
    conn.execute(JOBS, {"at": request.param})
    conn.execute("INSERT INTO pgqueue.job (task, enqueued_at) VALUES ('plain', now() - interval '5 minutes')")
    conn.execute(
        "INSERT INTO pgqueue.worker (id, host, pid, version_tag, queues, concurrency, lease, running) "
        "OVERRIDING SYSTEM VALUE "
        "SELECT 1, 'h', 7, 'v', '{default}', 1, '1 hour', array_agg(id) FROM pgqueue.job_running"
    )
    conn.commit()
    yield conn


@pytest.mark.promise("F140")
def test_ages_are_finite_and_not_negative(odd: psycopg.Connection[Any]) -> None:
    [queue] = pgqueue.queues(odd)
    held = [lock for lock in locks(odd) if lock.key == "k"]
    ages = [
        queue.oldest,
        *(lock.waited for lock in held),
        *(holder.age for lock in held for holder in lock.holders),
        *(limit.waited for limit in limits(odd)),
        *(rate.waited for rate in rates(odd)),
    ]
    assert len(ages) == 5
    assert all(age is not None and math.isfinite(age) and age >= 0 for age in ages), ages
    assert queue.oldest is not None and queue.oldest >= 300, "the other job is seen beside it"
    seconds = [finding.seconds for finding in pgqueue.doctor(odd).findings if finding.seconds is not None]
    assert all(map(math.isfinite, seconds)), seconds


@pytest.mark.promise("F140")
def test_what_the_leader_measures_is_finite(odd: psycopg.Connection[Any]) -> None:
    groups = [depth.Group(*each) for each in steps.drive(odd, depth.measure("pgqueue"), {})]
    assert {group.state for group in groups} >= {"available", "blocked", "running"}
    assert all(math.isfinite(group.since) for group in groups if group.since is not None), groups


@pytest.mark.promise("F140")
async def test_every_page_answers(dsn: str, odd: psycopg.Connection[Any]) -> None:
    ids = [id for (id,) in odd.execute("SELECT id FROM pgqueue.job")]
    async with reading(dsn) as browser:
        for path in (*PAGES, *(f"/jobs/{id}" for id in ids)):
            page = await browser.get(path, headers={"accept": "text/html"})
            answer = await browser.get(path, headers={"accept": "application/json"})
            assert (page.status_code, answer.status_code) == (200, 200), (path, page.text)
            if path == "/metrics":
                continue
            items = json.loads(answer.text, parse_constant=pytest.fail)["items"]
            if path.startswith("/limits/jobs"):
                [found] = items
                ages = [each["age"] for each in found["holders"]] + [each["waited"] for each in found["waiters"]]
                assert ages and all(age >= 0 for age in ages), ages


@pytest.mark.second
@pytest.mark.promise("F140")
def test_every_command_answers(dsn: str, odd: psycopg.Connection[Any]) -> None:
    [(blocked,)] = odd.execute("SELECT min(id) FROM pgqueue.job_blocked").fetchall()
    for name in ("status", "queues", "limits", "locks", "jobs", "doctor", f"why {blocked}"):
        arguments = name.split()
        for more in ((), ("--json",)):
            done = command(*arguments, *more, dsn=dsn)
            assert "Traceback" not in done.stderr and done.returncode in (0, 1), (arguments, done.stderr)
            if more:
                json.loads(done.stdout, parse_constant=pytest.fail)


@pytest.mark.promise("F140")
@pytest.mark.parametrize("column", ["started_at", "beat_at", "lease"])
def test_a_worker_has_no_time_that_is_none(conn: psycopg.Connection[Any], column: str) -> None:
    """Naive is to take the row: `why`, `workers` and `doctor` fail for all jobs then."""
    conn.execute(
        "INSERT INTO pgqueue.worker (host, pid, version_tag, queues, concurrency, lease) "
        "VALUES ('h', 7, 'v', '{}', 1, '1 hour')"
    )
    conn.commit()
    change = sql.SQL("UPDATE pgqueue.worker SET {} = {}")
    for odd in ("100000000 years", "-1 hour") if column == "lease" else TIMES:
        with pytest.raises(psycopg.errors.CheckViolation):
            conn.execute(change.format(sql.Identifier(column), sql.Literal(odd)))
        conn.rollback()
    if column == "lease" and conn.info.server_version >= 170000:
        with pytest.raises(psycopg.errors.CheckViolation):
            conn.execute("UPDATE pgqueue.worker SET lease = 'infinity'")
        conn.rollback()
    [only] = pgqueue.workers(conn)
    assert only.host == "h"
