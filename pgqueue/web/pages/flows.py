"""Flows: the newest ones, and one as a graph and as a table; and what an operator does to all jobs of one.

A retry and a cancel of a flow are each one transaction. So no worker sees the flow half changed (admin/actions.py). A
flow with more jobs than that is for is left to the commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pgqueue.admin.actions import acancel, aretry
from pgqueue.admin.answers import Answer
from pgqueue.admin.flows import COUNTED_MOST, FlowInfo, FlowNodes, acounted, aflows, after_of, aget_flow, ain_states
from pgqueue.jobs.states import DEAD, ENDED, LIVE
from pgqueue.web.flow_graph import graph_of
from pgqueue.web.pages.bulks import allowed_action
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.problems import Problem

SHOWN = 50
JOBS_MOST = 50_000
"""A flow with so many jobs is not counted for its page: all statements of the dashboard have 2 s each, and a flow of
200,000 nodes of one job each took 2.9 s on a busy machine. Its nodes are left to the command."""
CHANGED_MOST = 10_000
"""So many jobs of a flow are changed by one request: 10 statements, about a second."""
AFTER_SHOWN = 20
"""So many of the nodes that a node waits for stand in the table."""
STATES: Mapping[str, Sequence[str]] = {"cancel": LIVE, "retry": DEAD}
"""What can be done to a flow, and to jobs in which state."""


async def flows(asked: Asked) -> Page:
    """The newest flows."""
    found = await asked.read(lambda conn: aflows(conn, limit=SHOWN, before=asked.number("before")))
    last = found[-1].id if len(found) == SHOWN else None
    view = {"most": COUNTED_MOST, "first": asked.number("before") is None}
    return Page("flows.html", [_item(each) for each in found], {"before": last}, view)


async def flow(asked: Asked) -> Page:
    """One flow with its nodes. As JSON with its first 1,000; as HTML 50 at a time, with a graph of all first if
    these are 200 at most."""
    one = FlowNodes(await asked.read(lambda conn: acounted(conn, asked.id, JOBS_MOST)), (), 0)
    if one.flow.exact:
        one = await asked.read(lambda conn: aget_flow(conn, asked.id))
    first = min(max(0, (asked.number("from") or 1) - 1), len(one.nodes))
    nodes = one.nodes[first : first + SHOWN]
    has_graph = one.flow.exact and first == 0 and one.nodes_count == len(one.nodes)
    item = _item(one.flow) | {
        "nodes": [plain(node) | {"state": node.state} for node in one.nodes],
        "nodes_count": one.nodes_count,
        "forgotten": one.forgotten,
        "kept_for": one.kept_for,
    }
    view = {
        "first": first,
        "last": first + len(nodes),
        "after": [after_of(node, AFTER_SHOWN) for node in nodes],
        "graph": graph_of(one.nodes) if has_graph else None,
        "states": [state for state in (*LIVE, *ENDED) if one.flow.jobs.get(state)],
        "actions": [action for action in STATES if _possible(action, one, asked.rights)],
        "most": COUNTED_MOST,
        "jobs_most": JOBS_MOST,
    }
    return Page("flow.html", [item], view=view)


async def preview(asked: Asked) -> Page:
    """How many jobs of the flow would be cancelled, or retried, and the form that does it."""
    action = _action(asked, asked.value("action"))
    one = await asked.read(lambda conn: acounted(conn, asked.id, CHANGED_MOST))
    jobs = await _jobs(asked, action)
    count = sum(jobs.values())
    found = {state: jobs[state] for state in STATES[action] if state in jobs}
    view = {"action": action, "count": count, "found": found, "too_many": count > CHANGED_MOST, "most": CHANGED_MOST}
    return Page("flow_change.html", [_item(one)], {"action": action, "count": count}, view)


async def change(asked: Asked) -> Page:
    """Cancel all jobs of the flow that live, or retry those that failed or were cancelled."""
    action = _action(asked, asked.field("action"))
    await asked.read(lambda conn: acounted(conn, asked.id, 1))  # it is there
    if sum((await _jobs(asked, action)).values()) > CHANGED_MOST:
        raise Problem(409, "Too many jobs", f"Nothing was done. Use the command: pgqueue {action} --flow {asked.id}")
    answers = await asked.change(lambda conn: _changed(conn, action, asked.id))
    changed = sum(answer.changed for answer in answers)
    did = f"flow {action}" if changed else "flow before"
    return Page(
        "", [plain(answer) for answer in answers], {"changed": changed > 0}, after=f"/flows/{asked.id}", did=did
    )


async def _changed(conn: object, action: str, flow: int) -> list[Answer]:
    return await (acancel(conn, flow=flow) if action == "cancel" else aretry(conn, flow=flow))


def _action(asked: Asked, action: str | None) -> str:
    if action not in STATES:
        raise Problem(400, "This cannot be done", f"action: use one of {', '.join(STATES)}")
    return allowed_action(asked, action)


def _possible(action: str, one: FlowNodes, rights: Any) -> bool:
    return {"bulk", action} <= set(rights) and any(one.flow.jobs.get(state) for state in STATES[action])


async def _jobs(asked: Asked, action: str) -> dict[str, int]:
    """How many jobs would be changed: of each state one more than may be, however many there are."""
    return await asked.read(lambda conn: ain_states(conn, asked.id, STATES[action], CHANGED_MOST + 1))


def _item(flow: FlowInfo) -> dict[str, Any]:
    return dict(plain(flow)) | {"state": flow.state}
