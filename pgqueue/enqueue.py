"""Enqueue: jobs become rows inside the application's own transaction. The first station of the flow.

Called by the application, by tasks (`task.enqueue`) and the CLI. Pure functions make the statements (`one`, `many`);
`enqueue` and its three siblings only hand them to the connection; jobs with unique keys go the way of `unique`. A job
exists exactly when that transaction commits, and the NOTIFY that wakes a worker is part of it. Never commits, never
opens a connection, never takes a lock.

Arguments are checked before anything is sent, so a refused call leaves the application's transaction as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar, overload

from pgqueue import codec, connections, unique
from pgqueue.checks import check_task_name
from pgqueue.columns import column, lines, quoted
from pgqueue.config import client
from pgqueue.errors import InvalidArguments, InvalidOption
from pgqueue.handle import JobHandle
from pgqueue.job import Enqueueable, NewJob
from pgqueue.statements import Row, Statement, text

P = ParamSpec("P")
R = TypeVar("R")


@overload
def enqueue(conn: object, task: Enqueueable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]: ...
@overload
def enqueue(conn: object, task: str, /, **kwargs: Any) -> JobHandle[Any]: ...
def enqueue(conn: object, task: Any, /, *args: Any, **kwargs: Any) -> JobHandle[Any]:
    """Enqueue one call of `task` on the application's connection and return the job's handle.

    The job is part of the connection's transaction: it runs after the COMMIT, or never. One statement; never commits.
    `task` is a task (also `task.using(…)`), or the name of one that lives elsewhere, with keyword arguments only.
    Raises InvalidArguments before anything is sent, UnsupportedConnection, SchemaMissing, or the driver's own errors.

        with psycopg.connect(dsn) as conn:
            conn.execute("INSERT INTO orders (id) VALUES (7)")
            pgqueue.enqueue(conn, send_receipt, order_id=7)
    """
    new = _new_job(task, args, kwargs)
    return connections.run(conn, _one(new)) if new.keys is None else unique.enqueue(conn, [new], columns)[0]


@overload
async def aenqueue(conn: object, task: Enqueueable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]: ...
@overload
async def aenqueue(conn: object, task: str, /, **kwargs: Any) -> JobHandle[Any]: ...
async def aenqueue(conn: object, task: Any, /, *args: Any, **kwargs: Any) -> JobHandle[Any]:
    """`enqueue` for async connections."""
    new = _new_job(task, args, kwargs)
    if new.keys is None:
        return await connections.arun(conn, _one(new))
    return (await unique.aenqueue(conn, [new], columns))[0]


def enqueue_many(conn: object, jobs: Iterable[NewJob[Any]], /) -> list[JobHandle[Any]]:
    """Enqueue a batch and return the handles in the jobs' order. One statement, whatever the jobs; none for no jobs.

    A second one, seldom more, if unique keys of theirs are taken already.

        pgqueue.enqueue_many(conn, [remind.new(user) for user in users] + [report.new()])

    All or none: a job that is refused refuses the batch, before anything is sent. Only a duplicate whose task says
    on_duplicate="raise" is found out after the others are in: roll back if they are not wanted.
    """
    batch = _checked(jobs)
    if _has_keys(batch):
        return unique.enqueue(conn, batch, columns)
    return connections.run(conn, _many(batch)) if batch else []


async def aenqueue_many(conn: object, jobs: Iterable[NewJob[Any]], /) -> list[JobHandle[Any]]:
    """`enqueue_many` for async connections."""
    batch = _checked(jobs)
    if _has_keys(batch):
        return await unique.aenqueue(conn, batch, columns)
    return await connections.arun(conn, _many(batch)) if batch else []


# The statements ------------------------------------------------------------------------------------------------------


def one(job: NewJob[R], *, schema: str = "pgqueue", notify: bool = True) -> Statement[JobHandle[R]]:
    """The statement that enqueues one job."""
    params: dict[str, object] = {
        "task": job.task,
        "args": job.args,
        "queue": job.queue,
        "priority": job.priority,
        "headers": job.headers,
        "max_attempts": job.max_attempts,
        "notify": notify,
    }
    if _is_plain(job):
        return Statement(text("enqueue_now", schema), params, _handle)
    deadline, seconds = deadline_of(job)
    params |= {"run_at": moment_of(job.run_at), "delay": job.delay, "deadline": deadline, "deadline_seconds": seconds}
    params |= {"lock_key": job.lock_key, "lock_limit": job.lock_limit, "on_locked": job.on_locked}
    params |= {"limit_key": job.limit_key, "rate_key": job.rate_key}
    return Statement(text("enqueue_later", schema), params, _handle)


def many(
    jobs: Sequence[NewJob[Any]], *, schema: str = "pgqueue", notify: bool = True
) -> Statement[list[JobHandle[Any]]]:
    """The statement that enqueues these jobs, at least one; they have no unique keys."""
    if not all(map(_is_plain, jobs)):
        return Statement(text("enqueue_many_later", schema), columns(jobs) | {"notify": notify}, _handles)
    params = _plain_columns(jobs)
    params["heard"] = lines(sorted({job.queue for job in jobs})) if notify else ""
    return Statement(text("enqueue_many_now", schema), params, _handles)


def following(jobs: Sequence[NewJob[Any]], *, schema: str, notify: bool) -> Statement[Any]:
    """The statement that makes successors of these, at least one, whatever they have; what it answers says nothing."""
    if _has_keys(jobs):
        return unique.following(jobs, columns, schema=schema, notify=notify)
    return many(jobs, schema=schema, notify=notify)


def columns(jobs: Sequence[NewJob[Any]]) -> dict[str, object]:
    """What jobs are, column by column: all but their unique keys."""
    params = _plain_columns(jobs)
    params["run_at"] = column([job.run_at for job in jobs], moment_of)
    params["delay"] = column([job.delay for job in jobs], repr)
    deadlines = [deadline_of(job) for job in jobs]
    params["deadline"] = column([deadline for deadline, _ in deadlines])
    params["deadline_seconds"] = column([seconds for _, seconds in deadlines], repr)
    params["lock_key"] = column([job.lock_key for job in jobs], quoted)
    params["lock_limit"] = column([job.lock_limit for job in jobs], str)
    params["on_locked"] = column([job.on_locked for job in jobs])
    params["limit_key"] = column([job.limit_key for job in jobs], quoted)
    params["rate_key"] = column([job.rate_key for job in jobs], quoted)
    return params


def _plain_columns(jobs: Sequence[NewJob[Any]]) -> dict[str, object]:
    return {
        "task": column([job.task for job in jobs]),
        "args": lines([job.args for job in jobs]),
        "queue": column([job.queue for job in jobs]),
        "priority": column([job.priority for job in jobs], str),
        "headers": column([job.headers for job in jobs]),
        "max_attempts": column([job.max_attempts for job in jobs], str),
    }


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


def _new_job(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewJob[Any]:
    if isinstance(task, str):
        return _named(check_task_name(task), args, kwargs)
    make = getattr(task, "new", None)
    if make is None:
        raise InvalidArguments(f"{task!r} is not a task: declare it with @pgqueue.task, or give a task's name")
    return make(*args, **kwargs)  # type: ignore[no-any-return]


def _named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewJob[Any]:
    """A task of another codebase: its own declaration is not here, so the defaults of queue and priority apply."""
    encoded = codec.keywords_only(name).encode(args, kwargs)
    return NewJob(name, encoded, "default", 5, None, None, None, None)


def _checked(jobs: Iterable[NewJob[Any]]) -> list[NewJob[Any]]:
    batch = list(jobs)
    for cls in set(map(type, batch)):
        if not issubclass(cls, NewJob):
            raise InvalidArguments(f"enqueue_many takes what task.new(…) returns, not {cls.__qualname__}")
    return batch


def _is_plain(job: NewJob[Any]) -> bool:
    """It may run at once, and needs nothing that few jobs need."""
    timed = job.run_at is not None or job.delay is not None or job.deadline is not None
    return not timed and job.lock_key is None and job.limit_key is None and job.rate_key is None


def _has_keys(jobs: Sequence[NewJob[Any]]) -> bool:
    return any([job.keys is not None for job in jobs])


def deadline_of(job: NewJob[Any]) -> tuple[str | None, float | None]:
    """Its deadline as a time, or as seconds from now."""
    deadline = job.deadline
    return (moment_of(deadline), None) if isinstance(deadline, datetime) else (None, deadline)


def moment_of(moment: datetime | None) -> str | None:
    if moment is None:
        return None
    try:  # in UTC: PostgreSQL knows offsets up to 16 hours, Python up to 24
        return moment.astimezone(UTC).isoformat()
    except OverflowError:
        raise InvalidOption(f"{moment!r}: give a time between the years 1 and 9999, in UTC") from None
