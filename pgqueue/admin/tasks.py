"""Which tasks there are: those that live workers know, those that jobs have, and those that are paused.

Called by applications and by the CLI. Each function sends one statement that only reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import msgspec

from pgqueue.admin.depth import Count
from pgqueue.config import config
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task that live workers know, that jobs have, or that is paused.

    - `workers`: number of live workers that know it.
    - `jobs`: number of jobs that wait or run, and the `queues` in which they are.
    - `unknown`: jobs wait in a queue whose live workers do not know the task.
    - `paused_at`, `paused_by`: since when it is paused, and by which actor, else database role.
    """

    name: str
    workers: int
    jobs: Count
    queues: tuple[str, ...]
    unknown: bool
    paused_at: datetime | None = None
    paused_by: str | None = None


def tasks(conn: object) -> list[TaskInfo]:
    """Return the tasks that workers know, that jobs have, or that are paused, by name.

    Of each state 10,000 jobs are looked at.
    """
    statement = Statement(
        text("tasks_list", config().schema), {}, lambda rows: msgspec.json.decode(rows[0][0], type=list[TaskInfo])
    )
    return drivers.run(conn, statement)


def taken(conn: object) -> set[tuple[str, str]]:
    """Return the pairs of a queue and a task that live workers take jobs of."""
    return drivers.run(conn, Statement(text("tasks_taken", config().schema), {}, _pairs))


def may_look(conn: object) -> bool:
    """Whether this role may call `taken`."""
    return drivers.run(conn, Statement(text("tasks_may_look", config().schema), {}, lambda rows: bool(rows[0][0])))


def _pairs(rows: list[Row]) -> set[tuple[str, str]]:
    return {(queue, task) for queue, task in rows}
