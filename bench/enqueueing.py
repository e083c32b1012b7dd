"""Enqueueing: one job per transaction, and many in one call.

Both sides run in one client process, on one connection, in the same database, in short blocks that take turns: how long
a flush takes changes from second to second, and so hits both. Nobody listens. The floors insert the same number of rows
into the minimal table, with the same driver and `with conn.transaction()` around it. Included on our side: making the
job, checking and encoding its arguments, the NOTIFY.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from bench.figures import Figure, Goal
from bench.processes import Process
from bench.run import Run
from bench.samples import Sample, Side, alternate, ratio
from bench.server import Lab
from bench.track import start_client

ROUNDS = 4  # blocks to a round of the others
SINGLE, MANY, BATCH = 1_000, 50_000, 10_000


def enqueue_one(run: Run) -> list[Figure]:
    """One job in one transaction against *commit*: a one-row INSERT in `with conn.transaction()`."""
    jobs = run.jobs(SINGLE)
    ours, other = _in_turn(run, "commit", {"do": "enqueue", "jobs": jobs}, {"do": "commit", "jobs": jobs})
    return [Figure("enqueue-one", "of commit", ratio(ours, other), "x", Goal(0.8, 0.9), ours, other)]


def enqueue_many(run: Run) -> list[Figure]:
    """10,000 jobs in one call and one transaction against *copy*: COPY of 10,000 rows in one transaction."""
    batch = min(BATCH, run.jobs(MANY))
    size = {"batch": batch, "jobs": run.jobs(MANY) // batch * batch}
    ours, other = _in_turn(run, "copy", {"do": "enqueue_many"} | size, {"do": "copy"} | size)
    return [Figure("enqueue-many", "of copy", ratio(ours, other), "x", Goal(0.35, 0.5), ours, other)]


def enqueue_unique(run: Run) -> list[Figure]:
    """10,000 jobs in one call and one transaction, a unique key each, against the same jobs without keys."""
    batch = min(BATCH, run.jobs(MANY))
    jobs = run.jobs(MANY) // batch * batch
    size = {"do": "enqueue_numbered", "batch": batch, "jobs": jobs}
    firsts = count(1, jobs)
    with run.lab.database() as dsn, start_client(dsn) as client:
        sides = {
            "keyed": partial(_block, run.lab, client, lambda: size | {"first": next(firsts), "keyed": True}),
            "no keys": partial(_block, run.lab, client, lambda: size | {"first": next(firsts), "keyed": False}),
        }
        for warm in sides.values():
            warm()
        ours, other = alternate(ROUNDS * run.rounds, sides)
    return [Figure("enqueue-unique", "of no keys", ratio(ours, other), "x", Goal(0.35, 0.5), ours, other)]


def _in_turn(run: Run, floor: str, ours: dict[str, Any], other: dict[str, Any]) -> list[Side]:
    """Blocks of both sides in turn; one of each before anything counts: statements are prepared, caches full."""
    firsts = count(1, other["jobs"])
    with run.lab.database() as dsn, start_client(dsn) as client:
        sides = {
            "pgqueue": partial(_block, run.lab, client, lambda: ours),
            floor: partial(_block, run.lab, client, lambda: other | {"first": next(firsts)}),
        }
        for warm in sides.values():
            warm()
        return alternate(ROUNDS * run.rounds, sides)


def _block(lab: Lab, client: Process, message: Callable[[], dict[str, Any]]) -> Sample:
    server = lab.cpu()
    found = client.ask(**message())
    return Sample(found["jobs"], found["ended"] - found["started"], found["cpu"], lab.cpu() - server)
