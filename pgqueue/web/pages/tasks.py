"""The tasks: which fail, and on which workers spend their time; and one task, before and since the newest version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any
from urllib.parse import urlencode

from pgqueue.admin.audit import AuditEntry, aaudit
from pgqueue.admin.bounded import cut_at
from pgqueue.admin.cause_errors import CauseError, acause_errors
from pgqueue.admin.error_groups import ErrorGroup, aerror_groups
from pgqueue.admin.history import HistoryRow, ahistory
from pgqueue.admin.history import Step as Unit
from pgqueue.admin.known_names import aknown_names
from pgqueue.admin.task_history import (
    FAILING_SHARE,
    TaskHistory,
    TaskRow,
    atask_history,
    atask_paused,
    merged,
    together,
)
from pgqueue.admin.versions import Version, aversions, brought, newest
from pgqueue.jobs import histogram
from pgqueue.web import charts
from pgqueue.web.connections import Connections
from pgqueue.web.durations import Durations, durations
from pgqueue.web.pages import causes
from pgqueue.web.pages.history import ATTEMPTS, ENDED, EXTENTS, RANGES, WAITS, begin, change_mark, version_marks, wait
from pgqueue.web.pages.jobs import TABS, hides_class
from pgqueue.web.pages.page import Asked, Page, part_of, plain, rows_of, said_of
from pgqueue.web.panel import UNCOUNTED, Drawing
from pgqueue.web.problems import Problem
from pgqueue.web.redaction import HIDDEN, Redaction

UNITS: Mapping[Unit, timedelta] = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1)}
LISTED: Mapping[str, tuple[Unit, timedelta]] = {
    "1h": ("minute", timedelta(hours=1)),
    "6h": ("hour", timedelta(hours=6)),
    "24h": ("hour", timedelta(hours=24)),
}
"""In which unit the history is read for the list, and for how long. 30 days of all tasks are too much to add up."""
KNOWN_MOST = 1_000
"""So many tasks that did something in a time are read, those on which workers spend most; as many others, by name."""
CAUSES_MOST = 10
CHANGES_MOST = 200
"""So many changes by hand are looked at for those of a task."""


async def tasks(asked: Asked) -> Page:
    """The tasks that did something: those that fail first, then those that take most time of workers. Then the others
    that live workers know, or that are paused. Each with what it did before and since the newest version."""
    range_, shown = _range(asked, LISTED), rows_of(asked)
    step, length = LISTED[range_]
    now = datetime.now(UTC)
    first = begin(now, UNITS[step]) + UNITS[step] - length
    last = newest(await asked.read_shared(aversions, "versions"))
    split = _split(last, UNITS[step], first, now)
    ends = [first, *(() if split is None else (split, split + UNITS[step])), None]
    parts = [await _done(asked, step, since, until) for since, until in pairwise(ends)]
    known = await asked.read_shared(lambda conn: aknown_names(conn, KNOWN_MOST), "names", KNOWN_MOST)
    paused = parts[-1].paused
    read = (*(part.rows for part in parts), known.tasks, paused)
    rows = together(row for part in parts for row in part.rows)
    before, since = [{}, {}] if split is None else [{row.name: row for row in part.rows} for part in parts[::2]]
    others = sorted(({*known.tasks} | {*paused}) - {row.name for row in rows})
    idle = [TaskRow(name, (), 0, 0, 0, 0, 0.0, 0.0, (), ()) for name in others]
    ordered = [*sorted(rows, key=_need), *idle]
    items = [
        _listed(row, paused) | {"before": _compared(before.get(row.name)), "since": _compared(since.get(row.name))}
        for row in shown.of(ordered)
    ]
    version = None if last is None or split is None else {"name": last.version, "at": last.first_at}
    view = {"range": range_, "extents": {name: EXTENTS[name] for name in LISTED}, "ran": len(rows)}
    more = {"first": first, "version": version, "after": shown.after(ordered)}
    more |= {"cut_at": next(filter(None, (cut_at(each, KNOWN_MOST) for each in read)), None)}
    return Page("tasks.html", items, more, view | shown.view(ordered))


async def _done(asked: Asked, step: Unit, since: datetime | None, until: datetime | None) -> TaskHistory:
    """What all tasks did between these times."""
    assert since is not None
    ask = partial(atask_history, since=since, step=step, until=until)
    return await asked.read_shared(ask, "task history", since, step, until)


async def task(asked: Asked) -> Page:
    """One task in a time, as the only item: its numbers, each before and since the newest version; causes; changes."""
    name = asked.value("name")
    if name is None:
        raise Problem(400, "This cannot be asked", "name: give the name of a task")
    range_ = _range(asked, RANGES)
    step, length, number = RANGES[range_]
    now = datetime.now(UTC)
    first = begin(now, length) - (number - 1) * length
    read, errors, no_errors = await asked.shared(
        repr(("task", name, first, step)), partial(_read_with_errors, name, first, step)
    )
    rows, versions, groups = read.rows, read.versions, read.groups[:CAUSES_MOST]
    messages = causes.messages(errors or [], groups, asked.redaction)
    last = newest(versions)
    drawing = Drawing(charts.steps(rows, first, length, number), length, now)
    figures, split = _figures(rows, UNITS[step], first, now, last)
    changed = [each for each in read.recorded if each.target.get("task") == name]
    shown = [
        drawing.bars("ended", ATTEMPTS, ENDED),
        drawing.line("runs", "Runs: 95 % ran at most", "95 % ran at most", _run, is_time=True),
        drawing.line("waits", *WAITS, wait, is_time=True),
    ]
    drawn = drawing.panel(shown, [*version_marks(versions), *map(change_mark, changed)])
    item = {
        "name": name,
        "is_paused": read.is_paused,
        "figures": figures,
        "version": None
        if last is None
        else {"name": last.version, "at": last.first_at, "is_compared": split is not None},
        "causes": [_cause(each, messages, asked.redaction, versions) for each in groups],
        "changes": [_change(each) for each in changed],
        "states": [{"state": state, "query": urlencode({"state": state, "task": name})} for state in TABS],
    }
    more = {"first": first, "charts": plain(drawn), "durations": plain(_durations(rows, split, UNITS[step]))}
    more |= {"problems": said_of(no_errors)}
    return Page(
        "task.html", [item], more, {"range": range_, "extents": EXTENTS, "more_causes": len(read.groups) > CAUSES_MOST}
    )


@dataclass(frozen=True, slots=True)
class _Read:
    rows: list[HistoryRow]
    groups: list[ErrorGroup]
    recorded: list[AuditEntry]
    is_paused: bool
    versions: list[Version]


async def _read_with_errors(
    name: str, first: datetime, step: Unit, connections: Connections
) -> tuple[_Read, list[CauseError] | None, Problem | None]:
    """What the page of a task is made of, with what its causes say if that can be read. All visitors share it: nothing
    is hidden."""
    read = await connections.read(partial(_read, name, first, step))
    return read, *await part_of(connections, lambda conn: acause_errors(conn, read.groups[:CAUSES_MOST]))


async def _read(name: str, first: datetime, step: Unit, conn: object) -> _Read:
    groups = await aerror_groups(conn, task=name, since=first, limit=CAUSES_MOST + 1)
    return _Read(
        await ahistory(conn, since=first, task=name, step=step, by="all"),
        groups,
        await aaudit(conn, since=first, limit=CHANGES_MOST),
        await atask_paused(conn, name),
        await aversions(conn),
    )


def _run(step: charts.Step) -> float | None:
    return histogram.quantile(step.merged("run"), 0.95) if step.rows else None


def _range(asked: Asked, known: Mapping[str, object]) -> str:
    found = asked.value("range") or "1h"
    if found not in known:
        raise Problem(400, "This cannot be asked", f"range: use one of {', '.join(known)}")
    return found


def _need(row: TaskRow) -> tuple[float, float, str]:
    failing = row.failing or 0.0
    return (-failing if failing >= FAILING_SHARE else 0.0, -row.run_seconds, row.name)


def _listed(row: TaskRow, paused: Iterable[str]) -> dict[str, Any]:
    counted = {name: getattr(row, name) for name in ("name", "queues", "ended", "completed", "failed", "retried")}
    measured = {"run_p95": row.run_quantile(0.95), "wait_p95": row.wait_quantile(0.95), "run_seconds": row.run_seconds}
    is_failing = row.failing is not None and row.failing >= FAILING_SHARE
    return counted | measured | {"failing": row.failing, "is_failing": is_failing, "is_paused": row.name in paused}


def _compared(row: TaskRow | None) -> dict[str, Any] | None:
    return None if row is None else {"failing": row.failing, "run_p95": row.run_quantile(0.95)}


def _split(last: Version | None, step: timedelta, first: datetime, now: datetime) -> datetime | None:
    """The step in which the newest version started, if whole steps before and behind it are counted."""
    if last is None or not first + step <= last.first_at <= now - UNCOUNTED - step:
        return None
    return begin(last.first_at, step)


def _figures(
    rows: Sequence[HistoryRow],
    step: timedelta,
    first: datetime,
    now: datetime,
    last: Version | None,
) -> tuple[dict[str, Any], datetime | None]:
    """The numbers of the whole time, and of the parts of it before and since the newest version; the step in which it
    started.

    The minute or the hour in which it started is in neither part. None if it started before or after this time.
    """
    figures: dict[str, Any] = {"whole": _numbers(rows, first, now - UNCOUNTED), "before": None, "since": None}
    begun = _split(last, step, first, now)
    if begun is None:
        return figures, None
    before, since = _sides(rows, begun, step)
    figures["before"] = _numbers(before, first, begun)
    figures["since"] = _numbers(since, begun + step, now - UNCOUNTED)
    return figures, begun


def _sides(rows: Sequence[HistoryRow], begun: datetime, step: timedelta) -> tuple[list[HistoryRow], list[HistoryRow]]:
    return [row for row in rows if row.at < begun], [row for row in rows if row.at >= begun + step]


def _durations(rows: Sequence[HistoryRow], begun: datetime | None, step: timedelta) -> Durations | None:
    """How long runs took, before and since the version; in all if nothing is compared."""
    if begun is None:
        return durations({"whole": merged(row.run for row in rows)})
    before, since = _sides(rows, begun, step)
    return durations({"before": merged(row.run for row in before), "since": merged(row.run for row in since)})


def _numbers(rows: Sequence[HistoryRow], first: datetime, until: datetime) -> dict[str, Any]:
    """The numbers of these rows of a time. Without a row that is counted all are None: they are not 0."""
    counted = [row for row in rows if row.started is not None]
    if not counted and rows:
        return dict.fromkeys(("ended", "a_minute", "failing", "run_p50", "run_p95", "wait_p95"))
    completed, failed, retried = (
        sum(getattr(row, name) for row in counted) for name in ("completed", "failed", "retried")
    )
    run, wait = merged(row.run for row in counted), merged(row.wait for row in counted)
    minutes = max(1, ceil((until - first).total_seconds() / 60))
    attempts = completed + failed + retried
    return {
        "ended": completed + failed,
        "a_minute": (completed + failed) / minutes,
        "failing": (failed + retried) / attempts if attempts else None,
        "run_p50": histogram.quantile(run, 0.5),
        "run_p95": histogram.quantile(run, 0.95),
        "wait_p95": histogram.quantile(wait, 0.95),
    }


def _cause(
    group: ErrorGroup, messages: Mapping[str, str], redaction: Redaction, versions: Sequence[Version]
) -> dict[str, Any]:
    is_hidden = hides_class(group.error_type, redaction)
    query = {"error_type": group.error_type, "task": group.task}
    shown = {
        name: getattr(group, name) for name in ("place", "count", "first_at", "last_at", "version_tag", "first_version")
    }
    return shown | {
        "error_type": HIDDEN if is_hidden else group.error_type,
        "message": messages.get(group.fingerprint),
        "is_new": brought(versions, group.first_version),
        "jobs": None if is_hidden else urlencode([("state", "retrying"), ("state", "failed"), *query.items()]),
    }


def _change(entry: AuditEntry) -> dict[str, Any]:
    return {"at": entry.at, "actor": entry.actor, "action": entry.action, "count": entry.count}
