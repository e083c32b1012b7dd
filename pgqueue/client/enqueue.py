"""Enqueue: jobs become rows inside the application's own transaction. The first station of the flow.

Called by the application, by tasks (`task.enqueue`) and by the CLI. Pure functions make the statements (`one`, `many`).
`enqueue`, `aenqueue` and their batch forms only run them on the connection. Jobs with unique keys take another way,
`unique_enqueue`; jobs for a queue in another database are staged by `outbox`.

A job exists exactly if that transaction commits. The NOTIFY that wakes a worker is part of it. This module never
commits, never opens a connection and never takes a lock. Arguments are checked before anything is sent: a refused call
leaves the application's transaction as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from pgqueue.client import outbox, unique_enqueue
from pgqueue.client.handle import JobHandle
from pgqueue.client.job_parameters import (
    columns,
    has_keys,
    is_plain,
    lines,
    plain_columns,
    plain_values,
    values,
)
from pgqueue.client.observers import Sending, observers, sent
from pgqueue.client.registry import declared_tasks
from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text
from pgqueue.errors import InvalidArguments
from pgqueue.jobs import codec
from pgqueue.jobs.job import Enqueueable, NewJob
from pgqueue.jobs.nodes import refuse_results
from pgqueue.jobs.values import check_task_name
from pgqueue.options import needs_arguments

P = ParamSpec("P")
R = TypeVar("R")

watchers: list[Callable[[object], None]] = []
"""Each is told of every connection on which jobs are about to be enqueued, but for async ones. For integrations."""

ONE = "the connection of your transaction comes first, then the task: enqueue(conn, task, …)"
MANY = "the connection of your transaction comes first, then the jobs: enqueue_many(conn, [task.new(…), …])"


@overload
def enqueue(conn: object, task: Enqueueable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]: ...
@overload
def enqueue(conn: object, task: str, /, **kwargs: Any) -> JobHandle[Any]: ...
@needs_arguments(2, ONE)
def enqueue(conn: object, task: Any, /, *args: Any, **kwargs: Any) -> JobHandle[Any]:
    """Enqueue one call of `task` on the application's connection and return the job's handle.

    The job is part of the connection's transaction: it runs after the COMMIT, or never. One statement; never commits.
    `task` is a task (also `task.using(…)`), or the name of a task of another codebase, then with keyword arguments
    only. A name that is declared here is taken as that task. Of any other name every keyword is an argument, also one
    that is called as an option is: options go through `remote(name).using(delay=60)`. Raises InvalidArguments before
    anything is sent, UnsupportedConnection, SchemaMissing, or the driver's own errors.

        with psycopg.connect(dsn) as conn:
            conn.execute("INSERT INTO orders (id) VALUES (7)")
            pgqueue.enqueue(conn, send_receipt, order_id=7)
    """
    new = _new_job(conn, task, args, kwargs)
    if not observers:
        return _send(conn, new)
    sending = Sending([new])
    with sent(sending):
        sending.handles = [_send(conn, sending.jobs[0])]
    return sending.handles[0]


@overload
async def aenqueue(conn: object, task: Enqueueable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]: ...
@overload
async def aenqueue(conn: object, task: str, /, **kwargs: Any) -> JobHandle[Any]: ...
@needs_arguments(2, ONE)
async def aenqueue(conn: object, task: Any, /, *args: Any, **kwargs: Any) -> JobHandle[Any]:
    """`enqueue` for async connections."""
    new = _new_job(conn, task, args, kwargs)
    if not observers:
        return await _asend(conn, new)
    sending = Sending([new])
    with sent(sending):
        sending.handles = [await _asend(conn, sending.jobs[0])]
    return sending.handles[0]


@needs_arguments(2, MANY)
def enqueue_many(conn: object, jobs: Iterable[NewJob[Any]], /) -> list[JobHandle[Any]]:
    """Enqueue a batch and return the handles in the jobs' order. One statement for all jobs; none for no jobs.

    If unique keys of the jobs are taken already, there is a second statement, rarely more.

        pgqueue.enqueue_many(conn, [remind.new(user) for user in users] + [report.new()])

    All or none: if one job is refused, the batch is refused before anything is sent. Only a duplicate of a task with
    on_duplicate="raise" is found after the others are inserted: roll back if they are not wanted.
    """
    batch = _checked(jobs)
    if not observers or not batch:
        return _send_many(conn, batch)
    sending = Sending(batch, batch=True)
    with sent(sending):
        sending.handles = handles = _send_many(conn, sending.jobs)
    return handles


@needs_arguments(2, MANY)
async def aenqueue_many(conn: object, jobs: Iterable[NewJob[Any]], /) -> list[JobHandle[Any]]:
    """`enqueue_many` for async connections."""
    batch = _checked(jobs)
    if not observers or not batch:
        return await _asend_many(conn, batch)
    sending = Sending(batch, batch=True)
    with sent(sending):
        sending.handles = handles = await _asend_many(conn, sending.jobs)
    return handles


# By which way --------------------------------------------------------------------------------------------------------


def _send(conn: object, new: NewJob[Any]) -> JobHandle[Any]:
    if watchers:
        _tell_watchers(conn)
    if outbox.staged(conn):
        return outbox.stage(conn, [new])[0]
    return drivers.run(conn, _one(new)) if new.keys is None else unique_enqueue.enqueue(conn, [new])[0]


async def _asend(conn: object, new: NewJob[Any]) -> JobHandle[Any]:
    if outbox.staged(conn):
        return (await outbox.astage(conn, [new]))[0]
    if new.keys is None:
        return await drivers.arun(conn, _one(new))
    return (await unique_enqueue.aenqueue(conn, [new]))[0]


def _send_many(conn: object, batch: list[NewJob[Any]]) -> list[JobHandle[Any]]:
    if watchers and batch:
        _tell_watchers(conn)
    if batch and outbox.staged(conn):
        return outbox.stage(conn, batch)
    if has_keys(batch):
        return unique_enqueue.enqueue(conn, batch)
    return drivers.run(conn, _many(batch)) if batch else []


async def _asend_many(conn: object, batch: list[NewJob[Any]]) -> list[JobHandle[Any]]:
    if batch and outbox.staged(conn):
        return await outbox.astage(conn, batch)
    if has_keys(batch):
        return await unique_enqueue.aenqueue(conn, batch)
    return await drivers.arun(conn, _many(batch)) if batch else []


def _tell_watchers(conn: object) -> None:
    for watcher in watchers:
        watcher(outbox.bare(conn))


# The statements ------------------------------------------------------------------------------------------------------


def one(job: NewJob[R], *, schema: str = "pgqueue", notify: bool = True) -> Statement[JobHandle[R]]:
    """The statement that enqueues one job."""
    if is_plain(job):
        return Statement(text("enqueue_now", schema), plain_values(job) | {"notify": notify}, _handle)
    refuse_results([job])
    return Statement(text("enqueue_later", schema), values(job) | {"notify": notify}, _handle)


def many(
    jobs: Sequence[NewJob[Any]], *, schema: str = "pgqueue", notify: bool = True
) -> Statement[list[JobHandle[Any]]]:
    """The statement that enqueues these jobs: at least one, all without unique keys."""
    if not all(map(is_plain, jobs)):
        refuse_results(jobs)
        return Statement(text("enqueue_many_later", schema), columns(jobs) | {"notify": notify}, _handles)
    params = plain_columns(jobs)
    params["heard"] = lines(sorted({job.queue for job in jobs})) if notify else ""
    return Statement(text("enqueue_many_now", schema), params, _handles)


def following(jobs: Sequence[NewJob[Any]], *, schema: str, notify: bool) -> list[Statement[Any]]:
    """The statements that enqueue these jobs as successors, with keys or without, and those that are added to a node of
    a flow. Their answers mean nothing."""
    made: list[Statement[Any]] = []
    if others := [job for job in jobs if job.node is None]:
        way: Callable[..., Statement[Any]] = unique_enqueue.following if has_keys(others) else many
        made.append(way(others, schema=schema, notify=notify))
    added: dict[int, list[NewJob[Any]]] = {}
    for job in jobs:
        if job.node is not None:
            added.setdefault(job.node, []).append(job)
    for node, of_node in added.items():  # several, if these are the successors of a batch
        params = columns(of_node) | {"node": node, "notify": notify}
        made.append(Statement(text("enqueue_added", schema), params, list))
    return made


def _one(job: NewJob[R]) -> Statement[JobHandle[R]]:
    schema, notify = client()
    return one(job, schema=schema, notify=notify)


def _many(jobs: Sequence[NewJob[Any]]) -> Statement[list[JobHandle[Any]]]:
    schema, notify = client()
    return many(jobs, schema=schema, notify=notify)


def _handle(rows: list[Row]) -> JobHandle[Any]:
    return JobHandle(rows[0][0])


def _handles(rows: list[Row]) -> list[JobHandle[Any]]:
    return list(map(JobHandle, rows[0][0]))


# The values ----------------------------------------------------------------------------------------------------------


def _new_job(conn: object, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewJob[Any]:
    try:
        if isinstance(task, str):
            return _named(check_task_name(task), args, kwargs)
        make = getattr(task, "new", None)
        if make is None:
            raise InvalidArguments(f"{task!r} is not a task: declare it with @pgqueue.task, or give a task's name")
        return make(*args, **kwargs)  # type: ignore[no-any-return]
    except InvalidArguments:
        drivers.check_connection(outbox.bare(conn))  # an argument stands in its place: then all others seem to be wrong
        raise


def _named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewJob[Any]:
    """A job of the task that is declared here under this name. Else it is of another codebase: its declaration is
    unknown here, and queue and priority are the defaults."""
    declared = declared_tasks.get(name)
    if declared is not None:
        return declared.new(*args, **kwargs)  # type: ignore[no-any-return]
    encoded = codec.keywords_only(name).encode(args, kwargs)
    return NewJob(name, encoded, "default", 5, None, None, None, None)


def _checked(jobs: Iterable[NewJob[Any]]) -> list[NewJob[Any]]:
    if isinstance(jobs, NewJob) or not isinstance(jobs, Iterable):
        raise InvalidArguments(f"enqueue_many takes several jobs, [task.new(…), …], not {type(jobs).__qualname__}")
    batch = list(jobs)
    for cls in set(map(type, batch)):
        if not issubclass(cls, NewJob):
            raise InvalidArguments(f"enqueue_many takes what task.new(…) returns, not {cls.__qualname__}")
    return batch
