"""From COMMIT to the first line of the handler, in an idle worker that is another process.

Measured: a client enqueues 20 jobs a second, one per transaction, at random distances (25 to 75 ms, so that nothing
keeps step); the handler writes down when it began. The clock is the machine's monotonic one, the same in both. The
figures begin when COMMIT has returned to the application; `from send` begins before it is sent, and so includes the
server's flush. A handler that begins before the client has its answer counts as zero.

With NOTIFY off the worker is told nothing and finds the jobs by its poll (1 s, jittered): reported, not judged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any

from bench.figures import Figure, Goal
from bench.processes import Process
from bench.run import Run
from bench.samples import percentile
from bench.track import Setup, start_client, start_worker

RATE = 20.0
SECONDS = 30.0


def latency(run: Run) -> list[Figure]:
    """Commit to handler start with NOTIFY and by polling only (E02), at least 200 jobs each at full size."""
    return [
        *_figures(run, "NOTIFY", {}, (Goal(1.5, 0.9, at_most=True), Goal(5.0, at_most=True))),
        *_figures(run, "polling", {"PGQUEUE_NOTIFY": "off"}, (None, None)),
    ]


def _figures(run: Run, how: str, env: dict[str, str], goals: tuple[Goal | None, Goal | None]) -> list[Figure]:
    with (
        run.lab.database() as dsn,
        _environment(env),
        start_worker(dsn, Setup()) as worker,
        start_client(dsn) as client,
    ):
        client.ask(do="pace", rate=RATE, seconds=2.0)
        waits(worker, client.ask(do="pace", rate=RATE, seconds=1.0)["events"])
        events = client.ask(do="pace", rate=RATE, seconds=run.seconds(SECONDS))["events"]
        returned, sent = waits(worker, events)
    return [
        Figure("latency", f"{how} p50 of {len(events)}", percentile(returned, 50), "ms", goals[0]),
        Figure("latency", f"{how} p99", percentile(returned, 99), "ms", goals[1]),
        Figure("latency", f"{how} max", max(returned), "ms"),
        Figure("latency", f"{how} p50 from send", percentile(sent, 50), "ms"),
    ]


def waits(worker: Process, events: list[Any]) -> tuple[list[float], list[float]]:
    """Milliseconds from COMMIT (returned, sent) to the start of each of these jobs."""
    started = collect(worker, {id for id, _, _ in events})
    returned = [max(0.0, started[id] - at) * 1e3 for id, _, at in events]
    return returned, [(started[id] - at) * 1e3 for id, at, _ in events]


def collect(worker: Process, ids: set[int], patience: float = 60.0) -> dict[int, float]:
    """When each of these jobs began; RuntimeError if some never do."""
    started: dict[int, float] = {}
    for _ in range(int(patience / 0.25)):
        started.update(worker.ask()["starts"])
        if ids <= started.keys():
            return started
        sleep(0.25)
    raise RuntimeError(f"{len(ids - started.keys())} jobs did not start within {patience:g} s")


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables for the processes started inside."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
