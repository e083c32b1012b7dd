"""The four figures of the overview: waiting, running, failed and completed, each with a line of the last hour.

Called by the overview. Pure: it reads no database. A step that is not counted or measured is a gap, and not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pgqueue.admin.depth import Count
from pgqueue.admin.history import HistoryRow
from pgqueue.admin.queries import Status
from pgqueue.web import charts
from pgqueue.web.charts import Step
from pgqueue.web.pages.history import begin, waiting
from pgqueue.web.pages.page import plain
from pgqueue.web.panel import UNCOUNTED

STEP = timedelta(minutes=2)
STEPS = 30
LEAST = 20
"""A line that stays below so many jobs is drawn low: three jobs are no mountain."""

QUERIES: Mapping[str, Sequence[tuple[str, str]]] = {
    "waiting": (("state", "available"), ("state", "blocked")),
    "running": (("state", "running"),),
    "failed": (("state", "failed"),),
    "completed": (("state", "completed"),),
}
"""The jobs that a figure leads to."""


def figures(status: Status | None, history: Sequence[HistoryRow] | None, now: datetime) -> list[dict[str, Any]]:
    """The figures that are known. `jobs` is a number of jobs; None if it could not be read."""
    sums = {name: None if history is None else _sum(history, name) for name in ("failed", "completed", "retried")}
    found = [_figure(name, sums[name], history, now) for name in ("failed", "completed")]
    found[0]["retried"] = plain(sums["retried"])
    if status is None:
        return found
    live = [worker for worker in status.workers if worker.state != "dead"]
    counts = status.states
    parts = (counts["available"], counts["blocked"])
    waits = Count(sum(each.n for each in parts), all(each.exact for each in parts))
    runs = {"slots": sum(worker.concurrency for worker in live), "workers": len(live)}
    return [
        _figure("waiting", waits, history, now),
        _figure("running", counts["running"], history, now) | runs,
        *found,
    ]


def spark(rows: Sequence[HistoryRow], value: Callable[[Step], float | None], now: datetime) -> charts.Chart:
    """The line of the last hour of these rows."""
    first = begin(now, STEP) - (STEPS - 1) * STEP
    return charts.line(charts.steps(rows, first, STEP, STEPS), value, LEAST)


def _figure(name: str, jobs: Count | None, history: Sequence[HistoryRow] | None, now: datetime) -> dict[str, Any]:
    """Without a line if there is no history, or nothing in it."""
    drawn = spark(history, _VALUES.get(name) or _ended(name, now), now) if history else None
    return {"name": name, "jobs": plain(jobs), "line": plain(drawn) if drawn is not None and drawn.lines else None}


def _sum(rows: Sequence[HistoryRow], name: str) -> Count:
    return Count(sum(getattr(row, name) or 0 for row in rows))


def _ended(name: str, now: datetime) -> Callable[[Step], float | None]:
    """How many jobs ended so; None for the newest steps, of which not all minutes are counted."""
    return lambda step: step.sum(name) if step.at + STEP <= now - UNCOUNTED else None


_VALUES: Mapping[str, Callable[[Step], float | None]] = {
    "waiting": waiting,
    "running": lambda step: step.most("running"),
}
