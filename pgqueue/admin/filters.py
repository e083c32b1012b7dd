"""Which jobs `cancel`, `retry` and `discard` are to change: those with given ids, or all that fit a filter.

Checked before anything is sent. A filter names at least one of state, queue and task, or an age. An empty filter never
means all jobs, and an empty list of ids is no filter. Only finds, never changes a job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pgqueue.config import client
from pgqueue.database.statements import Statement, text
from pgqueue.database.steps import Steps
from pgqueue.errors import InvalidOption
from pgqueue.jobs.durations import seconds
from pgqueue.jobs.states import RETRYING
from pgqueue.jobs.validation import check_queue
from pgqueue.options import check_id, check_states, check_text

WALKED_MOST = 20_000
TASK_MOST = 200
"""Characters: the column has no more. An operation keeps its filter, and shows it."""
LEFT_OUT: Any = ...
"""The default of a filter's parts. None is different: `queue=None` was given, and means any queue."""


@dataclass(frozen=True, slots=True)
class Filter:
    """All jobs in one of these states, of the queue and the task if they are named.

    `limit`: only the oldest ones. `older_than`: only those that ended more than so many seconds ago.
    """

    states: tuple[str, ...]
    queue: str | None = None
    task: str | None = None
    limit: int | None = None
    older_than: float | None = None

    def named(self) -> dict[str, object]:
        """The parts that choose, as the record keeps them."""
        parts = {"queue": self.queue, "task": self.task, "limit": self.limit, "older_than": self.older_than}
        return {"states": list(self.states)} | {name: part for name, part in parts.items() if part is not None}


def filtered(ids: Sequence[int], states: Sequence[str], others: Sequence[str] = (), **given: Any) -> Filter | None:
    """Check the parts of a filter (`given`) and return the filter; None if there are only ids.

    `states` is the default; `others` are further states that may be named.
    """
    said = {name: value for name, value in given.items() if value is not LEFT_OUT}
    if not said:
        return None
    if ids:
        raise InvalidOption(f"give ids, or a filter ({', '.join(said)}); not both")
    limit = said.pop("limit", None)
    if all(value is None for value in said.values()):
        one = "state, queue, task and older_than" if "older_than" in given else "state, queue and task"
        raise InvalidOption(f"this filter would choose all jobs: give at least one of {one}")
    state, queue, task = (said.get(name) for name in ("state", "queue", "task"))
    named = check_states(state, (*states, *others))
    if task is not None and not isinstance(task, str):
        raise InvalidOption(f"task {task!r}: give its name, as task.name")
    check_text(task, "task")
    if task is not None and len(task) > TASK_MOST:
        raise InvalidOption(f"task {task!r:.80}: the name of a task has {TASK_MOST} characters at most")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise InvalidOption(f"limit {limit!r}: give a whole number from 1 on, or None for all")
    older_than = said.get("older_than")
    return Filter(
        named or tuple(states),
        None if queue is None else check_queue(queue),
        task,
        limit,
        None if older_than is None else seconds(older_than, "older_than"),
    )


def finding(asked: Filter) -> Steps[list[int]]:
    """The ids of the jobs that fit, oldest first. Each statement looks at up to 20,000 rows."""
    schema, _ = client()
    found: list[int] = []
    after: int | None = 0
    name, params = _matching(asked)
    while after is not None and (asked.limit is None or len(found) < asked.limit):
        [(ids, after)] = yield Statement(text(name, schema), params | {"after": after}, list)
        found += json.loads(ids)
    return found[: asked.limit]


def _matching(asked: Filter) -> tuple[str, dict[str, object]]:
    """The statement that finds what fits, and its parameters but for the place."""
    states = set(asked.states)
    params: dict[str, object] = {"queue": asked.queue, "task": asked.task, "most": WALKED_MOST}
    if RETRYING in states and "scheduled" not in states:
        return "filters_retrying", params | {"states": sorted(states - {RETRYING} | {"scheduled"})}
    params["states"] = sorted(states - {RETRYING})
    if asked.older_than is not None:
        return "filters_ended", params | {"older": asked.older_than}
    return "filters_matching", params


def checked(ids: Iterable[int]) -> list[int]:
    """Return the ids if they are valid, else raise InvalidOption."""
    return [check_id(id, "ids") for id in ids]
