"""A steady flow of jobs: beside a held horizon, and beside an application that loads the database.

A client commits jobs at a given rate; the handler writes down when it began. Waiting time and
backlog come from these two lists alone, so nobody asks the database while it is measured. The claim's cost is the
buffers the worker's fetching session touched per job, as in flat.py.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import sleep
from typing import Any

import psycopg

from bench.figures import Figure, Goal
from bench.holders import holding
from bench.latency import collect
from bench.processes import Process
from bench.run import Run
from bench.samples import percentile
from bench.server import Lab, buffers
from bench.track import SETTLE_SECONDS, Setup, start_client, start_worker

RATES = {50.0: 1, 1_000.0: 10}  # jobs/s, and how many of them one transaction enqueues
_TWICE = {1_000.0: Goal(2.0, at_most=True)}  # 50/s leave a p99 to a few jobs: it has only the bound
PGBENCH_SECONDS, PGBENCH_RATE = 20.0, 200.0


@dataclass(frozen=True, slots=True)
class Flow:
    """What happened to the jobs of one flow: ms from COMMIT to start, in order; the largest backlog; the true rate."""

    waits: list[float]
    backlog: int
    rate: float
    buffers: float | None = None

    def p99(self) -> float:
        return percentile(self.waits, 99)

    def slope(self) -> float:
        """p99 of the last quarter over that of the first."""
        quarter = max(1, len(self.waits) // 4)
        return percentile(self.waits[-quarter:], 99) / max(0.1, percentile(self.waits[:quarter], 99))


def held_load(run: Run) -> list[Figure]:
    """E14, F08: 50 and 1,000 jobs/s beside a `--holder` for `--held-seconds` (60 s; the long run takes 3,600).

    The same flow goes at the same time through another server, where nobody holds (a writer would be felt in each
    database of one server): whatever else the machine does, it does to both. Bounded means: p99 of the wait at most
    twice that of the free flow (or 5 ms), and never more than half a second's worth of jobs waiting.
    """
    figures = []
    seconds = max(2.0, run.held_seconds * min(1.0, run.scale))
    for rate, together in RATES.items():
        free, held = _flows(run, rate, seconds, together)
        name, bound = f"{rate:g}/s", round(max(5.0, 2 * free.p99()), 1)
        figures += [
            Figure("held-load", f"{name} free, p99", free.p99(), "ms"),
            Figure("held-load", f"{name} held, p99", held.p99(), "ms", Goal(bound, at_most=True)),
            Figure("held-load", f"{name} p99, held/free", held.p99() / free.p99(), "x", _TWICE.get(rate)),
            Figure("held-load", f"{name} p99 last/first", held.slope(), "x"),
            Figure("held-load", f"{name} free, backlog", free.backlog, ""),
            Figure("held-load", f"{name} held, backlog", held.backlog, "", Goal(rate / 2, at_most=True)),
            Figure("held-load", f"{name} enqueued really", held.rate, "/s"),
        ]
        if held.buffers and free.buffers:
            figures.append(Figure("held-load", f"{name} buffers, held", held.buffers / free.buffers, "x"))
    return figures


def beside_pgbench(run: Run) -> list[Figure]:
    """E16: 200 jobs/s beside `pgbench` (TPC-B-like, scale 10, 4 clients, as fast as it goes). Reported, not judged.

    The application alone, the queue alone, then both at once, in turn: what the queue costs the application in
    transactions per second, and what the application does to the queue's waiting time.
    """
    seconds = run.seconds(PGBENCH_SECONDS)
    alone, beside, quiet, loud = [], [], [], []
    for _ in range(min(run.rounds, 3)):
        with ExitStack() as stack:
            dsn = stack.enter_context(run.lab.database())
            _pgbench(run, dsn, "-i", "-q", "-s", "10")
            worker = stack.enter_context(start_worker(dsn, Setup()))
            client = stack.enter_context(start_client(dsn))
            client.ask(do="pace", rate=PGBENCH_RATE, seconds=1.0)
            alone.append(_tps(_pgbench(run, dsn, *_load(seconds))))
            quiet.append(_paced(worker, client, PGBENCH_RATE, seconds).p99())
            client.say(do="pace", rate=PGBENCH_RATE, seconds=seconds)
            beside.append(_tps(_pgbench(run, dsn, *_load(seconds))))
            loud.append(_waited(worker, client.hear()["events"], seconds).p99())
    share = median(both / one for both, one in zip(beside, alone, strict=True))
    return [
        Figure("beside-pgbench", "TPS alone", median(alone), "/s"),
        Figure("beside-pgbench", "TPS beside jobs", median(beside), "/s"),
        Figure("beside-pgbench", "TPS kept", share, "x"),
        Figure("beside-pgbench", "p99, queue alone", median(quiet), "ms"),
        Figure("beside-pgbench", "p99, both", median(loud), "ms"),
    ]


class _Stream:
    """One flow: a database, a client and a worker, and somebody who holds the horizon beside them, or nobody."""

    def __init__(self, lab: Lab, rate: float, together: int, holder: str | None, stack: ExitStack) -> None:
        self._rate, self._together = rate, together
        dsn = stack.enter_context(lab.database())
        self._worker = stack.enter_context(start_worker(dsn, Setup()))
        self._client = stack.enter_context(start_client(dsn))
        self._conn = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        _paced(self._worker, self._client, rate, 1.0, together)
        stack.enter_context(holding(dsn, holder))
        sleep(SETTLE_SECONDS)
        self._before = buffers(self._conn, "pgqueue fetch")

    def begin(self, seconds: float) -> None:
        self._client.say(do="pace", rate=self._rate, seconds=seconds, together=self._together)

    def end(self, seconds: float) -> Flow:
        flow = _waited(self._worker, self._client.hear(timeout=2 * seconds + 300)["events"], seconds)
        sleep(SETTLE_SECONDS)
        after = buffers(self._conn, "pgqueue fetch")
        touched = None if after is None or self._before is None else (after - self._before) / len(flow.waits)
        return Flow(flow.waits, flow.backlog, flow.rate, touched)


def _flows(run: Run, rate: float, seconds: float, together: int) -> tuple[Flow, Flow]:
    """The flow, free and beside the holder, at the same time."""
    with run.lab.twin() as other, ExitStack() as stack:
        free = _Stream(other, rate, together, None, stack)
        held = _Stream(run.lab, rate, together, run.holder, stack)
        free.begin(seconds)
        held.begin(seconds)
        return free.end(seconds), held.end(seconds)


def _paced(worker: Process, client: Process, rate: float, seconds: float, together: int = 1) -> Flow:
    client.say(do="pace", rate=rate, seconds=seconds, together=together)
    return _waited(worker, client.hear(timeout=2 * seconds + 300)["events"], seconds)


def _waited(worker: Process, events: list[Any], seconds: float) -> Flow:
    events = sorted(events, key=lambda event: event[2])
    took = max(seconds, events[-1][2] - events[0][2])
    started = collect(worker, {id for id, _, _ in events})
    waits = [max(0.0, started[id] - at) * 1e3 for id, _, at in events]
    return Flow(waits, backlog([(at, started[id]) for id, _, at in events]), len(events) / took)


def backlog(jobs: list[tuple[float, float]]) -> int:
    """The most jobs that were committed and not started at one time."""
    steps = sorted([(at, 1) for at, _ in jobs] + [(max(at, start), -1) for at, start in jobs])
    most = waiting = 0
    for _, step in steps:
        waiting += step
        most = max(most, waiting)
    return most


def _load(seconds: float) -> tuple[str, ...]:
    return ("-n", "-c", "4", "-j", "1", "-T", str(max(1, round(seconds))))


def _pgbench(run: Run, dsn: str, *arguments: str) -> str:
    command = [str(run.lab.bin_path / "pgbench"), *arguments, dsn]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def _tps(output: str) -> float:
    found = re.search(r"tps = ([\d.]+)", output)
    if found is None:
        raise RuntimeError(f"pgbench said no tps:\n{output}")
    return float(found[1])
