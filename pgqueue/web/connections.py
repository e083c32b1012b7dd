"""The dashboard's connections: a small pool that is made at the first request. Pages read in read-only transactions.

Made at the first request, because a mounted app may never be told that it starts: neither Starlette's `Mount` nor
a2wsgi pass lifespan events on. A pool belongs to the event loop that made it. If requests come from another loop,
because the first has ended, they get a new pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, LiteralString, TypeVar

from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from pgqueue.config import config
from pgqueue.database import embedded

T = TypeVar("T")

CONNECTIONS_MOST = 4
WAIT_SECONDS = 5.0
"""A request waits so long for a connection, before it says that the database cannot be reached."""
STATEMENT_SECONDS = 2
IDLE_SECONDS = 120.0

Connection = AsyncConnection[tuple[Any, ...]]
Ask = Callable[[Connection], Awaitable[T]]


class Connections:
    """Opens connections to the configured database when they are needed, and keeps them for two idle minutes."""

    def __init__(self) -> None:
        self._pool: AsyncConnectionPool[Connection] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()

    async def read(self, ask: Ask[T]) -> T:
        """What `ask` finds out, in one transaction that only reads. Each of its statements may take 2 s."""
        return await self._asked(ask, ", READ ONLY")

    async def change(self, ask: Ask[T]) -> T:
        """What `ask` answers, in one transaction that is committed. Each of its statements may take 2 s."""
        return await self._asked(ask, "")

    async def _asked(self, ask: Ask[T], mode: LiteralString) -> T:
        pool = await self._opened()
        async with pool.connection() as conn, conn.transaction():
            await conn.execute(f"SET TRANSACTION ISOLATION LEVEL READ COMMITTED{mode}")
            await conn.execute(
                "SELECT set_config('statement_timeout', %s, true), set_config('jit', 'off', true)",
                (f"{STATEMENT_SECONDS}s",),
            )
            return await ask(conn)

    async def close(self) -> None:
        """Close the connections. The next request opens new ones."""
        pool, self._pool = self._pool, None
        if pool is not None and self._loop is asyncio.get_running_loop():
            await pool.close()

    async def _opened(self) -> AsyncConnectionPool[Connection]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # A lock that no loop has waited on belongs to none.
            self._loop, self._pool, self._opening = loop, None, asyncio.Lock()
        async with self._opening:
            if self._pool is None:
                # The first use of `embedded:` starts a server, which takes a moment: that must not block the loop.
                dsn = await asyncio.to_thread(embedded.resolve, config().require_dsn())
                pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
                    dsn,
                    min_size=0,
                    max_size=CONNECTIONS_MOST,
                    timeout=WAIT_SECONDS,
                    max_idle=IDLE_SECONDS,
                    reconnect_timeout=WAIT_SECONDS,
                    open=False,
                    name="pgqueue web",
                    # Behind a transaction pooler a prepared statement may be sent to another session.
                    kwargs={"autocommit": True, "prepare_threshold": None, "application_name": "pgqueue web"},
                )
                await pool.open()
                self._pool = pool
            return self._pool
