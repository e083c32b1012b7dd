"""What people wait for when they ask how things stand, with ten million jobs waiting and ten million finished.

Measured: the functions behind `pgqueue status` and the first page of `pgqueue jobs`, on one open connection with the
settings of a command, the first call (which learns the tables) included; then the whole command, a process of its own
from its start to its end. The filters are of the dear kind: a search gives up at 20,000 jobs, so each but the states
asks for what none of the newest has.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import monotonic
from typing import Any

import psycopg

from bench.figures import Figure, Goal
from bench.history import FINISHED, finish
from bench.processes import ROOT, compiled
from bench.run import Run
from bench.track import FILL
from pgqueue.admin import limits, queries

WAITING = 10_000_000
SMALL = 1_000  # the queue that was filled first
TIMES = 7  # at least

Conn = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A command, and the filters of the function behind it; None: the command is `status`."""

    name: str
    filters: Mapping[str, str] | None

    @property
    def goal(self) -> Goal:
        return Goal(200 if self.filters is None else 100, at_most=True)

    @property
    def arguments(self) -> list[str]:
        if self.filters is None:
            return ["status"]
        return ["jobs", *(word for name, value in self.filters.items() for word in (f"--{name}", value))]

    def ask(self, conn: Conn) -> None:
        """As the command does (cli/status.py, cli/jobs.py), in one transaction."""
        with conn.transaction():
            if self.filters is None:
                queries.status(conn)
                limits.undeclared(conn)
            else:
                queries.search(conn, **self.filters, limit=20)  # type: ignore[arg-type]


QUESTIONS = (
    Question("status", None),
    Question("jobs", {}),
    Question("jobs --state failed", {"state": "failed"}),
    Question("jobs --task", {"task": "app.nobody_knows"}),
    Question("jobs --queue", {"queue": "small"}),
    Question("jobs --key", {"key": "account:4"}),
)


def reading(run: Run) -> list[Figure]:
    """`pgqueue status` and the first page of `pgqueue jobs` beside 10,000,000 jobs waiting and as many finished."""
    times = max(TIMES, run.rounds)
    with run.lab.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            _wait(conn, run.jobs(WAITING))
            finish(conn, run.jobs(FINISHED))
        # As cli/database.py connects, and sets its transaction.
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None, options="-c jit=off") as conn:
            asked = [_times(partial(each.ask, conn), times) for each in QUESTIONS]
        with compiled() as env:
            _command(dsn, QUESTIONS[0], env)
            whole = [_times(partial(_command, dsn, each, env), times) for each in QUESTIONS]
    return [
        figure
        for question, open_connection, command in zip(QUESTIONS, asked, whole, strict=True)
        for figure in (
            Figure("reading", f"{question.name}, p50", median(open_connection), "ms", question.goal),
            Figure("reading", f"{question.name}, max", max(open_connection), "ms"),
            Figure("reading", f"{question.name}, all", median(command), "ms"),
        )
    ]


def _wait(conn: Conn, jobs: int) -> None:
    """So many available jobs: a small queue first, then three of which one has nearly all."""
    small, tenth = min(SMALL, jobs // 10), jobs // 10
    for queue, rows in {"small": small, "mail": tenth, "reports": tenth, "bench": jobs - 2 * tenth - small}.items():
        conn.execute(FILL, ["bench.noop", queue, rows])


def _command(dsn: str, question: Question, env: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "pgqueue", *question.arguments, "--dsn", dsn]
    subprocess.run(command, check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _times(do: Callable[[], None], times: int) -> list[float]:
    """Milliseconds of each of so many calls."""
    found = []
    for _ in range(times):
        began = monotonic()
        do()
        found.append((monotonic() - began) * 1e3)
    return found
