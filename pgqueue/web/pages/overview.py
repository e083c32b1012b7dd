"""The first page: whether all is well, what is wrong, what fails, how many jobs there are, and what happened lately.

How many jobs there are is read once: the status and the doctor are both made of it. Each part is read in a transaction
of its own, at the same time. If one of them takes too long, the page says so and shows the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pgqueue.admin.cause_errors import CauseError, acause_errors
from pgqueue.admin.depth import Measured, QueueInfo, ameasured, queue_list
from pgqueue.admin.doctor import Diagnosis, adiagnosis
from pgqueue.admin.error_groups import ErrorGroup, aerror_groups
from pgqueue.admin.history import DepthRow, HistoryRow, adepths, ahistory
from pgqueue.admin.limit_jobs import asingle_keys
from pgqueue.admin.queries import Status, astanding
from pgqueue.admin.versions import Version, aversions, brought
from pgqueue.web.charts import HEIGHT, WIDTH
from pgqueue.web.connections import Connections
from pgqueue.web.pages.causes import messages
from pgqueue.web.pages.figures import QUERIES, figures
from pgqueue.web.pages.findings import told, verdict
from pgqueue.web.pages.history import last_hour
from pgqueue.web.pages.longest import along_runs, longest
from pgqueue.web.pages.page import Asked, Page, part_of, plain, said_of
from pgqueue.web.pages.queue import STEADY
from pgqueue.web.pages.queues_in_need import MOST, in_need, ordered, queues
from pgqueue.web.pages.waits import single, waits
from pgqueue.web.problems import Problem
from pgqueue.web.redaction import Redaction

_Happened = tuple[list[HistoryRow], list[ErrorGroup], list[DepthRow], list[Version], dict[str, str | None]]

MINUTES_SHOWN = 15
CAUSES_SHOWN = 5
SUMMED = ("started", "completed", "failed", "retried", "snoozed", "cancelled", "expired", "skipped", "rescued")


async def overview(asked: Asked) -> Page:
    """The states with their numbers as items; findings, the oldest jobs, minutes and totals beside them."""
    read = await asked.shared("overview", _read)
    numbers, no_numbers = read.numbers
    known = numbers or _nothing()
    listed = ordered(known)
    (status, no_status), (diagnosis, no_diagnosis), (happened, no_history) = read.status, read.diagnosis, read.happened
    (ran, no_ran), (errors, no_errors) = read.ran, read.errors
    history, causes, depths, versions, keys = (None, None, None, [], {}) if happened is None else happened
    said = messages(errors or [], causes or [], asked.redaction)
    problems = [each for each in (no_numbers, no_status, no_diagnosis, no_history, no_errors, no_ran) if each]
    if status is None and diagnosis is None and history is None:
        raise problems[0]
    states: list[Any] = []
    if status is not None and numbers is not None:
        states = [{"state": name, "jobs": count} for name, count in status.states.items()]
    now = datetime.fromtimestamp(known.now, UTC) if status is None else status.at
    hour = None if history is None else _hour(history)
    findings = None if diagnosis is None else diagnosis.findings
    waiting, more_waits = waits(known, single(keys, asked.redaction))
    may_retry = {"bulk", "retry"} <= set(asked.rights)
    return Page(
        "overview.html",
        plain(states),
        {
            "verdict": verdict(
                findings, None if hour is None else hour["failed"], None if numbers is None else in_need(listed)
            ),
            "about": None if status is None else {name: getattr(status, name) for name in _ABOUT},
            "live_workers": None if status is None else sum(worker.state != "dead" for worker in status.workers),
            "oldest": _oldest(known, "oldest"),
            "longest_blocked": _oldest(known, "longest_blocked"),
            "figures": figures(None if numbers is None else status, history, now),
            "findings": None if findings is None else [told(each, now) for each in findings],
            "causes": None if causes is None else [_cause(each, said, asked.redaction, versions) for each in causes],
            "waits": waiting,
            "more_waits": more_waits,
            "reasons": plain(None if diagnosis is None else diagnosis.reasons),
            "queues": queues(listed[:MOST], depths, now),
            "longest": None if ran is None else longest(*ran),
            "minutes": None if history is None else [_minute(row) for row in history[-MINUTES_SHOWN:]],
            "hour": hour,
            "charts": plain(last_hour(history, versions)) if history else None,
            "problems": said_of(*problems),
        },
        {
            "box": (WIDTH, HEIGHT),
            "now": now,
            "figure_queries": QUERIES,
            "steady": STEADY,
            "may_retry": may_retry,
        },
    )


@dataclass(frozen=True, slots=True)
class _Read:
    """The parts that were read, each with the problem if that has failed. All visitors share it: nothing is hidden."""

    numbers: tuple[Measured | None, Problem | None]
    status: tuple[Status | None, Problem | None]
    diagnosis: tuple[Diagnosis | None, Problem | None]
    happened: tuple[_Happened | None, Problem | None]
    errors: tuple[list[CauseError] | None, Problem | None]
    ran: tuple[Any, Problem | None]


async def _read(connections: Connections) -> _Read:
    numbers = await part_of(connections, ameasured)
    known = numbers[0] or _nothing()
    names = [each.name for each in ordered(known)[:MOST]]
    status, diagnosis, happened = await asyncio.gather(
        part_of(connections, lambda conn: astanding(conn, known)),
        part_of(connections, lambda conn: adiagnosis(conn, known)),
        part_of(connections, lambda conn: _happened(conn, names)),
    )
    causes = [] if happened[0] is None else happened[0][1]
    errors = await part_of(connections, lambda conn: acause_errors(conn, causes))
    return _Read(numbers, status, diagnosis, happened, errors, await part_of(connections, along_runs))


async def _happened(conn: object, queues: Sequence[str]) -> _Happened:
    """The last hour, the causes of its failures, the last one first, how many jobs waited in these queues, versions,
    and the only lock, limit and rate for which jobs wait."""
    since = datetime.now(UTC) - timedelta(hours=1)
    causes = await aerror_groups(conn, since=since, limit=CAUSES_SHOWN)
    depths = await adepths(conn, queues, since) if queues else []
    return await ahistory(conn, by="all"), causes, depths, await aversions(conn), await asingle_keys(conn)


def _cause(
    group: ErrorGroup, said: dict[str, str], redaction: Redaction, versions: Sequence[Version]
) -> dict[str, Any]:
    """A cause as the page of errors shows it."""
    shown = plain(group) | {"message": said.get(group.fingerprint)}
    return dict(redaction.shown(shown)) | {"is_new": brought(versions, group.first_version)}


_ABOUT = ("database", "schema", "version", "server_version", "at", "counted_at")


def _nothing() -> Measured:
    """What is known of the queues if they could not be read. No finding comes of it."""
    now = datetime.now(UTC).timestamp()
    return Measured(now, now, (), {}, {})


def _oldest(found: Measured, name: str) -> dict[str, Any] | None:
    """The queue in which a job has waited longest, and the seconds; None if no job waits so."""
    waiting: list[QueueInfo] = [queue for queue in queue_list(found) if getattr(queue, name) is not None]
    if not waiting:
        return None
    first = max(waiting, key=lambda queue: float(getattr(queue, name)))
    return {"queue": first.name, "seconds": getattr(first, name)}


def _minute(row: HistoryRow) -> dict[str, Any]:
    numbers = {name: getattr(row, name) for name in SUMMED}
    return {"at": row.at} | numbers | {"wait_p95": row.wait_quantile(0.95), "run_p95": row.run_quantile(0.95)}


def _hour(rows: Sequence[HistoryRow]) -> dict[str, int]:
    return {name: sum(getattr(row, name) or 0 for row in rows) for name in SUMMED}
