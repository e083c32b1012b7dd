"""The work of the fault matrix, and its books: the same kinds of jobs through every fault, and one account.

1. `plain`: may run again after a fault, must end.
2. `effect`: transactional, writes one row on its job's connection. That row must be there once.
3. `locked`: all have one lock key. No two may run at once.
4. `limited`: no more than two may run at once.
5. `held`: two jobs of one more lock key, of some seconds each. The first runs when the fault strikes.

An application enqueues the first four one after another, each in a transaction of its own. It notes each key before
it asks and after the server has acknowledged the COMMIT. Handlers note when they begin and when they are over. Notes
are appended to files by one write each, so kill -9 takes none back. Nothing here knows how pgqueue works inside.

As a program (`python fault_work.py DSN JOURNAL FIRST`) it is the application; SIGTERM ends it between two jobs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

import pgqueue

KINDS = "plain", "effect", "locked", "limited"
MOST = {"locked": 1, "limited": 2, "held": 1}
"""How many of a kind may run at once."""
TABLE = "CREATE TABLE matrix_effect (key bigint NOT NULL)"
EVENTS = "MATRIX_EVENTS"
"""The variable of the environment that names the file of the handlers' notes."""
SECONDS, LONG, PAUSE = 0.03, 4.0, 0.03
"""How long a job runs, how long one that is `held`, and how long the application waits between two jobs."""
HELD = -1, -2
"""The keys of the two jobs that are `held`."""
APART = 1_000_000
"""Between the first keys of two applications."""

# The tasks -----------------------------------------------------------------------------------------------------------

AGAIN = pgqueue.RetryPolicy(attempts=5, first=0.1, most=0.5)
_numbers = itertools.count()


def note(path: str | Path, **facts: Any) -> None:
    """Append one line, whole even beside other processes."""
    line = json.dumps({"at": time.monotonic(), **facts}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def notes(path: Path) -> list[dict[str, Any]]:
    """What was noted; a last line that is not whole yet is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextmanager
def noted(kind: str, key: int) -> Iterator[None]:
    """A run of a handler, from its beginning to its end, in whatever way it ends."""
    facts = {"kind": kind, "key": key, "pid": os.getpid(), "run": f"{os.getpid()}.{next(_numbers)}"}
    note(os.environ[EVENTS], event="began", **facts)
    try:
        yield
    finally:
        note(os.environ[EVENTS], event="over", **facts)


@pgqueue.task(name="matrix.plain", retry=AGAIN)
async def plain(key: int) -> None:
    with noted("plain", key):
        await asyncio.sleep(SECONDS)


@pgqueue.task(name="matrix.effect", transactional=True, retry=AGAIN)
def effect(job: pgqueue.Job, key: int) -> None:
    with noted("effect", key):
        job.connection.execute("INSERT INTO matrix_effect (key) VALUES (%s)", [key])
        time.sleep(SECONDS)


@pgqueue.task(name="matrix.locked", lock="one", timeout=60, retry=AGAIN)
async def locked(key: int) -> None:
    with noted("locked", key):
        await asyncio.sleep(SECONDS)


@pgqueue.task(name="matrix.limited", limit=pgqueue.Limit(MOST["limited"], name="matrix"), timeout=60, retry=AGAIN)
async def limited(key: int) -> None:
    with noted("limited", key):
        await asyncio.sleep(SECONDS)


@pgqueue.task(name="matrix.held", lock="two", timeout=60, retry=AGAIN)
async def held(key: int) -> None:
    with noted("held", key):
        await asyncio.sleep(LONG)


TASKS = {"plain": plain, "effect": effect, "locked": locked, "limited": limited}


def kind_of(key: int) -> str:
    return "held" if key < 0 else KINDS[key % len(KINDS)]


def hold(dsn: str, journal: Path) -> None:
    """Enqueue the two jobs that are `held`."""
    with psycopg.connect(dsn) as conn:
        for key in HELD:
            held.enqueue(conn, key=key)
    for key in HELD:
        note(journal, event="has", key=key)


# The application -----------------------------------------------------------------------------------------------------


def apply(dsn: str, journal: Path, first: int) -> None:
    """Enqueue one job after another, with rising keys, until SIGTERM; whatever the server refuses is noted only."""
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    keys = itertools.count(first)
    while not ending.is_set():
        try:
            with psycopg.connect(dsn, connect_timeout=2, application_name="application") as conn:
                while not ending.is_set():
                    key = next(keys)
                    note(journal, event="asks", key=key)
                    TASKS[kind_of(key)].enqueue(conn, key=key)  # type: ignore[attr-defined]
                    conn.commit()
                    note(journal, event="has", key=key)
                    time.sleep(PAUSE)
        except (psycopg.Error, pgqueue.Error) as error:
            note(journal, event="refused", why=str(error))
            ending.wait(0.05)


# The books -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Books:
    """What is known when nothing waits or runs any more."""

    journal: list[dict[str, Any]]
    events: list[dict[str, Any]]
    states: dict[int, str]
    """key -> the state of its job in the database"""
    effects: Counter[int]
    """How many effects each key has."""
    struck: float = 0.0
    lifted: float = 0.0
    ended: float = 0.0
    """Moments: the fault began, the fault was over, the application enqueued no more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the books say of one run of a fault."""

    jobs: int
    lost: list[int]
    """Keys whose COMMIT was acknowledged, or that are in the database, without an end of their own."""
    doubled: list[int]
    """Keys with more than one effect, or with an effect and no job."""
    overlaps: list[tuple[str, int, int, float]]
    """(kind, key, key, seconds) of runs that were at work at once although there was no room for both."""
    again: int
    """Keys whose handler began more than once."""
    lasted: float
    pause: float
    """The longest time since the fault began in which no job of some kind began, or in which the key of those that are
    `held` stood idle."""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.overlaps) and self.pause < math.inf

    def __str__(self) -> str:
        return (
            f"{self.jobs} jobs, {len(self.lost)} lost, {len(self.doubled)} doubled, {len(self.overlaps)} overlaps, "
            f"{self.again} again, lasted {self.lasted:.1f} s, longest pause {self.pause:.1f} s"
        )


def judge(books: Books) -> Verdict:
    """The one account of every fault."""
    committed = {line["key"] for line in books.journal if line["event"] == "has"}
    begun = Counter(event["key"] for event in books.events if event["event"] == "began")
    return Verdict(
        jobs=len(committed | books.states.keys()),
        lost=sorted(key for key in committed | books.states.keys() if not _ended(books, begun, key)),
        doubled=sorted(key for key, number in books.effects.items() if number > 1 or key not in books.states),
        overlaps=overlaps(books.events),
        again=sum(number > 1 for number in begun.values()),
        lasted=books.lifted - books.struck,
        pause=max(*(_pause(books, kind) for kind in KINDS), _idle(books)),
    )


def _ended(books: Books, begun: Counter[int], key: int) -> bool:
    """Whether this job is completed, has run, and has its effect if it is one that has one."""
    works = books.effects[key] > 0 if kind_of(key) == "effect" else begun[key] > 0
    return books.states.get(key) == "completed" and works


def _pause(books: Books, kind: str) -> float:
    began: list[float] = [
        event["at"] for event in books.events if (event["event"], event.get("kind")) == ("began", kind)
    ]
    moments = [books.struck, *sorted(at for at in began if books.struck < at < books.ended), books.ended]
    return max(later - earlier for earlier, later in itertools.pairwise(moments))


def _idle(books: Books) -> float:
    """The longest time since the fault began in which none of those that are `held` was at work, but one was yet to."""
    longest, worked = 0.0, books.struck
    for began, till, _ in sorted(_spans(books.events, "held")):
        longest, worked = max(longest, began - worked), max(worked, till)
    return longest


def overlaps(events: Iterable[dict[str, Any]]) -> list[tuple[str, int, int, float]]:
    """Runs of a kind that began or went on while so many as may were at work. A run ends with its process, too.

    A frozen process is not at work. When it goes on, so do its runs; they may overlap others from that moment.
    """
    found: list[tuple[str, int, int, float]] = []
    for kind, most in MOST.items():
        spans = sorted(_spans(events, kind))
        for place, (began, _, key) in enumerate(spans):
            beside = [span for span in spans[:place] if span[1] > began]
            if len(beside) >= most:
                other = min(beside, key=lambda span: span[1])
                found.append((kind, other[2], key, min(other[1], spans[place][1]) - began))
    return found


def _spans(events: Iterable[dict[str, Any]], kind: str) -> Iterator[tuple[float, float, int]]:
    """(from, till, key) for each time in which a run of this kind was at work."""
    running: defaultdict[int, dict[str, tuple[float, int]]] = defaultdict(dict)
    for event in sorted(events, key=lambda event: event["at"]):
        pid, at = event["pid"], event["at"]
        if event["event"] == "began" and event["kind"] == kind:
            running[pid][event["run"]] = (at, event["key"])
        elif event["event"] == "over" and event["run"] in running[pid]:
            began, key = running[pid].pop(event["run"])
            yield began, at, key
        elif event["event"] in ("died", "frozen"):
            for began, key in running[pid].values():
                yield began, at, key
            if event["event"] == "died":
                del running[pid]
        elif event["event"] == "thawed":
            running[pid] = {run: (at, key) for run, (_, key) in running[pid].items()}
    for runs in running.values():
        for began, key in runs.values():
            yield began, math.inf, key


if __name__ == "__main__":
    apply(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
