"""Curves: what a queue costs while more and more waits in it, and while an old snapshot is held longer and longer.

- `depth`: 1,000 to 1,000,000 jobs wait. At each depth a worker is started. Measured is the rate at which it begins the
  first half of them, or as many as are in one drain of this peer.
- `depth-start`: as many jobs wait in a queue that no worker serves. A worker of another queue is idle; from commit to
  start of its jobs, as in `start`.
- `held`: a snapshot is held that is older than all jobs. First a drain. Then a flow of jobs for two minutes, ten with
  `--full`, at a rate that is the same for all peers that can keep up with it. Then another drain. The flow is cut into
  parts of equal length: jobs begun a second, and from commit to start, in each. `held-2`: the same with two worker
  processes.

A depth that a peer does not fill within half a minute is left out. Rates come from the times at which jobs have begun,
which the handler writes down.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from time import monotonic, sleep

import psycopg

from bench.peers.size import PATIENCE, START_RATE, Size, Values
from bench.peers.stage import Stage
from bench.peers.starts import waits

DEPTHS = (1_000, 10_000, 100_000, 1_000_000)
PARTS = (1, 2, 3, 4, 5, 6, 7, 8)
FILL_SECONDS = 30.0
HELD_SECONDS, HELD_SECONDS_FULL = 120.0, 600.0
HELD_RATE = 1_000.0
SHORTEST = 1e-6  # seconds: a batch that begins at once has a rate, too


def depth(stage: Stage, size: Size) -> Values:
    rates: dict[int, float] = {}
    waiting = 0
    for nominal in _depths(stage, size):
        deep = size.jobs(nominal)
        stage.fill("noop", deep - waiting)
        rates[nominal], ran = _rate(stage, min(deep // 2, size.jobs(stage.peer.size)))
        waiting = deep - ran
    shallow = rates.get(10_000, rates[1_000])
    return {"flat": rates[max(rates)] / shallow, **{f"jobs_s@{deep}": rate for deep, rate in rates.items()}}


def depth_start(stage: Stage, size: Size) -> Values:
    found: dict[int, float] = {}
    waiting = 0
    for nominal in _depths(stage, size):
        deep = size.jobs(nominal)
        stage.fill("elsewhere", deep - waiting)
        waiting = deep
        found[nominal] = _start(stage, size.seconds(3.0))
    return {
        "flat": found[max(found)] / max(SHORTEST, found[min(found)]),
        **{f"p50_ms@{n}": ms for n, ms in found.items()},
    }


def held(stage: Stage, size: Size, processes: int = 1) -> Values:
    jobs = processes * size.jobs(stage.peer.size)
    with _snapshot(stage.dsn):
        stage.fill("noop", jobs)
        before, _ = _rate(stage, jobs, processes, until_done=True)
        flow = _flow(stage, size, processes)
        stage.fill("noop", jobs)
        after, _ = _rate(stage, jobs, processes, until_done=True)
    return {"share": after / before, "jobs_s": after, **flow}


def _depths(stage: Stage, size: Size) -> list[int]:
    """Those that this peer fills in time; the first one always."""
    rate = next(iter(size.known("bulk.jobs_s")), stage.peer.size)
    return [deep for deep in DEPTHS if deep == DEPTHS[0] or deep <= FILL_SECONDS * rate]


def held_2(stage: Stage, size: Size) -> Values:
    return held(stage, size, 2)


def _rate(stage: Stage, part: int, processes: int = 1, *, until_done: bool = False) -> tuple[float, int]:
    """Jobs a second while new workers begin so many; and how many they had begun when they had ended.

    `until_done`: they end when all jobs are done. Else jobs that they leave running are found much later.
    """
    since = monotonic()
    stage.work(processes, starts=True)
    stage.wait_for(part, 2 * PATIENCE)
    if until_done:
        stage.wait_until_done(PATIENCE)
    ran = stage.stop_work()
    times = sorted(at for _, at in stage.starts() if at > since)[:part]
    return (len(times) - 1) / max(SHORTEST, times[-1] - times[0]), ran


def _start(stage: Stage, seconds: float) -> float:
    """The p50 of a worker that is idle but for these jobs, in milliseconds."""
    probe = stage.client()
    stage.work(starts=True)
    probe.ask(do="one", task="noop", n=5)
    stage.wait_for(5, PATIENCE)
    since = monotonic()
    events = probe.ask(do="pace", task="noop", rate=START_RATE, seconds=seconds)["events"]
    stage.wait_for(5 + len(events), PATIENCE)
    probe.end()
    stage.stop_work()
    return median(ms for _, ms in waits(stage, events, since))


def _flow(stage: Stage, size: Size, processes: int) -> Values:
    """A flow of jobs for the time that the snapshot is held: rate and p50 in each part of it."""
    seconds = size.whole_seconds(HELD_SECONDS_FULL if size.full else HELD_SECONDS)
    rate = min([HELD_RATE, *(known / 2 for known in size.known("drain-1.jobs_s", "bulk.jobs_s"))])
    producer, probe = stage.client(), stage.client()
    stage.work(processes, starts=True)
    probe.ask(do="one", task="noop", n=5)
    stage.wait_for(5, PATIENCE)
    producer.say(do="flow", task="noop", rate=rate, seconds=seconds)
    stage.wait_for(6, PATIENCE)
    since = monotonic()
    probe.say(do="pace", task="noop", rate=START_RATE, seconds=seconds)
    ran = [stage.ran().total()]
    for part in PARTS:
        sleep(max(0.0, since + seconds * part / len(PARTS) - monotonic()))
        ran.append(stage.ran().total())
    events = probe.hear(seconds + PATIENCE)["events"]
    sent = producer.hear(seconds + PATIENCE)["jobs"]
    stage.wait_for(5 + len(events) + sent, PATIENCE)
    stage.wait_until_done(PATIENCE)
    stage.stop_work()
    each = [(after - before) * len(PARTS) / seconds for before, after in pairwise(ran)]
    found = waits(stage, events, since)
    half = len(PARTS) // 2
    values = {"last": sum(each[half:]) / max(SHORTEST, sum(each[:half])), "seconds": seconds, "beside_s": rate}
    for part, now in zip(PARTS, each, strict=True):
        values[f"jobs_s@{part}"] = now
        these = [ms for at, ms in found if part - 1 <= len(PARTS) * (at - since) / seconds < part]
        if these:
            values[f"p50_ms@{part}"] = median(these)
    return values


@contextmanager
def _snapshot(dsn: str) -> Iterator[None]:
    with psycopg.connect(dsn) as conn:
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT FROM pg_class LIMIT 1")
        yield
        conn.rollback()
