"""Which tasks there are: those that live workers know, those that jobs have, and those that are paused.

Called by applications and by the CLI. Each function sends one statement that only reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pgqueue.admin.depth import Count
from pgqueue.database.asking import asks, named, said
from pgqueue.database.statements import Statement

TASKS_MOST = 10_000
"""So many tasks are listed, the first ones by name."""


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


@asks
def tasks(conn: object) -> Statement[list[TaskInfo]]:
    """Return the tasks that workers know, that jobs have, or that are paused, by name.

    Of each state 10,000 jobs are looked at.
    """
    return said("tasks_list", list[TaskInfo])


@asks
def taken(conn: object) -> Statement[set[tuple[str, str]]]:
    """Return the pairs of a queue and a task that live workers take jobs of."""
    return named("tasks_taken", lambda rows: {(queue, task) for queue, task in rows})


@asks
def may_look(conn: object) -> Statement[bool]:
    """Whether this role may call `taken`."""
    return named("tasks_may_look", lambda rows: bool(rows[0][0]))
