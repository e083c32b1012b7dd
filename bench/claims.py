"""The worker's fetcher alone: what a claim costs, by its size.

`claim` runs in the client's process (client.py): a registered worker's Fetcher with its own session and watermark,
given room for k jobs at a time, whose jobs nobody runs. Measured is each whole fetch: the round trip, both statements,
the commit (asynchronous, as in a worker), decoding the rows, the watermark.

Lock time: a claim locks its rows with SKIP LOCKED, moves them and commits, in one message, and nothing is locked after
that for as long as the job runs. So a row is locked for a part of that transaction, no longer, and what a job costs in
lock time is the transaction's time shared by the jobs it took. It is bracketed: at most from the message that has the
BEGIN until the answer that has the COMMIT, by the client's clock; at least from the first row moved until the commit,
by the server's. (A row of a larger claim is locked for longer itself, and nobody waits for it: others pass it over.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import monotonic, process_time

import psycopg

from bench.figures import Figure
from bench.run import Run
from bench.samples import Sample, alternate, percentile
from bench.server import Lab, register
from bench.tasks import noop
from pgqueue.database.sessions import Link, Session
from pgqueue.jobs.job import Job
from pgqueue.worker.concurrency.waiter_cursors import WaiterCursors
from pgqueue.worker.fetch.fetcher import Fetcher
from pgqueue.worker.run.slots import Room
from pgqueue.worker.settings import by_name, settle
from pgqueue.worker.state import WorkerState

SIZES = (1, 10, 100)
JOBS = 20_000

# All of them are running still, each with the transaction that has taken it. The server's clock, in seconds.
LOCKED = """
SELECT sum(extract(epoch FROM pg_xact_commit_timestamp(xid) - moved))::float8
FROM (SELECT xmin AS xid, min(started_at) AS moved FROM pgqueue.job_running GROUP BY xmin) AS claim
"""


def batched_claim(run: Run) -> list[Figure]:
    """E15: claims of 1, 10 and 100 jobs: claim queries, wall time, CPU and lock time per job. Reported, not judged."""
    figures = []
    sides = alternate(min(run.rounds, 3), {f"k={k}": partial(_sample, run.lab, k, run.jobs(JOBS)) for k in SIZES})
    for k, side in zip(SIZES, sides, strict=True):
        queries = side.samples[0].more["fetches"] / side.samples[0].jobs
        figures.append(Figure("claims", f"k={k}, queries per job", queries, ""))
        figures.append(Figure("claims", f"k={k}, time per job", 1e6 / side.rate, "µs", None, side))
        for bound in ("at most", "at least"):
            locked = median(1e6 * sample.more[f"locked {bound}"] / sample.jobs for sample in side.samples)
            figures.append(Figure("claims", f"k={k}, locked {bound}", locked, "µs"))
    return figures


def _sample(lab: Lab, k: int, full: int) -> Sample:
    from bench.track import FILL, start_client

    jobs = max(k, full * k // SIZES[-1] if k < SIZES[-1] else full)
    jobs = max(jobs, min(full, 2_000))
    with lab.database() as dsn, start_client(dsn) as client, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(FILL, ["bench.noop", "bench", jobs])
        server = lab.cpu()
        found = client.ask(do="claim", k=k, jobs=jobs, queues=["bench"])
        server = lab.cpu() - server
        least = conn.execute(LOCKED).fetchone()
    assert least is not None
    locked = {"locked at most": found["took"], "locked at least": least[0]}
    return Sample(jobs, found["seconds"], found["cpu"], server, {"fetches": found["fetches"]} | locked)


class Sides:
    """What a fetcher asks and tells: it has this room, and its jobs are delivered; no job has a key."""

    def __init__(self, room: list[Room], deliver: Callable[[list[Job]], None]) -> None:
        self.room = room
        self.deliver = deliver
        self.waiter_cursors = WaiterCursors()

    def to_fetch(self) -> list[Room]:
        return self.room

    def poison_ranks(self) -> Sequence[int]:
        return ()

    def fetched(self) -> None: ...

    def blocked(self, *_: object) -> None: ...

    def granted(self, *_: object) -> None: ...


async def claim(dsn: str, k: int, jobs: int, queues: list[str]) -> dict[str, float]:
    """Claim `jobs` jobs, k at a time; seconds, CPU, how many fetches, the seconds of their messages, times in ms."""
    session = Session(Link(dsn, "pgqueue"), "fetch")
    worker_id = register(dsn, queues)
    times: list[float] = []
    taken, took = 0, 0.0

    def deliver(claimed: list[Job]) -> None:
        nonlocal taken, took
        taken += len(claimed)
        took += session.took
        times.append(monotonic())
        if taken >= jobs:
            fetcher.quiet()

    told = {"schema": None, "poll": 1.0, "lease": 15.0, "version_tag": "bench", "pool_size": None, "fail_unknown": 1.0}
    settings = settle([], queues=queues, concurrency=k, dsn=dsn, listen_dsn=None, **told)  # type: ignore[arg-type]
    state = WorkerState(settings, by_name([noop]))
    state.link, state.id = session.link, worker_id
    sides = Sides([Room(queues, k)], deliver)
    fetcher = Fetcher(session, state, sides, sides, sides)
    await session.ready()
    started, cpu = monotonic(), process_time()
    await fetcher.run()
    cpu = process_time() - cpu
    await session.close()
    each = [(after - before) * 1e3 for before, after in zip([started, *times], times, strict=False)]
    return {
        "seconds": times[-1] - started,
        "cpu": cpu,
        "fetches": fetcher.fetches,
        "took": took,
        "p50": percentile(each, 50),
        "p99": percentile(each, 99),
    }
