"""What a lock per job costs: drains of jobs with keys against the same drain of plain jobs."""

from __future__ import annotations

from functools import partial

from bench.figures import Figure, Goal
from bench.run import Run
from bench.samples import Sample, alternate, ratio
from bench.server import Lab
from bench.track import Setup, drain, track

JOBS = 100_000
FEW, FREE = 100, 1_000


def distinct(run: Run) -> list[Figure]:
    """Every job has a lock id of its own, against plain jobs."""
    return _against_plain(run, "locks-distinct", run.jobs(JOBS), Goal(0.5, 0.6))


def hundred(run: Run) -> list[Figure]:
    """Jobs on 100 lock ids, limit 1, against plain jobs."""
    return _against_plain(run, "locks-hundred", FEW, Goal(0.3, 0.4))


def behind(run: Run) -> list[Figure]:
    """1,000 free jobs behind 100,000 that wait for one id, against the same without those."""
    free, blocked = run.jobs(FREE), run.jobs(JOBS)
    parked, found, alone = alternate(
        run.rounds,
        {
            "behind parked ones": partial(_free, run.lab, free, blocked, parked=True),
            "not parked yet": partial(_free, run.lab, free, blocked),
            "alone": partial(_free, run.lab, free),
        },
    )
    took, longer = (ratio(side, alone, lambda sample: sample.seconds) for side in (parked, found))
    return [
        Figure("locks-behind", "time, of that without", took, "x", Goal(2.0, at_most=True), parked, alone),
        Figure("locks-behind", "time, not parked yet", longer, "x", None, found, alone),
    ]


def _free(lab: Lab, jobs: int, blocked: int = 0, *, parked: bool = False) -> Sample:
    with track(lab, Setup()) as ready:
        if blocked:
            ready.block(blocked, parked=parked)
        return ready.measure(jobs)


def _against_plain(run: Run, scenario: str, keys: int, goal: Goal) -> list[Figure]:
    jobs = run.jobs(JOBS)
    ours, plain = alternate(
        run.rounds,
        {
            "keyed": partial(drain, run.lab, Setup(keys=keys), jobs),
            "plain": partial(drain, run.lab, Setup(), jobs),
        },
    )
    return [Figure(scenario, "of plain jobs", ratio(ours, plain), "x", goal, ours, plain)]
