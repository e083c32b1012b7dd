"""Enqueue a flow: all of its nodes and jobs by one statement, or nothing of it.

Called by `Flow.enqueue`. Never commits, opens no connection. What is sent has been checked by `Flow.add`. The function
`enqueue_flow` acts as the owner of the schema: a role that enqueues has no right on the tables of flows.

Why it is whole or not at all, also in autocommit:
1. It is one statement.
2. The unique keys of all jobs are taken first, within a savepoint of the function. If another job has one of them, the
   savepoint is undone, and nothing else was written. The answer names that job. No error ends the transaction.
3. A job never replaces another one here, and is never replaced by the job that has its key: a flow with other jobs in
   it is not the flow that was written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pgqueue.client import enqueue as enqueues
from pgqueue.client import outbox
from pgqueue.client.handle import JobHandle
from pgqueue.client.job_parameters import columns, key_columns
from pgqueue.client.observers import Sending, observers, sent
from pgqueue.client.unique_enqueue import NOTES
from pgqueue.config import client
from pgqueue.database.statements import Row, Statement, integers, text
from pgqueue.database.steps import Steps, adrive, drive
from pgqueue.errors import DuplicateJob, InvalidOption, PayloadTooLarge
from pgqueue.jobs.headers import with_delay
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.nodes import FEWER, Node

TOLD_MOST = 100
"""So many nodes without jobs are told at the enqueue; the sweep finds the others."""
NODES_BYTES = 250_000_000
"""The most that the names of nodes, and what they wait for, may take as jsonb: an array of it holds 256 MiB."""


@dataclass(frozen=True, slots=True)
class FlowHandle:
    """A flow that was enqueued: its id, and the handles of its jobs.

    `id` is what `find`, `cancel`, `retry` and `discard` take as `flow=`.
    """

    id: int
    name: str
    _jobs: Mapping[Node[Any], range] = field(repr=False)
    _ids: Sequence[int] = field(repr=False)

    def jobs(self, node: Node[Any], /) -> list[JobHandle[Any]]:
        """Return the handles of the jobs of this node, in their order. Raises InvalidOption for a node of another flow.

        receipt = handle.jobs(paid)[0].result(timeout=30)
        """
        if node not in self._jobs:
            raise InvalidOption(f"flow {self.id}: {node!r} is no node of it")
        return [JobHandle(self._ids[place]) for place in self._jobs[node]]


def enqueue(conn: object, name: str, nodes: Sequence[Node[Any]]) -> FlowHandle:
    """Enqueue these nodes, all of one flow, in their order. Raises DuplicateJob if another job has a unique key."""
    _refuse_staged(conn)
    for watcher in enqueues.watchers:
        watcher(conn)
    jobs = [job for node in nodes for job in node.jobs]
    if not observers or not jobs:
        return drive(conn, _enqueueing(name, nodes, jobs), NOTES)
    sending = Sending(jobs, batch=True)
    with sent(sending):
        handle = drive(conn, _enqueueing(name, nodes, sending.jobs), NOTES)
        sending.handles = list(map(JobHandle, handle._ids))
    return handle


async def aenqueue(conn: object, name: str, nodes: Sequence[Node[Any]]) -> FlowHandle:
    """`enqueue` on an async connection."""
    _refuse_staged(conn)
    jobs = [job for node in nodes for job in node.jobs]
    if not observers or not jobs:
        return await adrive(conn, _enqueueing(name, nodes, jobs), NOTES)
    sending = Sending(jobs, batch=True)
    with sent(sending):
        handle = await adrive(conn, _enqueueing(name, nodes, sending.jobs), NOTES)
        sending.handles = list(map(JobHandle, handle._ids))
    return handle


def _refuse_staged(conn: object) -> None:
    if outbox.staged(conn):
        raise InvalidOption(
            "a flow cannot be staged in an outbox: stage a job that enqueues the flow, on a connection to the database "
            "of the queue"
        )


def _enqueueing(name: str, nodes: Sequence[Node[Any]], jobs: Sequence[NewJob[Any]]) -> Steps[FlowHandle]:
    schema, notify = client()
    flow, ids, place, key, holder = yield statement(name, nodes, jobs, schema=schema, notify=notify)
    if flow is None:
        raise _duplicate(nodes, place - 1, key, holder)
    begins, places = 0, dict[Node[Any], range]()
    for node in nodes:
        places[node] = range(begins, begins := begins + len(node.jobs))
    return FlowHandle(flow, name, places, ids)


def statement(
    name: str, nodes: Sequence[Node[Any]], jobs: Sequence[NewJob[Any]], *, schema: str, notify: bool
) -> Statement[Row]:
    """The statement that enqueues a flow; `jobs` are those of the nodes, in their order.

    One row: the flow's id and those of its jobs; or the place from 1 of a job, its key, and the job that has it.
    Raises PayloadTooLarge if it is more than a statement may have, and InvalidOption if two jobs have one key.
    """
    _check_keys(nodes, jobs)
    numbers = [node.number for node in nodes for _ in node.jobs]
    waiting = {node.number for node in nodes if node.conditions.size}
    sent = [
        _released_later(job) if n in waiting and job.delay is not None else job
        for job, n in zip(jobs, numbers, strict=True)
    ]
    rows = [node for node in nodes if node.name is not None or node.number in waiting]
    params: dict[str, object] = {"flow_name": name, "nodes": _rows(name, rows)}
    if not jobs:
        return Statement(text("flow_enqueue_empty", schema), params, _first)
    try:
        params |= columns(sent) | key_columns(sent)
    except PayloadTooLarge as error:
        raise PayloadTooLarge(str(error).replace("enqueue_many", f"flow {name!r}")) from error
    params |= {"numbers": integers(numbers), "never": integers(_never(nodes)), "notify": notify}
    params["on_duplicate"] = "return"  # a job of a flow replaces no job
    return Statement(text("flow_enqueue", schema), params, _first)


def _released_later(job: NewJob[Any]) -> NewJob[Any]:
    """A job whose delay counts from its release."""
    return msgspec.structs.replace(job, delay=None, headers=with_delay(job.headers, job.delay))


def _rows(flow: str, nodes: Sequence[Node[Any]]) -> str:
    rows = [_row(node) for node in nodes]
    # From above: a number takes 16 bytes of jsonb, whatever its length, and all the rest less than twice its text.
    size = sum(2 * len(row) for row in rows) + sum(16 * (node.conditions.size + len(node.results)) for node in nodes)
    if size > NODES_BYTES:
        raise PayloadTooLarge(
            f"flow {flow!r}: {size:,} bytes of names of nodes and of what they wait for, the limit is {NODES_BYTES:,}; "
            f"{FEWER}"
        )
    return "[" + b",".join(rows).decode() + "]"


def _row(node: Node[Any]) -> bytes:
    waits = node.conditions
    said: dict[str, object] = {"number": node.number, "name": node.name}
    said |= {"after": waits.completed, "after_end": waits.ended, "after_failure": waits.failed}
    if node.results:
        said["results"] = {
            name: {"node": of.number, "many": True} if of.many else {"node": of.number} for name, of in node.results
        }
    return msgspec.json.encode(said)


def _never(nodes: Sequence[Node[Any]]) -> list[int]:
    """The first of the nodes without jobs that a job watches: the last of those that it waits for."""
    last = {max(numbers[-1] for numbers in node.conditions if numbers) for node in nodes if node.conditions.size}
    return [node.number for node in nodes if not node.jobs and node.number in last][:TOLD_MOST]


def _check_keys(nodes: Sequence[Node[Any]], jobs: Sequence[NewJob[Any]]) -> None:
    taken: dict[str, int] = {}
    for place, job in enumerate(jobs):
        for key in job.keys.names() if job.keys is not None else ():
            if taken.setdefault(key, place) != place:
                first, second = _node_of(nodes, taken[key]), _node_of(nodes, place)
                raise InvalidOption(
                    f"two jobs of a flow have the {_shown(key)}: one of {first!r}, and one of {second!r}"
                )


def _duplicate(nodes: Sequence[Node[Any]], place: int, key: str, holder: int) -> DuplicateJob:
    node = _node_of(nodes, place)
    return DuplicateJob(
        f"{node.shown}: job {holder} has the {_shown(key)}; nothing of the flow was written",
        existing=holder,
        job_id=holder,
    )


def _shown(key: str) -> str:
    kind, _, bare = key.partition(":")
    return f"{kind} key {bare!r}"


def _node_of(nodes: Sequence[Node[Any]], place: int) -> Node[Any]:
    for node in nodes:
        if place < len(node.jobs):
            return node
        place -= len(node.jobs)
    raise IndexError(place)


def _first(rows: list[Row]) -> Row:
    return rows[0][:5]
