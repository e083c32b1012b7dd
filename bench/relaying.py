"""The relay: jobs staged in one database until they are in the queue of another, against enqueueing them there at once.

Both databases are on one server, and so share its disk and its CPUs: this is the relay at its worst. A block of the
relay begins when the first job is staged. It ends when the outbox is empty: each job was staged, read, inserted,
remembered and deleted, with four commits on the way. The relay works meanwhile, in a process of its own. A block of the
other side is `enqueue_many` of as many jobs into the queue.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from typing import Any

import psycopg

from bench.figures import Figure, Goal
from bench.holders import Holder, holding
from bench.processes import Process
from bench.run import Run
from bench.samples import Sample, alternate, ratio
from bench.server import Lab
from bench.track import PATIENCE, start_client
from pgqueue.database import migrations

JOBS, BATCH = 50_000, 10_000
MANY = 1_000_000
LOOK_SECONDS = 0.01

Connection = psycopg.Connection[Any]


def relay(run: Run) -> list[Figure]:
    """50,000 jobs staged and relayed against `enqueue_many` of as many, in 10,000 a transaction."""
    batch = min(BATCH, run.jobs(JOBS))
    size = {"batch": batch, "jobs": run.jobs(JOBS) // batch * batch}
    with run.lab.database() as app, run.lab.database() as queue:
        migrations.migrate(app, line=migrations.OUTBOX)
        with (
            start_client(app) as stager,
            start_client(queue) as client,
            Process("bench.relay_process", app, queue) as relaying,
            psycopg.connect(app, autocommit=True) as source,
            psycopg.connect(queue, autocommit=True) as target,
        ):
            relaying.hear()
            sides = {
                "relay": partial(_relayed, run.lab, stager, relaying, source, size),
                "enqueue_many": partial(_enqueued, run.lab, client, size),
            }
            for warm in sides.values():
                warm()
            ours, other = alternate(run.rounds, sides)
            [(count,)] = target.execute("SELECT count(*) FROM pgqueue.relayed").fetchall()
            if count != size["jobs"] * (1 + run.rounds):
                raise RuntimeError(f"{count} jobs have arrived, not {size['jobs'] * (1 + run.rounds)}")
    return [Figure("relay", "of enqueue_many", ratio(ours, other), "x", Goal(0.3), ours, other)]


def held(run: Run) -> list[Figure]:
    """A million jobs staged and relayed while a snapshot is held in the application's database, against without one."""
    batch = min(BATCH, run.jobs(MANY))
    size = {"batch": batch, "jobs": run.jobs(MANY) // batch * batch}
    sides = {
        name: partial(_relayed_anew, run.lab, partial(holding, holder=holder), size)
        for name, holder in (("held", "snapshot"), ("free", None))
    }
    ours, other = alternate(run.rounds, sides)
    memory = max(sample.more["rss"] for side in (ours, other) for sample in side.samples)
    return [
        Figure("relay-held", "of without", ratio(ours, other), "x", Goal(0.8), ours, other),
        Figure("relay-held", "memory of the relay", memory, "MiB", Goal(200, at_most=True)),
    ]


def _relayed_anew(lab: Lab, holder: Holder, size: dict[str, int]) -> Sample:
    """Relay so many in new databases."""
    with lab.database() as app, lab.database() as queue:
        migrations.migrate(app, line=migrations.OUTBOX)
        with (
            start_client(app) as stager,
            Process("bench.relay_process", app, queue) as relaying,
            psycopg.connect(app, autocommit=True) as source,
            holder(app),
        ):
            relaying.hear()
            sample = _relayed(lab, stager, relaying, source, size)
            return replace(sample, more={"rss": relaying.rss()})


def _relayed(lab: Lab, stager: Process, relaying: Process, source: Connection, size: dict[str, int]) -> Sample:
    server, cpu = lab.cpu(), relaying.cpu()
    found = stager.ask(do="stage_many", **size)
    deadline = monotonic() + PATIENCE
    # Rows go in the order of their ids. Under a snapshot only the look-up of one row stays cheap.
    for uid in source.execute("SELECT uid FROM pgqueue.outbox ORDER BY id DESC LIMIT 1").fetchall():
        while source.execute("SELECT FROM pgqueue.outbox WHERE uid = %s", uid).fetchall():
            if monotonic() > deadline:
                raise RuntimeError(f"the outbox is not empty after {PATIENCE:g} s")
            sleep(LOOK_SECONDS)
    ended = monotonic()
    return Sample(found["jobs"], ended - found["started"], found["cpu"] + relaying.cpu() - cpu, lab.cpu() - server)


def _enqueued(lab: Lab, client: Process, size: dict[str, int]) -> Sample:
    server = lab.cpu()
    found = client.ask(do="enqueue_many", **size)
    return Sample(found["jobs"], found["ended"] - found["started"], found["cpu"], lab.cpu() - server)
