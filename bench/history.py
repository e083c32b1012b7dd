"""What ten million finished jobs cost those that come after them (F20): nothing.

Two workers, each with a database of its own, drain in turn; one has the history of a day beside its jobs, the other has
none but of its own drains. History is made as the workers would have left it, by one INSERT: spread over the leaves of
the rings in the order of time, ids in that order too, many tasks and queues, and vacuumed since, as autovacuum does.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import psycopg

from bench.figures import Figure
from bench.flat import DRAINED, flat
from bench.run import Run
from bench.samples import alternate
from bench.track import Setup, track

FINISHED = 10_000_000
DEAD_SHARE = 100  # one in so many has failed or was cancelled

# The rings as they are in the middle of a leaf's time: the oldest has been thrown away, seven have a seventh each.
RING = """
UPDATE pgqueue.ring SET bin = 6, since = pgqueue.now() - retention / (leaves - 2) / 2 WHERE kind IN ('done', 'dead')
"""
PAST = """
INSERT INTO pgqueue.job (
    state, bin, reason, task, queue, lock_key, args, headers,
    enqueued_at, started_at, finished_at, attempt, worker_id, claim, version_tag)
SELECT state, n * 7 / {rows}, CASE WHEN state IN ('failed', 'cancelled') THEN state END, 'app.task_' || n % 20,
       CASE WHEN n % 3 = 0 THEN 'bench' ELSE 'queue_' || n % 7 END,
       CASE WHEN n % 4 = 0 THEN 'account:' || n % 100000 END,
       jsonb_build_object('order', n), CASE WHEN n % 10 = 0 THEN jsonb_build_object('trace', n) END,
       at, at + interval '20 ms', at + interval '50 ms', 1, n % 8, n / 100, 'v' || n * 3 / {rows}
FROM (SELECT n, pgqueue.now() - interval '1 day' * (1 - n / {rows}::float8) AS at,
             CASE WHEN n % {dead} = 0 THEN CASE WHEN n % ({dead} * 5) = 0 THEN 'cancelled' ELSE 'failed' END
                  WHEN n % 50 = 1 THEN 'skipped' ELSE 'completed' END AS state
      FROM generate_series(0, {rows} - 1) AS n) AS past
"""


def history(run: Run) -> list[Figure]:
    """F20: drains beside 10,000,000 finished jobs against the same beside none."""
    jobs, finished = run.jobs(DRAINED), run.jobs(FINISHED)
    with ExitStack() as stack:
        ours, other = (stack.enter_context(track(run.lab, Setup())) for _ in range(2))
        with psycopg.connect(ours.dsn, autocommit=True) as conn:
            finish(conn, finished)
        other.tidy()
        beside, alone = alternate(
            run.rounds, {"beside history": partial(ours.measure, jobs), "without": partial(other.measure, jobs)}
        )
    return flat("history", f"{finished:,} finished", beside, alone)


def finish(conn: psycopg.Connection[Any], jobs: int, dead: int = DEAD_SHARE) -> None:
    """Give the database a day's history of so many jobs, written to disk before this returns: not during a sample.

    One in `dead` of them has failed or was cancelled.
    """
    conn.execute(RING)
    conn.execute(PAST.format(rows=jobs, dead=dead).encode())
    conn.execute("VACUUM ANALYZE")
    conn.execute("CHECKPOINT")
