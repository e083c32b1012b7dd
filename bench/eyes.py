"""What an operator looks at in an incident: a long backlog, a snapshot that is held, and many dead rows before it.

Measured: `status`, `queues`, `depth` of one queue, `doctor` and the gauges of a scrape on one open connection with the
settings of a command, and `why` of jobs of several kinds, there and on a connection of an application, which has no
settings of ours. The leader's measurement is made here as the leading worker makes it, and its duration is a figure,
too: the first one, which starts every lane at its front, and a later one. At full size 1,000,000 jobs wait, and as many
dead rows lie before them. `--scale 10` is the largest size that the goals speak of: 10,000,000 jobs wait, and the dead
rows are still 1,000,000. Filling takes some minutes then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median
from time import monotonic
from typing import Any

import psycopg

from bench.figures import Figure, Goal
from bench.holders import holding
from bench.run import Run
from bench.track import FILL
from pgqueue.admin import depth, doctor, queries
from pgqueue.admin.why.why import why
from pgqueue.database import steps
from pgqueue.database.sessions import Link, Session
from pgqueue.telemetry.gauges import gauges
from pgqueue.worker.leader.depth import Depth

WAITING = 1_000_000
DEAD_MOST = 1_000_000
BLOCKED_MOST = 10_000
WHY_MILLISECONDS = 50.0
TIMES = 7  # at least

Conn = psycopg.Connection[Any]
LOOKS: dict[str, tuple[Callable[[Conn], object], float]] = {
    "queues": (depth.queues, 2.0),
    "depth of one queue": (lambda conn: depth.depth(conn, "mail"), 2.0),
    "status": (queries.status, 200.0),
    "doctor": (doctor.doctor, 1_000.0),
    "gauges of a scrape": (lambda conn: steps.drive(conn, gauges("pgqueue"), {}), 20.0),
}
"""What is looked at, and how many milliseconds it may take."""


HOLD = """
    INSERT INTO pgqueue.job_running (state, task, lock_key, holds, worker_id, claim, started_at)
    VALUES ('running', 'bench.noop', 'one', true, 1, 1, pgqueue.now()) RETURNING id
"""
BLOCK = """
    INSERT INTO pgqueue.job_blocked (state, task, lock_key, key)
    SELECT 'blocked', 'bench.noop', 'one', 'lock:one' FROM generate_series(1, %s)
"""
SCHEDULE = """
    INSERT INTO pgqueue.job_scheduled (state, task, run_at)
    SELECT 'scheduled', 'bench.noop', pgqueue.now() + make_interval(secs => n) FROM generate_series(1, %s) AS n
"""


def eyes(run: Run) -> list[Figure]:
    """What operators and scrapes look at, beside 1,000,000 jobs, as many dead rows and a held snapshot."""
    times, jobs = max(TIMES, run.rounds), run.jobs(WAITING)
    dead = min(jobs, DEAD_MOST)
    with run.lab.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(FILL, ["bench.noop", "default", dead])
            conn.execute(FILL, ["bench.noop", "mail", jobs // 10])
            conn.execute(FILL, ["bench.noop", "default", jobs - jobs // 10])
            asked = _some_jobs(conn, dead, jobs)
            conn.execute("VACUUM ANALYZE")
        plain = psycopg.connect(dsn, autocommit=True)
        with holding(dsn, run.holder), plain, psycopg.connect(dsn, autocommit=True, options="-c jit=off") as conn:
            conn.execute("DELETE FROM pgqueue.job_available WHERE id <= %s", [dead])
            first, later = asyncio.run(_measure(dsn))
            looks = {name: _times(look, conn, times) for name, (look, _) in LOOKS.items()}
            reasons = {
                f"why{where}, {name}": _times(lambda at, id=id: why(at, id), session, times)  # type: ignore[misc]
                for where, session in (("", conn), (" in an app", plain))
                for name, id in asked.items()
            }
    figures = [Figure("eyes", "measurement, first", first, "ms"), Figure("eyes", "measurement, later", later, "ms")]
    for name, taken in (looks | reasons).items():
        goal = LOOKS[name][1] if name in LOOKS else WHY_MILLISECONDS
        figures.append(Figure("eyes", f"{name}, p50", median(taken), "ms", Goal(goal, at_most=True)))
        figures.append(Figure("eyes", f"{name}, max", max(taken), "ms"))
    return figures


def _some_jobs(conn: Conn, dead: int, jobs: int) -> dict[str, int]:
    """A job of each kind that `why` is asked about."""
    [[holder]] = conn.execute(HOLD).fetchall()
    conn.execute(BLOCK, [min(jobs, BLOCKED_MOST)])
    conn.execute(SCHEDULE, [jobs // 10])
    [[blocked, scheduled]] = conn.execute(
        "SELECT (SELECT max(id) FROM pgqueue.job_blocked), (SELECT max(id) FROM pgqueue.job_scheduled)"
    ).fetchall()
    return {
        "the first job": dead + jobs // 10 + 1,
        "the last job": dead + jobs,
        "other queue": dead + jobs // 20,
        "blocked": blocked,
        "scheduled": scheduled,
        "running": holder,
        "no job": 1,
    }


async def _measure(dsn: str) -> tuple[float, float]:
    """Milliseconds of the first measurement of a leader, and of its third."""
    link = Link(dsn, "pgqueue")
    session = Session(link, "housekeeping")
    duty, took = Depth(session, leads=lambda: True), []
    for _ in range(3):
        await duty.measure()
        took.append(duty.took * 1e3)
    await session.close()
    return took[0], took[2]


def _times(look: Callable[[Conn], object], conn: Conn, times: int) -> list[float]:
    """Milliseconds of each of so many looks, the first ones included, which learn the tables."""
    found = []
    for _ in range(times):
        began = monotonic()
        look(conn)
        found.append((monotonic() - began) * 1e3)
    return found
