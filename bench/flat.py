"""Flatness: what must not make claiming dearer.

`held` and `deep` drain through a real worker and compare both the rate and the buffers touched per claimed job. The
buffers are those the worker's own fetching session has found or read (`pg_stat_get_backend_io`, PostgreSQL 18): its
real claims with its real cursors, the scans from zero included; vacuum and the observer are not in it. On 16 only the
rate is reported. `shapes`, beside tables of other jobs, and the claims of `held` run the worker's fetcher alone
(claims.py).
"""

from __future__ import annotations

from functools import partial

import psycopg

from bench.figures import Figure, Goal
from bench.holders import Holder, holding
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
    """F08: a drain after 500,000 jobs have passed, and claims alone, with and without one who holds the horizon.

    Both sides have the same past in the same worker process; on one of them a transaction of another session, older
    than the first of them (`--holder`: a snapshot, or a writer with an id), keeps every dead row from being vacuumed,
    pruned or hinted. Measured is the drain after that, still held. Then, in a database of their own, each whole claim
    of ten by the worker's fetcher alone, over the dead rows of those before.
    """
    past, jobs = run.jobs(HELD_JOBS), run.jobs(DRAINED)
    holders = {"held": partial(holding, holder=run.holder), "free": partial(holding, holder=None)}
    ours, other = alternate(
        run.rounds, {name: partial(after, run.lab, past, jobs, holder) for name, holder in holders.items()}
    )
    claims, alone = alternate(
        run.rounds, {f"claims {name}": partial(claimed, run.lab, jobs, holder) for name, holder in holders.items()}
    )
    slower = ratio(claims, alone, lambda sample: sample.more["claim_p99_ms"])
    return [
        *flat("held", f"{run.holder} over {past:,}", ours, other),
        Figure("held", "claim p99, held/free", slower, "x", Goal(2.0, at_most=True), claims, alone),
    ]


def deep(run: Run) -> list[Figure]:
    """The first 50,000 completions out of 1,000,000 waiting jobs against a drain of 50,000 waiting ones."""
    jobs, waiting = run.jobs(SHALLOW), run.jobs(DEEP)
    ours, other = alternate(
        run.rounds,
        {"deep": partial(_backlog, run.lab, jobs, waiting), "shallow": partial(_backlog, run.lab, jobs, jobs)},
    )
    return flat("deep", f"{waiting:,} waiting", ours, other)


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


def flat(scenario: str, name: str, ours: Side, other: Side) -> list[Figure]:
    """The rate of one side against that of the other, and where the server counts them the buffers per claimed job."""
    figures = [Figure(scenario, name, ratio(ours, other), "x", Goal(0.9), ours, other)]
    if all("buffers" in sample.more for sample in (*ours.samples, *other.samples)):
        touched = ratio(ours, other, lambda sample: sample.more["buffers"])
        figures.append(Figure(scenario, "buffers per job", touched, "x", Goal(1.1, at_most=True)))
    return figures


def after(lab: Lab, past: int, jobs: int, holder: Holder) -> Sample:
    """A drain of so many when `past` jobs have been completed, the holder older than all of them."""
    with track(lab, Setup()) as ready, holder(ready.dsn):
        ready.pass_through(past)
        return ready.measure(jobs)


def claimed(lab: Lab, jobs: int, holder: Holder) -> Sample:
    """So many jobs taken, ten at a time, by the worker's fetcher alone; completed by nobody."""
    with lab.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(FILL, ["bench.noop", "bench", jobs])
        with holder(dsn):
            return _claims(lab, dsn, 10, jobs)


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
        return _claims(lab, dsn, 100, jobs)


def _claims(lab: Lab, dsn: str, k: int, jobs: int) -> Sample:
    with start_client(dsn) as client:
        server = lab.cpu()
        found = client.ask(do="claim", k=k, jobs=jobs, queues=["bench", "paused"])
        server = lab.cpu() - server
    return Sample(
        jobs, found["seconds"], found["cpu"], server, {"claim_ms": found["p50"], "claim_p99_ms": found["p99"]}
    )
