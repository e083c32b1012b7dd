"""1,000 schedules, one tick a minute each, spread over the minute and all at once.

Late is the time from the tick's own, by the server's clock, which is this machine's, to the first line of its handler.
CPU is what worker and server use together in these minutes, less what the same idle worker has used in a minute before;
the jobs that the ticks become are in it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import sleep

import psycopg

from bench.figures import Figure, Goal
from bench.processes import Process
from bench.run import Run
from bench.samples import percentile
from bench.tasks import tick
from bench.track import Setup, start_worker
from pgqueue import Cron
from pgqueue.client import schedules

SCHEDULES = 1_000
MINUTES, IDLE, SETTLE = 3.0, 60.0, 10.0


def at_once(run: Run) -> list[Figure]:
    """1,000 schedules that tick at the same second of each minute: how late, and how much CPU."""
    return _figures(run, "ticks-at-once", lambda number: "0 * * * * *")


def spread(run: Run) -> list[Figure]:
    """1,000 schedules that tick once a minute each, spread over its seconds: how late, and how much CPU."""
    return _figures(run, "ticks-spread", lambda number: f"{number % 60} * * * * *")


def _figures(run: Run, name: str, line: Callable[[int], str]) -> list[Figure]:
    number, seconds = SCHEDULES, max(61.0, run.seconds(60.0 * MINUTES))
    with run.lab.database() as dsn, start_worker(dsn, Setup()) as worker:
        sleep(run.seconds(SETTLE))
        idle = _share(run, worker, run.seconds(IDLE))
        with psycopg.connect(dsn) as conn:
            for each in range(number):
                schedules.add(conn, f"bench {each}", Cron(line(each)), tick)
        sleep(run.seconds(SETTLE))
        worker.ask()
        busy = _share(run, worker, seconds)
        late = worker.ask()["late"]
    return [
        Figure(name, f"late, p50 of {len(late)} ticks", 1e3 * percentile(late, 50), "ms"),
        Figure(name, "late, p99", 1e3 * percentile(late, 99), "ms", Goal(1_000.0, at_most=True)),
        Figure(name, "late, max", 1e3 * max(late), "ms"),
        Figure(name, "ticks made", len(late) / (number * seconds / 60), "", Goal(0.6)),
        Figure(name, "CPU of one core, more than idle", 100 * (busy - idle), "%", Goal(1.0, at_most=True)),
        Figure(name, "CPU of one core, idle", 100 * idle, "%"),
    ]


def _share(run: Run, worker: Process, seconds: float) -> float:
    """Of a core, what the worker and the server use together."""
    before = worker.cpu() + run.lab.cpu()
    sleep(seconds)
    return (worker.cpu() + run.lab.cpu() - before) / seconds
