"""Finds out that something has changed: by LISTEN on a connection of its own, and by looking behind it.

Used by `live.py`, one for a process. A notification is a hint: it may be lost, and jobs that start or end send none. So
there is a look every second, which needs no LISTEN. Behind a pooler in transaction mode, on a standby, and with
`listen_dsn=off` the look is all there is.

The connection is in autocommit mode, so it holds no snapshot. It is read at least every `REST_SECONDS`, so it keeps no
notification of others back.
"""

from __future__ import annotations

import asyncio
import logging

import psycopg
from psycopg import AsyncConnection, sql

from pgqueue.admin.activity import achannels, amark
from pgqueue.database import embedded
from pgqueue.database.conninfo import connect_timeout_at_most
from pgqueue.errors import Error
from pgqueue.steady_clock import monotonic
from pgqueue.web.connections import Connection, Connections

log = logging.getLogger("pgqueue")

LOOK_SECONDS = 1.0
AGAIN_SECONDS = 30.0
"""After this time the channels are asked for again: there may be new queues. A broken connection is opened again."""
CONNECT_SECONDS, HOST_SECONDS = 5.0, 3
"""So long it may take to connect and to listen; and with one host, so that a frozen one leaves time for the next."""


class Listener:
    """Answers `changed`. `close` it at the end."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._conn: Connection | None = None
        self._channels: frozenset[str] = frozenset()
        self._again = 0.0
        self._mark: str | None = None

    async def changed(self) -> bool:
        """Wait until something has changed, a second at most; whether it has.

        Raises what a look raises if the database does not answer.
        """
        if self._mark is None:
            self._mark = await self._connections.read(amark)
        if await self._heard():
            return True
        before, self._mark = self._mark, await self._connections.read(amark)
        return self._mark != before

    async def close(self) -> None:
        """Close the connection, if there is one."""
        conn, self._conn, self._channels = self._conn, None, frozenset()
        if conn is not None:
            await conn.close()

    async def _heard(self) -> bool:
        """Whether a notification came, within the time of a look. Without LISTEN: wait for so long."""
        ends = monotonic() + LOOK_SECONDS
        try:
            if monotonic() >= self._again:
                self._again = monotonic() + AGAIN_SECONDS
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self._listen()
            if self._conn is not None:
                async for _ in self._conn.notifies(timeout=max(0.0, ends - monotonic()), stop_after=1):
                    return True
                return False
        except (psycopg.Error, Error, OSError) as error:
            log.debug("the dashboard does not hear notifications, and looks every second", exc_info=error)
            await self.close()
        await asyncio.sleep(max(0.0, ends - monotonic()))
        return False

    async def _listen(self) -> None:
        """Listen to the channels that are new. Without use of LISTEN there is no connection."""
        if self._conn is None:
            dsn = self._connections.config().listen_dsn
            if dsn is None:
                return
            address = await embedded.aresolve(dsn)
            self._conn = await AsyncConnection.connect(
                address,
                **connect_timeout_at_most(address, HOST_SECONDS),
                autocommit=True,
                prepare_threshold=None,
                client_encoding="utf8",
                application_name="pgqueue web listen",
            )
        found = await achannels(self._conn)
        if not found.useful:
            return await self.close()
        new = sorted(frozenset(found.names) - self._channels)
        if new:  # in one round trip
            each = [sql.SQL("LISTEN {}").format(sql.Identifier(name)) for name in new]
            await self._conn.execute(sql.SQL("; ").join(each))
            self._channels |= frozenset(new)
