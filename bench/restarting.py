"""What a rolling restart of four processes costs those that wait: the worst second, and how long jobs wait to start.

A supervisor with four processes, steady flow, SIGHUP; seconds are those of completions, by the server's clock. `worst
second` is the least of them from the signal until the old processes have gone, over the median of those before.
Booting takes CPU from who works: on a machine with few of them that is what is measured.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import monotonic, sleep
from typing import Any

import psutil
import psycopg

from bench.figures import Figure, Goal
from bench.processes import ROOT, compiled
from bench.run import Run
from bench.tasks import QUEUE

PROCESSES = 4
STEADY, SECONDS = 1_000.0, 10.0
DRAINED = 200_000
EVERY = 0.01
PATIENCE = 120.0

FILL = "INSERT INTO pgqueue.job (task, queue) SELECT 'bench.noop', %s FROM generate_series(1, %s)"
TOLD = "SELECT count(pg_notify('pgqueue.' || %s, ''))"
WORKS = "SELECT count(*) FROM pgqueue.worker WHERE state = 'running' AND dead_at IS NULL"
PER_SECOND = """
SELECT (SELECT count(*) FROM pgqueue.job_done
        WHERE finished_at >= to_timestamp(second) AND finished_at < to_timestamp(second + 1)),
       (SELECT count(*) FROM pgqueue.job_done
        WHERE enqueued_at >= to_timestamp(second) AND enqueued_at < to_timestamp(second + 1))
FROM (SELECT %(low)s::float8 + n AS second FROM generate_series(0, %(seconds)s::integer - 1) AS n) AS seconds
"""
WAITED = """
SELECT percentile_disc(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM started_at - enqueued_at))::float8
FROM pgqueue.job_done WHERE enqueued_at >= to_timestamp(%s::float8)
"""

TWICE = "SELECT (SELECT count(*) FROM pgqueue.attempt) + count(*) FROM pgqueue.job_done WHERE attempt <> 1"
LAST = "SELECT extract(epoch FROM max(finished_at)) FROM pgqueue.job_done"


@dataclass(frozen=True, slots=True)
class Cost:
    """The worst second over the median before; the same over what was enqueued in it, if less; p99 of the wait."""

    worst: float
    fair: float
    waited: float


class Flow:
    """Enqueues at a rate, counted from the first time it is asked to; batches of 10 ms, and a NOTIFY for each."""

    def __init__(self, conn: psycopg.Connection[Any], rate: float) -> None:
        self._conn, self._rate = conn, rate
        self._began: float | None = None
        self.enqueued = 0

    def go(self, until: Callable[[], bool]) -> None:
        """Enqueue until `until()`, which is asked for each batch; RuntimeError if that never comes.

        What was due since the last time, too: else the moments between would be missing from what is measured.
        """
        began = monotonic()
        self._began = began if self._began is None else self._began
        while not until():
            due = int((monotonic() - self._began) * self._rate) - self.enqueued
            if due > 0:
                with self._conn.transaction():
                    self._conn.execute(FILL.encode(), [QUEUE, due])
                    self._conn.execute(TOLD.encode(), [QUEUE])
                self.enqueued += due
            if monotonic() - began > PATIENCE:
                raise RuntimeError(f"not within {PATIENCE:g} s")
            sleep(EVERY)


def restart(run: Run) -> list[Figure]:
    """A rolling restart of 4 processes: at 1,000 jobs/s, and at half of what they can drain (S02)."""
    with run.lab.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn, _supervisor(dsn, conn) as process:
        _flow(run, conn, process, STEADY)
        steady = _flow(run, conn, process, STEADY)
        rate = _drain(run, conn)
        half = _flow(run, conn, process, rate / 2)
        twice = _one(conn, TWICE)
    return [
        Figure("restart", "worst second at 1,000/s", steady.worst, "", Goal(0.95)),
        Figure("restart", "of what was enqueued in it", steady.fair, ""),
        Figure("restart", "p99 start at 1,000/s", steady.waited * 1e3, "ms", Goal(500, at_most=True)),
        Figure("restart", f"worst second at {rate / 2:,.0f}/s", half.worst, "", Goal(0.6)),
        Figure("restart", "of what was enqueued in it", half.fair, ""),
        Figure("restart", "jobs that ran twice", twice, "", Goal(0, at_most=True)),
    ]


def _flow(run: Run, conn: psycopg.Connection[Any], process: psutil.Process, rate: float) -> Cost:
    """A restart under this flow."""
    flow, seconds = Flow(conn, rate), run.seconds(SECONDS)
    ends = monotonic() + seconds
    flow.go(lambda: monotonic() > ends)
    old = [child.pid for child in process.children()]
    signalled = _now(conn)
    process.send_signal(signal.SIGHUP)
    # The old ones alone are looked at: to list children is to read all processes of the machine (8 ms of CPU where
    # there are 320), and at this pace that would be taken from who works.
    flow.go(lambda: not any(map(psutil.pid_exists, old)))
    whole = int(_now(conn) - signalled) + 1
    ends = monotonic() + whole
    flow.go(lambda: monotonic() > ends)
    _idle(conn)
    before = [done for done, _ in _seconds(conn, signalled - int(seconds), int(seconds))]
    usual = max(1.0, median(before))
    during = _seconds(conn, signalled, whole)
    # Beside others the one that enqueues is late, too.
    fair = min(done / max(1.0, min(usual, enqueued)) for done, enqueued in during)
    waited = float(_one(conn, WAITED, signalled))
    return Cost(min(done for done, _ in during) / usual, fair, waited)


def _drain(run: Run, conn: psycopg.Connection[Any]) -> float:
    """What the processes drain in a second."""
    jobs = run.jobs(DRAINED)
    conn.execute("INSERT INTO pgqueue.queue (name, paused_at) VALUES (%s, pgqueue.now())", [QUEUE])
    conn.execute(FILL.encode(), [QUEUE, jobs])
    began = _now(conn)
    conn.execute("DELETE FROM pgqueue.queue WHERE name = %s", [QUEUE])
    conn.execute(TOLD.encode(), [QUEUE])
    _idle(conn)
    return jobs / max(0.001, float(_one(conn, LAST)) - began)


def _seconds(conn: psycopg.Connection[Any], low: float, seconds: int) -> list[tuple[int, int]]:
    """How many were completed and enqueued in each second."""
    return conn.execute(PER_SECOND.encode(), {"low": low, "seconds": seconds}).fetchall()


def _idle(conn: psycopg.Connection[Any]) -> None:
    waits = "SELECT (SELECT count(*) FROM pgqueue.job_available) + (SELECT count(*) FROM pgqueue.job_running)"
    while _one(conn, waits):
        sleep(0.02)


def _now(conn: psycopg.Connection[Any]) -> float:
    return float(_one(conn, "SELECT extract(epoch FROM pgqueue.now())"))


def _one(conn: psycopg.Connection[Any], sql: str, *params: object) -> Any:
    row = conn.execute(sql.encode(), params or None).fetchone()
    assert row is not None
    return row[0]


@contextmanager
def _supervisor(dsn: str, conn: psycopg.Connection[Any]) -> Iterator[psutil.Process]:
    """A supervisor with its processes at work; ended in order."""
    command = [sys.executable, "-m", "pgqueue", "work", "bench.tasks", "--processes", str(PROCESSES)]
    command += ["--dsn", dsn, "--log-level", "warning", "-q", QUEUE]
    with compiled() as env:
        child = subprocess.Popen(command, cwd=ROOT, env=env)
        try:
            yield _at_work(child, conn)
        finally:
            child.terminate()
            child.wait(PATIENCE)


def _at_work(child: subprocess.Popen[bytes], conn: psycopg.Connection[Any]) -> psutil.Process:
    """It, as soon as its processes work."""
    while _one(conn, WORKS) < PROCESSES:
        if child.poll() is not None:
            raise RuntimeError(f"the supervisor ended with exit code {child.returncode}")
        sleep(0.05)
    return psutil.Process(child.pid)
