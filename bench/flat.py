"""Flatness: what must not make claiming dearer.

`held` and `deep` drain through a real worker and compare both the rate and the buffers touched per claimed job. The
buffers are those the worker's own fetching session has found or read (`pg_stat_get_backend_io`, PostgreSQL 18): its
real claims with its real cursors, the scans from zero included; vacuum and the observer are not in it. On 16 only the
rate is reported. `shapes` runs the worker's fetcher alone (claims.py) beside tables of other jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psycopg

from bench.figures import Figure, Goal
from bench.run import Run
from bench.samples import Sample, Side, alternate, ratio
from bench.server import Lab, register
from bench.track import FILL, HOLD, PAUSE, Setup, start_client, track

HELD_JOBS = 500_000
DRAINED = 100_000
DEEP, SHALLOW = 1_000_000, 50_000
FEW, MANY = 1_000, 1_000_000
SHAPED_CLAIMS = 200

FUTURE = """
INSERT INTO pgqueue.job (state, task, queue, run_at)
SELECT 'scheduled', 'bench.noop', 'bench', pgqueue.now() + make_interval(secs => 86400 + n)
FROM generate_series(1, %s) n
"""


BLOCKED = """
INSERT INTO pgqueue.job (state, task, queue, lock_key, key)
SELECT 'blocked', 'bench.noop', 'bench', 'account:0', 'lock:account:0' FROM generate_series(1, %s)
"""


def held(run: Run) -> list[Figure]:
    """A drain after 500,000 jobs have passed, with and without a snapshot held open since before the first of them.

    Both sides have the same past in the same worker process; on one of them a REPEATABLE READ transaction of another
    session keeps every dead row from being vacuumed, pruned or hinted. Measured is the drain after that, the snapshot
    still held.
    """
    past, jobs = run.jobs(HELD_JOBS), run.jobs(DRAINED)
    ours, other = alternate(
        run.rounds,
        {
            "held": partial(_after, run.lab, past, jobs, hold=True),
            "free": partial(_after, run.lab, past, jobs, hold=False),
        },
    )
    return _flat("held", f"snapshot over {past:,}", ours, other)


def deep(run: Run) -> list[Figure]:
    """The first 50,000 completions out of 1,000,000 waiting jobs against a drain of 50,000 waiting ones."""
    jobs, waiting = run.jobs(SHALLOW), run.jobs(DEEP)
    ours, other = alternate(
        run.rounds,
        {"deep": partial(_backlog, run.lab, jobs, waiting), "shallow": partial(_backlog, run.lab, jobs, jobs)},
    )
    return _flat("deep", f"{waiting:,} waiting", ours, other)


def shapes(run: Run) -> list[Figure]:
    """F07: the time of a claim of 100 beside 1,000 and beside 1,000,000 other rows, in five shapes; at most twice.

    Ready backlog of the same lane, jobs of the future, the backlog of a queue this worker does not serve, that of a
    queue it serves but which is paused, and jobs that are blocked on one key. The figure is the ratio of median claim
    times, few rows against many.
    """
    figures = []
    for shape in ("ready", "future", "elsewhere", "paused", "blocked"):
        many, few = alternate(
            min(run.rounds, 3),
            {
                f"{shape} {rows:,}": partial(_shaped, run.lab, shape, rows, run.jobs(SHAPED_CLAIMS * 100))
                for rows in (run.jobs(MANY), run.jobs(FEW))
            },
        )
        slower = ratio(many, few, lambda sample: sample.more["claim_ms"])
        figures.append(Figure("shapes", f"{shape}, claim many/few", slower, "x", Goal(2.0, at_most=True), many, few))
    return figures


def _flat(scenario: str, name: str, ours: Side, other: Side) -> list[Figure]:
    figures = [Figure(scenario, name, ratio(ours, other), "x", Goal(0.9), ours, other)]
    if all("buffers" in sample.more for sample in (*ours.samples, *other.samples)):
        touched = ratio(ours, other, lambda sample: sample.more["buffers"])
        figures.append(Figure(scenario, "buffers per job", touched, "x", Goal(1.1, at_most=True)))
    return figures


def _after(lab: Lab, past: int, jobs: int, *, hold: bool) -> Sample:
    with track(lab, Setup()) as ready, snapshot(ready.dsn, hold=hold):
        ready.pass_through(past)
        return ready.measure(jobs)


def _backlog(lab: Lab, jobs: int, waiting: int) -> Sample:
    with track(lab, Setup()) as ready:
        return ready.measure(jobs, waiting)


def _shaped(lab: Lab, shape: str, rows: int, jobs: int) -> Sample:
    with lab.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        if shape == "future":
            conn.execute(FUTURE, [rows])
        elif shape == "blocked":
            conn.execute(HOLD, ["bench", register(dsn, ["elsewhere"]), 1])
            conn.execute(BLOCKED, [rows])
        else:
            queue = {"ready": "bench", "elsewhere": "elsewhere", "paused": "paused"}[shape]
            conn.execute(FILL, ["bench.noop", queue, rows])
        conn.execute(FILL, ["bench.noop", "bench", jobs])
        conn.execute(PAUSE, ["paused"])
        with start_client(dsn) as client:
            server = lab.cpu()
            found = client.ask(do="claim", k=100, jobs=jobs, queues=["bench", "paused"])
            server = lab.cpu() - server
    return Sample(
        jobs, found["seconds"], found["cpu"], server, {"claim_ms": found["p50"], "claim_p99_ms": found["p99"]}
    )


@contextmanager
def snapshot(dsn: str, *, hold: bool = True) -> Iterator[None]:
    """Somebody's REPEATABLE READ transaction, idle with its snapshot, for as long as the block lasts."""
    if not hold:
        yield
        return
    with psycopg.connect(dsn, application_name="bench holder") as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("SELECT 1")
        yield
