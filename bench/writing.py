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
