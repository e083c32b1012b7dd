"""Which jobs are meant: those with given ids, or all that fit a filter. The one shape of a filter, and its one check.

Lists (`queries`), changes (`actions`) and operations (`bulk`) are asked for with it, from Python, the command line and
the dashboard. It is checked before anything is sent. What fits is said by one function of the schema, `pgqueue.fits`.

The filter of a change names at least one of state, queue and task, or an age. An empty one never means all jobs, and an
empty list of ids is no filter. A list may ask for all, and for more. If it names a queue that cannot be, it is empty; a
change is refused. Only finds, never changes a job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypedDict

from pgqueue.config import client
from pgqueue.database.statements import Statement, text
from pgqueue.database.steps import Steps
from pgqueue.errors import InvalidOption
from pgqueue.jobs.codec import json_object
from pgqueue.jobs.nodes import FLOW_HIGHEST, NODES_MOST
from pgqueue.jobs.states import RETRYING
from pgqueue.jobs.values import (
    check_id,
    check_limit,
    check_moment,
    check_queue,
    check_states,
    check_text,
    seconds,
    whole,
)
from pgqueue.options import no_option

WALKED_MOST = 20_000
TASK_MOST = 200
"""Characters: the column has no more. An operation keeps its filter, and shows it."""
LISTED = 50
"""So many jobs a list has, if it does not say how many."""
OF_LISTS = ("key", "args", "worker", "error_type", "error", "since", "until", "node")
"""The parts of a filter that no change knows, but `error_type` those of operations."""
CHOSEN_MOST = 1_000
"""So many jobs can be named by their ids beside a filter."""
LEFT_OUT: Any = ...
"""The default of a filter's parts. None is different: `queue=None` was given, and means any queue."""


class Criteria(TypedDict, total=False):
    """What a search asks for; what is left out, or None, is not asked for."""

    state: str | Iterable[str] | None
    queue: str | None
    task: str | None
    key: str | None
    args: Mapping[str, Any] | None
    worker: int | None
    error_type: str | None
    error: str | None
    since: datetime | None
    until: datetime | None
    flow: int | None
    node: int | None
    limit: int
    after: int | str | None


@dataclass(frozen=True, slots=True)
class Filter:
    """All jobs in one of these states for which each part holds that is given. `pgqueue.fits` is what that means.

    - `queue`, `task`: of this queue, of this task.
    - `flow`: of this flow. Operations do not ask for it.
    - `limit`: only so many, the oldest; in a list the first ones of its order.
    - `older_than`: only those that ended more than so many seconds ago. Lists do not ask for it.
    - `only`: of these jobs. Only operations ask for it.
    - The other parts are for lists. Times and arguments are texts that the server reads.
    """

    states: tuple[str, ...]
    queue: str | None = None
    task: str | None = None
    limit: int | None = None
    older_than: float | None = None
    only: tuple[int, ...] | None = None
    key: str | None = None
    args: str | None = None
    worker: int | None = None
    error_type: str | None = None
    error: str | None = None
    since: str | None = None
    until: str | None = None
    flow: int | None = None
    node: int | None = None

    def named(self) -> dict[str, object]:
        """The parts that choose, as the record keeps them."""
        parts = {
            "queue": self.queue,
            "task": self.task,
            "flow": self.flow,
            "limit": self.limit,
            "older_than": self.older_than,
            "error_type": self.error_type,
            "ids": None if self.only is None else list(self.only),
        }
        return {"states": list(self.states)} | {name: part for name, part in parts.items() if part is not None}

    def params(self) -> dict[str, object]:
        """The parameters of the fragment `filter`: what a change asks for. A part that no change knows is refused: else
        it would change more jobs than are meant."""
        if beyond := [name for name in (*OF_LISTS, "only") if getattr(self, name) is not None]:
            raise InvalidOption(f"{', '.join(beyond)}: lists can ask for this, changes cannot")
        return self._changed()

    def of_operation(self) -> dict[str, object]:
        """The parameters of the fragment `bulk_filter`: what an operation asks for."""
        only = None if self.only is None else list(self.only)
        return self._changed() | {"ids": only, "error_type": self.error_type}

    def _changed(self) -> dict[str, object]:
        return {"states": list(self.states), "queue": self.queue, "task": self.task, "older": self.older_than}

    def searched(self) -> dict[str, object]:
        """The parameters of the fragment `job_fits`: what a list asks for."""
        parts = {name: getattr(self, name) for name in OF_LISTS}
        return {
            "states": list(self.states),
            "queue": self.queue,
            "task": self.task,
            "flow": self.flow,
            "node": self.node,
        } | parts


def filtered(named: Sequence[int], states: Sequence[str], others: Sequence[str] = (), **given: Any) -> Filter | None:
    """The filter of a change, of its parts (`given`), if they are right; None if there are only ids.

    `states` is the default; `others` are further states that may be named.
    """
    said = {name: value for name, value in given.items() if value is not LEFT_OUT}
    if not said:
        return None
    if named:
        raise InvalidOption(f"give ids, or a filter ({', '.join(said)}); not both")
    if all(value is None for name, value in said.items() if name != "limit"):
        *most, last = [
            name for name in ("state", "queue", "task", "flow", "older_than", "error_type", "ids") if name in given
        ]
        raise InvalidOption(f"this filter would choose all jobs: give at least one of {', '.join(most)} and {last}")
    queue, task, limit = (said.get(name) for name in ("queue", "task", "limit"))
    if queue is not None:
        check_queue(queue)
    if task is not None and not isinstance(task, str):
        raise InvalidOption(f"task {task!r}: give its name, as task.name")
    if task is not None and len(task) > TASK_MOST:
        raise InvalidOption(f"task {task!a:.80}: the name of a task has {TASK_MOST} characters at most")
    if limit is not None and not whole(limit, 1):
        raise InvalidOption(f"limit {limit!r}: give a whole number from 1 on, or None for all")
    return _filter(states, others, said)


def searched(given: Criteria, states: Sequence[str], most: int) -> Filter:
    """The filter of a list of at most `most` jobs, of what is asked for, if that is right. `states` is the default."""
    if unknown := given.keys() - Criteria.__annotations__.keys():
        raise no_option("find", unknown, Criteria.__annotations__)
    asked = _filter(states, (RETRYING,), given)
    return replace(asked, limit=check_limit(given.get("limit", LISTED), most))


def _filter(states: Sequence[str], others: Sequence[str], given: Mapping[str, Any]) -> Filter:
    named = check_states(given.get("state"), (*states, *others))
    for each in ("queue", "task", "key", "error_type", "error"):
        check_text(given.get(each), each)
    worker, args, older_than, flow, node = (
        given.get(name) for name in ("worker", "args", "older_than", "flow", "node")
    )
    if flow is not None and not whole(flow, 1, FLOW_HIGHEST):
        raise InvalidOption(f"flow {flow!r:.80}: give the id of a flow, as handle.id")
    if node is not None and not (flow is not None and whole(node, 1, NODES_MOST)):
        raise InvalidOption(f"node {node!r:.80}: give the number of a node in its flow, and the flow")
    if worker is not None and not whole(worker, 1):
        raise InvalidOption(f"worker {worker!r:.80}: give the id of a worker, a whole number")
    return Filter(
        named or tuple(states),
        limit=given.get("limit"),
        older_than=None if older_than is None else seconds(older_than, "older_than"),
        only=None if given.get("ids") is None else _only(given["ids"]),
        args=None if args is None else json_object(args, "args"),
        worker=worker,
        since=check_moment(given.get("since"), "since"),
        until=check_moment(given.get("until"), "until"),
        flow=flow,
        node=node,
        **{name: given.get(name) for name in ("queue", "task", "key", "error_type", "error")},
    )


def _only(ids: Iterable[int]) -> tuple[int, ...]:
    chosen = tuple(sorted(set(checked(ids))))
    if not 1 <= len(chosen) <= CHOSEN_MOST:
        raise InvalidOption(f"ids: give 1 to {CHOSEN_MOST:,} of them, not {len(chosen):,}; a filter has no such limit")
    return chosen


def finding(asked: Filter) -> Steps[list[int]]:
    """The ids of the jobs that fit, oldest first. Each statement looks at up to 20,000 rows, or at those of a flow."""
    schema, _ = client()
    found: list[int] = []
    after: int | None = 0
    while after is not None and (asked.limit is None or len(found) < asked.limit):
        params = asked.params()
        if asked.flow is None:
            walk = Statement(text("filters_matching", schema), params | {"after": after, "most": WALKED_MOST}, list)
        else:
            walk = Statement(text("filters_of_flow", schema), params | {"flow": asked.flow}, list)
        [(ids, after)] = yield walk
        found += json.loads(ids)
    return found[: asked.limit]


def checked(ids: Iterable[int]) -> list[int]:
    """Return the ids if they are valid, else raise InvalidOption."""
    return [check_id(id, "ids") for id in ids]
