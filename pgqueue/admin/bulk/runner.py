"""Work on an operation by filter over a plain connection in autocommit mode: for commands, beside a worker or without.

A step is one statement, and so a transaction of its own: a process that is suspended holds no lock.
"""

from __future__ import annotations

from collections.abc import Callable

from pgqueue.admin.bulk.steps import Steps, claiming
from pgqueue.config import client
from pgqueue.database import drivers


def take(conn: object, holder: str, bulk: int | None = None) -> Steps | None:
    """Take this operation, or the one that has waited longest; None if none is due that no other process works on."""
    schema, notify = client()
    claim = drivers.run(conn, claiming(schema, holder, bulk))
    return None if claim is None else Steps(claim, schema, notify)


def step(conn: object, steps: Steps, refused: Callable[[int, Exception], None] | None = None) -> None:
    """Make one step. `refused` is called with a job that was left out, and the error of the server."""
    while True:
        try:
            rows = drivers.run(conn, steps.step())
        except Exception as error:
            if not steps.refused(error):
                raise
            continue
        left_out = steps.stepped(rows)
        if left_out is not None and refused is not None and steps.error is not None:
            refused(left_out, steps.error)
        return


def release(conn: object, steps: Steps) -> None:
    """Let another process go on at once."""
    drivers.run(conn, steps.release())
