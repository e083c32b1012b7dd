"""The worker's fetcher alone: what a claim costs, by its size.

`claim` runs in the client's process (client.py): a registered worker's Fetcher with its own session and watermark,
given room for k jobs at a time, whose jobs nobody runs. Measured is each whole fetch: the round trip, both statements,
the commit (asynchronous, as in a worker), decoding the rows, the watermark.
"""

from __future__ import annotations

from functools import partial
from time import monotonic, process_time

import psycopg

from bench.figures import Figure
from bench.run import Run
from bench.samples import Sample, alternate, percentile
from bench.server import Lab, register
from pgqueue.fetcher import Fetcher, Share
from pgqueue.job import Job
from pgqueue.sessions import Link, Session

SIZES = (1, 10, 100)
JOBS = 20_000


def batched_claim(run: Run) -> list[Figure]:
    """E15: claims of 1, 10 and 100 jobs: claim queries, wall time and server CPU per job. Reported, not judged."""
    figures = []
    sides = alternate(min(run.rounds, 3), {f"k={k}": partial(_sample, run.lab, k, run.jobs(JOBS)) for k in SIZES})
    for k, side in zip(SIZES, sides, strict=True):
        queries = side.samples[0].more["fetches"] / side.samples[0].jobs
        figures.append(Figure("claims", f"k={k}, queries per job", queries, ""))
        figures.append(Figure("claims", f"k={k}, time per job", 1e6 / side.rate, "µs", None, side))
    return figures


def _sample(lab: Lab, k: int, full: int) -> Sample:
    from bench.track import FILL, start_client

    jobs = max(k, full * k // SIZES[-1] if k < SIZES[-1] else full)
    jobs = max(jobs, min(full, 2_000))
    with lab.database() as dsn, start_client(dsn) as client:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(FILL, ["bench.noop", "bench", jobs])
        server = lab.cpu()
        found = client.ask(do="claim", k=k, jobs=jobs, queues=["bench"])
        return Sample(jobs, found["seconds"], found["cpu"], lab.cpu() - server, {"fetches": found["fetches"]})


async def claim(dsn: str, k: int, jobs: int, queues: list[str]) -> dict[str, float]:
    """Claim `jobs` jobs, k at a time; seconds, CPU, how many fetches, and the distribution of their times in ms."""
    session = Session(Link(dsn, "pgqueue"), "fetch")
    worker_id = register(dsn, queues)
    times: list[float] = []
    taken = 0

    def deliver(claimed: list[Job]) -> None:
        nonlocal taken
        taken += len(claimed)
        times.append(monotonic())
        if taken >= jobs:
            fetcher.quiet()

    fetcher = Fetcher(
        session,
        lambda: worker_id,
        shares=lambda: [Share(queues, k)],
        deliver=deliver,
        suspects=lambda: (),
        live_workers=lambda: 1,
        in_doubt=lambda: None,
        poll=1.0,
    )
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
        "p50": percentile(each, 50),
        "p99": percentile(each, 99),
    }
