"""What happened, as charts: throughput, failures, waits, and how many jobs there were.

Changes by hand are marked, and new versions of the application.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pgqueue.admin.audit import AuditEntry, aaudit
from pgqueue.admin.history import HistoryRow, ahistory
from pgqueue.admin.history import Step as Unit
from pgqueue.admin.versions import aversions
from pgqueue.jobs import histogram
from pgqueue.jobs.values import EPOCH
from pgqueue.web import charts
from pgqueue.web.charts import Chart, Step
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.problems import Problem

MARKS_MOST = 200
ENDED = ("completed", "failed", "retried")
RANGES: dict[str, tuple[Unit, timedelta, int]] = {
    "1h": ("minute", timedelta(minutes=1), 60),
    "6h": ("minute", timedelta(minutes=5), 72),
    "24h": ("hour", timedelta(hours=1), 24),
    "30d": ("hour", timedelta(hours=6), 120),
}
"""The unit in which the history is read, the length of a step of the charts, and their number. Each unit has a row for
each task: a day of minutes would be too much to add up for one page."""
EXTENTS = {"1h": "the last hour", "6h": "the last 6 hours", "24h": "the last day", "30d": "the last 30 days"}


async def history(asked: Asked) -> Page:
    """The steps as items, the charts and the marks beside them."""
    range_ = asked.value("range") or "1h"
    if range_ not in RANGES:
        raise Problem(400, "This cannot be asked", f"range: use one of {', '.join(RANGES)}")
    unit, length, number = RANGES[range_]
    queue, task = asked.value("queue"), asked.value("task")
    first = begin(datetime.now(UTC), length) - (number - 1) * length
    rows = await asked.read(lambda conn: ahistory(conn, since=first, queue=queue, task=task, step=unit, by="all"))
    changes = await asked.read(lambda conn: aaudit(conn, since=first, limit=MARKS_MOST))
    versions = await asked.read(aversions)
    given = charts.steps(rows, first, length, number)
    marks = [_mark(each, charts.place_of(each.at, first, number * length)) for each in changes]
    started = [
        {"x": x, "at": each.first_at, "version": each.version}
        for each in versions
        if (x := charts.place_of(each.first_at, first, number * length)) is not None
    ]
    view = {
        "asked": {"range": range_, "queue": queue or "", "task": task or ""},
        "extents": EXTENTS,
        "box": (charts.WIDTH, charts.HEIGHT),
    }
    shown = {
        "ended": charts.stacked(given, ENDED),
        "waits": charts.line(given, _wait),
        "waiting": charts.line(given, waiting) if task is None else None,
        "oldest": charts.line(given, lambda step: step.most("oldest")) if task is None else None,
    }
    more = {"first": first, "step_seconds": length.total_seconds(), "charts": plain(shown)}
    more |= {"marks": marks, "versions": started}
    return Page("history.html", [_item(step) for step in given if step.rows], more, view)


def last_hour(rows: Sequence[HistoryRow]) -> dict[str, Chart]:
    """What ended in the last hour, and how long jobs waited, of the rows of its minutes."""
    _, length, number = RANGES["1h"]
    given = charts.steps(rows, begin(datetime.now(UTC), length) - (number - 1) * length, length, number)
    return {"ended": charts.stacked(given, ENDED), "waits": charts.line(given, _wait)}


def begin(at: datetime, length: timedelta) -> datetime:
    """The beginning of the step of this length in which `at` is."""
    return EPOCH + (at - EPOCH) // length * length


def waiting(step: Step) -> float | None:
    """How many jobs were available or blocked at most; None if nothing was measured."""
    available, blocked = step.most("available"), step.most("blocked")
    return None if available is None or blocked is None else available + blocked


def _wait(step: Step) -> float | None:
    return histogram.quantile(step.merged("wait"), 0.95) if step.rows else None


def _item(step: Step) -> dict[str, Any]:
    counted = {name: step.sum(name) for name in ("started", "completed", "failed", "retried")}
    measured = {"wait_p95": _wait(step), "waiting": waiting(step), "oldest": step.most("oldest")}
    return {"at": step.at} | counted | measured


def _mark(entry: AuditEntry, x: float | None) -> dict[str, Any]:
    """Without the target: it may be a filter, with arguments of jobs."""
    return {"x": x, "at": entry.at, "actor": entry.actor, "action": entry.action, "count": entry.count}
