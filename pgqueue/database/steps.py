"""One description of what to ask for, one statement after another, sent on a sync or an async connection.

A generator yields statements and is sent their rows; so what people do by hand is written once, however the application
connects. Knows nothing of what the statements mean.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TypeVar

from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement

T = TypeVar("T")
Steps = Generator[Statement[list[Row]], list[Row], T]
"""What to send, one statement after another; what comes back is sent in; at the end the result."""


NOTES: Mapping[str, str] = {
    "40001": "the job has moved since this transaction took its snapshot (REPEATABLE READ or SERIALIZABLE); roll back "
    "and try again in a new transaction"
}
"""What an error of the server means where jobs are changed by hand, by its SQLSTATE."""


def drive(conn: object, steps: Steps[T], notes: Mapping[str, str] = NOTES) -> T:
    """Send what the steps say, on this connection; their result."""
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
    """Add to the driver's error, which applications know how to retry on, what it means here."""
    for each in (error, getattr(error, "orig", None), error.__cause__):
        state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if note := notes.get(str(state)):
            error.add_note(f"pgqueue: {note}")
            return
