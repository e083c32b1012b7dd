"""What runs longest on the overview: first the jobs that run unusually long for their task, then the others.

Called by the overview. Two statements: the jobs that run, which are few, and the history of their tasks by the hour of
the last day. To add up the minutes of a day would take too long for this page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pgqueue.admin.task_history import atask_history
from pgqueue.admin.workers import LongRun, alongest
from pgqueue.web.pages.page import plain

MOST = 5
LOOKED_AT = 1_000
"""So many of the jobs that have run longest are compared."""
COMPARED = timedelta(days=1)
UNUSUAL = 2.0
"""A job runs unusually long from this multiple of its task's p95 on: the p95 is off by a factor of 2 at most."""
LEAST_SECONDS = 10.0
"""A shorter run needs nobody."""


async def along_runs(conn: object) -> tuple[list[LongRun], dict[str, float | None]]:
    """The jobs that have run longest, and the p95 of the runs of their tasks in the last day."""
    runs = await alongest(conn, LOOKED_AT)
    tasks = sorted({run.task for run in runs})
    if not tasks:
        return [], {}
    told = await atask_history(conn, datetime.now(UTC) - COMPARED, "hour", tasks=tasks)
    return runs, {row.name: row.run_quantile(0.95) for row in told.rows}


def longest(runs: Sequence[LongRun], usual: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """What is said of the first of them. `run_p95` is None if no run of the task is counted in the last day."""
    said = [plain(run) | {"run_p95": usual.get(run.task), "is_unusual": _is_unusual(run, usual)} for run in runs]
    return sorted(said, key=_place)[:MOST]


def _is_unusual(run: LongRun, usual: Mapping[str, float | None]) -> bool:
    p95 = usual.get(run.task)
    return p95 is not None and run.age >= LEAST_SECONDS and run.age >= UNUSUAL * p95


def _place(said: Mapping[str, Any]) -> tuple[bool, float]:
    """The unusual ones by how many times their p95 they have run, then the others by how long."""
    return not said["is_unusual"], -said["age"] / (max(said["run_p95"], 0.001) if said["is_unusual"] else 1)
