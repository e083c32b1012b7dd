"""Drains of no-op jobs: how fast a backlog is claimed, run and completed, history kept.

Measured: from the COMMIT that opens the queue to the COMMIT of the last completion (track.py). Left out on both sides:
starting processes, connecting, preparing, filling the table. The floors claim-1 and claim-2 (floors.py) move the same
number of rows with the same batch in two statements, on one and two connections with a process each, as many as
pgqueue has worker processes. They take the rows in any order, run no handler, keep no history and know no dead worker.
A pgqueue worker uses two sessions while it drains, one that claims and one that completes, so it gets more of two CPUs
than a floor that does one thing after another: compare the CPU per job, too. What the floor would do if it kept the
order of its jobs, as pgqueue does, is reported beside the first scenario.
"""

from __future__ import annotations

from functools import partial

from bench.figures import Figure, Goal
from bench.run import Run
from bench.samples import alternate, ratio
from bench.track import Setup, drain, drain_floor

JOBS = 100_000


def drain_uvloop(run: Run) -> list[Figure]:
    """No-op async task, one worker process on uvloop (the `fast` extra), against claim-1."""
    jobs = run.jobs(JOBS)
    ours, floor, ordered = alternate(
        run.rounds,
        {
            "pgqueue": partial(drain, run.lab, Setup(), jobs),
            "claim-1": partial(drain_floor, run.lab, 1, jobs),
            "claim-1 in order": partial(drain_floor, run.lab, 1, jobs, ordered=True),
        },
    )
    return [
        Figure("drain-uvloop", "of claim-1", ratio(ours, floor), "x", Goal(0.6, 0.75), ours, floor),
        Figure("drain-uvloop", "of it in order", ratio(ours, ordered), "x", None, ours, ordered),
    ]


def drain_asyncio(run: Run) -> list[Figure]:
    """No-op async task, one worker process on plain asyncio, against claim-1."""
    return _against_claim(run, "drain-asyncio", Setup(loop="asyncio"), Goal(0.5))


def drain_two(run: Run) -> list[Figure]:
    """No-op async task, two worker processes on uvloop, against claim-2."""
    return _against_claim(run, "drain-two", Setup(workers=2), Goal(0.45, 0.55))


def drain_sync(run: Run) -> list[Figure]:
    """No-op plain `def` task in threads, one worker process on uvloop, against claim-1."""
    return _against_claim(run, "drain-sync", Setup(task="bench.noop_sync"), Goal(0.35, 0.5))


def _against_claim(run: Run, scenario: str, setup: Setup, goal: Goal) -> list[Figure]:
    jobs, floor = run.jobs(JOBS * setup.workers), f"claim-{setup.workers}"
    ours, other = alternate(
        run.rounds,
        {"pgqueue": partial(drain, run.lab, setup, jobs), floor: partial(drain_floor, run.lab, setup.workers, jobs)},
    )
    return [Figure(scenario, f"of {floor}", ratio(ours, other), "x", goal, ours, other)]
