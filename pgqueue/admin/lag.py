"""How far the relay of an outbox is behind: the staged jobs that wait in the application's own database.

Called by applications and by `pgqueue status`. Only reads. `lag` and `visible` are for a connection to the database of
the outbox. `relays` is for one to the database of the queue, and says what relays have reported there.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue.database.asking import asks, named, twin
from pgqueue.database.statements import Statement
from pgqueue.database.steps import Steps

COUNTED_MOST = 10_000
"""More rows than this are not counted: then `waiting` or `refused` is one more."""
HELD_SECONDS = 20.0
"""So long no delivery holds the fence; a relay ends the session that does within 2 s, if it has the right."""
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
    stopped: str | None = None
    """Why it delivers nothing until a person says so; None if it delivers."""

    @property
    def is_silent(self) -> bool:
        """Whether no relay seems to work for this outbox."""
        return self.reported > SILENT_SECONDS


@dataclass(frozen=True, slots=True)
class HeldFence:
    """A session of this database that has held the fence of an outbox for 20 s: what is staged there waits for it."""

    source: str
    """The name of the outbox, a uuid."""
    name: str
    """Where it lies: host and database; empty if its relay has not reported yet."""
    pid: int
    role: str
    seconds: float
    """For how long; if this role may not see that, since the last report of the relay."""

    @property
    def said(self) -> str:
        """What holds up which outbox."""
        return f"session {self.pid} of role {self.role} holds the fence of outbox {self.name or self.source}"


@asks
def relays(conn: object) -> Steps[list[RelayLag]]:
    """How far each relay is behind that delivers to this queue. Empty if this role may not see it."""
    [[may]] = yield named("lag_relays_visible")
    return [RelayLag(*row) for row in (yield named("lag_relays"))] if may else []


arelays = twin(relays)
"""`relays` for async connections."""


@asks
def held(conn: object) -> Steps[list[HeldFence]]:
    """The outboxes whose jobs wait for a session that stands still. Empty if this role may not see it."""
    [[may]] = yield named("lag_relays_visible")
    return [HeldFence(*row) for row in (yield named("lag_held", seconds=HELD_SECONDS))] if may else []


@asks
def visible(conn: object) -> Statement[bool]:
    """Whether there is an outbox here, and this role may read it."""
    return named("lag_visible", lambda rows: bool(rows[0][0]))


avisible = twin(visible)
"""`visible` for async connections."""


@asks
def lag(conn: object) -> Statement[Lag]:
    """How far the relay is behind."""
    return named("lag_outbox", lambda rows: Lag(*rows[0]))


alag = twin(lag)
"""`lag` for async connections."""
