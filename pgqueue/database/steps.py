"""Run several statements one after the other, on a sync or an async connection.

A generator yields statements and gets their answers. An operation that people do by hand is therefore written once for
all kinds of connections. This module does not know what the statements mean.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from pgqueue.database import drivers
from pgqueue.database.statements import Statement

T = TypeVar("T")
Steps = Generator[Statement[Any], Any, T]
"""A generator that yields statements, is sent their answers, and returns the result."""

NOTES: Mapping[str, str] = {
    "40001": "the job has moved, or one of its unique keys was taken, since this transaction took its snapshot "
    "(REPEATABLE READ or SERIALIZABLE); roll back and try again in a new transaction",
    "55P03": "another transaction is changing one of these jobs, or is just taking one of their unique keys, and is "
    "still open. Roll back (or to a savepoint) and try again. The wait is bounded by lock_timeout",
}
"""By SQLSTATE: what a server's error means for an operation that changes jobs by hand."""


def drive(conn: object, steps: Steps[T], notes: Mapping[str, str] = NOTES) -> T:
    """Run the steps on this connection; return their result."""
    drivers.check_connection(conn)  # steps without a statement send nothing that would ask
    try:
        statement = next(steps)
        while True:
            statement = steps.send(drivers.run(conn, statement))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except Exception as error:
        _explain(error, notes)
        raise


async def adrive(conn: object, steps: Steps[T], notes: Mapping[str, str] = NOTES) -> T:
    """`drive` for async connections."""
    drivers.check_connection(conn)
    try:
        statement = next(steps)
        while True:
            statement = steps.send(await drivers.arun(conn, statement))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except Exception as error:
        _explain(error, notes)
        raise


def _explain(error: Exception, notes: Mapping[str, str]) -> None:
    """Add a note to the driver's error: what it means here. The error stays the same: applications retry on it."""
    for each in (error, getattr(error, "orig", None), error.__cause__):
        state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if note := notes.get(str(state)):
            error.add_note(f"pgqueue: {note}")
            return
