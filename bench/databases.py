"""Several databases in one worker process: what twenty cost that have nothing to do, and what one does to the others.

Measured is `pgqueue work` itself, as a process of its own. A wait is what the database says of a job: from the begin of
its transaction to its start. `apart` compares the waits in two databases by four phases, in turn in each round: the
third database is there, it is away, it was away when the process started, it has a backlog. It lies on a server of its
own, which is stopped and started. The backlog is one of jobs that wait for a millisecond each, and one of no-op jobs:
these keep the event loop of the process busy, which is that of all databases.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from statistics import median
from time import monotonic, sleep
from typing import Any

import psutil
import psycopg

import pgqueue
from bench.figures import Figure, Goal
from bench.processes import ROOT, compiled
from bench.run import Run
from bench.samples import percentile
from bench.server import Lab
from bench.tasks import QUEUE, millisecond, noop
from bench.track import FILL, start_client
from pgqueue.database import migrations

MANY = 20
SETTLE, SECONDS = 15.0, 60.0
RATE, PHASE = 20.0, 20.0
BACKLOG = 300_000
PATIENCE = 120.0
EVERY = 0.02

# By phase: p99 over that of the phase in which all are there.
RATIOS = {
    "away": Goal(1.5, at_most=True),
    "from start": Goal(1.5, at_most=True),
    "1 ms jobs": Goal(2, at_most=True),
    "no-op jobs": Goal(2, at_most=True),
}

WORKS = "SELECT count(*) FROM pgqueue.worker WHERE state = 'running' AND dead_at IS NULL"
DONE = "SELECT count(*) FROM pgqueue.job_done WHERE id = ANY (%s)"
WAITS = "SELECT extract(epoch FROM started_at - enqueued_at)::float8 * 1000 FROM pgqueue.job_done WHERE id = ANY (%s)"


def databases(run: Run) -> list[Figure]:
    """One process that works for 20 databases and has nothing to do: threads, connections, memory, CPU of each."""
    with ExitStack() as stack:
        many = max(2, round(MANY * min(1.0, run.scale)))
        dsns = {f"d{number}": stack.enter_context(_numbered(run.lab, number)) for number in range(many)}
        process = stack.enter_context(_working(dsns))
        conns = [stack.enter_context(closing(psycopg.connect(dsn, autocommit=True))) for dsn in dsns.values()]
        for conn in conns:  # each worker has worked
            handles = pgqueue.enqueue_many(conn, [noop.new() for _ in range(100)])
            _wait(conn, [handle.id for handle in handles])
            conn.close()
        sleep(run.seconds(SETTLE))
        before = _cpu(process)
        sleep(run.seconds(SECONDS))
        used = (_cpu(process) - before) / run.seconds(SECONDS)
        threads, memory = process.num_threads(), process.memory_info().rss / (1 << 20)
        connections = sum(map(run.lab.connections, dsns.values()))
    n = len(dsns)
    return [
        Figure("databases", f"threads of each of {n}", threads / n, "", Goal(3, at_most=True)),
        Figure("databases", "connections of each", connections / n, "", Goal(4, at_most=True)),
        Figure("databases", "memory of the process", memory, "MiB"),
        Figure("databases", "CPU of each, of one core", 100 * used / n, "%"),
    ]


def apart(run: Run) -> list[Figure]:
    """The waits in two databases while a third is away, was away at the start, or has a backlog of 300,000 jobs."""
    p99: dict[str, list[float]] = {}
    back: list[float] = []
    with run.lab.twin() as twin:
        for _ in range(run.rounds):
            for phase, waits in _round(run, twin, back).items():
                p99.setdefault(phase, []).append(percentile(waits, 99))
    alone = p99.pop("alone")
    figures = [Figure("databases-apart", "p99, all there", median(alone), "ms")]
    for phase, goal in RATIOS.items():
        ratio = median(each / other for each, other in zip(p99[phase], alone, strict=True))
        figures.append(Figure("databases-apart", f"ratio, {phase}", ratio, "", goal))
    return [*figures, Figure("databases-apart", "back, first job", median(back), "s", Goal(2, at_most=True))]


def _round(run: Run, twin: Lab, back: list[float]) -> dict[str, list[float]]:
    """The waits in milliseconds of each phase, all in one life of the databases and two of the process."""
    with ExitStack() as stack:
        near = {name: stack.enter_context(_numbered(run.lab, number)) for number, name in enumerate(("a", "b"))}
        far = stack.enter_context(_numbered(twin, 2))
        both = _Both(run, near, stack)
        waits: dict[str, list[float]] = {}
        with _working(near | {"c": far}):
            both.waits()  # what is planned and cached once
            waits["alone"] = both.waits()
            with twin.away():
                waits["away"] = both.waits()
            back.append(_first_job(far))
            with closing(psycopg.connect(far, autocommit=True)) as conn:
                for name, task, share in (("1 ms jobs", millisecond, 1.0), ("no-op jobs", noop, 0.25)):
                    conn.execute(FILL.encode(), [task.name, QUEUE, run.jobs(BACKLOG)])
                    pgqueue.enqueue(conn, noop)  # tells the worker
                    waits[name] = both.waits(share)
                    conn.execute("DELETE FROM pgqueue.job_available")
        with twin.away(), _working(near | {"c": far}, wait_for=near):
            both.waits()
            waits["from start"] = both.waits()
        return waits


@contextmanager
def _numbered(lab: Lab, number: int) -> Iterator[str]:
    """A database with this number."""
    with lab.database() as dsn:
        migrations.migrate(dsn, number=number)
        yield dsn


class _Both:
    """Enqueues into two databases at the same pace, and reads how long the jobs have waited."""

    def __init__(self, run: Run, dsns: Mapping[str, str], stack: ExitStack) -> None:
        self._seconds = run.seconds(PHASE)
        self._clients = [stack.enter_context(start_client(dsn)) for dsn in dsns.values()]
        self._conns = [stack.enter_context(closing(psycopg.connect(dsn, autocommit=True))) for dsn in dsns.values()]

    def waits(self, share: float = 1.0) -> list[float]:
        """Milliseconds that each job of one phase, or of a share of it, has waited."""
        for client in self._clients:
            client.say(do="pace", rate=RATE, seconds=share * self._seconds)
        ids = [[id for id, *_ in client.hear()["events"]] for client in self._clients]
        found: list[float] = []
        for conn, mine in zip(self._conns, ids, strict=True):
            _wait(conn, mine)
            found += [wait for (wait,) in conn.execute(WAITS.encode(), [mine])]
        return found


def _first_job(dsn: str) -> float:
    """Seconds from now, as the server has just come back, until a job has run there."""
    began = monotonic()
    with closing(psycopg.connect(dsn, autocommit=True)) as conn:
        _wait(conn, [pgqueue.enqueue(conn, noop).id])
    return monotonic() - began


@contextmanager
def _working(dsns: Mapping[str, str], wait_for: Mapping[str, str] | None = None) -> Iterator[psutil.Process]:
    """`pgqueue work` for these databases, ready in those to wait for."""
    options = [word for name, dsn in dsns.items() for word in ("--database", f"{name}={dsn}")]
    command = [sys.executable, "-m", "pgqueue", "work", "bench.tasks", "-q", QUEUE, "--log-level", "error", *options]
    with compiled() as env:
        env = {name: value for name, value in env.items() if not name.startswith("PGQUEUE_")}
        process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
        try:
            for name, dsn in (wait_for or dsns).items():
                with closing(psycopg.connect(dsn, autocommit=True)) as conn:
                    _until(partial(_works, conn), f"the worker of {name} does not work", process)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(conn: psycopg.Connection[Any], ids: list[int]) -> None:
    """Wait until these jobs are completed."""
    _until(lambda: _one(conn, DONE, ids) == len(ids), "the jobs are not completed")


def _until(over: Callable[[], bool], what: str, process: subprocess.Popen[bytes] | None = None) -> None:
    until = monotonic() + PATIENCE
    while not over():
        if process is not None and (code := process.poll()) is not None:
            raise RuntimeError(f"pgqueue work has ended with exit code {code}")
        if monotonic() > until:
            raise RuntimeError(f"{what} within {PATIENCE:g} s")
        sleep(EVERY)


def _works(conn: psycopg.Connection[Any]) -> bool:
    return _one(conn, WORKS) == 1


def _one(conn: psycopg.Connection[Any], query: str, *params: object) -> int:
    [[value]] = conn.execute(query.encode(), params).fetchall()
    return int(value)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
