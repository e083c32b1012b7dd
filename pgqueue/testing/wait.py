"""Lists jobs that wait to be run, and asserts about them. The messages show the jobs that were found instead.

Arguments are compared as the handler would get them: decoded by the task's annotations, with defaults filled in. Only
the arguments that are named are compared.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from pgqueue.admin.filters import Filter
from pgqueue.admin.queries import JobInfo, newest
from pgqueue.client import tasks
from pgqueue.client.tasks import Task
from pgqueue.config import config
from pgqueue.database.asking import asks, named, twin
from pgqueue.database.steps import Steps
from pgqueue.errors import InvalidArguments
from pgqueue.jobs.states import WAITING
from pgqueue.jobs.values import check_id, seconds
from pgqueue.steady_clock import monotonic

SHOWN = 20
MOST = 10_000
PAUSE = 0.02
"""Seconds between two looks. The server waits: so one way serves all connections, sync and async."""


@asks
def enqueued(conn: object, task: Task[..., Any] | str | None = None, /, **args: Any) -> Steps[list[JobInfo]]:
    """Return the jobs that wait to be run, oldest first: all, or those of a task, with these arguments.

    Looks at the newest 10,000 jobs of each state. `flow` is the id of a flow: only its jobs. Raises InvalidArguments
    for an argument that the task does not have.

        [job] = enqueued(conn, send_receipt, order_id=7)
        assert job.priority == 0
    """
    flow = _flow(task, args)
    return _fitting((yield from _waiting(flow)), task, args)


aenqueued = twin(enqueued)
"""`enqueued` for async connections."""


@asks
def assert_enqueued(conn: object, task: Task[..., Any] | str, /, **args: Any) -> Steps[JobInfo]:
    """Assert that a job of this task, with at least these arguments, waits to be run; return the oldest one.

        assert_enqueued(conn, send_receipt, order_id=7)
        assert_enqueued(conn, send_receipt, order_id=7, within=1)
        assert_enqueued(conn, send_receipt, flow=handle.id)

    `within` waits so long for another session to commit it: a duration. `flow` is the id of its flow; a job that waits
    for others is enqueued, too. If the task has a parameter of such a name, it is an argument like the others.
    """
    patience, flow = _patience(task, args), _flow(task, args)
    until = monotonic() + patience
    while True:
        waiting = yield from _waiting(flow)
        if found := _fitting(waiting, task, args):
            return found[0]
        if monotonic() >= until:
            break
        yield named("patience_pause", seconds=PAUSE)
    late = f" within {patience:g} s" if patience else ""
    raise AssertionError(f"{_wanted(task, args)} is not enqueued{late}; {_listed(waiting)}")


aassert_enqueued = twin(assert_enqueued)
"""`assert_enqueued` for async connections."""


@asks
def assert_not_enqueued(conn: object, task: Task[..., Any] | str | None = None, /, **args: Any) -> Steps[None]:
    """Assert that no job of this task with these arguments waits to be run. Without a task: no job at all.

    `flow` is as for `assert_enqueued`.

        assert_not_enqueued(conn, send_receipt)
    """
    flow = _flow(task, args)
    found = _fitting((yield from _waiting(flow)), task, args)
    if found:
        raise AssertionError(f"{_wanted(task, args)} should not be enqueued; {_listed(found)}")


aassert_not_enqueued = twin(assert_not_enqueued)
"""`assert_not_enqueued` for async connections."""


def _patience(task: Task[..., Any] | str, args: dict[str, Any]) -> float:
    """Take `within` out of the arguments, in seconds; 0 without it."""
    return seconds(args.pop("within"), "within") if _is_option("within", task, args) else 0.0


def _flow(task: Task[..., Any] | str | None, args: dict[str, Any]) -> int | None:
    """Take `flow` out of the arguments; None without it."""
    return check_id(args.pop("flow"), "flow") if _is_option("flow", task, args) else None


def _is_option(name: str, task: Task[..., Any] | str | None, args: dict[str, Any]) -> bool:
    known = tasks.find(task) if isinstance(task, str) else task
    return name in args and (known is None or name not in _signature(known).parameters)


def _waiting(flow: int | None) -> Steps[list[JobInfo]]:
    found: list[JobInfo] = []
    for state in WAITING:
        page = yield newest(Filter((state,), limit=MOST, flow=flow), config().schema)
        found += page.jobs
    return sorted(found, key=lambda job: job.id)


def _fitting(waiting: list[JobInfo], task: Task[..., Any] | str | None, args: dict[str, Any]) -> list[JobInfo]:
    if task is None:
        return [job for job in waiting if _has(dict(job.args), args)]
    known = tasks.find(task) if isinstance(task, str) else task
    if known is None:
        return [job for job in waiting if job.task == task and _has(dict(job.args), args)]
    _check_names(known, args)
    names = {known.name, *known.aliases}
    return [job for job in waiting if job.task in names and _has(_arguments(known, job), args)]


def _arguments(task: Task[..., Any], job: JobInfo) -> dict[str, Any]:
    """The job's arguments by name, as the handler would get them. If they do not fit the handler, or it is not here, as
    they are stored."""
    try:
        args, kwargs = task.codec.decode(msgspec.json.encode(job.args))
        bound = _signature(task).bind(*args, **kwargs)
    except (InvalidArguments, TypeError):
        return dict(job.args)
    by_name = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            by_name |= by_name.pop(parameter.name, {})
    return by_name


def _signature(task: Task[..., Any]) -> inspect.Signature:
    """The signature of the task's function, without the Job."""
    whole = inspect.signature(task.fn)
    return whole.replace(parameters=list(whole.parameters.values())[task.wants_job :])


def _check_names(task: Task[..., Any], args: dict[str, Any]) -> None:
    """Refuse unknown names: a misspelled name fits no job, and `assert_not_enqueued` would always pass."""
    parameters = _signature(task).parameters.values()
    unknown = args.keys() - {parameter.name for parameter in parameters}
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        takes = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
        raise InvalidArguments(f"task {task.name!r}: no parameter {', '.join(sorted(unknown))}; it takes ({takes})")


def _has(given: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(name in given and given[name] == value for name, value in wanted.items())


def _wanted(task: Task[..., Any] | str | None, args: dict[str, Any]) -> str:
    name = "a job" if task is None else task if isinstance(task, str) else task.name
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" if args else name


def _listed(jobs: list[JobInfo]) -> str:
    if not jobs:
        return "nothing is enqueued"
    lines = [_line(job) for job in jobs[:SHOWN]] + [f"… and {len(jobs) - SHOWN:,} more"] * (len(jobs) > SHOWN)
    return "\n  ".join(["enqueued are:", *lines])


def _line(job: JobInfo) -> str:
    due = f" for {job.run_at:%Y-%m-%d %H:%M:%S}" if job.state == "scheduled" and job.run_at else ""
    return (
        f"job {job.id} {job.task} {msgspec.json.encode(job.args).decode():.200} ({job.state}{due}, queue {job.queue})"
    )
