"""Enqueueing: one job per transaction, and many in one call.

Both sides run in one client process on one connection each sample anew, in a fresh database, with nobody listening.
The floors insert the same number of rows into the minimal table, with the same driver and `with conn.transaction()`
around it. Included on our side: making the job, checking and encoding its arguments, the NOTIFY.
"""

from __future__ import annotations

from functools import partial

from bench.figures import Figure, Goal
from bench.run import Run
from bench.samples import Sample, alternate, ratio
from bench.server import Lab
from bench.track import start_client

SINGLE = 4_000
MANY = 200_000
BATCH = 10_000


def enqueue_one(run: Run) -> list[Figure]:
    """One job in one transaction against *commit*: a one-row INSERT in `with conn.transaction()`."""
    jobs = run.jobs(SINGLE)
    ours, other = alternate(
        run.rounds,
        {
            "pgqueue": partial(_sample, run.lab, [{"do": "enqueue", "jobs": 200}], {"do": "enqueue", "jobs": jobs}),
            "commit": partial(
                _sample,
                run.lab,
                [{"do": "commit", "jobs": 200, "first": 1}],
                {"do": "commit", "jobs": jobs, "first": 1_000},
            ),
        },
    )
    return [Figure("enqueue-one", "of commit", ratio(ours, other), "x", Goal(0.8, 0.9), ours, other)]


def enqueue_many(run: Run) -> list[Figure]:
    """10,000 jobs in one call and one transaction against *copy*: COPY of 10,000 rows in one transaction."""
    batch = min(BATCH, run.jobs(MANY))
    jobs = run.jobs(MANY) // batch * batch
    many = {"do": "enqueue_many", "batch": batch}
    copy = {"do": "copy", "batch": batch}
    ours, other = alternate(
        run.rounds,
        {
            "pgqueue": partial(_sample, run.lab, [many | {"jobs": batch}], many | {"jobs": jobs}),
            "copy": partial(
                _sample, run.lab, [copy | {"jobs": batch, "first": 1}], copy | {"jobs": jobs, "first": 1 + batch}
            ),
        },
    )
    return [Figure("enqueue-many", "of copy", ratio(ours, other), "x", Goal(0.35, 0.5), ours, other)]


def _sample(lab: Lab, before: list[dict[str, object]], measured: dict[str, object]) -> Sample:
    """A fresh database and client; `before` is done once first: statements are prepared, caches full."""
    with lab.database() as dsn, start_client(dsn) as client:
        for message in before:
            client.ask(**message)
        server = lab.cpu()
        found = client.ask(**measured)
        return Sample(found["jobs"], found["ended"] - found["started"], found["cpu"], lab.cpu() - server)
