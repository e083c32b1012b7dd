"""Connections for handlers: lent for one transaction each, from a pool for threads and a pool for the loop.

A pool is opened when somebody first asks: a worker whose tasks want no connection has none. Each connection is made
known to the others (`listed`) before a handler gets it, so that whoever rescues us can end it: a stopped process
would keep its row locks for ever. Behind a transaction pooler a session is nobody's own, so nothing is set for it:
what a transaction needs is then set in the transaction.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection, Connection
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pgqueue.sessions import Link, options
from pgqueue.statements import text

# Longer than this no handler waits for a row lock that somebody holds, unless it says so itself (SET LOCAL).
LOCK_SECONDS = 10
# Longer than this nobody waits for a connection: with a pool as large as the slots, the database is away.
GET_SECONDS = 30.0
IDLE_SECONDS = 60.0
NAME = "pgqueue job"

SET_FOR_SESSION = f"SET lock_timeout = '{LOCK_SECONDS}s'"
SET_FOR_TRANSACTION = f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"

Identity = tuple[int, str]


class Lender:
    """Lends connections to handlers; `size` at most in each pool. `listed` waits until our sessions are known."""

    def __init__(self, link: Link, size: int, listed: Callable[[], Awaitable[object]]) -> None:
        self._link = link
        self._size = size
        self._listed = listed
        self._loop = asyncio.get_running_loop()
        self._opening = threading.Lock()
        self._known: WeakKeyDictionary[object, Identity] = WeakKeyDictionary()
        self._sync: ConnectionPool[Connection[Any]] | None = None
        self._async: AsyncConnectionPool[AsyncConnection[Any]] | None = None
        self.closed = False

    def take(self) -> Connection[Any]:
        """A connection for a thread, in autocommit mode; psycopg's errors if the database is away."""
        return (self._sync or self._open()).getconn()

    def give(self, conn: Connection[Any]) -> None:
        """Take it back; a broken one, or one inside a transaction, is not lent again as it is."""
        assert self._sync is not None
        conn.row_factory = tuple_row  # whoever has it next did not ask for dicts
        self._sync.putconn(conn)

    async def atake(self) -> AsyncConnection[Any]:
        """A connection for the loop."""
        if self._async is None:
            self._async = AsyncConnectionPool(configure=self._aconfigure, **self._pool())
            await self._async.open()
        return await self._async.getconn()

    async def agive(self, conn: AsyncConnection[Any]) -> None:
        """Take it back."""
        assert self._async is not None
        conn.row_factory = tuple_row
        await self._async.putconn(conn)

    def set_up(self, conn: object) -> str | None:
        """What has to be said first in a transaction on this connection; None if its session says it."""
        return None if conn in self._known else SET_FOR_TRANSACTION

    def identity(self, conn: object) -> Identity | None:
        """(pid, backend_start) of a connection that is nobody else's."""
        return self._known.get(conn)

    def identities(self) -> list[Identity]:
        """The sessions there are, for the beat; called from its thread."""
        return [identity for conn, identity in list(self._known.items()) if not getattr(conn, "closed", True)]

    async def close(self) -> None:
        """Close the pools; connections that are lent are closed when they come back."""
        self.closed = True
        if self._async is not None:
            await self._async.close()
        if self._sync is not None:
            await asyncio.to_thread(self._sync.close)

    def _open(self) -> ConnectionPool[Connection[Any]]:
        with self._opening:
            if self._sync is None:
                self._sync = ConnectionPool(configure=self._configure, **self._pool())
                self._sync.open()
            return self._sync

    def _pool(self) -> dict[str, Any]:
        prepare = {"prepare_threshold": 5 if self._link.prepare else None}
        return {
            "conninfo": self._link.dsn,
            "kwargs": options(self._link, NAME) | prepare,
            "min_size": 0,
            "max_size": self._size,
            "open": False,
            "name": "pgqueue-jobs",
            "timeout": GET_SECONDS,
            "max_idle": IDLE_SECONDS,
        }

    def _configure(self, conn: Connection[Any]) -> None:
        row = conn.execute(text("session_identity", self._link.schema)).fetchone()
        if self._own(conn, row):
            conn.execute(SET_FOR_SESSION)
            done: Future[object] = asyncio.run_coroutine_threadsafe(_awaited(self._listed), self._loop)
            done.result()

    async def _aconfigure(self, conn: AsyncConnection[Any]) -> None:
        row = await (await conn.execute(text("session_identity", self._link.schema))).fetchone()
        if self._own(conn, row):
            await conn.execute(SET_FOR_SESSION)
            await self._listed()

    def _own(self, conn: Connection[Any] | AsyncConnection[Any], row: tuple[int, str] | None) -> bool:
        """Whether the session is ours alone: a pooler gives us a number that is not its backend's."""
        if row is None or row[0] != conn.info.backend_pid:
            return False
        self._known[conn] = (row[0], row[1])
        return True


async def _awaited(function: Callable[[], Awaitable[object]]) -> object:
    return await function()
