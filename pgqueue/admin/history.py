"""What happened to jobs, by minute for a day and by hour for 30 days: how many started, how they ended, how long they
waited and ran; and how many there were in each queue.

Called by applications and by the CLI. Only reads, inside the caller's transaction, on any connection. Workers count and
the leader folds: a minute is counted about two minutes later, and until then its numbers are None. What was counted by
no worker is not there: jobs that `pgqueue.testing` ran.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pgqueue.database import shown
from pgqueue.database.asking import asks, named, twin
from pgqueue.database.statements import Row, Statement
from pgqueue.errors import InvalidOption
from pgqueue.jobs import histogram
from pgqueue.jobs.values import check_moment, check_text

Step = Literal["minute", "hour"]
By = Literal["task", "queue", "all"]

_STATEMENTS = {"minute": "history_minutes", "hour": "history_hours"}
_BY = ("task", "queue", "all")


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """What happened in one minute or hour, to the jobs of one queue and task.

    Numbers of jobs:
    - `started`: attempts that began.
    - `completed`, `failed`: jobs that ended so.
    - `retried`: attempts that failed and will be made again. `snoozed`: jobs that put themselves off.
    - `cancelled`: jobs that were stopped on purpose, waiting or running. `expired`: not started before their deadline.
    - `skipped`: jobs that ended because another one had their lock.
    - `interrupted`: attempts that their worker stopped, as at a shutdown. `rescued`: jobs given back because their
      worker died.

    Times: `wait` and `run` are histograms of the attempts that began, and of those that ended. The n-th number counts
    the times up to the n-th of `pgqueue.jobs.histogram.BOUNDS`, in seconds, and above the bound before. `wait_seconds`
    and `run_seconds` are their sums. A job waits from when it could run: an intended delay is left out, the time for
    which a lock, a limit or a rate has blocked it is not.

    How many jobs there were, as the leading worker has measured it: `available`, `scheduled`, `blocked`, `running`;
    None if nothing was measured, and in rows of single tasks. So the newest minutes have rows before anything is
    counted. What is not counted yet is None, and not 0. `oldest` and `longest_blocked` are the seconds that `QueueInfo`
    has. Of an hour each is the largest of its minutes; of all queues the numbers are added up.
    """

    at: datetime
    """When the minute or the hour began, UTC."""
    queue: str | None
    """None if all queues are together."""
    task: str | None
    """None if all tasks are together. `other tasks`: those beyond the first 200 that a worker has counted."""
    started: int | None
    completed: int | None
    failed: int | None
    retried: int | None
    snoozed: int | None
    cancelled: int | None
    expired: int | None
    skipped: int | None
    interrupted: int | None
    rescued: int | None
    wait_seconds: float | None
    run_seconds: float | None
    wait: tuple[int, ...]
    run: tuple[int, ...]
    available: int | None = None
    scheduled: int | None = None
    blocked: int | None = None
    running: int | None = None
    oldest: float | None = None
    longest_blocked: float | None = None

    def wait_quantile(self, share: float) -> float | None:
        """The seconds that this share of the waits has not exceeded; None if no attempt began.

        An estimate: off by less than a factor of 2, below ten seconds of 1.67.

            row.wait_quantile(0.95)
        """
        return histogram.quantile(self.wait, share)

    def run_quantile(self, share: float) -> float | None:
        """The seconds that this share of the runs has not exceeded, as `wait_quantile`; None if no attempt ended."""
        return histogram.quantile(self.run, share)


@asks
def history(
    conn: object,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    queue: str | None = None,
    task: str | None = None,
    step: Step = "minute",
    by: By = "task",
) -> Statement[list[HistoryRow]]:
    """Return what happened to jobs: a row for each minute or hour, queue and task in which something did.

    - `since`: from the minute or hour of this time on. Default: an hour ago, with `step="hour"` a day ago.
    - `until`: before this time.
    - `queue`, `task`: only of these.
    - `by`: `"queue"` puts the tasks of a queue together, `"all"` everything. Only these two say how many jobs there
      were; then a minute in which jobs waited and nothing happened has a row, too.

    Minutes are kept for a day, hours for 30 days. Raises InvalidOption for a time without a zone, and for an unknown
    step or `by`.

        for row in pgqueue.history(conn, task="mail.send"):
            print(row.at, row.completed, row.run_quantile(0.95))
    """
    if step not in _STATEMENTS:
        raise InvalidOption(f"step {step!r}: use minute or hour")
    if by not in _BY:
        raise InvalidOption(f"by {by!r}: use {', '.join(_BY)}")
    check_text(queue, "queue")
    check_text(task, "task")
    times = {"since": check_moment(since, "since"), "until": check_moment(until, "until")}
    return named(_STATEMENTS[step], _read, queue=queue, task=task, by=by, **times)


ahistory = twin(history)
"""`history` for async connections."""


@dataclass(frozen=True, slots=True)
class DepthRow:
    """How many jobs of a queue were available or blocked in the minute `at`."""

    queue: str
    at: datetime
    waiting: int


@asks
def depths(conn: object, queues: Sequence[str], since: datetime) -> Statement[list[DepthRow]]:
    """Return how many jobs of these queues waited, by minute from `since` on, where it was measured.

    It is what `history` says of one queue after the other, in one statement and without what happened.
    """

    def read(rows: list[Row]) -> list[DepthRow]:
        return [DepthRow(queue, shown.at(at), waiting) for queue, at, waiting in json.loads(rows[0][0])]

    return named("history_depths", read, queues=list(queues), since=check_moment(since, "since"))


adepths = twin(depths)
"""`depths` for async connections."""


def _read(rows: list[Row]) -> list[HistoryRow]:
    return [_row(each) for each in json.loads(rows[0][0])]


def _row(each: dict[str, Any]) -> HistoryRow:
    names = {"queue": each["queue"] or None, "task": each["task"] or None}
    times = {"at": shown.at(each["at"]), "wait": tuple(each["wait"]), "run": tuple(each["run"])}
    return HistoryRow(**(each | names | times))
