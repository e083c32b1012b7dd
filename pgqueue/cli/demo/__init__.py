"""`pgqueue demo`: a small shop on a real PostgreSQL, one worker killed on the way, and the account at the end.

Called by the CLI. It touches no database but its own. In order:
1. It starts the embedded server in its own directory, and migrates.
2. It starts two workers, with `pgqueue work` as an operator would.
3. Two producers take orders in transactions, some of which roll back.
4. It kills the busier worker with -9.
5. It waits until no job is left, and settles the account from the shop's own tables.

Nothing is left behind: every process it started is stopped on the way out. If the demo itself is killed with -9, its
workers notice that their stdin ends, and the server's watchman notices that its user is gone.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg

from pgqueue.cli.demo.account import TABLES, Account, settle
from pgqueue.cli.demo.processes import (
    CONCURRENCY,
    LEASE,
    Producer,
    Worker,
    all_at_work,
    fresh_database,
    running_server,
    running_worker,
)
from pgqueue.cli.json_document import document
from pgqueue.config import config
from pgqueue.database.statements import in_schema
from pgqueue.errors import Error
from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic

WORKERS = 2
PRODUCERS = 2
KILL_AT = 0.4  # of the time orders are taken
LOOK_SECONDS = 0.1
START_SECONDS = 60.0  # if a worker has not registered after this time, it has failed
DRAIN_SECONDS = 60.0  # jobs not run this long after the last order count as lost

COUNTS = """
SELECT count(*) FILTER (WHERE state = 'completed'),
       count(*) FILTER (WHERE state = 'running'),
       count(*) FILTER (WHERE state IN ('available', 'scheduled', 'blocked'))
FROM pgqueue.job
"""
BUSIEST = """
SELECT w.id, w.pid, count(r.id)
FROM pgqueue.worker w LEFT JOIN pgqueue.job_running r ON r.worker_id = w.id
GROUP BY w.id ORDER BY count(r.id) DESC, w.id LIMIT 1
"""
HELD = "SELECT count(*) FROM pgqueue.job_running WHERE worker_id = %s"


def run(*, seconds: float, directory: str | None, json: bool) -> int:
    """Take orders for `seconds`, kill a worker, print the account. Return 0 if it balances, else 1; 130 if interrupted.

    The server's files are in `directory` and stay there, for a look afterwards. Without it they are in a temporary
    directory, which is removed. With `json` only the account is printed. Raises Error if the server cannot be started.
    """
    say = Teller(quiet=json)
    try:
        with _signals_as_exceptions(), ExitStack() as stack:
            server = stack.enter_context(running_server(directory))
            dsn = fresh_database(server)
            say.line(f"PostgreSQL {_version(dsn)} in {server.cluster.directory}, a database of its own, migrated")
            account = _play(dsn, server.cluster.directory, seconds, say, stack)
    except KeyboardInterrupt:
        say.line("interrupted: workers and server are stopped")
        return 130
    if json:
        print(document([asdict(account) | {"balances": account.balances}]))
    else:
        verdict = "The account balances." if account.balances else "The account does NOT balance."
        print("", *account.lines(), verdict, sep="\n", flush=True)
    return 0 if account.balances else 1


def _play(dsn: str, directory: Path, seconds: float, say: Teller, stack: ExitStack) -> Account:
    """The demo in its order: workers, orders, a kill in the middle, no more orders, an empty queue, the account."""
    from pgqueue.cli.demo import (
        shop,
    )  # imported here, because it declares tasks and a lifespan

    conn = stack.enter_context(psycopg.connect(dsn, autocommit=True))
    conn.execute(TABLES.encode())
    workers = [stack.enter_context(running_worker(dsn, directory, number)) for number in range(1, WORKERS + 1)]
    watch = Watch(conn, workers, directory, say)
    watch.until_announced(WORKERS)
    producers = [Producer(dsn, number) for number in range(PRODUCERS)]
    with all_at_work(producers):
        watch.start(producers)
        watch.for_seconds(seconds * KILL_AT)
        watch.kill_the_busier()
        watch.for_seconds(seconds * (1 - KILL_AT))
    say.line("no more orders; waiting for the last jobs")
    return settle(
        conn,
        [task.name for task in shop.TASKS],
        committed=sum(producer.committed for producer in producers),
        rolled_back=sum(producer.rolled_back for producer in producers),
        completed=watch.until_empty(),
    )


class Watch:
    """Looks at the queue ten times a second, and prints what it sees."""

    def __init__(self, conn: psycopg.Connection[Any], workers: list[Worker], directory: Path, say: Teller) -> None:
        self._conn = conn
        self._workers = {worker.pid: worker for worker in workers}
        self._directory = directory
        self._say = say
        self._pause = threading.Event()
        self._started = monotonic()
        self._producers: list[Producer] = []
        self._victim: tuple[int, int, float] | None = None  # its worker id, its jobs, when it died

    def start(self, producers: list[Producer]) -> None:
        self._producers, self._started = producers, monotonic()

    def until_announced(self, number: int) -> None:
        """Wait until `number` workers have registered. If one ended instead, raise Error with the end of its log."""
        deadline = monotonic() + START_SECONDS
        while _one_row(self._conn, "SELECT count(*) FROM pgqueue.worker")[0] < number:
            for worker in self._workers.values():
                if not worker.lives or monotonic() > deadline:
                    raise Error(f"demo: worker {worker.number} did not start: {worker.last_words()}")
            self._pause.wait(LOOK_SECONDS)
        names = ", ".join(f"worker {worker.number} (pid {pid})" for pid, worker in self._workers.items())
        self._say.line(f"{names}; lease {LEASE}, concurrency {CONCURRENCY}, logs beside the server's")

    def for_seconds(self, seconds: float) -> None:
        until = monotonic() + seconds
        while monotonic() < until:
            self._look()
            self._pause.wait(min(LOOK_SECONDS, max(0.0, until - monotonic())))

    def kill_the_busier(self) -> None:
        """Send kill -9 to the worker with more running jobs. It is not started again."""
        worker_id, pid, _ = _one_row(self._conn, BUSIEST)
        worker = self._workers[pid]
        worker.process.kill()
        worker.process.wait()
        [jobs] = _one_row(self._conn, HELD, [worker_id])
        self._victim = (worker_id, jobs, monotonic())
        middle = f"in the middle of {plural(jobs, 'job', 'jobs')}"
        self._say.line(f"kill -9 of worker {worker.number} (pid {pid}) {middle}; it stays dead")

    def until_empty(self) -> int:
        """Wait until no job is left, or the time is over; return how many were completed."""
        deadline = monotonic() + DRAIN_SECONDS
        completed, left = self._look()
        while left and monotonic() < deadline and any(worker.lives for worker in self._workers.values()):
            self._pause.wait(LOOK_SECONDS)
            completed, left = self._look()
        if left:
            self._say.line(f"{plural(left, 'job is', 'jobs are')} left; what the workers said last:")
            for worker in self._workers.values():
                self._say.line(worker.last_words())
        return completed

    def _look(self) -> tuple[int, int]:
        """Print the progress; return how many jobs were completed, and how many are left."""
        completed, running, waiting = _one_row(self._conn, COUNTS)
        self._notice_rescue()
        committed = sum(producer.committed for producer in self._producers)
        rolled_back = sum(producer.rolled_back for producer in self._producers)
        self._say.progress(
            f"{monotonic() - self._started:4.1f} s   orders: {committed} committed, {rolled_back} rolled back   "
            f"jobs: {completed} run, {running} running, {waiting} waiting"
        )
        return int(completed), int(running + waiting)

    def _notice_rescue(self) -> None:
        if self._victim is None:
            return
        worker_id, jobs, died = self._victim
        if _one_row(self._conn, HELD, [worker_id])[0] == 0:
            self._victim = None
            its = plural(jobs, "of its jobs was", "of its jobs were")
            self._say.line(f"{its} given to the other worker {monotonic() - died:.1f} s after its death")


class Teller:
    """Prints the progress: on a terminal one line that is overwritten, else a plain line each second."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stdout.isatty()
        self._next = 0.0

    def line(self, text: str) -> None:
        """Print an event: a line that stays."""
        if not self._quiet:
            print(f"\r\x1b[K{text}" if self._terminal else text, flush=True)

    def progress(self, text: str) -> None:
        """Print the progress."""
        if self._quiet:
            return
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", flush=True)
        elif monotonic() >= self._next:
            self._next = monotonic() + 1.0
            print(text, flush=True)


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the demo as Ctrl-C does: with every clean-up."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _version(dsn: str) -> str:
    with psycopg.connect(dsn) as conn:
        return conn.info.parameter_status("server_version") or "?"


def _one_row(conn: psycopg.Connection[Any], sql: str, params: list[Any] | None = None) -> tuple[Any, ...]:
    row = conn.execute(in_schema(sql, config().schema).encode(), params).fetchone()
    assert row is not None
    return tuple(row)
