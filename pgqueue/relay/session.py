"""One session of a relay, in the source or in the target. After any error that ends it, it is never used again.

A relay needs a session of its own on both sides: the lock goes with the one, the fence belongs to the other. So a
connection through a pooler in transaction mode is refused when it is opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from psycopg import OperationalError

from pgqueue.database.backoff import wait
from pgqueue.database.pipeline import Wire
from pgqueue.database.sessions import ROUND_TRIP_SECONDS, Link, ReadOnly, connect, identify, keep, overdue, writable
from pgqueue.database.statements import Statement
from pgqueue.errors import Error
from pgqueue.steady_clock import monotonic

POOLED = (
    "the connection to the {side} is no session of its own (a pooler in transaction mode?): give the relay a direct "
    "connection, or a pooler in session mode. It would work without its lock else"
)


class Session:
    """A connection that is ours alone. `ask` sends statements in one round trip."""

    def __init__(self, link: Link, wire: Wire, side: str) -> None:
        self.link = link
        self._wire = wire
        self._side = side
        self._noted = asyncio.Event()
        wire.add_notify_handler(lambda note: self._noted.set())

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        """The named statement with its parameters; its answer is a list of its rows."""
        return self.link.statement(name, **params)

    async def ask(self, *statements: Statement[Any]) -> list[Any]:
        """Send the statements in one round trip; return the answer of each. After an error of the server the session
        goes on, in a transaction that has failed; after any other exception it has ended."""
        with overdue(self._wire, self.link, ROUND_TRIP_SECONDS):
            answers = await self._wire.ask(statements)
        self.link.outage.answered(self._side)
        return [each.read(rows) for each, rows in zip(statements, answers, strict=True)]

    def check_writable(self) -> None:
        """Raise ReadOnly if the server has told this session that nothing may be written any more."""
        if self._wire.info.parameter_status("default_transaction_read_only") == "on":
            raise ReadOnly(f"in the {self._side}")

    async def stirs(self, seconds: float) -> None:
        """Wait for a notification, at most so long. It returns early, too, if the connection breaks."""
        if self._wire.closed:
            raise OperationalError("the connection is closed")
        loop, file = asyncio.get_running_loop(), self._wire.fileno()
        loop.add_reader(file, self._noted.set)
        try:
            await wait(self._noted, seconds)
        finally:
            loop.remove_reader(file)
        self._noted.clear()


@asynccontextmanager
async def opened(link: Link, side: str) -> AsyncIterator[Session]:
    """A session of the source or the target, with the settings of `sessions_settings` and of its side."""
    began = monotonic()
    wire = await connect(link, f"pgqueue relay {side}")
    wire.prepares = False  # a pooler may refuse that with an error of its own
    try:
        identity = await identify(wire, link)
        if identity is not None:
            await keep(wire, link, identity, began)
        if not wire.keeps:
            raise Error(POOLED.format(side=side))
        await writable(wire, link, f"in the {side}")
        wire.prepares = link.prepare
        session = Session(link, wire, side)
        await session.ask(link.statement(f"{side}_settings"))
        yield session
    finally:
        await wire.close()
