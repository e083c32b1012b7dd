"""What a rate costs a task that is far below it.

The same no-op async task, drained by one worker on uvloop from the same backlog: plain, and under a rate of a million a
second, so that every job is parked, let in by a transaction that locks and charges the limiter, and started. Both in
one run, alternating.
"""

from __future__ import annotations

from functools import partial

from bench.figures import Figure, Goal
from bench.run import Run
from bench.samples import alternate, ratio
from bench.track import Setup, drain

JOBS = 50_000


def rates(run: Run) -> list[Figure]:
    """No-op async task under a rate that it is far below, against the same without; one worker process on uvloop."""
    jobs = run.jobs(JOBS)
    rated, plain = alternate(
        run.rounds,
        {
            "rated": partial(drain, run.lab, Setup(task="bench.rated", rate="bench.rated"), jobs),
            "plain": partial(drain, run.lab, Setup(), jobs),
        },
    )
    return [Figure("rates", "of a drain without", ratio(rated, plain), "x", Goal(0.6), rated, plain)]
