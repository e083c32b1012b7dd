"""What each task did in a time: how many of its jobs ended, how many attempts failed, how long they ran and waited.

Called by the dashboard. Only reads, in the caller's transaction. The numbers are those of `history`, added up by the
database: a minute is counted about two minutes later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from typing import Any

from pgqueue.admin.history import Step
from pgqueue.database.asking import asks, named, said, twin
from pgqueue.database.statements import Statement
from pgqueue.jobs import histogram
from pgqueue.jobs.values import check_moment, check_text

NUMBERS = ("started", "completed", "failed", "retried", "wait_seconds", "run_seconds")
FAILING_SHARE = 0.01
"""A task fails if at least this share of its attempts did."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """What one task did, in all its `queues`: the numbers of `HistoryRow`."""

    name: str
    queues: tuple[str, ...]
    started: int
    completed: int
    failed: int
    retried: int
    wait_seconds: float
    run_seconds: float
    wait: tuple[int, ...]
    run: tuple[int, ...]

    @property
    def ended(self) -> int:
        """How many jobs have completed or failed."""
        return self.completed + self.failed

    @property
    def failing(self) -> float | None:
        """Which share of the attempts that ended has failed; None if none has ended."""
        ended = self.ended + self.retried
        return (self.failed + self.retried) / ended if ended else None

    def wait_quantile(self, share: float) -> float | None:
        """The seconds that this share of the waits has not exceeded."""
        return histogram.quantile(self.wait, share)

    def run_quantile(self, share: float) -> float | None:
        """The seconds that this share of the runs has not exceeded."""
        return histogram.quantile(self.run, share)


def together(rows: Iterable[TaskRow]) -> list[TaskRow]:
    """One row for each task, of the rows of times that do not overlap."""
    of_task: dict[str, list[TaskRow]] = defaultdict(list)
    for row in rows:
        of_task[row.name].append(row)
    return [_added(name, each) for name, each in of_task.items()]


def _added(name: str, rows: Sequence[TaskRow]) -> TaskRow:
    queues = tuple(sorted({queue for row in rows for queue in row.queues}))
    sums: dict[str, Any] = {each: sum(getattr(row, each) for row in rows) for each in NUMBERS}
    return TaskRow(name, queues, **sums, wait=merged(row.wait for row in rows), run=merged(row.run for row in rows))


def merged(given: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The sum of histograms."""
    return tuple(map(sum, zip_longest(*given, fillvalue=0)))


@dataclass(frozen=True, slots=True)
class TaskHistory:
    """The tasks that did something, those with the longest runs first; the names of those that are paused."""

    now: datetime
    rows: tuple[TaskRow, ...]
    paused: tuple[str, ...]


@asks
def task_history(
    conn: object,
    since: datetime,
    step: Step = "minute",
    until: datetime | None = None,
    queue: str | None = None,
    tasks: Sequence[str] | None = None,
) -> Statement[TaskHistory]:
    """Return what each task did from the minute or the hour `since` on, and before `until`, in all queues or in one;
    1,000 tasks at most, or these `tasks`."""
    check_text(queue, "queue")
    times = {"since": check_moment(since, "since"), "until": check_moment(until, "until")}
    return said(
        f"task_history_{step}s", TaskHistory, queue=queue, tasks=None if tasks is None else list(tasks), **times
    )


atask_history = twin(task_history)
"""`task_history` for async connections."""


@asks
def task_paused(conn: object, task: str) -> Statement[bool]:
    """Return whether this task is paused."""
    check_text(task, "task")
    return named("task_history_paused", lambda rows: bool(rows[0][0]), task=task)


atask_paused = twin(task_paused)
"""`task_paused` for async connections."""
