"""What is measured of each peer, and how. Every sample begins on a fresh database, with processes of its own.

- `one`: a process enqueues no-op jobs, one per transaction, after some that are not counted.
- `bulk`: a process enqueues no-op jobs with the peer's best call for many, after some that are not counted.
- `drain-1`, `drain-2`: jobs wait; then one or two worker processes are started. Measured is from the moment when every
  process has begun a job until the peer itself knows all as done, so starting is left out. The jobs counted are those
  that had not been begun at that moment. Where they are less than half, starting is included, and the report says so:
  the peer's `size` is too small. From the same sample: WAL, transactions and CPU a job, claim to end.
  Statements a job are of another drain in the first sample of a peer: see statements.py.
- `start`: a worker is idle; a process enqueues 20 jobs a second, one per transaction, at random distances. From the
  return of the commit to the first line of the handler; a handler that is quicker than the answer counts as 0.
- `start-loaded`: the same while another process enqueues half of what the peer drains, or enqueues, in this run: see
  starts.py.
- `application`: 200 bytes of arguments, 1 ms of waiting in each job, history kept where the peer can, jobs waiting, and
  a process that enqueues one per transaction beside. Jobs begun a second by one worker process.
- `idle`: a worker that has worked and has nothing to do.
- `killed`, `crashed`: see crashes.py.
- `depth`, `depth-start`, `held`, `held-2`: see curves.py. Without `--full` or their names only `held` is measured, of
  the peers near pgqueue.
- `killed`, `crashed`, `held` and `held-2` take long: one round of them, and all with `--full`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep

from bench.peers.crashes import crashed, killed
from bench.peers.curves import DEPTHS, PARTS, depth, depth_start, held, held_2
from bench.peers.drain import drain
from bench.peers.peer import Peer
from bench.peers.size import PATIENCE, Size, Values
from bench.peers.stage import Stage
from bench.peers.starts import start, start_loaded
from bench.peers.statements import statements

WARM_JOBS = 200
ONE_JOBS = 3_000
BULK_MOST = 100_000


@dataclass(frozen=True, slots=True)
class Measure:
    """One column of a scenario: its key in the samples, its heading, and which side is better."""

    key: str
    heading: str
    less_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """Measures of one thing at several points, to be drawn as a line: `KEY@POINT` in the samples."""

    key: str
    heading: str
    points: tuple[int, ...]
    axis: str
    less_is_better: bool = False

    @property
    def measures(self) -> tuple[Measure, ...]:
        return tuple(
            Measure(f"{self.key}@{point}", f"{self.heading}, {point:,} {self.axis}", self.less_is_better)
            for point in self.points
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """One table of the report. Its first measure is the one that ratios are taken of."""

    name: str
    title: str
    take: Callable[[Stage, Size], Values]
    measures: tuple[Measure, ...]
    history: bool = False
    full_only: bool = False
    once: bool = False
    """One round, but with `--full`."""
    postgresql_only: bool = False
    """It says nothing about a peer whose jobs are elsewhere."""
    near_only: bool = False
    """Only of the peers near pgqueue (see plan.py), but with `--full` or by its name."""
    curves: tuple[Curve, ...] = ()
    around_s: float = 3.0
    """How long a sample is likely to take, whatever its size: a database, the start and the end of processes."""
    scaled_s: float = 5.0
    """And how long besides, at full size."""
    full_s: float = 0.0
    """The same with `--full`, where that takes longer."""


def one(stage: Stage, size: Size) -> Values:
    client = stage.client()
    client.ask(do="one", task="noop", n=size.jobs(WARM_JOBS))
    found = client.ask(do="one", task="noop", n=size.jobs(min(ONE_JOBS, stage.peer.size)))
    return {"jobs_s": found["jobs"] / found["seconds"]}


def bulk(stage: Stage, size: Size) -> Values:
    client = stage.client()
    client.ask(do="many", task="noop", n=size.jobs(WARM_JOBS))
    found = client.ask(do="many", task="noop", n=size.jobs(min(BULK_MOST, stage.peer.size)))
    return {"jobs_s": found["jobs"] / found["seconds"]}


def drain_1(stage: Stage, size: Size) -> Values:
    stage.fill("noop", size.jobs(stage.peer.size))
    found = drain(stage, size.jobs(stage.peer.size), 1)
    if stage.dsn and not size.known("drain-1.statements"):
        found["statements"] = statements(stage, size)
    return found


def drain_2(stage: Stage, size: Size) -> Values:
    jobs = size.jobs(2 * stage.peer.size)
    stage.fill("noop", jobs)
    return drain(stage, jobs, 2)


def application(stage: Stage, size: Size) -> Values:
    seconds = size.seconds(5.0)
    waiting = size.jobs(stage.peer.size)
    stage.fill("application", waiting)
    producer = stage.client()
    stage.work()
    stage.wait_for(1, PATIENCE)
    producer.say(do="produce", task="application", seconds=seconds)
    begun, first = monotonic(), stage.ran().total()
    while (now := monotonic()) - begun < seconds and (ran := stage.ran().total()) < waiting:
        sleep(0.01)
    ran = stage.ran().total()
    produced = producer.hear()
    return {"jobs_s": (ran - first) / (now - begun), "enqueued_s": produced["jobs"] / produced["seconds"]}


def idle(stage: Stage, size: Size) -> Values:
    seconds = size.seconds(10.0)
    stage.fill("noop", size.jobs(1_000))
    stage.work()
    stage.wait_for(size.jobs(1_000), PATIENCE)
    stage.wait_until_done(PATIENCE)
    with stage.lab.without_autovacuum():
        sleep(size.seconds(3.0))
        before, ended, begun = stage.counters(), stage.transactions(), monotonic()
        sleep(seconds)
        after, passed = stage.counters(), monotonic() - begun
        ended = stage.transactions() - ended
    each = {name: (after[name] - before[name]) / passed for name in before}
    return {
        **({"transactions_s": ended / passed} if stage.dsn else {}),
        "rss_mib": sum(worker.rss() for worker in stage.workers),
        "worker_cpu": 100 * each["worker_cpu"],
        "server_cpu": 100 * each["server_cpu"],
    }


RATE = Measure("jobs_s", "jobs/s")
_STARTS = (Measure("p50_ms", "p50 ms", True), Measure("p95_ms", "p95 ms", True), Measure("p99_ms", "p99 ms", True))
_STARTS_LOADED = (*_STARTS, Measure("beside_s", "jobs/s beside"), Measure("grows", "queue grew", True))
_COSTS = (
    Measure("wal_bytes", "WAL bytes a job", True),
    Measure("transactions", "transactions a job", True),
    Measure("statements", "statements a job", True),
    Measure("server_us", "server CPU µs a job", True),
    Measure("worker_us", "worker CPU µs a job", True),
)
_IDLE = (
    Measure("rss_mib", "RSS MiB", True),
    Measure("transactions_s", "transactions/s", True),
    Measure("worker_cpu", "worker CPU %", True),
    Measure("server_cpu", "server CPU %", True),
)
_LEFT = (Measure("left", "not in time", True), Measure("limit_s", "s waited at most"))
_DEPTH_RATES = Curve("jobs_s", "jobs/s", DEPTHS, "waiting")
_DEPTH_STARTS = Curve("p50_ms", "p50 ms", DEPTHS, "waiting", less_is_better=True)
_HELD_RATES = Curve("jobs_s", "jobs/s", PARTS, f"of {len(PARTS)} parts of the time")
_HELD_STARTS = Curve("p50_ms", "p50 ms", PARTS, f"of {len(PARTS)} parts of the time", less_is_better=True)
_HELD = (
    Measure("share", "drain after the flow, of the one before"),
    Measure("last", "jobs/s in the last half, of the first"),
    RATE,
    Measure("seconds", "s held"),
    *_HELD_STARTS.measures,
)
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("one", "Enqueue one per transaction", one, (RATE,), around_s=1.5, scaled_s=3.0),
        Scenario("bulk", "Enqueue many", bulk, (RATE,), around_s=1.5, scaled_s=4.0),
        Scenario("drain-1", "Drain of no-op jobs, one worker process", drain_1, (RATE, *_COSTS), scaled_s=8.0),
        Scenario("drain-2", "Drain of no-op jobs, two worker processes", drain_2, (RATE, *_COSTS), scaled_s=12.0),
        Scenario("start", "From commit to start, at rest", start, _STARTS, scaled_s=15.0),
        Scenario(
            "start-loaded",
            "From commit to start, at half load",
            start_loaded,
            _STARTS_LOADED,
            around_s=4.0,
            scaled_s=15.0,
        ),
        Scenario(
            "application",
            "Like an application: 200 bytes, 1 ms, producers beside, history kept",
            application,
            (RATE, Measure("enqueued_s", "enqueued/s beside")),
            history=True,
            around_s=3.5,
            scaled_s=9.0,
        ),
        Scenario("idle", "Idle worker", idle, _IDLE, around_s=3.5, scaled_s=14.0),
        Scenario(
            "held",
            "A snapshot is held: a flow of jobs, then a drain",
            held,
            _HELD,
            once=True,
            postgresql_only=True,
            near_only=True,
            curves=(_HELD_RATES, _HELD_STARTS),
            around_s=135.0,
            scaled_s=20.0,
            full_s=500.0,
        ),
        Scenario(
            "killed",
            "A worker is killed: seconds until its jobs run again",
            killed,
            (Measure("again_s", "s", True), Measure("held", "jobs"), Measure("waiting", "others waiting"), *_LEFT),
            once=True,
            around_s=30.0,
            scaled_s=15.0,
        ),
        Scenario(
            "crashed",
            "The server crashes: seconds until a job begins again",
            crashed,
            (
                Measure("back_s", "s", True),
                Measure("whole_s", "s until all have begun", True),
                *_LEFT,
                Measure("twice", "jobs begun twice", True),
                Measure("revived", "workers that ended", True),
            ),
            once=True,
            postgresql_only=True,
            around_s=10.0,
            scaled_s=10.0,
        ),
        Scenario(
            "depth",
            "Drain of a part, more and more waiting",
            depth,
            (Measure("flat", "rate at the deepest, of that at 10,000"), *_DEPTH_RATES.measures),
            full_only=True,
            curves=(_DEPTH_RATES,),
        ),
        Scenario(
            "depth-start",
            "From commit to start, more and more waiting in another queue",
            depth_start,
            (Measure("flat", "p50 at the deepest, of that at 1,000", True), *_DEPTH_STARTS.measures),
            full_only=True,
            curves=(_DEPTH_STARTS,),
        ),
        Scenario(
            "held-2",
            "A snapshot is held, two worker processes: a flow of jobs, then a drain",
            held_2,
            _HELD,
            full_only=True,
            once=True,
            postgresql_only=True,
            curves=(_HELD_RATES, _HELD_STARTS),
            around_s=135.0,
            scaled_s=30.0,
            full_s=510.0,
        ),
    )
}


def applies(scenario: Scenario, peer: Peer) -> bool:
    """Whether this scenario says anything about this peer: only PostgreSQL holds a snapshot, or crashes here."""
    return not scenario.postgresql_only or peer.server == "postgresql"
