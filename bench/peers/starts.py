"""From the return of a commit to the first line of the handler: at rest, and beside a flow of other jobs.

The flow is half of what the peer drains, or enqueues, in this run: whichever is less. Both were measured alone, so on a
busy machine half of it may still be more than the peer manages while something enqueues. Then a queue grows, and the
figure would say how long the sample took. So where starts come later and later, the flow is halved and measured anew.
`beside_s` is the flow that it was.
"""

from __future__ import annotations

from statistics import median
from time import monotonic

from bench.peers.child import Child
from bench.peers.size import PATIENCE, START_RATE, Size, Values
from bench.peers.stage import Stage
from bench.samples import percentile

Waits = list[tuple[float, float]]
"""When each commit had returned, and the milliseconds until its job began."""
WARM_JOBS = 20
REST_SECONDS, LOADED_SECONDS = 15.0, 10.0
HALVINGS = 4
GROWN_FACTOR, GROWN_MS = 2.0, 50.0
"""A queue grows where the last third of the starts waits more than this much longer than the first."""


def start(stage: Stage, size: Size) -> Values:
    probe = _at_work(stage)
    return _percentiles(_probed(stage, probe, size.seconds(REST_SECONDS)))


def start_loaded(stage: Stage, size: Size) -> Values:
    known = size.known("drain-1.jobs_s", "bulk.jobs_s")
    load = min(known) / 2 if known else stage.peer.size / 10
    probe, other = _at_work(stage), stage.client()
    found = _beside(stage, probe, other, load, size.seconds(LOADED_SECONDS))
    for _ in range(HALVINGS):
        if not grows(found):
            break
        load /= 2
        found = _beside(stage, probe, other, load, size.seconds(LOADED_SECONDS))
    return {**_percentiles(found), "beside_s": load, "grows": float(grows(found))}


def grows(found: Waits) -> bool:
    """Whether these starts come later and later: more is enqueued than is taken."""
    third = len(found) // 3
    if not third:
        return False
    first, last = (median(ms for _, ms in part) for part in (found[:third], found[-third:]))
    return last > GROWN_FACTOR * first + GROWN_MS


def waits(stage: Stage, events: list[tuple[int, float]], since: float) -> Waits:
    """What the handlers have written down about these jobs, which were enqueued after `since`."""
    started = {number: at for number, at in stage.starts() if at > since}
    return [(at, max(0.0, started[number] - at) * 1e3) for number, at in events]


def _at_work(stage: Stage) -> Child:
    """A client whose first jobs a worker has run."""
    stage.work(starts=True)
    probe = stage.client()
    probe.ask(do="one", task="noop", n=WARM_JOBS)
    stage.wait_for(WARM_JOBS, PATIENCE)
    stage.wait_until_done(PATIENCE)
    return probe


def _probed(stage: Stage, probe: Child, seconds: float) -> Waits:
    before, begun = stage.ran().total(), monotonic()
    events = probe.ask(do="pace", task="noop", rate=START_RATE, seconds=seconds)["events"]
    stage.wait_for(before + len(events), PATIENCE)
    return waits(stage, events, begun)


def _beside(stage: Stage, probe: Child, other: Child, load: float, seconds: float) -> Waits:
    """The same while so many other jobs a second are enqueued; all are done at the end."""
    before = stage.ran().total()
    other.say(do="flow", task="noop", rate=load, seconds=seconds + 1.0)
    stage.wait_for(before + 1, PATIENCE)
    begun = monotonic()
    events = probe.ask(do="pace", task="noop", rate=START_RATE, seconds=seconds)["events"]
    sent = other.hear(seconds + PATIENCE)["jobs"]
    stage.wait_for(before + len(events) + sent, PATIENCE)
    stage.wait_until_done(PATIENCE)
    return waits(stage, events, begun)


def _percentiles(found: Waits) -> Values:
    return {f"p{percent}_ms": percentile([ms for _, ms in found], percent) for percent in (50, 95, 99)}
