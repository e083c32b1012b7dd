"""`pgqueue flows`: the newest flows, or one with its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from pgqueue.cli.database import clock, reading
from pgqueue.cli.json_document import document, fields_of
from pgqueue.cli.options import Whole, as_json, database
from pgqueue.cli.tables import fitting, span, table
from pgqueue.jobs.nodes import FLOW_HIGHEST
from pgqueue.plain_text import plain, plural

if TYPE_CHECKING:
    from pgqueue.admin.flows import FlowInfo, FlowNodes

NODES_SHOWN = 200


@click.command("flows")
@click.argument("id", type=Whole(1, FLOW_HIGHEST), required=False)
@click.option("--limit", type=Whole(1, 1_000), help="List at most this many; 20 if it is not said.")
@click.option("--before", metavar="ID", type=Whole(1, FLOW_HIGHEST), help="Only flows with a lower ID.")
@as_json
@database
def command(id: int | None, limit: int | None, before: int | None, as_json: bool) -> None:
    """List the newest flows, or show one with its nodes.

    A flow runs as long as a job of it lives. Else it has failed, was cancelled, or is completed, by the jobs of it that
    history still has. WHEN is its age, or how long ago it ended. With an ID each node is a line: its jobs, and under
    AFTER the numbers of the nodes that it waits for. Up to 10,000 jobs of a flow are counted for the list. Exit code 1:
    no flow has this ID.

    \b
    Examples:
      pgqueue flows
      pgqueue flows 7
      pgqueue jobs --flow 7 --state failed
      pgqueue retry --flow 7
      pgqueue flows --json | jq '.items[] | select(.state == "failed") | .id'
    """
    from pgqueue.admin import flows

    if id is not None and (limit is not None or before is not None):
        raise click.UsageError("an ID and the options of a list exclude each other")
    with reading("flows") as conn:
        now = clock(conn)
        if id is not None:
            one = flows.get_flow(conn, id)
            click.echo(_document(one) if as_json else "\n".join(_details(one, now)))
            return
        listed = flows.flows(conn, limit=limit or 20, before=before)
    if as_json:
        click.echo(document([{**fields_of(flow), "state": flow.state} for flow in listed]))
    else:
        click.echo("\n".join(_screen(listed, now)) if listed else "There is no flow.")


def _document(one: FlowNodes) -> str:
    nodes = [{**fields_of(node), "state": node.state} for node in one.nodes]
    flow = {**fields_of(one.flow), "state": one.flow.state, "nodes": nodes, "nodes_count": one.nodes_count}
    flow |= {"forgotten": one.forgotten, "kept_for": one.kept_for}
    return document([flow])


def _screen(listed: Sequence[FlowInfo], now: datetime) -> list[str]:
    rows = [[flow.id, flow.name, flow.state, _counted(flow.jobs, flow.exact), _when(flow, now)] for flow in listed]
    return table(["ID", "NAME", "STATE", "JOBS", "WHEN"], rows, right="ID", gives="NAME JOBS")


def _details(one: FlowNodes, now: datetime) -> list[str]:
    from pgqueue.admin.flows import after_of

    flow, (shown, more) = one.flow, fitting(one.nodes, NODES_SHOWN)
    rows = [
        [node.number, node.name or "", node.task or "", node.state, _counted(node.jobs), after_of(node)]
        for node in shown
    ]
    lines = [f"flow {flow.id} {plain(flow.name)!r}: {flow.state}, {_when(flow, now)}"]
    if rows:
        heads = ["NODE", "NAME", "TASK", "STATE", "JOBS", "AFTER"]
        lines += ["", *table(heads, rows, right="NODE", gives="AFTER TASK NAME")]
    if more := more + one.nodes_count - len(one.nodes):
        lines += [f"… and {more:,} more nodes"]
    if one.forgotten:
        lines += [f"History has forgotten {plural(one.forgotten, 'job', 'jobs')} of it, not counted here."]
    elif one.kept_for is not None:
        lines += [f"It is older than history, {span(timedelta(seconds=one.kept_for))}: jobs of it may be forgotten."]
    return lines


def _counted(jobs: Mapping[str, int], exact: bool = True) -> str:
    counts = ", ".join(f"{count:,} {state}" for state, count in sorted(jobs.items()))
    return counts if exact else f"{counts}, and more"


def _when(flow: FlowInfo, now: datetime) -> str:
    if flow.finished_at is None:
        return f"since {span(now - flow.enqueued_at)}"
    return f"ended {span(now - flow.finished_at)} ago"
