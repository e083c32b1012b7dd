"""What happened, as charts: throughput, failures, waits, and how many jobs there were.

Changes by hand are marked, and new versions of the application. A step that is not counted yet has no numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pgqueue.admin.audit import AuditEntry, aaudit
from pgqueue.admin.history import HistoryRow, ahistory
from pgqueue.admin.history import Step as Unit
from pgqueue.admin.versions import Version, aversions
from pgqueue.jobs import histogram
from pgqueue.jobs.values import EPOCH
from pgqueue.web import charts
from pgqueue.web.charts import Step
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.panel import Drawing, Mark, Panel
from pgqueue.web.problems import Problem

MARKS_MOST = 200
ENDED = (("completed", "completed"), ("retried", "to be made again"), ("failed", "failed"))
"""The parts of a bar and their labels, the one at the ground first."""
ATTEMPTS = "Jobs that ended, and attempts to be made again"
WAITS = ("Waits: 95 % waited at most", "95 % waited at most")
RANGES: dict[str, tuple[Unit, timedelta, int]] = {
    "1h": ("minute", timedelta(minutes=1), 60),
    "6h": ("minute", timedelta(minutes=10), 36),
    "24h": ("hour", timedelta(hours=1), 24),
    "30d": ("hour", timedelta(hours=12), 60),
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

    async def ask(conn: object) -> tuple[list[HistoryRow], list[AuditEntry], list[Version]]:
        rows = await ahistory(conn, since=first, queue=queue, task=task, step=unit, by="all")
        return rows, await aaudit(conn, since=first, limit=MARKS_MOST), await aversions(conn)

    rows, changes, versions = await asked.read_shared(ask, "history", first, queue, task, unit)
    now = datetime.now(UTC)
    given = charts.steps(rows, first, length, number)
    drawing = Drawing(given, length, now)
    figures = [drawing.bars("ended", ATTEMPTS, ENDED), drawing.line("waits", *WAITS, wait, is_time=True)]
    if task is None:
        figures.append(drawing.line("waiting", "Jobs that are available or blocked", "waiting", waiting))
        oldest = ("The oldest job that could run", "oldest")
        figures.append(drawing.line("oldest", *oldest, lambda step: step.most("oldest"), is_time=True))
    drawn = drawing.panel(figures, [*version_marks(versions), *map(change_mark, changes)])
    view = {"asked": {"range": range_, "queue": queue or "", "task": task or ""}, "extents": EXTENTS}
    items = [
        _item(step, column.is_counted)
        for step, column in zip(given, drawn.columns, strict=True)
        if step.rows or not column.is_counted
    ]
    more = {"first": first, "step_seconds": length.total_seconds(), "charts": plain(drawn)}
    return Page("history.html", items, more, view | {"happened": any(step.rows for step in given)})


def last_hour(rows: Sequence[HistoryRow], versions: Sequence[Version]) -> Panel:
    """What ended in the last hour, and how long jobs waited, of the rows of its minutes."""
    _, length, number = RANGES["1h"]
    now = datetime.now(UTC)
    drawing = Drawing(charts.steps(rows, begin(now, length) - (number - 1) * length, length, number), length, now)
    figures = [drawing.bars("ended", ATTEMPTS, ENDED), drawing.line("waits", *WAITS, wait, is_time=True)]
    return drawing.panel(figures, version_marks(versions))


def version_marks(versions: Iterable[Version]) -> list[Mark]:
    """The first start of each."""
    return [Mark(each.first_at, "version", each.version, f"Version {each.version} began") for each in versions]


def change_mark(entry: AuditEntry) -> Mark:
    """Without the target: it may be a filter, with arguments of jobs."""
    return Mark(entry.at, "change", "", f"{entry.action} by {entry.actor}, {entry.count:,}")


def begin(at: datetime, length: timedelta) -> datetime:
    """The beginning of the step of this length in which `at` is."""
    return EPOCH + (at - EPOCH) // length * length


def waiting(step: Step) -> float | None:
    """How many jobs were available or blocked at most; None if nothing was measured."""
    available, blocked = step.most("available"), step.most("blocked")
    return None if available is None or blocked is None else available + blocked


def wait(step: Step) -> float | None:
    """The time that 95 % of the attempts have waited at most; None if none has begun."""
    return histogram.quantile(step.merged("wait"), 0.95) if step.rows else None


def _item(step: Step, is_counted: bool) -> dict[str, Any]:
    names = ("started", "completed", "failed", "retried")
    counted = {name: step.sum(name) if is_counted else None for name in names}
    measured = {"wait_p95": wait(step), "waiting": waiting(step), "oldest": step.most("oldest")}
    return {"at": step.at, "is_counted": is_counted} | counted | measured
