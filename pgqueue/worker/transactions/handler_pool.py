"""Connections for handlers: lent for one transaction each, from a pool for threads and a pool for the loop.

A pool is opened when a connection is first asked for: if the tasks of a worker want none, it has none. Each connection
is made known to the other workers (`listed`) before a handler gets it, so that a worker that rescues our jobs can end
it: a stopped process would keep its row locks for ever. One that broke on our side stays known until its session has
been ended: the server may not have noticed, and the next attempt would run into its locks.

A handler leaves nothing behind in a session: settings, cursors, channels, temporary tables and advisory locks are
cleared in the message that commits (`prepared`); a connection that did not commit is closed. One on which that message
has begun a transaction ahead stays here for the next job, not in its pool; if none comes, that is undone. Behind a
transaction pooler a session belongs to no connection alone, so there is nothing to clear, and a name in
pg_stat_activity that is not ours to end.

Where there are to be fewer connections than slots, a job waits for a place first (`permits`). One job never has two:
its transactions come one after another, and a job that settles a COMMIT without an answer keeps the place of that one.
So a job that has a place waits for no other. A connection with a transaction begun ahead has no place. If it would be
one too many, that transaction is undone for the job that comes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection, AsyncCursor, Cursor, OperationalError
from psycopg.rows import tuple_row

from pgqueue.database.backoff import to_its_end
from pgqueue.database.sessions import Link, options
from pgqueue.database.statements import text
from pgqueue.worker.transactions.commit_message import CommitMessage
from pgqueue.worker.transactions.handler_connection import AsyncHandlerConnection, HandlerConnection
from pgqueue.worker.transactions.permits import Permits

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolClosed

# Longer than this no job waits in a pool: there is a connection for each slot, or the job has a place, so the database
# is away. For a place a job waits as long as others have theirs and it may run: that ends the wait, no time of ours.
GET_SECONDS = 30.0
IDLE_SECONDS = 60.0
# So long a transaction may stand there without a job; and so long a stop waits for those that are being undone.
AHEAD_SECONDS = LEAVE_SECONDS = 1.0
NAME = "pgqueue job"

Identity = tuple[int, str]
C = TypeVar("C", HandlerConnection, AsyncHandlerConnection)


class HandlerPool:
    """Lends connections to handlers, from each pool one for each slot, or `size` if that is less. `listed` waits until
    our sessions are known."""

    def __init__(
        self, link: Link, slots: int, listed: Callable[[], Awaitable[object]], *, size: int | None = None
    ) -> None:
        self._link = link
        self._prepare = 5 if link.prepare else None
        self._prepared = CommitMessage(link.schema) if link.prepare else None
        self._size = size = slots if size is None else min(size, slots)
        self._permits = Permits(size) if size < slots else None
        self._apermits = Permits(size) if size < slots else None
        self._listed = listed
        self._loop = asyncio.get_running_loop()
        self._opening = threading.Lock()
        self._naming = threading.Lock()
        self._known: WeakKeyDictionary[object, Identity] = WeakKeyDictionary()
        self._orphans: set[Identity] = set()
        """Sessions of connections that broke: the server may not know."""
        self._sync: ConnectionPool[HandlerConnection] | None = None
        self._async: AsyncConnectionPool[AsyncHandlerConnection] | None = None
        self._early: list[HandlerConnection] = []
        self._aearly: list[AsyncHandlerConnection] = []
        """Those with a transaction that was begun ahead, the youngest last."""
        self._leaving: set[asyncio.Task[None]] = set()
        self.closed = False

    def acquire(
        self, *, begun: bool = False, look: Callable[[], object] | None = None, settles: bool = False
    ) -> HandlerConnection:
        """A connection for a thread, in autocommit mode; psycopg's errors if the database is away.

        With `begun` it may be in a transaction that was begun ahead; its `begin` is called then, and knows what to do.
        While all are lent it waits, and calls `look` now and then, which may raise. With `settles` the job has a place
        already, and does not wait for one.
        """
        if self._permits is None or settles:
            return self._take(begun)
        place = self._permits.acquire(partial(self._still, look))
        try:
            conn = self._take(begun)
        except BaseException:
            self._permits.release(place)
            raise
        conn.permit = place
        return conn

    def _still(self, look: Callable[[], object] | None) -> None:
        if self.closed:
            raise _closed()
        if look is not None:
            look()

    def _take(self, begun: bool) -> HandlerConnection:
        if begun and not self._orphans and (conn := _last(self._early)) is not None:
            return conn  # orphans are ended in no job's transaction
        if (self._orphans or _crowded(self._permits, self._early)) and (conn := _last(self._early)) is not None:
            self._back(conn)  # there may be none left in the pool
        try:
            conn = (self._sync or self._open()).getconn()
            conn.out_since = monotonic()
        except OperationalError as error:
            self._explain(error)
            raise
        try:
            for orphan in list(self._orphans):
                conn.execute(*self._ending(orphan))
                self._orphans.discard(orphan)
        except BaseException:
            self.release(conn)
            raise
        return conn

    def release(self, conn: HandlerConnection) -> None:
        """Take it back; a broken one, or one inside a transaction, is not lent again as it is."""
        assert self._sync is not None
        if conn.forsaken:
            conn.close()
            return
        self._tidy(conn)
        with _vacating(conn, self._permits):
            with self._opening:  # so that `close` finds all
                stays = conn.early is not None and not conn.closed and not self.closed
                if stays:
                    self._early.append(conn)
            if not stays:
                self._sync.putconn(conn)

    def discard(self, conn: HandlerConnection) -> None:
        """The job was taken from the handler that has this, which may hang for ever: it counts no more. On the loop,
        and not while the handler gives it back."""
        if self._permits is not None and self._sync is not None and not self.closed:
            with _vacating(conn, self._permits):
                conn.forsaken = True
                self._sync.resize(0, self._sync.max_size + 1)  # it never comes back

    @contextmanager
    def kept(self, conn: HandlerConnection | AsyncHandlerConnection) -> Iterator[None]:
        """Within this block the connection can be given back, and its place is kept meanwhile."""
        with _vacating(conn, self._apermits if isinstance(conn, AsyncConnection) else self._permits):
            yield

    async def aacquire(self, *, begun: bool = False, settles: bool = False) -> AsyncHandlerConnection:
        """A connection for the loop."""
        if self._apermits is None or settles:
            return await self._atake(begun)
        place = await self._apermits.aacquire()
        try:
            conn = await self._atake(begun)
        except BaseException:
            self._apermits.release(place)
            raise
        conn.permit = place
        return conn

    async def _atake(self, begun: bool) -> AsyncHandlerConnection:
        if self.closed:
            raise _closed()
        if begun and not self._orphans and (conn := _last(self._aearly)) is not None:
            return conn
        if (self._orphans or _crowded(self._apermits, self._aearly)) and (conn := _last(self._aearly)) is not None:
            await self._aback(conn)
        if self._async is None:
            from psycopg_pool import AsyncConnectionPool  # with the first request: most workers are never asked

            pool = AsyncConnectionPool(
                connection_class=AsyncHandlerConnection, configure=self._aconfigure, **self._pool()
            )
            self._async = pool
        if self._async.closed:
            await self._async.open()
        try:
            conn = await self._async.getconn()
            conn.out_since = monotonic()
        except OperationalError as error:
            self._explain(error)
            raise
        try:
            for orphan in list(self._orphans):
                await conn.execute(*self._ending(orphan))
                self._orphans.discard(orphan)
        except BaseException:
            await self.arelease(conn)
            raise
        return conn

    async def arelease(self, conn: AsyncHandlerConnection) -> None:
        """Take it back. A cancellation meanwhile is raised when it is back: the pool may wait for its own lock."""
        assert self._async is not None
        self._tidy(conn)
        with _vacating(conn, self._apermits):
            if conn.early is None or conn.closed or self.closed:
                await to_its_end(self._async.putconn(conn))
            else:
                self._aearly.append(conn)

    def identity(self, conn: object) -> Identity | None:
        """(pid, backend_start) of a connection, if its session is ours alone."""
        return self._known.get(conn)

    def identities(self) -> list[Identity]:
        """The sessions there are, for the beat; called from its thread. A transaction that was begun ahead, and that no
        job has come for, is undone."""
        if (self._early or self._aearly) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave_idle)
        with self._naming:
            known = list(self._known.items())
        return [identity for conn, identity in known if not getattr(conn, "closed", True)] + list(self._orphans)

    def _explain(self, error: OperationalError) -> None:
        """Raise, for a pool that had none in time, what says why."""
        from psycopg_pool import PoolTimeout

        if isinstance(error, PoolTimeout):
            said = f"no connection for a job within {GET_SECONDS:g} s: the database takes none"
            if self._permits is None:
                said += (
                    f", or all {self._size} (one for each slot) are lent to handlers, of which some were taken away "
                    "and do not stop"
                )
            raise PoolTimeout(said) from error

    def _tidy(self, conn: HandlerConnection | AsyncHandlerConnection) -> None:
        """The next job did not ask for dicts; and a session that we did not end ourselves may go on."""
        conn.kept = False
        conn.row_factory = tuple_row
        conn.cursor_factory = AsyncCursor if isinstance(conn, AsyncConnection) else Cursor
        conn.prepare_threshold = self._prepare
        identity = self._known.get(conn)
        if conn.broken and identity is not None:
            self._orphans.add(identity)

    def _ending(self, orphan: Identity) -> tuple[str, dict[str, object]]:
        params: dict[str, object] = {"pid": orphan[0], "backend_start": orphan[1]}
        return text("transactions_end_session", self._link.schema), params

    async def close(self) -> None:
        """Close the pools; connections that are lent are closed when they come back."""
        with self._opening:
            self.closed = True
        if self._leaving:
            await asyncio.wait(
                self._leaving, timeout=LEAVE_SECONDS
            )  # over a dead link they last; the pools close anyhow
        if self._async is not None:
            await self._async.close()
            while (aconn := _last(self._aearly)) is not None:
                await self._async.putconn(aconn)  # closed as it is: the pool is
        if self._sync is not None:
            await asyncio.to_thread(self._sync.close)
            while (conn := _last(self._early)) is not None:
                self._sync.putconn(conn)

    def _leave_idle(self) -> None:
        """Put back connections on which a transaction was begun long ago, for a job that has not come."""
        for leaving in (
            *(asyncio.to_thread(self._back, conn) for conn in _taken_out(self._early)),
            *(self._aback(conn) for conn in _taken_out(self._aearly)),
        ):
            task = self._loop.create_task(leaving)
            self._leaving.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(self._leaving.discard)

    def _back(self, conn: HandlerConnection) -> None:
        try:
            conn.leave()
        finally:  # a run that is stopped meanwhile wanted a connection for its own job: this one is no job's
            self.release(conn)

    async def _aback(self, conn: AsyncHandlerConnection) -> None:
        try:
            await conn.leave()
        finally:
            await self.arelease(conn)

    def _open(self) -> ConnectionPool[HandlerConnection]:
        with self._opening:
            if self.closed:
                raise _closed()
            if self._sync is None:
                from psycopg_pool import ConnectionPool

                pool = ConnectionPool(connection_class=HandlerConnection, configure=self._configure, **self._pool())
                pool.open()
                self._sync = pool
            return self._sync

    def _pool(self) -> dict[str, Any]:
        return {
            "conninfo": self._link.dsn,
            "kwargs": options(self._link, NAME) | {"prepare_threshold": self._prepare},
            "min_size": 0,
            "max_size": self._size,
            "open": False,
            "name": NAME,
            "timeout": GET_SECONDS,
            "max_idle": IDLE_SECONDS,
        }

    def _configure(self, conn: HandlerConnection) -> None:
        if self._own(conn, conn.execute(text("sessions_identity", self._link.schema)).fetchone()):
            done: Future[object] = asyncio.run_coroutine_threadsafe(_awaited(self._listed), self._loop)
            done.result()

    async def _aconfigure(self, conn: AsyncHandlerConnection) -> None:
        cursor = await conn.execute(text("sessions_identity", self._link.schema))
        if self._own(conn, await cursor.fetchone()):
            await self._listed()

    def _own(self, conn: HandlerConnection | AsyncHandlerConnection, row: tuple[int, str] | None) -> bool:
        """Whether the session is ours alone: a pooler gives us a number that is not its backend's."""
        if row is None or row[0] != conn.info.backend_pid:
            return False
        with self._naming:
            self._known[conn] = (row[0], row[1])
        conn.own, conn.prepared = True, self._prepared
        return True


def _last(conns: list[C]) -> C | None:
    """The last of these, taken out: each thread gets another one."""
    try:
        return conns.pop()
    except IndexError:
        return None


@contextmanager
def _vacating(conn: HandlerConnection | AsyncHandlerConnection, places: Permits | None) -> Iterator[None]:
    """Give up the place it has, last of all, so that the next one finds a connection; but none that it has by then:
    once it is back another job may have it already, with a place of its own."""
    place, conn.permit = conn.permit, None
    try:
        yield
    finally:
        if places is not None and place is not None:
            places.release(place)


def _crowded(places: Permits | None, ahead: Sequence[object]) -> bool:
    """Whether a job that has just got a place finds none in the pool, because of those that were begun ahead."""
    return places is not None and places.taken + len(ahead) > places.number


def _taken_out(conns: list[C]) -> list[C]:
    """Those of these that were begun long ago, taken out; another thread may have been quicker."""
    before, found = monotonic() - AHEAD_SECONDS, list[C]()
    for conn in conns[:]:
        ahead = conn.early
        if ahead is not None and ahead.at <= before:
            try:
                conns.remove(conn)
            except ValueError:
                continue
            found.append(conn)
    return found


def _closed() -> PoolClosed:
    from psycopg_pool import PoolClosed

    return PoolClosed("the worker has stopped: it lends no connections any more")


async def _awaited(function: Callable[[], Awaitable[object]]) -> object:
    return await function()
