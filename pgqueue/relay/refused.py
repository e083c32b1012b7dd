"""Rows of an outbox that were put aside, because they cannot be delivered as they are: listed, and tried again.

Used by `pgqueue relay --list-refused` and `--retry-refused`, and listed by the dashboard. On a connection to the
application's database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pgqueue.config import client
from pgqueue.database.asking import asks, named, twin
from pgqueue.database.statements import Statement

REFUSED_MOST = 100
"""So many rows are listed, the oldest ones."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A staged job that was put aside."""

    id: int
    task: str
    uid: str
    staged_at: datetime
    refused_at: datetime
    reason: str


@asks
def refused(conn: object, most: int = REFUSED_MOST) -> Statement[list[RefusedRow]]:
    """The rows that were put aside, the oldest first."""
    return named("refused_list", lambda rows: [RefusedRow(*row) for row in rows], most=most)


arefused = twin(refused)
"""`refused` for async connections."""


@asks
def retry(conn: object, ids: Sequence[int] | None = None) -> Statement[int]:
    """Put these rows back into the outbox, all of them by default; return how many. A relay tries them again."""
    wanted = None if ids is None else list(ids)
    return named("refused_retry", lambda rows: int(rows[0][0]), ids=wanted, notify=client()[1])
