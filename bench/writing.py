"""Handlers that write one row: in the job's own transaction, beside in a transaction that the handler opens itself.

Both sides run the same INSERT with the same number of connections and slots. The handler that opens its own takes a
connection from a psycopg_pool and commits there; its completion follows in a batch, so what it wrote can be there twice
after a crash. The transactional one commits once, with its completion inside, and no batch can help it.
"""

from __future__ import annotations

from functools import partial

from bench.figures import Figure, Goal
from bench.run import Run
from bench.samples import alternate, ratio
from bench.track import Setup, drain

JOBS = 20_000


def transactional(run: Run) -> list[Figure]:
    """A transactional task, in threads and on the loop, against one that writes its row in a transaction of its own."""
    jobs = run.jobs(JOBS)
    figures = []
    for kind in ("sync", "async"):
        ours, own = alternate(
            run.rounds,
            {
                "transactional": partial(drain, run.lab, Setup(task=f"bench.write_{kind}"), jobs),
                "own": partial(drain, run.lab, Setup(task=f"bench.own_{kind}"), jobs),
            },
        )
        figures.append(Figure("transactional", f"{kind}, of its own", ratio(ours, own), "x", Goal(0.8), ours, own))
    return figures


def batches(run: Run) -> list[Figure]:
    """A transactional task that writes a row for each of 100 jobs in one call, against one that writes one row a call.

    CPU of a job on both sides, worker and server: how many times less it is in a batch.
    """
    jobs = run.jobs(JOBS)
    ours, single = alternate(
        run.rounds,
        {
            "batch": partial(drain, run.lab, Setup(task="bench.write_batch", args='{"rows": 1}'), jobs),
            "single": partial(drain, run.lab, Setup(task="bench.write_sync"), jobs),
        },
    )
    less = (single.client + single.server) / (ours.client + ours.server)
    return [
        Figure("batches", "times the jobs/s one by one", ratio(ours, single), "x", None, ours, single),
        Figure("batches", "times less CPU a job", less, "x", None, ours, single),
    ]
