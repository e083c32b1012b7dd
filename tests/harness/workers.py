"""Workers for the tests: real processes with tasks of the test's own, and ways to wait for what happens.

A test gives the source of a tasks module; the process imports it, works, and reports by lines on its standard output:
`say("ran", job=7)` in a handler is an event that `process.event("ran", job=7)` waits for. Nothing here sleeps a guess:
`until` looks again until a condition holds, and fails with what it saw if it never does.

As a program (`python workers.py MODULE OPTIONS`) it is the worker process itself.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import forks
import psycopg
from worker_states import Hands, worker_state

from pgqueue.client.tasks import Task
from pgqueue.database import migrations, schema_locks
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import texts
from pgqueue.jobs.job import Job
from pgqueue.worker.fetch.fetcher import Fetcher
from pgqueue.worker.fetch.kinds import Kind
from pgqueue.worker.fetch.poison_jobs import MORE_CRASHES, ONE_CRASH
from pgqueue.worker.liveness.registration import register
from pgqueue.worker.run.slots import Room
from pgqueue.worker.worker import Worker

T = TypeVar("T")
LOOK = 0.01  # seconds between looks at a condition that announces itself nowhere


# In the worker process -----------------------------------------------------------------------------------------------


def say(event: str, **facts: Any) -> None:
    """Report an event to the test: one line, written at once, whole even from several threads."""
    os.write(1, (json.dumps({"event": event, "at": monotonic(), **facts}) + "\n").encode())


async def serve(options: dict[str, Any]) -> None:
    worker = Worker(**options)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGUSR1, worker.quiet)
    await worker.start()
    say("ready", worker=worker.worker_id, pid=os.getpid())
    ended = asyncio.ensure_future(worker.run())
    await asyncio.wait([ended, asyncio.ensure_future(stopping.wait())], return_when=asyncio.FIRST_COMPLETED)
    fenced = worker.services.completer.fenced
    left = await worker.stop(float(os.environ.get("GRACE", "25")))
    say("stopped", left=left, fenced=fenced)
    if ended.done():
        ended.result()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    spec = importlib.util.spec_from_file_location(Path(sys.argv[1]).stem, sys.argv[1])
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    if os.environ.get("LOOP") == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(json.loads(sys.argv[2])))
    return asyncio.run(serve(json.loads(sys.argv[2])))


# In the test ---------------------------------------------------------------------------------------------------------


class Process:
    """A worker process; it is killed at the end of the test if it still lives."""

    def __init__(self, module: Path, options: dict[str, Any], environment: dict[str, str]) -> None:
        self.log = module.with_suffix(f".{monotonic()}.log")
        with self.log.open("wb") as log:
            self.process = forks.start(
                forks.WORKER,
                str(module),
                json.dumps(options),
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | environment,
            )
        self.pid = self.process.pid
        self.events: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def event(self, name: str, seconds: float = 60.0, **facts: Any) -> dict[str, Any]:
        """Wait for an event with these facts and return it."""
        wanted = {"event": name, **facts}.items()
        deadline = monotonic() + seconds
        with self._news:
            while True:
                for event in self.events:
                    if wanted <= event.items():
                        return event
                if not self._news.wait(max(0.0, deadline - monotonic())) and monotonic() >= deadline:
                    raise AssertionError(f"no {dict(wanted)} within {seconds} s; {self.events[-20:]}\n{self.written()}")

    def all(self, name: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event["event"] == name]

    def written(self) -> str:
        """What it logged."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM, and wait; its exit code."""
        self.process.terminate()
        return self.wait(seconds)

    def wait(self, seconds: float = 60.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(30)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._reader.join(30)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            with self._news:
                self.events.append(event)
                self._news.notify_all()


class Workers:
    """Starts worker processes with the tasks of one module."""

    def __init__(self, directory: Path, dsn: str, source: str) -> None:
        self._module = directory / f"tasks_{directory.name.replace('-', '_')}.py"
        self._module.write_text(f"import asyncio, os, time\nimport pgqueue\nfrom workers import say\n{source}")
        self._dsn = dsn
        self.all: list[Process] = []

    def start(self, environment: dict[str, str] | None = None, **options: Any) -> Process:
        """Start one and return at once; it says `ready` when it works."""
        process = Process(self._module, {"dsn": self._dsn, **options}, environment or {})
        self.all.append(process)
        return process

    def ready(self, number: int = 1, **options: Any) -> list[Process]:
        """Start some and wait until they work."""
        started = [self.start(**options) for _ in range(number)]
        for process in started:
            process.event("ready")
        return started


@contextmanager
def workers(directory: Path, dsn: str, source: str) -> Iterator[Workers]:
    """Worker processes for this `source`, all gone at the end."""
    made = Workers(directory, dsn, source)
    try:
        yield made
    finally:
        for process in made.all:
            process.close()


@asynccontextmanager
async def work(dsn: str, *tasks: Task[..., Any], **options: Any) -> AsyncIterator[Worker]:
    """A worker in the test's own process, with these tasks; stopped without patience at the end."""
    worker = Worker(dsn=dsn, tasks=tasks, **options)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop(1.0)


async def until(look: Callable[[], T | Awaitable[T]], seconds: float = 50.0) -> T:
    """Look until the answer is true, and return it. Less than a poll of 60 s: what is told must not wait for that."""
    deadline = monotonic() + seconds
    while True:
        answer = look()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return answer
        if monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s, last: {answer!r}")
        await asyncio.sleep(LOOK)


def wait_until(look: Callable[[], T], seconds: float = 120.0) -> T:
    """`until` for tests without a loop."""
    deadline = monotonic() + seconds
    while not (answer := look()):
        if monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s, last: {answer!r}")
        sleep(LOOK)
    return answer


async def least(measure: Callable[[], Awaitable[float]], bound: float, rounds: int = 3) -> float:
    """The least of what is measured, in so many rounds at most: the first below the bound ends it.

    For promises in seconds: one round may meet a moment in which the machine does something else.
    """
    found = [await measure()]
    while found[-1] >= bound and len(found) < rounds:
        found.append(await measure())
    return min(found)


class Stalls:
    """How long this machine has let nobody run: a thread sleeps 20 ms again and again, and adds up what is over 50 ms.

    For promises in seconds whose measurement cannot be made twice: the time in which nothing moved is not theirs.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def between(self, since: float, till: float) -> float:
        """What of it fell between these two moments, monotonic; the second is over."""
        return sum(max(0.0, min(end, till) - max(began, since)) for began, end in list(self._spans))

    def _run(self) -> None:
        before, ended = monotonic(), False
        while not ended:
            ended = self._end.wait(0.02)
            since, before = before, monotonic()
            if before - since > 0.07:
                self.seconds += before - since - 0.02
                self._spans.append((since + 0.02, before))


def apply_ddl(dsn: str, sql: str) -> None:
    """Change the schema beside working workers, as migrate does: again when it waits too long or loses a deadlock."""
    for left in reversed(range(schema_locks.ATTEMPTS)):
        try:
            with psycopg.connect(dsn) as conn:
                conn.execute("SET LOCAL lock_timeout = '5s'")
                conn.execute(sql.encode())
            return
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if not left:
                raise


LATER = """-- breaking: {breaking}
ALTER TABLE pgqueue.job ADD COLUMN colour text NOT NULL DEFAULT 'grey';
CREATE INDEX job_running_colour ON pgqueue.job_running (colour) WHERE colour <> 'grey';
CREATE OR REPLACE FUNCTION pgqueue.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    RETURN date_trunc('milliseconds', clock_timestamp());
INSERT INTO pgqueue.migration (version, name, breaking) VALUES ({version}, 'colour', {answer});
"""


def later(*, breaking: bool) -> tuple[str, str]:
    """What might be the next migration, which this pgqueue does not know: its name and its text."""
    version = migrations.files()[-1].version + 1
    answer = str(breaking).lower()
    return f"{version:04}_colour", LATER.format(breaking="yes" if breaking else "no", answer=answer, version=version)


def apply_later(dsn: str, *, breaking: bool) -> str:
    """Apply what might be the next migration; its name."""
    name, sql = later(breaking=breaking)
    apply_ddl(dsn, sql)
    return name


EARLIER = """
DO $$
DECLARE
    made regprocedure;
BEGIN
    FOR made IN SELECT oid FROM pg_proc WHERE pronamespace = 'pgqueue'::regnamespace AND prokind = 'f' LOOP
        EXECUTE format('ALTER FUNCTION %s RENAME TO %I', made, 'later_' || made::oid);
    END LOOP;
END $$
"""
"""Leaves the schema like one of an earlier version: without the functions that statements call."""

HAPPENINGS = (
    "started", "completed", "failed", "retried", "snoozed", "cancelled", "expired", "skipped", "interrupted", "rescued",
)  # fmt: skip
"""What the history counts."""
TOTALS = f"""
    SELECT jsonb_build_object({", ".join(f"'{what}', sum({what})" for what in HAPPENINGS)}) FROM (
        SELECT each.* FROM pgqueue.history_part
        CROSS JOIN LATERAL jsonb_to_recordset(counts) AS each ({" integer, ".join(HAPPENINGS)} integer)
        UNION ALL SELECT {", ".join(HAPPENINGS)} FROM pgqueue.history_minute WHERE state IS NULL) AS every
"""  # noqa: S608


class Eyes:
    """A connection of the test's own that looks at the queue, always in new transactions."""

    def __init__(self, dsn: str) -> None:
        self.conn = psycopg.connect(dsn, autocommit=True)

    def all(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return self.conn.execute(sql.encode(), params or None).fetchall()

    def one(self, sql: str, *params: Any) -> Any:
        """The first value of the first row."""
        rows = self.all(sql, *params)
        return rows[0][0] if rows else None

    def do(self, sql: str, *params: Any) -> int:
        return self.conn.execute(sql.encode(), params or None).rowcount

    def states(self) -> dict[str, int]:
        """How many jobs are in each state."""
        return dict(self.all("SELECT state, count(*)::int FROM pgqueue.job GROUP BY 1"))

    def totals(self) -> dict[str, int]:
        """How many jobs the history counts as what: its parts, and the minutes into which a leader has folded some."""
        found: dict[str, int] = self.one(TOTALS)
        return {what: number for what, number in found.items() if number}

    def happened(self, what: str) -> int:
        """How many jobs the history counts as that."""
        return self.totals().get(what, 0)

    def state(self, job: int) -> str | None:
        found: str | None = self.one("SELECT state FROM pgqueue.job WHERE id = %s", job)
        return found

    def done(self, number: int) -> Callable[[], bool]:
        """Whether so many jobs are completed: a condition for `until`."""
        return lambda: self.one("SELECT count(*) FROM pgqueue.job_done WHERE state = 'completed'") >= number

    def is_in(self, job: int, state: str) -> Callable[[], bool]:
        return lambda: self.state(job) == state

    def backends(self, name: str = "pgqueue %") -> list[tuple[int, str]]:
        """(pid, application_name) of the workers' sessions in this database."""
        return [
            (pid, application)
            for pid, application in self.all(
                "SELECT pid, application_name FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE %s ORDER BY 2",
                name,
            )
        ]

    def known(self) -> set[int]:
        """The pids of the workers' sessions which those who would rescue them could end."""
        return {
            pid
            for (pid,) in self.all(
                "SELECT (known ->> 'pid')::integer FROM pgqueue.worker, jsonb_array_elements(sessions) AS known "
                "JOIN pg_stat_activity ON pid = (known ->> 'pid')::integer"
            )
        }

    def busy(self) -> set[int]:
        """The pids of the workers' sessions that have a transaction open."""
        return {
            pid
            for (pid,) in self.all(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name LIKE 'pgqueue %' AND xact_start IS NOT NULL"
            )
        }

    def terminate(self, name: str) -> int:
        """End the workers' sessions of this name; how many."""
        return len(
            self.all(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = %s",
                name,
            )
        )

    def close(self) -> None:
        self.conn.close()


SOME_TASKS = (
    "x", "a", "b", "c", "k", "t", "plain", "keyed", "late", "waits", "neighbour", "double", "one", "two", "again",
    "between",
)  # fmt: skip
"""What tests call a task that nothing runs."""


class Taker:
    """The taking half of a worker, step by step: registered, with a fetcher, nothing running by itself.

    It takes jobs of `tasks`; without any named of every task that it finds, and its row says so.
    """

    def __init__(
        self, dsn: str, queues: tuple[str, ...] = ("default",), lease: float = 15.0, tasks: Sequence[str] | None = None
    ) -> None:
        self.link = Link(dsn, "pgqueue")
        self.session = Session(self.link, "fetch")
        self.tasks = set(SOME_TASKS if tasks is None else tasks)
        with psycopg.connect(dsn) as conn:
            self.worker_id = register(
                conn, "pgqueue", lease=lease, concurrency=1, version_tag="t", queues=list(queues), tasks=self.tasks
            )
        self._finds = tasks is None
        self.queues = queues
        self.jobs: list[Job] = []
        self.doubts = 0
        self.poison_free = True
        self.state = worker_state(self.link, self.worker_id, self.tasks, queues=queues, lease=lease)
        self.state.in_doubt = self._doubt  # type: ignore[method-assign]
        self.hands = Hands()
        self.hands.to_fetch = lambda: [Room(queues, self.room)]
        self.hands.poison_ranks = lambda: (ONE_CRASH, MORE_CRASHES) if self.poison_free else ()
        self.hands.deliver = self.jobs.extend
        self.fetcher = Fetcher(self.session, self.state, self.hands, self.hands, self.hands)
        self.room = 1000

    async def fetch(self, room: int = 1000) -> list[Job]:
        """One fetch of so many of each kind of jobs that there is, plain ones first; what they claimed."""
        self.jobs.clear()
        self.room = room
        kinds = self._kinds()
        if self.fetcher.kinds.plain not in kinds:
            self.fetcher.kinds.plain.known.update(self.queues)  # as after a fetch that found none
        for kind in kinds:
            if len(self.jobs) < room or not room:
                await self.fetcher._fetch(Room(self.queues, room - len(self.jobs)), kind)
        return list(self.jobs)

    def _kinds(self) -> list[Kind]:
        with psycopg.connect(self.link.dsn) as conn:
            keyed = "SELECT DISTINCT coalesce(lock_key, limit_key, rate_key) IS NOT NULL FROM pgqueue.job_available"
            there = {with_keys for (with_keys,) in conn.execute(keyed.encode()).fetchall()}
            names = {task for (task,) in conn.execute("SELECT DISTINCT task FROM pgqueue.job").fetchall()}
        if self._finds and not self.tasks.issuperset(names):
            self.tasks |= names
            self.know()
        return [
            kind for kind in (self.fetcher.kinds.plain, self.fetcher.kinds.keyed) if kind.keyed in (there or {False})
        ]

    def know(self) -> None:
        """Take jobs of `tasks` from now on."""
        self.state.tasks = dict.fromkeys(self.tasks)  # type: ignore[assignment]
        self.fetcher._tasks = texts(self.tasks)
        with psycopg.connect(self.link.dsn) as conn:
            conn.execute("UPDATE pgqueue.worker SET tasks = %s WHERE id = %s", [sorted(self.tasks), self.worker_id])

    async def close(self) -> None:
        await self.session.close()

    def _doubt(self) -> None:
        self.doubts += 1
        self.state.doubt.set()


if __name__ == "__main__":
    sys.modules["workers"] = sys.modules["__main__"]
    main()
