"""Flows as people see them: the newest ones, and one with its nodes; each with a state that is judged by its jobs.

Called by applications and by the CLI. Only reads, inside the caller's transaction, on any connection. No state of a
flow is stored: the rows of its jobs are the only truth. So what history has forgotten is not counted any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from pgqueue.database.asking import asks, named, said, twin
from pgqueue.database.statements import Row, Statement
from pgqueue.errors import FlowNotFound
from pgqueue.jobs.nodes import FLOW_HIGHEST
from pgqueue.jobs.states import LIVE
from pgqueue.jobs.values import check_id, check_limit

LIMIT_MOST = 1_000
COUNTED_MOST = 10_000
"""So many jobs of a flow are counted for the list. A flow by itself is counted as a whole."""
NODES_MOST = 1_000
"""So many nodes of one flow are shown, the first ones."""


@dataclass(frozen=True, slots=True)
class FlowInfo:
    """A flow. `jobs` is how many of its jobs are in each state; times are UTC, by the database's clock.

    `exact` is False if it has more jobs than were counted. Then a state of others that decides `state` counts 1 at
    least. `finished_at` is the end of the job that ended last; None as long as a job of it lives.
    """

    id: int
    name: str
    enqueued_at: datetime
    finished_at: datetime | None
    jobs: Mapping[str, int]
    exact: bool = True

    @property
    def state(self) -> str:
        """One of `running` (a job of it lives), `failed`, `cancelled`, `completed`; `empty`: no job of it is there."""
        return judged(self.jobs)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node of a flow: how many of its jobs are in each state, and the numbers of the nodes that it waits for.

    `waiting` is how many of its jobs wait for their release. `task` is the task of its jobs, by name the first one.
    """

    number: int
    name: str | None
    task: str | None
    jobs: Mapping[str, int]
    waiting: int
    after: tuple[int, ...]
    after_end: tuple[int, ...]
    after_failure: tuple[int, ...]

    @property
    def state(self) -> str:
        """As of a flow; `waiting` if all of its jobs that live wait for their release, `skipped` if all were."""
        state = judged(self.jobs)
        if state == "running" and self.waiting == sum(self.jobs.get(each, 0) for each in LIVE):
            return "waiting"
        return "skipped" if state == "completed" and not self.jobs.get("completed") else state


@dataclass(frozen=True, slots=True)
class FlowNodes:
    """A flow with its first 1,000 nodes. `nodes_count` is how many it has.

    History forgets ended jobs, and these are counted no more. `forgotten` is how many of them are known to have been of
    this flow, 10,000 at most: only while a job waits. `kept_for` is the retention, in seconds, if the flow is older
    than that, so that jobs may have been forgotten; else None.
    """

    flow: FlowInfo
    nodes: tuple[NodeInfo, ...]
    nodes_count: int
    forgotten: int = 0
    kept_for: float | None = None


def judged(jobs: Mapping[str, int]) -> str:
    """The state of jobs together, from how many are in each state.

    >>> judged({"completed": 7, "blocked": 1}), judged({"completed": 7, "cancelled": 1}), judged({"skipped": 1})
    ('running', 'cancelled', 'completed')
    >>> judged({"cancelled": 3, "failed": 1}), judged({})
    ('failed', 'empty')
    """
    if any(jobs.get(state) for state in LIVE):
        return "running"
    for state in ("failed", "cancelled"):
        if jobs.get(state):
            return state
    return "completed" if any(jobs.values()) else "empty"


@asks
def flows(conn: object, *, limit: int = 20, before: int | None = None) -> Statement[list[FlowInfo]]:
    """Return the newest flows, at most `limit` (1 to 1,000); with `before` those with a lower id.

    Of each flow up to 10,000 jobs are counted; its state is that of all. Raises InvalidOption for another limit, or
    what is no id.

        for flow in pgqueue.flows(conn, limit=5):
            print(flow.id, flow.name, flow.state, dict(flow.jobs))
    """
    n = check_limit(limit, LIMIT_MOST)
    below = FLOW_HIGHEST if before is None else check_id(before, "before")
    return said("flows_list", list[FlowInfo], n=n, before=below, most=COUNTED_MOST)


aflows = twin(flows)
"""`flows` for async connections."""


@asks
def get_flow(conn: object, id: int) -> Statement[FlowNodes]:
    """Return a flow with its nodes. Raises FlowNotFound: unknown id, not committed, or forgotten with its last job.

    for node in pgqueue.get_flow(conn, handle.id).nodes:
        print(node.number, node.name, node.task, node.state)
    """
    flow = check_id(id, "flow")

    def read(rows: list[Row]) -> FlowNodes:
        if not rows or flow > FLOW_HIGHEST:
            raise _not_found(flow)
        return msgspec.json.decode(rows[0][0], type=FlowNodes, strict=False)

    return named("flows_get", read, flow=min(flow, FLOW_HIGHEST), n=NODES_MOST, most=COUNTED_MOST)


aget_flow = twin(get_flow)
"""`get_flow` for async connections."""


@asks
def counted(conn: object, id: int, most: int) -> Statement[FlowInfo]:
    """Return a flow with up to `most` of its jobs counted, however many it has. Raises FlowNotFound as `get_flow`."""
    flow = check_id(id, "flow")

    def read(rows: list[Row]) -> FlowInfo:
        found = msgspec.json.decode(rows[0][0], type=list[FlowInfo], strict=False)
        if not found or found[0].id != flow:
            raise _not_found(flow)
        return found[0]

    return named("flows_list", read, n=1, before=min(flow, FLOW_HIGHEST) + 1, most=most)


acounted = twin(counted)
"""`counted` for async connections."""


@asks
def in_states(conn: object, id: int, states: Sequence[str], most: int) -> Statement[dict[str, int]]:
    """Return how many jobs of the flow are in each of these states, among `most` of each. They are states of jobs that
    live, that failed or that were cancelled."""
    flow = min(check_id(id, "flow"), FLOW_HIGHEST)
    return said("flows_counts", dict[str, int], flow=flow, states=list(states), most=most)


ain_states = twin(in_states)
"""`in_states` for async connections."""


def after_of(node: NodeInfo, most: int | None = None) -> str:
    """What a node waits for, in words; of more nodes than `most` the first ones.

    >>> node = NodeInfo(4, None, "t", {}, 0, (1, 2), (3,), ())
    >>> after_of(node), after_of(node, 1)
    ('1, 2, 3 ended', '1 and 2 more')
    """
    said = [*map(str, node.after), *_with(node.after_end, "ended"), *_with(node.after_failure, "failed")]
    if most is None or len(said) <= most:
        return ", ".join(said)
    return f"{', '.join(said[:most])} and {len(said) - most:,} more"


def _not_found(flow: int) -> FlowNotFound:
    return FlowNotFound(
        f"flow {flow} is not there: unknown id, its transaction is open or was rolled back, or retention has "
        "removed its last job"
    )


def _with(numbers: Iterable[int], word: str) -> list[str]:
    return [f"{number} {word}" for number in numbers]
