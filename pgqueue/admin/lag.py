"""How far the relay of an outbox is behind: the staged jobs that wait in the application's own database.

Called by applications and by `pgqueue status`. Only reads. `lag` and `visible` are for a connection to the database of
the outbox.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue.config import config
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text

COUNTED_MOST = 10_000
"""More rows than this are not counted: then `waiting` or `refused` is one more."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Staged jobs that wait for a relay, the seconds that the oldest has waited, and how many were put aside."""

    waiting: int
    oldest: float | None
    refused: int


def visible(conn: object) -> bool:
    """Whether there is an outbox here, and this role may read it."""
    return drivers.run(conn, Statement(text("lag_visible", config().schema), {}, lambda rows: bool(rows[0][0])))


def lag(conn: object) -> Lag:
    """How far the relay is behind."""
    return drivers.run(conn, Statement(text("lag_outbox", config().schema), {}, _lag))


def _lag(rows: list[Row]) -> Lag:
    waiting, oldest, refused = rows[0]
    return Lag(waiting, oldest, refused)
