"""A real supervisor for the tests: `pgqueue work … --processes N`, its processes seen from outside.

A test gives the source of the tasks module and may write another one later (a deploy). Tasks report by lines appended
to a file: `say("ran", job=7)` there is an event here. All processes are gone at the end, by their ids.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from time import monotonic, sleep
from typing import Any

import psutil
from commands import Worker, working
from workers import Eyes, wait_until

HEAD = """
import asyncio, json, os, pathlib, signal, sys, threading, time
import pgqueue

EVENTS = os.open(str(pathlib.Path(__file__).with_name("events")), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
HERE = pathlib.Path(__file__).parent

def say(event, **facts):
    line = json.dumps({"event": event, "pid": os.getpid(), "at": time.monotonic(), "time": time.time(), **facts})
    os.write(EVENTS, f"{line}\\n".encode())

VERSION = 1
"""

TASKS = """
@pgqueue.task(name="quick")
async def quick(job: pgqueue.Job, n: int = 0) -> int:
    say("ran", job=job.id, version=VERSION)
    return VERSION

@pgqueue.task(name="short")
async def short(job: pgqueue.Job, seconds: float = 0.02) -> None:
    say("ran", job=job.id, version=VERSION)
    await asyncio.sleep(seconds)

@pgqueue.task(name="held", timeout=None)
async def held(job: pgqueue.Job, name: str) -> None:
    say("began", job=job.id, name=name, attempt=job.attempt, crashes=job.crashes)
    while not (HERE / name).exists():
        await asyncio.sleep(0.01)
    say("ended", job=job.id, name=name, version=VERSION)

@pgqueue.task(name="held_thread")
def held_thread(job: pgqueue.Job, name: str) -> None:
    say("began", job=job.id, name=name, attempt=job.attempt, crashes=job.crashes)
    while not (HERE / name).exists():
        time.sleep(0.01)
    say("ended", job=job.id, name=name, version=VERSION)
"""

SHOWN = 60
"""Lines of what the supervisor said that are shown when a test fails."""


class Supervised:
    """A supervisor and its processes, in a directory with the module `shop`."""

    def __init__(self, worker: Worker, directory: Path) -> None:
        self.worker = worker
        self.pid = worker.process.pid
        self.directory = directory
        self.seen: dict[int, float] = {}
        """The processes that were there, by pid: when each was created, for a pid comes again."""

    def deploy(self, source: str = TASKS, version: int = 1) -> None:
        """Write another version of the module."""
        deploy(self.directory, source, version)

    def children(self) -> list[psutil.Process]:
        """The worker processes that are there, also the quiet ones."""
        try:
            found = [one for one in psutil.Process(self.pid).children() if _alive(one.pid)]
        except psutil.NoSuchProcess:
            return []
        for one in found:
            with suppress(psutil.Error):  # it may be gone already
                self.seen[one.pid] = one.create_time()
        return found

    def pids(self) -> set[int]:
        return {one.pid for one in self.children()}

    def titles(self) -> dict[int, str]:
        """What the process list shows."""
        shown = {}
        for one in self.children():
            try:
                shown[one.pid] = " ".join(one.cmdline()).strip()  # a title is padded
            except psutil.NoSuchProcess:
                continue
        return shown

    def events(self, name: str, **facts: Any) -> list[dict[str, Any]]:
        path = self.directory / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        wanted = {"event": name, **facts}.items()
        return [event for event in map(json.loads, lines) if wanted <= event.items()]

    def event(self, name: str, **facts: Any) -> dict[str, Any]:
        return wait_until(lambda: self.events(name, **facts))[0]

    def signal(self, number: Any) -> None:
        self.worker.signal(number)

    def counts(self, text: str) -> int:
        return self.worker.output.count(text)

    def says_again(self, text: str, before: int, seconds: float = 60.0) -> None:
        """Wait until it has said this more often than `before`."""
        wait_until(lambda: self.counts(text) > before, seconds)

    def restart(self, number: Any, seconds: float = 60.0) -> None:
        """Send the signal and wait until the restart is through."""
        before = self.counts("the restart is through")
        self.signal(number)
        self.says_again("the restart is through", before, seconds)

    def close(self) -> None:
        """End the supervisor and all processes it has started; that some are gone already is no error."""
        if self.worker.process.poll() is None:
            self.worker.process.send_signal(SIGSTOP)  # it starts no other while we look
        self.children()
        mine = [one for one in map(theirs, [*self.seen.items(), *started(self.worker.output)]) if one is not None]
        self.worker.process.kill()
        self.worker.process.wait()
        for one in mine:
            with suppress(psutil.Error):  # psutil itself compares the time of creation once more
                one.send_signal(SIGKILL)
        psutil.wait_procs(mine, timeout=60)
        self.worker.close()  # last: they all write to the one stderr


CLOCKS = 2.0
"""Seconds between the time in the log and the kernel's for the same start, at most."""


def started(output: str) -> Iterator[tuple[int, float]]:
    """The processes that a supervisor says it has started: each one's pid, and when."""
    said = re.compile(r"^(\S+) \w+ pgqueue\[\d+\]: process \d+ \(pid (\d+)\): is started$", re.MULTILINE)
    for at, pid in said.findall(output):
        yield int(pid), datetime.fromisoformat(at).timestamp()


def theirs(one: tuple[int, float]) -> psutil.Process | None:
    """The process of this pid that was created at this time; None if it is gone, also if its pid has come again."""
    pid, created = one
    try:
        found = psutil.Process(pid)
        mine = abs(found.create_time() - created) < CLOCKS and "pgqueue" in " ".join(found.cmdline())
        return found if mine else None
    except psutil.Error:
        return None


def deploy(directory: Path, source: str = TASKS, version: int = 1) -> None:
    text = HEAD.replace("VERSION = 1", f"VERSION = {version}") + source
    # Whatever was compiled in the same second must not count.
    for cached in (directory / "__pycache__").glob("shop.*"):
        cached.unlink()
    (directory / "shop.py").write_text(text)


@contextmanager
def supervised(
    directory: Path,
    dsn: str,
    *options: str,
    processes: int = 3,
    source: str = TASKS,
    ready: bool = True,
    environ: dict[str, str] | None = None,
    where: Sequence[str] = (),
) -> Iterator[Supervised]:
    """A supervisor with so many processes, ready; everything is gone at the end."""
    deploy(directory, source)
    arguments = ["shop", "--processes", str(processes), *options]
    with working(*arguments, dsn=dsn, cwd=directory, where=where, terminal=False, **(environ or {})) as worker:
        one = Supervised(worker, directory)
        try:
            if ready:
                worker.says("ready: ")
                one.children()
            yield one
        except BaseException:
            print("the supervisor said at last:", *worker.lines[-SHOWN:], sep="\n  ")
            raise
        finally:
            one.close()


class Sampler:
    """Looks every 50 ms how many workers take jobs: rows that say so, whose process is there."""

    EVERY = 0.05

    def __init__(self, dsn: str) -> None:
        self.samples: list[tuple[float, int]] = []
        self._eyes = Eyes(dsn)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def least(self) -> int:
        return min(count for _, count in self.samples)

    @property
    def most(self) -> int:
        return max(count for _, count in self.samples)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._eyes.close()

    def _run(self) -> None:
        while not self._stop.wait(self.EVERY):
            rows = self._eyes.all("SELECT pid FROM pgqueue.worker WHERE state = 'running' AND dead_at IS NULL")
            self.samples.append((monotonic(), sum(psutil.pid_exists(pid) for (pid,) in rows)))


class Flow:
    """Enqueues so many jobs a second, steadily, until it is left; how many, and their ids."""

    def __init__(self, dsn: str, rate: float, task: str = "quick") -> None:
        self.enqueued = 0
        self._eyes = Eyes(dsn)
        self._rate, self._task = rate, task
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Flow:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._eyes.close()

    def _run(self) -> None:
        began = monotonic()
        while not self._stop.is_set():
            due = int((monotonic() - began) * self._rate) - self.enqueued
            if due > 0:
                sql = "SELECT count(pgqueue.enqueue(%s)) FROM generate_series(1, %s)"
                self._eyes.all(sql, self._task, due)
                self.enqueued += due
            sleep(0.01)


def put(eyes: Eyes, task: str, args: str = "{}", number: int = 1) -> list[int]:
    """Enqueue jobs; their ids."""
    sql = "SELECT pgqueue.enqueue(%s, %s::jsonb) FROM generate_series(1, %s)"
    return [job for (job,) in eyes.all(sql, task, args, number)]


def gone(pids: set[int]) -> Callable[[], bool]:
    """Whether none of these processes is there any more."""
    return lambda: not any(map(_alive, pids))


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
