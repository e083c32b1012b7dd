"""What a lock per job costs: drains of jobs with keys against the same drain of plain jobs, and against themselves.

`deep` is F07 of jobs with keys, `held` is F08 of them: what a long line costs the completion that admits from it, and
what a held snapshot does to the dead rows at the head of each line.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from time import monotonic

from bench.figures import Figure, Goal
from bench.holders import holding
from bench.run import Run
from bench.samples import Sample, Side, alternate, ratio
from bench.server import Lab
from bench.track import Setup, Track, drain, start_client, track

JOBS = 100_000
FEW, FREE = 100, 1_000
PARKED, SHALLOW, ADMITTED = 1_000_000, 50_000, 20_000
FLOW, TOGETHER, DRAINED = 1_000.0, 10, 20_000
KEYED = Setup(task="bench.keyed", keys=FEW)


def distinct(run: Run) -> list[Figure]:
    """Every job has a lock id of its own, against plain jobs."""
    return _against_plain(run, "locks-distinct", run.jobs(JOBS), Goal(0.5, 0.6))


def hundred(run: Run) -> list[Figure]:
    """Jobs on 100 lock ids, limit 1, against plain jobs; then how often two of an id ran at once, of jobs that look."""
    figures = _against_plain(run, "locks-hundred", FEW, Goal(0.3, 0.4))
    with track(run.lab, KEYED) as ready:
        ready.measure(run.jobs(JOBS))
        overlaps = ready.overlaps()
    return [*figures, Figure("locks-hundred", "overlaps", overlaps, "", Goal(0, at_most=True))]


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


def deep(run: Run) -> list[Figure]:
    """20,000 completions where 1,000,000 jobs wait on 100 ids, against the same where 50,000 wait."""
    jobs = run.jobs(ADMITTED)
    many, few = (max(jobs, run.jobs(waiting)) for waiting in (PARKED, SHALLOW))
    ours, other = alternate(
        min(run.rounds, 3),
        {"deep": partial(_parked, run.lab, jobs, many), "shallow": partial(_parked, run.lab, jobs, few)},
    )
    took = ratio(ours, other, lambda sample: sample.seconds)
    return [Figure("locks-deep", f"time with {many:,} parked", took, "x", Goal(2.0, at_most=True), ours, other)]


def held(run: Run) -> list[Figure]:
    """F08 over 100 ids: 1,000 jobs/s with a snapshot held for `--held-seconds` (60 s; the long run takes 600).

    The same flow goes at the same time through another database of the server, where no snapshot is held. Before and
    after it each side is drained in turn; the slope is the held side's rate after the flow over that before.
    """
    seconds = max(2.0, run.held_seconds * min(1.0, run.scale))
    with ExitStack() as stack:
        ours, other = (stack.enter_context(track(run.lab, KEYED)) for _ in range(2))
        stack.enter_context(holding(ours.dsn, "snapshot"))
        before = _drains(run, ours, other)
        behind = _flow(ours, other, seconds, stack)
        after = _drains(run, ours, other)
        overlaps = ours.overlaps() + other.overlaps()
    return [
        Figure("locks-held", "of free, before", ratio(*before), "x", None, *before),
        Figure("locks-held", f"of free, after {seconds:g} s", ratio(*after), "x", Goal(0.5), *after),
        Figure("locks-held", "slope of held, after/before", after[0].rate / before[0].rate, "x"),
        Figure("locks-held", "slope of free, after/before", after[1].rate / before[1].rate, "x"),
        Figure("locks-held", "behind at the end of the flow", behind, "s", Goal(1.0, at_most=True)),
        Figure("locks-held", "overlaps", overlaps, "", Goal(0, at_most=True)),
    ]


def _drains(run: Run, ours: Track, other: Track) -> tuple[Side, Side]:
    jobs = run.jobs(DRAINED)
    sides = {"held": partial(ours.measure, jobs), "free": partial(other.measure, jobs)}
    held, free = alternate(min(run.rounds, 3), sides)
    return held, free


def _flow(ours: Track, other: Track, seconds: float, stack: ExitStack) -> float:
    """The flow on both sides at once; how long after its end the held side has completed all of it, in seconds."""
    ours.reopen()
    other.reopen()
    clients = [stack.enter_context(start_client(side.dsn)) for side in (ours, other)]
    for client in clients:
        client.say(do="pace_keyed", rate=FLOW, seconds=seconds, together=TOGETHER, keys=FEW)
    held, free = (client.hear(timeout=2 * seconds + 300) for client in clients)
    ended = monotonic()
    ours.finish(held["last"])
    behind = monotonic() - ended
    other.finish(free["last"])
    return behind


def _parked(lab: Lab, jobs: int, waiting: int) -> Sample:
    with track(lab, Setup()) as ready:
        return ready.measure_parked(jobs, waiting, FEW)


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
