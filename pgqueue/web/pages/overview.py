"""The first page: how many jobs there are, what is wrong, and what happened in the last hour.

Its three parts are read in three transactions. If one of them takes too long, the page says so and shows the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgqueue.admin.doctor import adoctor
from pgqueue.admin.history import HistoryRow, ahistory
from pgqueue.admin.queries import astatus
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.problems import Problem

MINUTES_SHOWN = 15
SUMMED = ("started", "completed", "failed", "retried", "snoozed", "cancelled", "expired", "skipped", "rescued")


async def overview(asked: Asked) -> Page:
    """The states with their numbers as items; findings, minutes and totals beside them."""
    status, no_status = await asked.part(astatus)
    diagnosis, no_diagnosis = await asked.part(adoctor)
    history, no_history = await asked.part(lambda conn: ahistory(conn, by="all"))
    problems = [no for no in (no_status, no_diagnosis, no_history) if no is not None]
    if status is None and diagnosis is None and history is None:
        raise problems[0]
    states = [] if status is None else [{"state": name, "jobs": count} for name, count in status.states.items()]
    about = None if status is None else {name: getattr(status, name) for name in _ABOUT}
    return Page(
        "overview.html",
        plain(states),
        {
            "about": about,
            "live_workers": None if status is None else sum(worker.state != "dead" for worker in status.workers),
            "findings": plain(None if diagnosis is None else diagnosis.findings),
            "reasons": plain(None if diagnosis is None else diagnosis.reasons),
            "minutes": None if history is None else [_minute(row) for row in history[-MINUTES_SHOWN:]],
            "hour": None if history is None else _hour(history),
            "problems": [_said(problem) for problem in problems],
        },
    )


_ABOUT = ("database", "schema", "version", "server_version", "at", "counted_at")


def _minute(row: HistoryRow) -> dict[str, Any]:
    numbers = {name: getattr(row, name) for name in SUMMED}
    return {"at": row.at} | numbers | {"wait_p95": row.wait_quantile(0.95), "run_p95": row.run_quantile(0.95)}


def _hour(rows: Sequence[HistoryRow]) -> dict[str, int]:
    return {name: sum(getattr(row, name) for row in rows) for name in SUMMED}


def _said(problem: Problem) -> dict[str, Any]:
    return {"title": problem.title, "text": problem.text}
