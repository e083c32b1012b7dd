"""One queue: whether it rises or falls, which tasks ran in it, which workers serve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import urlencode

from pgqueue.admin.audit import AuditEntry, aaudit
from pgqueue.admin.bounded import cut_at
from pgqueue.admin.depth import QueueInfo, adepth
from pgqueue.admin.history import HistoryRow, ahistory
from pgqueue.admin.task_history import TaskHistory, TaskRow, atask_history
from pgqueue.admin.versions import Version, aversions
from pgqueue.admin.workers import WORKERS_MOST, WorkerNow, aworkers
from pgqueue.web import charts
from pgqueue.web.pages.history import ATTEMPTS, ENDED, RANGES, begin, change_mark, version_marks, waiting
from pgqueue.web.pages.jobs import TABS
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.panel import Drawing
from pgqueue.web.problems import Problem

TREND = timedelta(minutes=15)
"""The trend is that of this time."""
LEAST = 3
"""Of fewer measured minutes no trend is told."""
CHANGES_MOST = 200
"""So many changes by hand are looked at for those of a queue."""
STEADY = 0.5
"""Jobs a minute: below that a queue neither rises nor falls."""


async def queue(asked: Asked) -> Page:
    """The queue as the only item. `trend` is in jobs a minute, above 0 if it rises; None if too little was measured."""
    name = asked.value("name")
    if name is None:
        raise Problem(400, "This cannot be asked", "name: give the name of a queue")
    _, length, number = RANGES["1h"]
    now = datetime.now(UTC)
    first = begin(now, length) - (number - 1) * length
    read = await asked.read_shared(partial(_read, name, first), "queue", name, first)
    found, rows, ran, versions = read.found, read.rows, read.ran, read.versions
    workers = [each for each in read.workers if name in each.queues]
    drawing = Drawing(charts.steps(rows, first, length, number), length, now)
    figures = [
        drawing.line("waiting", "Jobs that are available or blocked", "waiting", waiting),
        drawing.bars("ended", ATTEMPTS, ENDED),
    ]
    changed = [change_mark(each) for each in read.recorded if each.target.get("queue") == name]
    drawn = drawing.panel(figures, [*version_marks(versions), *changed])
    item = plain(found) | {
        "trend": trend([row for row in rows if row.at >= now - TREND]),
        "tasks": [_task(row) for row in ran.rows],
        "served_by": [_worker(each) for each in workers],
        "workers_cut_at": cut_at(read.workers, WORKERS_MOST),
        "states": [{"state": state, "query": urlencode({"state": state, "queue": name})} for state in TABS],
    }
    return Page(
        "queue.html", [item], {"first": first, "charts": plain(drawn)}, {"steady": STEADY, "happened": bool(rows)}
    )


@dataclass(frozen=True, slots=True)
class _Read:
    found: QueueInfo
    rows: list[HistoryRow]
    ran: TaskHistory
    workers: Sequence[WorkerNow]
    versions: list[Version]
    recorded: list[AuditEntry]


async def _read(name: str, first: datetime, conn: object) -> _Read:
    """What the page is made of. All visitors share it: nothing is hidden."""
    step, _, _ = RANGES["1h"]
    return _Read(
        await adepth(conn, name),
        await ahistory(conn, since=first, queue=name, step=step, by="all"),
        await atask_history(conn, first, step, queue=name),
        await aworkers(conn),
        await aversions(conn),
        await aaudit(conn, since=first, limit=CHANGES_MOST),
    )


def trend(rows: Sequence[HistoryRow]) -> float | None:
    """By how many jobs a minute those that wait became more: the slope of the line that fits the minutes best."""
    return slope([(row.at, waiting) for row in rows if (waiting := _waiting(row)) is not None])


def slope(measured: Sequence[tuple[datetime, int]]) -> float | None:
    """The same of what was measured at these times, the first one first; None if it is too little."""
    if len(measured) < LEAST:
        return None
    points = [((at - measured[0][0]).total_seconds() / 60, waiting) for at, waiting in measured]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    rise, run = sum((at - x) * (n - y) for at, n in points), sum((at - x) ** 2 for at, _ in points)
    return float(rise / run)


def _waiting(row: HistoryRow) -> int | None:
    return None if row.available is None or row.blocked is None else row.available + row.blocked


def _task(row: TaskRow) -> dict[str, Any]:
    counted = {"name": row.name, "ended": row.ended, "failing": row.failing}
    return counted | {"run_p95": row.run_quantile(0.95), "wait_p95": row.wait_quantile(0.95)}


def _worker(worker: WorkerNow) -> dict[str, Any]:
    names = ("id", "host", "pid", "state", "version_tag", "busy", "concurrency", "lost")
    return {name: getattr(worker, name) for name in names}
