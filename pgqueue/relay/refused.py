"""Rows of an outbox that were put aside, because they cannot be delivered as they are: listed, and tried again.

Used by `pgqueue relay --list-refused` and `--retry-refused`, and listed by the dashboard. On a connection to the
application's database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A staged job that was put aside."""

    id: int
    task: str
    uid: str
    staged_at: datetime
    refused_at: datetime
    reason: str


def refused(conn: object, most: int = 100) -> list[RefusedRow]:
    """The rows that were put aside, the oldest first."""
    return drivers.run(conn, _listing(most))


async def arefused(conn: object, most: int = 100) -> list[RefusedRow]:
    """`refused` for async connections."""
    return await drivers.arun(conn, _listing(most))


def retry(conn: object, ids: Sequence[int] | None = None) -> int:
    """Put these rows back into the outbox, all of them by default; return how many. A relay tries them again."""
    schema, notify = client()
    params = {"ids": None if ids is None else list(ids), "notify": notify}
    return drivers.run(conn, Statement(text("refused_retry", schema), params, lambda rows: int(rows[0][0])))


def _listing(most: int) -> Statement[list[RefusedRow]]:
    schema, _ = client()
    return Statement(text("refused_list", schema), {"most": most}, _rows)


def _rows(rows: list[Row]) -> list[RefusedRow]:
    return [RefusedRow(*row) for row in rows]
