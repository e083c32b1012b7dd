"""Run a flow without a database: each handler in its turn, with the results of others among its arguments.

Called by tests of applications. It goes on as a release does: a node runs after the nodes that it waits for, or is
cancelled, or skipped. Jobs run once, one after the other. Written once, as a generator, for sync and async tests.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import msgspec

from pgqueue.client import tasks
from pgqueue.client.flow import Flow
from pgqueue.client.tasks import Task
from pgqueue.errors import Error
from pgqueue.jobs.codec import result_json
from pgqueue.jobs.job import Job, NewJob
from pgqueue.jobs.nodes import NODE_BITS, Node
from pgqueue.jobs.outcomes import Cancel, Fail, Retry, Snooze
from pgqueue.testing.handlers import ATTEMPT_ERRORS, arun_job, run_job
from pgqueue.testing.resources import AS_DECLARED

FLOW = 1
"""The id of the flow, as its jobs see it."""
MOST = 10_000
"""The most jobs of a run; a job that adds itself would never end."""

Ran = tuple[Job, Any]
"""A job, and what its handler returned."""
Runs = Generator[tuple[Task[..., Any], NewJob[Any]], Ran, dict[Node[Any], Any]]


def run_flow(flow: Flow, *, resources: Any = AS_DECLARED) -> dict[Node[Any], Any]:
    """Run all jobs of a flow without a database, as workers would, and return the results by node, as plain JSON.

    Of `add_many` the result is a list in the order of the jobs, with None for one that failed. A node of one job that
    failed, and nodes that were cancelled or skipped, are not among the results. A handler that raises has failed; so
    has one that answers `Retry`, `Snooze`, `Cancel` or `Fail`. Its exception is raised, unless a node waits for the
    end or the failure of its node. Jobs of `job.add` run, those of `job.enqueue` do not. Raises Error for a task that
    is not declared here, and after 10,000 jobs.

    >>> @pgqueue.task(name="testing.add")
    ... def add(a: int, b: int) -> int:
    ...     return a + b
    >>> flow = pgqueue.Flow("sums")
    >>> first = flow.add(add.new(1, 2))
    >>> second = flow.add(add.new(first.result, 10))
    >>> run_flow(flow)[second]
    13
    """
    runs = _runs(flow)
    try:
        task, new = next(runs)
        while True:
            try:
                ran = run_job(task, new, resources)
            except ATTEMPT_ERRORS as error:
                task, new = runs.throw(error)
            else:
                task, new = runs.send(ran)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def arun_flow(flow: Flow, *, resources: Any = AS_DECLARED) -> dict[Node[Any], Any]:
    """`run_flow` on the loop of the test.

    results = await arun_flow(flow)
    """
    runs = _runs(flow)
    try:
        task, new = next(runs)
        while True:
            try:
                ran = await arun_job(task, new, resources)
            except ATTEMPT_ERRORS as error:
                task, new = runs.throw(error)
            else:
                task, new = runs.send(ran)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _runs(flow: Flow) -> Runs:
    """Give each job that runs, with its task; take what its handler returned, or its exception."""
    values: dict[Node[Any], list[Any]] = {}
    """Of each node that ran, what its jobs returned; None for one that failed."""
    failed, left_out = set[int](), set[int]()
    expected = {number for node in flow.nodes for number in (*node.conditions.ended, *node.conditions.failed)}
    count = 0
    for node in flow.nodes:
        waits = node.conditions
        if failed.intersection(waits.completed):
            failed.add(node.number)
            left_out.add(node.number)
        elif waits.failed and not failed.intersection(waits.failed):
            left_out.add(node.number)
        if node.number in left_out:
            continue
        given = {name: _result(values, of) for name, of in node.results}
        values[node] = []
        todo = [_ready(new, given, node) for new in node.jobs]
        for new in todo:  # grows while it runs
            count += 1
            if count > MOST:
                raise Error(f"run_flow ran {MOST:,} jobs and there is more to do: does {new.task} add itself?")
            try:
                job, value = yield _task(new), new
                if isinstance(value, Snooze | Retry | Cancel | Fail):
                    raise Error(f"{node.shown}: {new.task} answered {value!r}, and run_flow runs each job once")
            except ATTEMPT_ERRORS:
                if node.number not in expected:
                    raise
                failed.add(node.number)
                values[node].append(None)
                continue
            values[node].append(json.loads(result_json(value)) if _task(new).store_result else None)
            todo += [added for added in job.successors or () if added.node is not None]
    return {node: _result(values, node) for node in values if node.many or node.number not in failed}


def _ready(new: NewJob[Any], given: dict[str, Any], node: Node[Any]) -> NewJob[Any]:
    """The job as it is when it is released."""
    args = new.args if not given else json.dumps({**json.loads(new.args), **given})
    return msgspec.structs.replace(new, args=args, results=None, node=FLOW << NODE_BITS | node.number)


def _result(values: dict[Node[Any], list[Any]], node: Node[Any]) -> Any:
    """What stands for the result of a node."""
    if node.many:
        return values.get(node, [None] * len(node.jobs))
    return values[node][0] if node in values else None


def _task(new: NewJob[Any]) -> Task[..., Any]:
    found = tasks.find(new.task)
    if found is None:
        raise Error(f"task {new.task!r} is not declared here: run_flow runs handlers of this codebase only")
    return found
