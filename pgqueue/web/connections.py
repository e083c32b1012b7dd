"""The dashboard's connections: a small pool that is made at the first request. Pages read in read-only transactions.

Made at the first request, because a mounted app may never be told that it starts: neither Starlette's `Mount` nor
a2wsgi pass lifespan events on. A pool belongs to the event loop that made it. If requests come from another loop,
because the first has ended, they get a new pool.

Why a page says within a second that the database is away, and why:

1. A pool tells a request that waits only that it has waited too long. So a request that has waited for a moment tries
   to connect by itself. What that says is what the page says: refused, no such database, no answer.
2. If that succeeds, the pool's attempt will, too: the request waits for it.
3. While another request has a connection of the pool, the database is there. Then requests wait for their turn.
4. If a connection was lost while it was idle, its transaction does not begin. Then the request takes another one, and
   nothing has been asked or changed by then. So no page is lost with a connection that was lost.
5. A connection that was made after the request came is not replaced. So what it says is told, and there is an end.
6. There is one such attempt to connect at a time, which requests share, and each leaves it after a moment. It is not
   given up with them: the name of a server is resolved in a thread of the loop, which goes on. Naive: each request
   leaves one more thread behind, until none is left in which another name can be resolved.

A read costs three round trips and those of what is asked: BEGIN and the settings of the transaction are one message. A
message of several statements is possible without parameters only.

Why no request waits on for a link that has fallen silent (nothing comes, and nothing is closed; the kernel takes a
quarter of an hour to give it up):

1. If a transaction has not begun after `CHECK_SECONDS`, its connection is broken. If that was idle before, the request
   takes another one then.
2. A transaction that has not ended after `TRANSACTION_SECONDS` is given up: its connection is broken. What waits on
   it gets an error at once, and the pool makes another connection.
3. Both break the socket (`hang_up`). Naive: cancel the task. Then psycopg asks the server to cancel, which may take
   10 s.

Where its connections lead: to a server that can be written, if the address has one (see `primary`); else to a standby,
and each page says so. A change that comes to a server that only reads is tried again on another connection, since that
may have become a standby, or be one no longer, after the connection was made. Nothing of the change has run by then.

Why the end of a loop does not hang, although no lifespan event told of it: its runner cancels every task and waits for
them. A task of the pool that is connecting takes this for a failure, and goes on. So one more task waits for the end,
and closes the pool then: that stops such tasks, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from math import inf
from typing import Any, LiteralString, TypeVar, cast

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from pgqueue.config import Config, config
from pgqueue.database import embedded, primary
from pgqueue.database.backoff import is_loss
from pgqueue.database.conninfo import connect_timeout, connect_timeout_at_most
from pgqueue.database.dead_link import hang_up
from pgqueue.database.outage import Outage
from pgqueue.database.pool_log import quieten
from pgqueue.database.sessions import ReadOnly
from pgqueue.databases import Database, within
from pgqueue.steady_clock import monotonic
from pgqueue.web.shared_reads import SharedReads

T = TypeVar("T")

CONNECTIONS_MOST = 4
WAIT_SECONDS = 5.0
"""A request waits so long for a connection, while others have all of them."""
SILENCE_SECONDS = 0.2
"""After so long a request tries to connect by itself."""
ANSWER_SECONDS = 0.7
"""So long that may take. Then it says that the database does not answer."""
CLOSE_SECONDS = 0.5
"""So long the end waits for attempts to connect, which are given up then."""
CHECK_SECONDS = 2.0
"""So long a transaction may take to begin, before its connection is broken."""
TRANSACTION_SECONDS = 10.0
"""So long a transaction may take, before it is given up with its connection."""
STATEMENT_SECONDS = 2
BEGIN: LiteralString = """
BEGIN ISOLATION LEVEL READ COMMITTED{mode};
SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on',
    set_config('statement_timeout', '{seconds}s', true), set_config('jit', 'off', true),
    set_config('row_security', 'off', true)
"""
"""Without row_security rows that it hides would look as if there were none."""
IDLE_SECONDS = 120.0

NAME = "pgqueue web"

Connection = AsyncConnection[tuple[Any, ...]]
Ask = Callable[[Connection], Awaitable[T]]

# Behind a transaction pooler a prepared statement may be sent to another session.
OPTIONS: dict[str, Any] = {
    "autocommit": True,
    "prepare_threshold": None,
    "client_encoding": "utf8",
    "application_name": "pgqueue web",
}


class Unreachable(psycopg.OperationalError):
    """No connection can be made. The message names the server and says why."""


class _Stale(ReadOnly):
    """This connection was made before, and only reads. A new one may write."""


class _Pooled(AsyncConnection[tuple[Any, ...]]):
    """A connection of the dashboard's pool: it can be told from those of an application in the same process."""

    opened_at = 0.0


_Begun = tuple[_Pooled, bool, bool]
"""A connection in a transaction, whether its server is a standby, and whether it only reads."""


class _ToThePrimary:
    """In place of psycopg's class of connections, for its pool."""

    @staticmethod
    async def connect(dsn: str, **options: Any) -> _Pooled:
        began = monotonic()  # the session may be as old as that
        conn = await primary.aconnect(_Pooled, dsn, **options)
        conn.opened_at = began
        return conn


class Connections:
    """Opens connections to this database when they are needed, and keeps them for two idle minutes. None is the
    configured database."""

    def __init__(self, database: Database | None = None) -> None:
        self._database = database
        self._pool: AsyncConnectionPool[_Pooled] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._dsn = ""
        self._used = 0
        self._outage = Outage()
        self.shared = SharedReads()
        self.answered_at = -inf
        """When this database has answered last, by `monotonic`."""
        self.on_standby = False
        """Whether what was asked last was answered by a standby."""
        self._returning = set[asyncio.Task[None]]()
        self._reaching: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def read(self, ask: Ask[T]) -> T:
        """What `ask` finds out, in one transaction that only reads. Each of its statements may take 2 s."""
        return await self._asked(ask, is_change=False)

    async def change(self, ask: Ask[T]) -> T:
        """What `ask` answers, in one transaction that is committed. Each of its statements may take 2 s."""
        began = monotonic()
        for _ in range(CONNECTIONS_MOST):
            with suppress(_Stale):
                return await self._asked(ask, is_change=True, began=began)
        return await self._asked(ask, is_change=True, began=began)

    def here(self) -> AbstractContextManager[None]:
        """Within this block the current database is this one: for the configuration, and for lines of the log."""
        return within(self._database)

    async def _asked(self, ask: Ask[T], *, is_change: bool, began: float = 0.0) -> T:
        with self.here():
            return await self._asked_here(ask, is_change, began)

    async def _asked_here(self, ask: Ask[T], is_change: bool, began: float) -> T:
        pool = await self._opened()
        try:
            async with self._transaction(pool, is_change) as (conn, only_reads):
                self._outage.answered(NAME)
                self.answered_at = monotonic()
                if only_reads and is_change:
                    raise _Stale if conn.opened_at < began else ReadOnly
                return await ask(conn)
        except psycopg.OperationalError as error:
            if is_loss(error) and not isinstance(error, PoolTimeout):
                self._outage.lost(NAME, error)
            raise

    def config(self) -> Config:
        """The configuration for this database, whichever one is the current one."""
        with self.here():
            return config()

    async def close(self) -> None:
        """Close the connections. The next request opens new ones."""
        pool, self._pool = self._pool, None
        reaching, self._reaching = self._reaching, None
        if pool is not None and self._loop is asyncio.get_running_loop():
            if reaching is not None:
                reaching.cancel()
            await pool.close(CLOSE_SECONDS)
            if self._closing is not None:
                self._closing.cancel()

    @asynccontextmanager
    async def _transaction(
        self, pool: AsyncConnectionPool[_Pooled], is_change: bool
    ) -> AsyncIterator[tuple[_Pooled, bool]]:
        """A connection in a transaction, which is committed unless an error is raised; and whether it only reads."""
        conn, self.on_standby, only_reads = await self._taken(pool, is_change)
        self._used += 1
        try:
            async with self._in_time(conn):
                yield conn, only_reads
                await conn.commit()
        except psycopg.errors.ReadOnlySqlTransaction:
            await conn.close()  # it keeps what it began with; another session may write
            raise
        except BaseException:
            with suppress(psycopg.Error):  # it is lost, and so is its transaction
                await conn.rollback()
            raise
        finally:
            self._used -= 1
            await pool.putconn(conn)

    @asynccontextmanager
    async def _in_time(self, conn: _Pooled) -> AsyncIterator[None]:
        """Break the connection if this block takes too long. Then Unreachable says so."""
        with _broken_after(TRANSACTION_SECONDS, conn) as is_late:
            try:
                yield
            except psycopg.OperationalError as error:
                if is_late():
                    text = f"{server_of(self._dsn)} has not answered within {TRANSACTION_SECONDS:.0f} seconds"
                    raise Unreachable(text) from error
                raise

    async def _taken(self, pool: AsyncConnectionPool[_Pooled], is_change: bool) -> _Begun:
        """A transaction that has begun. Raises what an attempt to connect says, if the pool has nothing to say."""
        taking = asyncio.create_task(_begun(pool, is_change))
        try:
            if self._used == 0 and not (await asyncio.wait({taking}, timeout=SILENCE_SECONDS))[0]:
                await self._reached()
            return await taking
        except BaseException:
            # To be cancelled takes a moment, and it may just have got a connection.
            taking.cancel()
            taking.add_done_callback(lambda done: self._return(pool, done))
            raise

    async def _reached(self) -> None:
        """Raise Unreachable, which says why, unless the database can be connected within ANSWER_SECONDS."""
        if self._reaching is None or self._reaching.done():
            self._reaching = asyncio.create_task(_reach(self._dsn))
            self._reaching.add_done_callback(lambda done: done.cancelled() or done.exception())  # all may have left
        attempt = self._reaching
        if not (await asyncio.wait({attempt}, timeout=ANSWER_SECONDS))[0]:
            raise Unreachable(f"{server_of(self._dsn)} does not answer")
        if attempt.cancelled():
            raise Unreachable(f"{server_of(self._dsn)}: the dashboard closes its connections")
        attempt.result()

    def _return(self, pool: AsyncConnectionPool[_Pooled], taken: asyncio.Task[_Begun]) -> None:
        if not taken.cancelled() and taken.exception() is None:
            returning = asyncio.create_task(_given_back(pool, taken.result()[0]))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)

    async def _opened(self) -> AsyncConnectionPool[_Pooled]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # A lock that no loop has waited on belongs to none.
            self._loop, self._pool, self._opening, self._used = loop, None, asyncio.Lock(), 0
            self._reaching = None
        async with self._opening:
            if self._pool is None or self._pool.closed:
                dsn = await embedded.aresolve(self.config().require_dsn())
                quieten(NAME, _Pooled, silent=True)  # each page says what is wrong, and the log what an outage is
                pool: AsyncConnectionPool[_Pooled] = AsyncConnectionPool(
                    dsn,
                    connection_class=cast(Any, _ToThePrimary),
                    min_size=0,
                    max_size=CONNECTIONS_MOST,
                    timeout=WAIT_SECONDS,
                    max_idle=IDLE_SECONDS,
                    reconnect_timeout=WAIT_SECONDS,
                    open=False,
                    name=NAME,
                    kwargs=OPTIONS | connect_timeout(dsn),
                )
                await pool.open()
                self._pool, self._dsn = pool, dsn
                self._closing = asyncio.create_task(_close_at_the_end(pool))
            return self._pool


async def _begun(pool: AsyncConnectionPool[_Pooled], is_change: bool) -> _Begun:
    """A connection of the pool, in a transaction. One that was lost while it was idle is replaced."""
    began = monotonic()
    begin = BEGIN.format(mode="" if is_change else ", READ ONLY", seconds=STATEMENT_SECONDS)
    while True:
        conn = await pool.getconn()
        try:
            with _broken_after(CHECK_SECONDS, conn):
                cursor = await conn.execute(begin)
            cursor.nextset()
            on_standby, only_reads, *_ = await cursor.fetchone() or (False, False)
            return conn, on_standby, only_reads
        except BaseException as error:
            was_lost = isinstance(error, psycopg.OperationalError) and conn.closed and conn.opened_at < began
            await _given_back(pool, conn)
            if not was_lost:
                raise


async def _given_back(pool: AsyncConnectionPool[_Pooled], conn: _Pooled) -> None:
    """To the pool, without a transaction: the pool would end that, too, but warn of it."""
    with suppress(psycopg.Error):
        await conn.rollback()
    await pool.putconn(conn)


@contextmanager
def _broken_after(seconds: float, conn: _Pooled) -> Iterator[Callable[[], bool]]:
    """Break the connection unless this block ends before. What is given says whether it was too late."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(seconds, hang_up, conn)
    try:
        yield lambda: loop.time() >= timer.when()
    finally:
        timer.cancel()


async def _close_at_the_end(pool: AsyncConnectionPool[_Pooled]) -> None:
    """Close the pool when this task is cancelled, with all others of its loop."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        with suppress(asyncio.CancelledError):  # of the pool's tasks, which are cancelled, too
            await pool.close(CLOSE_SECONDS)


async def _reach(dsn: str) -> None:
    """Connect with the database. Raises Unreachable, which says why not."""
    try:
        conn = await AsyncConnection.connect(dsn, **(OPTIONS | connect_timeout_at_most(dsn, WAIT_SECONDS)))
    except psycopg.OperationalError as error:
        raise Unreachable(f"{server_of(dsn)}: {error}") from error
    await conn.close()


def server_of(dsn: str) -> str:
    """The server and the database that a DSN names, for people: without password, user and options.

    >>> server_of("postgresql://app:hunter2@db.example/shop?sslmode=require")
    'database shop at db.example:5432'
    """
    said = conninfo_to_dict(dsn)
    hosts = str(said.get("host") or said.get("hostaddr") or "the local socket").split(",")
    ports = str(said.get("port") or 5432).split(",")
    at = ", ".join(
        host if host.startswith("/") or " " in host else f"{host}:{ports[min(place, len(ports) - 1)]}"
        for place, host in enumerate(hosts)
    )
    return f"database {said.get('dbname') or said.get('user') or 'of this user'} at {at}"
