"""How far the relay of an outbox is behind: the staged jobs that wait in the application's own database.

Called by applications and by `pgqueue status`. Only reads. `lag` and `visible` are for a connection to the database of
the outbox. `relays` is for one to the database of the queue, and says what relays have reported there.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue.config import config
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text

COUNTED_MOST = 10_000
"""More rows than this are not counted: then `waiting` or `refused` is one more."""
SILENT_SECONDS = 150.0
"""A relay that works has reported within this time."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Staged jobs that wait for a relay, the seconds that the oldest has waited, and how many were put aside."""

    waiting: int
    oldest: float | None
    refused: int


@dataclass(frozen=True, slots=True)
class RelayLag:
    """What the relay of one outbox has reported last. A relay reports once a minute at least."""

    source: str
    """The name of the outbox, a uuid."""
    name: str
    """Where it lies: host and database."""
    waiting: int
    oldest: float | None
    """Seconds that the oldest job had waited then."""
    refused: int
    reported: float
    """Seconds since the report."""

    @property
    def is_silent(self) -> bool:
        """Whether no relay seems to work for this outbox."""
        return self.reported > SILENT_SECONDS


def relays(conn: object) -> list[RelayLag]:
    """How far each relay is behind that delivers to this queue. Empty if this role may not see it."""
    return drivers.run(conn, _relays()) if drivers.run(conn, _may("lag_relays_visible")) else []


async def arelays(conn: object) -> list[RelayLag]:
    """`relays` for async connections."""
    return await drivers.arun(conn, _relays()) if await drivers.arun(conn, _may("lag_relays_visible")) else []


def visible(conn: object) -> bool:
    """Whether there is an outbox here, and this role may read it."""
    return drivers.run(conn, _may("lag_visible"))


async def avisible(conn: object) -> bool:
    """`visible` for async connections."""
    return await drivers.arun(conn, _may("lag_visible"))


def lag(conn: object) -> Lag:
    """How far the relay is behind."""
    return drivers.run(conn, _outbox())


async def alag(conn: object) -> Lag:
    """`lag` for async connections."""
    return await drivers.arun(conn, _outbox())


def _may(name: str) -> Statement[bool]:
    return Statement(text(name, config().schema), {}, lambda rows: bool(rows[0][0]))


def _relays() -> Statement[list[RelayLag]]:
    return Statement(text("lag_relays", config().schema), {}, lambda rows: [RelayLag(*row) for row in rows])


def _outbox() -> Statement[Lag]:
    return Statement(text("lag_outbox", config().schema), {}, _lag)


def _lag(rows: list[Row]) -> Lag:
    waiting, oldest, refused = rows[0]
    return Lag(waiting, oldest, refused)
