"""The pool of connections for handlers: one connection for one transaction, one side for threads and one for the loop.

Used by the transactions (`commit`), which acquire and release connections. A side opens its pool when a connection is
first asked for: a worker whose tasks want none has none.

1. Each connection is made known to the other workers (`listed`) before a handler gets it. So a worker that rescues this
   one's jobs can end its session: a stopped process would keep its row locks for ever.
2. A connection that broke on this side stays known until its session has been ended. The server may not have noticed,
   and the next attempt would run into its locks. A connection that turns out to be dead at this step goes to no job.
   A session that has not ended in 5 s is told again each half minute, until it has, over the worker's own sessions:
   no job waits for that, nor for a connection that it would take (`sessions.tell_stuck`).
3. A handler leaves nothing behind in a session: settings, cursors, channels, temporary tables and advisory locks are
   cleared in the message that commits, or undoes the transaction of an attempt that failed (`commit_message`). Nor does
   it leave anything on the client's side of the connection (`as_lent`).
4. If that message has begun a transaction early, the connection stays here for the next job, outside of its pool. If no
   job comes, the transaction is undone.
5. Behind a transaction pooler a session belongs to no connection alone. So there is nothing to clear, and no session to
   end by its name in pg_stat_activity.

The session of an attempt that failed is kept, in a new connection (`undo`):

1. What the handler left behind, a task or a thread, may still have its connection and cursors of it. If that connection
   were lent again, it would write in the transaction of another job.
2. So the session goes to an heir, under the connection's lock: no statement comes between what clears it and that. From
   then on the old connection is closed. Its cursors send by it, also those that wait for its lock.
3. It is kept only if the server waits for a statement. In the middle of one, of a COPY or a pipeline, its state is
   unknown.
4. Prepared statements go, too: psycopg does the same after a rollback, as what they name may have gone with it.
5. Closed are all others: behind a pooler; after a stop, which may have broken into the driver at any step; if the job
   was taken from its handler, which may be anywhere; if the answer does not come in time.

If there are fewer connections than slots, a job first waits for a permit (`permits`):

1. One job never has two permits. Its transactions come one after another, and a job that settles a COMMIT without an
   answer keeps the permit of that one.
2. So a job with a permit waits for no other job.
3. A connection with a transaction begun early has no permit. If it would be one too many, that transaction is undone
   for the job that comes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection, Error, OperationalError

from pgqueue.database import alarms, forks
from pgqueue.database.backoff import one_line, to_its_end
from pgqueue.database.dead_link import hang_up
from pgqueue.database.pool_log import quieten
from pgqueue.database.sessions import AGAIN_SECONDS, Away, Identity, Link, options, own
from pgqueue.database.statements import Row, Statement, text
from pgqueue.steady_clock import monotonic
from pgqueue.worker.transactions.as_lent import is_left_inside
from pgqueue.worker.transactions.commit_message import CommitMessage
from pgqueue.worker.transactions.handler_connection import AsyncHandlerConnection, HandlerConnection
from pgqueue.worker.transactions.handler_cursor import AsyncHandlerCursor, HandlerCursor
from pgqueue.worker.transactions.opening import AsyncOpening, Opening
from pgqueue.worker.transactions.permits import Permits
from pgqueue.worker.transactions.steps import asend, awaited, blocked, run, send

if TYPE_CHECKING:
    from psycopg_pool import PoolClosed

log = logging.getLogger("pgqueue")

# A job waits no longer than this in a pool: it has a slot's connection or a permit, so only the database can be away.
# For a permit it waits as long as other jobs have theirs and it may run itself: that ends the wait, no time limit here.
GET_SECONDS = 30.0
NAME = "pgqueue job"
"""The name of the pools for handlers."""
IDLE_SECONDS = 60.0
# A transaction begun early may stand so long without a job; a stop waits so long for those that are being undone.
STALE_SECONDS = UNDO_SECONDS = 1.0
# A session that is not cleared in this time is closed.
CLEAR_SECONDS = 5.0

C = TypeVar("C", HandlerConnection, AsyncHandlerConnection)


class Side(Generic[C]):
    """The connections for handlers in threads, or for those on the loop. Its coroutines are bodies (`steps`)."""

    def __init__(self, pools: HandlerPool, is_async: bool, permits: Permits | None) -> None:
        self.pools: HandlerPool = pools
        self.is_async: bool = is_async
        self.wait: Callable[[Any], Awaitable[Any]] = awaited if is_async else blocked
        self.permits: Permits | None = permits
        """None if there is a connection for each slot."""
        self.pool: Any = None
        """psycopg's, for connections of this kind; None until one is asked for."""
        self.early: list[C] = []
        """Those with a transaction that was begun early, the youngest last."""
        self._lock: AbstractContextManager[Any] = nullcontext() if is_async else pools.opening

    def acquire(
        self, *, begun: bool = False, settles: bool = False, look: Callable[[], object] | None = None
    ) -> Coroutine[Any, Any, C]:
        """A connection in autocommit mode; psycopg's errors if the database is away.

        With `begun` it may be in a transaction that was begun early, which its `begin` knows how to use. With `settles`
        the job has a permit already. While no permit is free a thread calls `look` now and then, which may raise.
        """
        return self._take(begun) if self.permits is None or settles else self._permitted(self.permits, begun, look)

    async def release(self, conn: C) -> None:
        """Take the connection back; a broken one, or one inside a transaction, goes to no other job as it is.

        On the loop a cancellation meanwhile is raised when it is back: psycopg's pool may wait for its own lock.
        """
        if conn.discarded:
            await self.close(conn)
            return
        if not conn.closed and is_left_inside(conn):
            await self.close(conn)
        self.pools.tidy(conn)
        with self.kept(conn):
            with self._lock:  # so that `close` finds all
                stays = conn.early is not None and not conn.closed and not self.pools.closed
                if stays:
                    self.early.append(conn)
            if not stays:
                await self.put(conn)

    async def close(self, conn: Any) -> None:
        await self.wait(conn.close())

    async def undo(self, conn: C) -> C:
        """Undo the transaction of a handler that has left; the connection that is to be released. It is closed if its
        session cannot be cleared, or does not answer in time."""
        over = False
        try:
            if conn.own and not conn.closed:
                heir = self.pools.heir_of(conn)
                with alarms.after(CLEAR_SECONDS, partial(hang_up, conn)):
                    over = await conn.hand_over()
                return heir if over else conn
        except Error as error:
            log.debug("a connection of a failed attempt is closed: %s", one_line(error))
        finally:
            if not over:
                await self.close(conn)
        return conn

    async def put(self, conn: C) -> None:
        putting = self.pool.putconn(conn)
        await self.wait(to_its_end(putting) if self.is_async else putting)

    async def send(self, conn: C, statement: Statement[Any]) -> Any:
        """The cursor with the answer."""
        return await self.wait((asend if self.is_async else send)(conn, statement))  # type: ignore[arg-type]

    async def rows(self, conn: C, statement: Statement[Any]) -> list[Row]:
        rows: list[Row] = await self.wait((await self.send(conn, statement)).fetchall())
        return rows

    async def undo_early(self, conn: C) -> None:
        """Put back a connection with a transaction that no job wants."""
        try:
            await conn.undo_early()
        except Error:
            await self.close(conn)
        finally:  # if a run is stopped meanwhile, it wanted a connection for its own job: this one is no job's
            await self.release(conn)

    def take_early(self) -> C | None:
        """The youngest of `early`, taken out: each thread gets another one."""
        try:
            return self.early.pop()
        except IndexError:
            return None

    def take_stale(self) -> list[C]:
        """Those of `early` that were begun long ago, taken out; another thread may be quicker."""
        before, found = monotonic() - STALE_SECONDS, list[C]()
        for conn in self.early[:]:
            early = conn.early
            if early is not None and early.at <= before:
                with suppress(ValueError):
                    self.early.remove(conn)
                    found.append(conn)
        return found

    @contextmanager
    def kept(self, conn: C) -> Iterator[None]:
        """Within this block the connection can be released, and its permit is kept meanwhile.

        It is given up last of all, so that the next job finds a connection; but no other that the connection has by
        then: once it is back, another job may have it already, with a permit of its own.
        """
        permit, conn.permit = conn.permit, None
        try:
            yield
        finally:
            if self.permits is not None and permit is not None:
                self.permits.release(permit)

    def discard(self, conn: C) -> None:
        """The job was taken from the handler that has this connection and may hang for ever: it counts no more. For a
        thread's; called on the loop, and not while the handler releases it."""
        if self.permits is not None and self.pool is not None and not self.pools.closed:
            with self.kept(conn):
                conn.discarded = True
                self.pool.resize(0, self.pool.max_size + 1)  # it never comes back

    async def _permitted(self, permits: Permits, begun: bool, look: Callable[[], object] | None) -> C:
        permit = await self.wait(permits.aacquire() if self.is_async else permits.acquire(partial(self._look, look)))
        try:
            conn = await self._take(begun)
        except BaseException:
            permits.release(permit)
            raise
        conn.permit = permit
        return conn

    async def _take(self, begun: bool) -> C:
        orphans = self.pools.orphans
        if self.pools.closed:
            raise _closed()
        if begun and not orphans and (early := self.take_early()) is not None:
            return early  # a session that broke is ended in no job's transaction
        if (orphans or self._crowded()) and (early := self.take_early()) is not None:
            await self.undo_early(early)  # there may be none left in the pool
        left = self.pools.size  # all that lie in the pool may be dead; if the database is away, `_get` raises
        while True:
            conn = await self._get()
            try:
                await self._end_orphans(conn)
            except BaseException as error:
                was_dead = conn.closed and isinstance(error, OperationalError)
                await self.release(conn)
                left -= 1
                if not was_dead or left < 0 or self._stopped():
                    raise
            else:
                return conn

    async def _end_orphans(self, conn: C) -> None:
        """End the sessions that broken connections have left behind. One job waits for each, and no other one does."""
        orphans, ending = self.pools.orphans, self.pools.ending
        while orphans:
            try:
                orphan = orphans.pop()  # a thread may have taken the last one
            except KeyError:
                return
            ending.add(orphan)  # other workers know of it meanwhile
            try:
                if (False,) in await self.rows(conn, self.pools.end_of(orphan)):
                    message = "session %d of a handler has not ended in 5 s: its locks stay; it is told again"
                    log.warning(message, orphan[0])
                    self.pools.is_stuck(orphan)
            except BaseException:
                orphans.add(orphan)
                raise
            finally:
                ending.discard(orphan)

    def _stopped(self) -> bool:
        """Whether the task here was cancelled: an error of a connection may have taken the place of that."""
        task = asyncio.current_task() if self.is_async else None
        return task is not None and task.cancelling() > 0

    async def _get(self) -> C:
        """A connection of psycopg's pool. It may be dead: the pool does not check."""
        try:
            if self.pool is None:
                self._open()
            if self.is_async and self.pool.closed:
                await self.pool.open()
            conn: C = await self.wait(self.pool.getconn())
        except OperationalError as error:
            self._explain(error)
            raise
        conn.out_since = monotonic()
        conn.lend()
        return conn

    def _open(self) -> None:
        from psycopg_pool import AsyncConnectionPool, ConnectionPool  # with the first request: most workers need none

        quieten(NAME, HandlerConnection, AsyncHandlerConnection)
        with self._lock:
            if self.pools.closed:
                raise _closed()
            if self.pool is None and self.is_async:  # it is opened on the loop
                self.pool = AsyncConnectionPool(
                    connection_class=cast(Any, self.pools.openings[1]), **self.pools.options()
                )
            elif self.pool is None:
                pool = ConnectionPool(connection_class=cast(Any, self.pools.openings[0]), **self.pools.options())
                pool.open()
                self.pool = pool

    def _crowded(self) -> bool:
        """Whether a job that has just got a permit finds no connection in the pool, because of the early ones."""
        return self.permits is not None and self.permits.taken + len(self.early) > self.permits.number

    def _look(self, look: Callable[[], object] | None) -> None:
        if self.pools.closed:
            raise _closed()
        if look is not None:
            look()

    def _explain(self, error: OperationalError) -> None:
        """Raise, for a pool that had none in time, an error that says why."""
        from psycopg_pool import PoolTimeout

        if isinstance(error, PoolTimeout):
            if self.pools.is_away(self.is_async):
                raise Away(f"no connection for a job within {GET_SECONDS:g} s: the database is away") from error
            said = f"no connection for a job within {GET_SECONDS:g} s: the database takes none"
            if self.permits is None:
                said += (
                    f", or all {self.pool.max_size} (one for each slot) are with handlers, of which some were taken "
                    "away and do not stop"
                )
            raise PoolTimeout(said) from error


class HandlerPool:
    """The pools of connections for handlers: on each side one connection for each slot, or `size` if that is less.
    `listed` waits until the worker's sessions are known."""

    def __init__(
        self, link: Link, slots: int, listed: Callable[[], Awaitable[object]], *, size: int | None = None
    ) -> None:
        self._link = link
        self._prepare = 5 if link.prepare else None
        self._prepared = CommitMessage(link.schema) if link.prepare else None
        self.size = size = slots if size is None else min(size, slots)
        self._listed = listed
        self._loop = asyncio.get_running_loop()
        self._naming = threading.Lock()
        self._known: WeakKeyDictionary[object, Identity] = WeakKeyDictionary()
        self.orphans: set[Identity] = set()
        """Sessions of connections that broke: the server may not know."""
        self.ending: set[Identity] = set()
        """Those that are just told to end."""
        self.opening = threading.Lock()
        self.openings = Opening(link, self._configure), AsyncOpening(link, self._aconfigure)
        """What makes the connections for threads, and for the loop."""
        self.threads = Side[HandlerConnection](self, False, Permits(size) if size < slots else None)
        self.on_loop = Side[AsyncHandlerConnection](self, True, Permits(size) if size < slots else None)
        self._undoing: set[asyncio.Task[None]] = set()
        self.closed = False

    def identity(self, conn: object) -> Identity | None:
        """(pid, backend_start) of a connection, if its session is the worker's alone."""
        return self._known.get(conn)

    def identities(self) -> list[Identity]:
        """The sessions there are, for the heartbeat; called from its thread. A transaction that was begun early, and
        that no job has come for, is undone."""
        if (self.threads.early or self.on_loop.early) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._undo_stale)
        with self._naming:
            known = list(self._known.items())
        live = [identity for conn, identity in known if not getattr(conn, "closed", True)]
        return [*live, *self.orphans.copy()]

    def stuck(self) -> list[Identity]:
        """Sessions of this worker and its handlers that are told to end, or were, and have not ended. In the
        heartbeat's thread."""
        return [*self.ending.copy(), *list(self._link.stuck)]

    def is_stuck(self, orphan: Identity) -> None:
        """This session has not ended in time: the worker's own sessions tell it again."""
        self._link.stuck[orphan] = monotonic() + AGAIN_SECONDS

    def _undo_stale(self) -> None:
        """Put back connections on which a transaction was begun long ago, for a job that has not come."""

        def undo(conn: HandlerConnection) -> None:
            run(self.threads.undo_early(conn))

        for undoing in (
            *(asyncio.to_thread(undo, conn) for conn in self.threads.take_stale()),
            *(self.on_loop.undo_early(conn) for conn in self.on_loop.take_stale()),
        ):
            task = self._loop.create_task(undoing)
            self._undoing.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(self._undoing.discard)

    async def close(self) -> None:
        """Close the pools; connections that are out are closed when they come back."""
        with self.opening:
            self.closed = True
        for each in self.openings:
            each.close()
        if self._undoing:  # over a dead link this takes longer; the pools close anyhow
            await asyncio.wait(self._undoing, timeout=UNDO_SECONDS)
        sides: list[Side[Any]] = [self.on_loop, self.threads]
        for side in sides:
            if side.pool is not None:
                await (side.pool.close() if side.is_async else asyncio.to_thread(side.pool.close))
                while (conn := side.take_early()) is not None:
                    await side.put(conn)  # closed as it is: the pool is

    def tidy(self, conn: HandlerConnection | AsyncHandlerConnection) -> None:
        """The next job did not ask for dicts; and a session that the worker did not end itself may go on."""
        conn.tidy()
        identity = self._known.get(conn)
        if conn.broken and identity is not None:
            self.orphans.add(identity)

    def heir_of(self, conn: C) -> C:
        """The heir of this connection; its session is known all the time."""
        heir: C = conn.heir()
        forks.cut_in_children(heir)
        with self._naming:
            self._known[heir] = self._known[conn]
        self._link.primary.succeed(conn, heir)
        return heir

    def end_of(self, orphan: Identity) -> Statement[None]:
        """What ends its session."""
        params = {"pid": orphan[0], "backend_start": orphan[1]}
        return Statement(text("transactions_end_session", self._link.schema), params, lambda rows: None)

    def is_away(self, on_loop: bool) -> bool:
        """Whether a job has waited in vain because the database is away: a connection for it is still being opened, or
        a session of the worker is lost. If handlers have all connections, none is being opened."""
        return self._link.outage.is_on() or bool(self.openings[on_loop].under_way)

    def options(self) -> dict[str, Any]:
        """How psycopg's pool is made."""
        return {
            "conninfo": self._link.dsn,
            "kwargs": options(self._link, NAME) | {"prepare_threshold": self._prepare},
            "min_size": 0,
            "max_size": self.size,
            "open": False,
            "name": NAME,
            "timeout": GET_SECONDS,
            "max_idle": IDLE_SECONDS,
        }

    # Called by the pools' own threads and tasks, and a thread waits for the loop: two, as the ways to wait differ.

    def _configure(self, conn: HandlerConnection) -> None:
        forks.cut_in_children(conn)
        _give_cursors(conn)
        [(server, only_reads)] = conn.execute(text("sessions_server", self._link.schema)).fetchall()
        if not only_reads:  # else its first transaction finds out
            self._link.primary.met(conn, server)
        if self._own(conn, conn.execute(text("sessions_identity", self._link.schema)).fetchall()):
            conn.execute(text("sessions_idle", self._link.schema))
            done: Future[object] = asyncio.run_coroutine_threadsafe(_awaited(self._listed), self._loop)
            done.result()

    async def _aconfigure(self, conn: AsyncHandlerConnection) -> None:
        forks.cut_in_children(conn)
        _give_cursors(conn)
        cursor = await conn.execute(text("sessions_server", self._link.schema))
        [(server, only_reads)] = await cursor.fetchall()
        if not only_reads:
            self._link.primary.met(conn, server)
        cursor = await conn.execute(text("sessions_identity", self._link.schema))
        if self._own(conn, await cursor.fetchall()):
            await conn.execute(text("sessions_idle", self._link.schema))
            await self._listed()

    def _own(self, conn: HandlerConnection | AsyncHandlerConnection, rows: list[tuple[int, str]]) -> bool:
        """Whether the session is the worker's alone."""
        conn.made_at = monotonic()
        identity = own(conn, rows)
        if identity is None:
            return False
        with self._naming:
            self._known[conn] = identity
        conn.own, conn.prepared = True, self._prepared
        return True


def _give_cursors(conn: HandlerConnection | AsyncHandlerConnection) -> None:
    """Its cursors are those of handlers."""
    if isinstance(conn, AsyncConnection):
        conn.cursor_factory = AsyncHandlerCursor
    else:
        conn.cursor_factory = HandlerCursor


def _closed() -> PoolClosed:
    from psycopg_pool import PoolClosed

    return PoolClosed("the worker has stopped: its pool gives out no connections any more")


async def _awaited(function: Callable[[], Awaitable[object]]) -> object:
    return await function()
