"""What a limit costs while somebody holds a snapshot: each admit reads its holders and its line, past those gone.

The same no-op async task under a limit of 50, drained again and again by one worker on uvloop; on one side beside a
session whose snapshot is older than the first of the jobs. What is compared is the last of those drains.
"""

from __future__ import annotations

from functools import partial
from statistics import median

from bench.figures import Figure, Goal
from bench.holders import Holder, holding
from bench.run import Run
from bench.samples import Sample, alternate, ratio
from bench.server import Lab
from bench.track import Setup, track

JOBS, DRAINS = 10_000, 6
LIMITED = Setup(task="bench.limited", limit="bench.limited", concurrency=100)


def held(run: Run) -> list[Figure]:
    """F08 of a limit: the last of six drains of 10,000 jobs each, a `--holder` older than the first, and without."""
    jobs = run.jobs(JOBS)
    ours, other = alternate(
        run.rounds,
        {
            "held": partial(_last, run.lab, jobs, partial(holding, holder=run.holder)),
            "free": partial(_last, run.lab, jobs, partial(holding, holder=None)),
        },
    )
    fell, alone = (median(one.rate / one.more["first"] for one in side.samples) for side in (ours, other))
    return [
        Figure("limits-held", f"{run.holder}, drain {DRAINS} of free", ratio(ours, other), "x", Goal(0.5), ours, other),
        Figure("limits-held", "held: last of first drain", fell, "x"),
        Figure("limits-held", "free: last of first drain", alone, "x"),
    ]


def _last(lab: Lab, jobs: int, holder: Holder) -> Sample:
    """The last drain; `more` has the rate of the first."""
    with track(lab, LIMITED) as ready, holder(ready.dsn):
        first, *_, last = (ready.measure(jobs) for _ in range(DRAINS))
    return Sample(last.jobs, last.seconds, last.client, last.server, {"first": first.rate})
