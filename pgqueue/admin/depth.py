"""How many jobs each queue has, and since when they wait: `queues`, `depth`. What `status` shows of numbers, too.

Called by applications and by the CLI. Every function only reads, in the connection's own transaction.

Where the numbers come from:

1. While each table has at most 512 kB, dead rows and all, they are counted at once: the numbers are exact, and of now.
2. Else they are those that the leading worker has measured last (`pgqueue/worker/leader/depth.py`). `counted_at` says
   when: 5 seconds ago as a rule, 120 at most.
3. If that is overdue, because no worker leads, the reader measures by itself. It counts up to 10,000 and estimates
   beyond, as the leader does.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pgqueue.config import config
from pgqueue.database import shown, steps
from pgqueue.database.asking import asks, twin
from pgqueue.database.statements import Row, Statement, text
from pgqueue.database.steps import Steps
from pgqueue.jobs.values import check_queue

QUEUES_MOST = 1_000
UNKNOWN = "unknown"
"""The reason of jobs whose task no live worker of their queue knows."""
APART = (UNKNOWN, "task_paused")
"""Reasons of available jobs that could not run whatever the others of their queue do: they make no queue old."""
LANE_MOST = 10_001


@dataclass(frozen=True, slots=True)
class Count:
    """A number of jobs; above 10,000 an estimate, not `exact`. `str()` writes an estimate as `~9,600,000`."""

    n: int
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.n:,}" if self.exact else f"~{_two_digits(self.n):,}"


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue: its jobs, for how long they have waited, and how many live workers serve it. Times are in seconds.

    - `oldest`: for how long the first job that could run has waited. A job whose queue or task is paused cannot, nor
      one whose task no live worker of its queue knows. One that waits for a slot, or for any worker at all, could. A
      scheduled job could from its time on: while no worker leads, nothing makes it available.
    - `longest_blocked`: for how long a blocked job has waited although its key has room. None if there is no such job,
      or no worker leads. Alert on both: each job that could run, and does not, is counted by `oldest` or by this.
    - `counted_at`: when the jobs were counted. Less than a second ago while the tables are small, else 5 to 120 s.
    """

    name: str
    available: Count
    scheduled: Count
    blocked: Count
    running: Count
    oldest: float | None
    workers: int
    paused_at: datetime | None
    longest_blocked: float | None = None
    counted_at: datetime | None = None
    paused_by: str | None = None
    """The actor of the pause, else the database role; None if it is not paused."""

    @property
    def unserved(self) -> bool:
        """Whether no worker serves this queue that takes jobs and has sent a heartbeat within three leases."""
        return self.workers == 0


@dataclass(frozen=True, slots=True)
class UnknownTask:
    """A task with `jobs` that wait in a queue whose workers do not know the task."""

    queue: str
    task: str
    jobs: Count


@dataclass(frozen=True, slots=True)
class Group:
    """The jobs of one queue and state that wait for the same reason.

    - `reason` of an available job: `slot` (it waits for a free slot), `paused` and `unserved` (its queue), `unknown`
      and `task_paused` (its `task`).
    - `reason` of a scheduled job: `time`, `retry`, `snooze`.
    - `reason` of a blocked job: `lock`, `limit`, `rate`, `unknown`.
    - `since`: since when the first of them could run, in seconds since 1970. None: none of them could.
    """

    queue: str
    state: str
    reason: str
    task: str
    n: int
    exact: bool
    since: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of all queues: the groups of jobs, and what is said of queues. Times are in seconds since 1970."""

    now: float
    counted_at: float
    groups: tuple[Group, ...]
    longest: Mapping[str, float]
    """By queue: since when a blocked job could have gone on."""
    served: Mapping[str, int]
    """By queue: how many live workers serve it."""
    paused: Mapping[str, float | None] = field(default_factory=dict)
    paused_by: Mapping[str, str | None] = field(default_factory=dict)


@asks
def queues(conn: object) -> Steps[list[QueueInfo]]:
    """Return every queue that has jobs, workers or a pause, by name; at most 1,000.

    Small numbers are counted now. Those of large tables were counted by the leading worker, 5 to 120 seconds ago; then
    `counted_at` says when. So a job that this transaction has enqueued is not counted yet beside many others.

        [queue.name for queue in pgqueue.queues(conn) if queue.unserved]
    """
    return queue_list((yield from measured(config().schema)))


aqueues = twin(queues)
"""`queues` for async connections."""


@asks
def depth(conn: object, queue: str) -> Steps[QueueInfo]:
    """Return one queue as `queues` does. A queue that has nothing is all zeros.

    Raises InvalidOption for an invalid name.

    pgqueue.depth(conn, "mail").available.n
    """
    found = yield from measured(config().schema, check_queue(queue))
    return _info(found, queue, found.groups)


adepth = twin(depth)
"""`depth` for async connections."""


async def ameasured(conn: object) -> Measured:
    """What is known of all queues, for callers that make more than one thing of it."""
    return await steps.adrive(conn, measured(config().schema), {})


# Asking --------------------------------------------------------------------------------------------------------------


def measured(schema: str, queue: str | None = None) -> Steps[Measured]:
    """Ask for the numbers of all queues, or of one; measure if no measurement is fresh."""
    said = yield from _told(schema, queue)
    if said["at"] is None:
        groups, said["at"] = (yield from measure(schema)), said["now"]
        said["groups"] = [each for each in groups if each[0] and queue in (None, each[0])]
    return _measured(said)


def fresh(schema: str) -> Steps[Measured | None]:
    """Ask for the numbers of all queues, never measure: None if the tables are large and no measurement is fresh."""
    said = yield from _told(schema, None)
    return None if said["at"] is None else _measured(said)


def _told(schema: str, queue: str | None) -> Steps[dict[str, Any]]:
    """What is known without a measurement: see `depth_read_queues`. Small tables are counted, which is of now."""
    [[found]] = yield Statement(text("depth_read_queues", schema), {"queue": queue}, _rows)
    said: dict[str, Any] = json.loads(found)
    if said["small"]:
        [[found]] = yield Statement(text("depth_read_live", schema), {"queue": queue}, _rows)
        said["groups"], said["at"] = json.loads(found), said["now"]
    return said


def _measured(said: Mapping[str, Any]) -> Measured:
    return Measured(
        said["now"],
        said["at"],
        tuple(Group(*each) for each in said["groups"]),
        dict(said["longest"]),
        dict(said["served"]),
        {name: since for name, since, _ in said["paused"]},
        {name: by for name, _, by in said["paused"]},
    )


def history(schema: str) -> Steps[tuple[tuple[Group, ...], float | None]]:
    """Ask how many jobs history has in each state, and when they were counted (seconds since 1970); None: just now."""
    [[found, at]] = yield Statement(text("depth_read_history", schema), {}, _rows)
    if found is None:
        [[found]] = yield Statement(text("depth_others", schema), {}, _rows)
    return tuple(Group(*each) for each in json.loads(found) if not each[0]), at


def measure(schema: str) -> Steps[list[list[Any]]]:
    """Measure here, every lane from its start."""
    whole = {"known": [], "queues": [], "ranks": [], "keyed": [], "afters": [], "most": LANE_MOST}
    [[lanes, _, _]] = yield Statement(text("depth_lanes", schema), whole, _rows)
    [[scheduled, _, _]] = yield Statement(text("depth_scheduled", schema), {"after": None}, _rows)
    [[others]] = yield Statement(text("depth_others", schema), {}, _rows)
    return [*json.loads(lanes), *json.loads(scheduled), *json.loads(others)]


def _rows(rows: list[Row]) -> list[Row]:
    return rows


# What comes of it ----------------------------------------------------------------------------------------------------


def queue_list(found: Measured, most: int | None = QUEUES_MOST) -> list[QueueInfo]:
    """The queues that have jobs, workers or a pause, by name: the first 1,000 of them, or `most`. None: all."""
    names = {group.queue for group in found.groups} | found.served.keys() | found.paused.keys()
    of_queue: dict[str, list[Group]] = defaultdict(list)
    for group in found.groups:
        of_queue[group.queue].append(group)
    return [_info(found, name, of_queue[name]) for name in sorted(names)[:most]]


def unknown_list(groups: Iterable[Group]) -> tuple[UnknownTask, ...]:
    """The tasks with waiting jobs that no live worker of their queue knows, the most frequent first."""
    found: dict[tuple[str, str], list[Group]] = defaultdict(list)
    for group in groups:
        if group.reason == UNKNOWN:
            found[group.queue, group.task].append(group)
    tasks = [UnknownTask(queue, task, total(each)) for (queue, task), each in found.items()]
    return tuple(sorted(tasks, key=lambda task: (-task.jobs.n, task.queue, task.task)))


def total(groups: Iterable[Group]) -> Count:
    """How many jobs these groups have."""
    listed = list(groups)
    return Count(sum(group.n for group in listed), all(group.exact for group in listed))


def _info(found: Measured, name: str, groups: Iterable[Group]) -> QueueInfo:
    states: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        states[group.state].append(group)
    blocked, paused = found.longest.get(name), found.paused.get(name)
    # Whether the queue is paused is read now; what was measured may be of the time before the pause, or before its end.
    waiting = [*states["available"], *states["scheduled"]] if paused is None else []
    could = [group.since for group in waiting if group.since is not None and group.reason not in APART]
    return QueueInfo(
        name,
        total(states["available"]),
        total(states["scheduled"]),
        total(states["blocked"]),
        total(states["running"]),
        oldest=max(0.0, found.now - min(could)) if could else None,
        workers=found.served.get(name, 0),
        paused_at=None if paused is None else shown.at(paused),
        longest_blocked=None if blocked is None else found.now - blocked,
        counted_at=shown.at(found.counted_at),
        paused_by=found.paused_by.get(name),
    )


def _two_digits(n: int) -> int:
    return round(n, 2 - len(str(n))) if n > 99 else n
