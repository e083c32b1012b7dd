"""What a rate costs a task that is far below it.

The same no-op async task, drained by one worker on uvloop from the same backlog: plain, and under a rate of a million a
second, so that every job waits in its line, is charged to its limiter, and starts in time. Both in one
run, alternating; and with and without somebody who holds the horizon since before the first of them.
"""

from __future__ import annotations

from functools import partial

import psycopg

from bench.figures import Figure, Goal
from bench.flat import flat
from bench.holders import Holder, holding
from bench.run import Run
from bench.samples import Sample, alternate, ratio
from bench.server import Lab, buffers
from bench.track import Setup, drain, track

JOBS = 50_000
RATED = Setup(task="bench.rated", rate="bench.rated")
SESSIONS = ("fetch", "rates")


def rates(run: Run) -> list[Figure]:
    """No-op async task under a rate that it is far below, against the same without; one worker process on uvloop."""
    jobs = run.jobs(JOBS)
    rated, plain = alternate(
        run.rounds,
        {
            "rated": partial(drain, run.lab, RATED, jobs),
            "plain": partial(drain, run.lab, Setup(), jobs),
        },
    )
    return [Figure("rates", "of a drain without", ratio(rated, plain), "x", Goal(0.3), rated, plain)]


def held(run: Run) -> list[Figure]:
    """50,000 jobs under a rate that they are far below, with a `--holder` since before the first, and without."""
    jobs = run.jobs(JOBS)
    ours, other = alternate(
        run.rounds,
        {
            "held": partial(_past, run.lab, jobs, partial(holding, holder=run.holder)),
            "free": partial(_past, run.lab, jobs, partial(holding, holder=None)),
        },
    )
    return flat("rates-held", f"{run.holder} over {jobs:,}", ours, other)


def _past(lab: Lab, jobs: int, holder: Holder) -> Sample:
    """A drain of so many, the holder older than all of them; the buffers are those of all who take jobs."""
    with (
        track(lab, RATED) as ready,
        holder(ready.dsn),
        psycopg.connect(ready.dsn, autocommit=True) as conn,
    ):
        before = [buffers(conn, f"pgqueue {name}") for name in SESSIONS]
        sample = ready.measure(jobs)  # it has waited until the sessions have said what they did
        after = [buffers(conn, f"pgqueue {name}") for name in SESSIONS]
    if None in before:
        return sample
    touched = [now - then for now, then in zip(after, before, strict=True)]  # type: ignore[operator]
    return Sample(
        sample.jobs,
        sample.seconds,
        sample.client,
        sample.server,
        {"buffers": sum(touched) / jobs} | {name: each / jobs for name, each in zip(SESSIONS, touched, strict=True)},
    )
