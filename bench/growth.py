"""What a job costs the disk and its log, and a worker the memory: what decides when one machine is not enough.

Each job is enqueued alone, in a transaction of its own, without arguments; one worker process runs all of them.
The WAL is that of the whole server, from the first enqueue to the last completion, without that of a checkpoint before.
Bytes are those of the tables and their indexes, divided by the jobs: of all tables while the jobs wait, of the history
of completed jobs after the end.
"""

from __future__ import annotations

from contextlib import closing
from time import monotonic, sleep
from typing import Any

import psycopg

import pgqueue
from bench.figures import Figure
from bench.run import Run
from bench.track import Setup, start_worker

JOBS = 10_000
PATIENCE = 600.0
DAY = 86_400
WAL = "SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint"
BYTES = """
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c
WHERE c.relnamespace = 'pgqueue'::regnamespace AND c.relkind = 'r' AND c.relname LIKE %s
"""
DONE = "SELECT count(*) FROM pgqueue.job_done"


def growth(run: Run) -> list[Figure]:
    """WAL of a job, bytes of one that waits and of one that is kept, memory of a worker."""
    wal, waiting, kept, memory = _life(run, lock=False)
    locked, *_ = _life(run, lock=True)
    return [
        Figure("growth", "WAL of a job", wal, "bytes"),
        Figure("growth", "WAL of a job with a lock", locked, "bytes"),
        Figure("growth", "a job that waits", waiting, "bytes"),
        Figure("growth", "a job that is kept", kept, "bytes"),
        Figure("growth", "a worker's memory", memory, "MiB"),
        Figure("growth", "WAL of 1,000 jobs/s, a day", wal * 1_000 * DAY / 1e9, "GB"),
        Figure("growth", "history of 1,000 jobs/s, a day", kept * 1_000 * DAY / 1e9, "GB"),
    ]


def _life(run: Run, *, lock: bool) -> tuple[float, float, float, float]:
    """Bytes of WAL, of a waiting job, of a kept one; MiB of the worker that has run them."""
    jobs, noop = run.jobs(JOBS), pgqueue.remote("bench.noop").using(queue="bench")
    with run.lab.database() as dsn, closing(psycopg.connect(dsn, autocommit=True)) as conn:
        conn.execute("CHECKPOINT")
        before, empty, history = _one(conn, WAL), _one(conn, BYTES, "%"), _one(conn, BYTES, "job_done%")
        for n in range(jobs):
            (noop.using(lock=f"key:{n}") if lock else noop).enqueue(conn)
        waiting = _one(conn, BYTES, "%") - empty
        with start_worker(dsn, Setup()) as worker:
            until = monotonic() + PATIENCE
            while _one(conn, DONE) < jobs:
                if monotonic() > until:
                    raise TimeoutError(f"the jobs have not ended within {PATIENCE:g} s")
                sleep(0.05)
            wal, memory = _one(conn, WAL) - before, worker.rss()
        return wal / jobs, waiting / jobs, (_one(conn, BYTES, "job_done%") - history) / jobs, memory


def _one(conn: psycopg.Connection[Any], query: str, *arguments: str) -> int:
    [[value]] = conn.execute(query.encode(), arguments or None).fetchall()
    return int(value)
