"""Steps that are run on a sync or an async connection.

A generator yields steps (a statement, a command without rows, a handler to call) and is sent their answers. `play` and
`aplay` run the steps, so that no function of this package is written twice for async. This module does not know what
the steps mean.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pgqueue.client.tasks import Task
from pgqueue.database import drivers
from pgqueue.database.statements import Statement
from pgqueue.jobs.job import Job
from pgqueue.testing import handlers
from pgqueue.testing.resources import Resources

R = TypeVar("R")
Params = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Command:
    """A statement without rows, as SAVEPOINT, or with rows that are not read."""

    sql: str
    params: Params | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Run the handler of this job. The answer is a `handlers.Ran`."""

    job: Job
    task: Task[..., Any]
    worker_id: int
    alone: bool
    resources: Resources


Step = Statement[Any] | Command | Call
Steps = Generator[Step, Any, R]


def play(conn: Any, steps: Steps[R]) -> R:
    """Run the steps on a connection of any sync kind; return what the generator returns."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = steps.send(answer) if failure is None else steps.throw(failure)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            answer, failure = _take(conn, step), None
        except BaseException as error:  # thrown into the generator, which may tidy up; else `throw` raises it again
            answer, failure = None, error


async def aplay(conn: Any, steps: Steps[R]) -> R:
    """`play` for async connections."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = steps.send(answer) if failure is None else steps.throw(failure)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            answer, failure = await _atake(conn, step), None
        except BaseException as error:
            answer, failure = None, error


def _take(conn: Any, step: Step) -> Any:
    match step:
        case Statement():
            return drivers.run(conn, step)
        case Command():
            return _command(conn, step)
        case Call():
            return handlers.call(step.job, step.task, conn, step.worker_id, alone=step.alone, resources=step.resources)


async def _atake(conn: Any, step: Step) -> Any:
    match step:
        case Statement():
            return await drivers.arun(conn, step)
        case Command():
            return await _acommand(conn, step)
        case Call():
            return await handlers.acall(
                step.job, step.task, conn, step.worker_id, alone=step.alone, resources=step.resources
            )


def _command(conn: Any, command: Command) -> None:
    """Run a command. SQLAlchemy's connections have exec_driver_sql, its sessions a method `connection`, all others
    cursors."""
    if isinstance(conn, str):
        from django.db import connections as django

        conn = django[conn]
    if not hasattr(conn, "cursor") and not hasattr(conn, "exec_driver_sql"):  # a session, or a cursor itself
        conn = conn.connection() if callable(conn.connection) else conn.connection
    if hasattr(conn, "exec_driver_sql"):
        conn.exec_driver_sql(*_bound(command)).close()
        return
    with conn.cursor() as cursor:
        cursor.execute(*_bound(command, numbered=drivers.is_raw(cursor.__class__)))


async def _acommand(conn: Any, command: Command) -> None:
    if drivers.is_django(conn):
        from asgiref.sync import sync_to_async

        return await sync_to_async(_command)(conn if isinstance(conn, str) else conn.alias, command)
    connection = getattr(conn, "exec_driver_sql", None) is None and getattr(conn, "connection", None)
    if callable(connection):
        conn = await connection()
    elif connection:
        conn = connection
    if hasattr(conn, "exec_driver_sql"):
        await conn.exec_driver_sql(*_bound(command, numbered=conn.dialect.driver == "asyncpg"))
    elif hasattr(conn, "cursor_factory"):
        async with conn.cursor() as cursor:
            await cursor.execute(*_bound(command, numbered=drivers.is_raw(cursor.__class__)))
    else:
        sql, values = drivers.numbered(command.sql, command.params or {})
        await conn.execute(sql, *values)


def _bound(command: Command, *, numbered: bool = False) -> tuple[Any, ...]:
    """The statement, and its parameters if it has any. Without parameters a `%` in the statement is only a `%`."""
    if not command.params:
        return (command.sql,)
    return drivers.numbered(command.sql, command.params) if numbered else (command.sql, dict(command.params))
