"""A SQLAlchemy session inside a transaction that it does not own: `job.session()`, `await job.asession()`.

SQLAlchemy is imported only when a handler asks. The engine is made once per worker, and owns nothing. Its "driver
connection" is a `SavepointConnection` around the job's psycopg connection. What SQLAlchemy takes for transactions are
savepoints there, because only the worker ends the transaction they are in.

An async session is the same with awaits: SQLAlchemy runs its own sync code in a greenlet, and awaits the driver there.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from psycopg.pq import TransactionStatus

from pgqueue.errors import Error

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncConnection as EngineConnection
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

    from pgqueue.worker.transactions.handler_connection import HandlerConnection

_for_engine: ContextVar[SavepointConnection] = ContextVar("pgqueue_session_connection")
_for_async_engine: ContextVar[AsyncSavepointConnection] = ContextVar("pgqueue_async_session_connection")

NO_COMMIT = "the worker commits this session, together with the job's completion; to write now: flush()"
NO_ROLLBACK = "the worker rolls this session back when the handler raises; for a part of it: begin_nested()"
OLD_SQLALCHEMY = "await job.asession() needs SQLAlchemy 2.0.16 or newer; job.session() and job.aconnection() do not"

SAVEPOINT = b"SAVEPOINT pgqueue_session"
ROLLBACK = b"ROLLBACK TO SAVEPOINT pgqueue_session"
RELEASE = b"RELEASE SAVEPOINT pgqueue_session"


class SavepointConnection:
    """The connection as SQLAlchemy sees it: what SQLAlchemy takes for its transaction is a savepoint of the worker's.

    So what SQLAlchemy rolls back (at `session.begin()`, after a flush that failed) is rolled back, and nothing else.
    """

    _left: bool

    def __init__(self, conn: HandlerConnection) -> None:
        object.__setattr__(self, "_conn", conn)
        object.__setattr__(self, "_left", False)
        conn.execute(SAVEPOINT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._conn, name, value)

    def commit(self) -> None:
        """What was written so far is kept, if the worker commits."""
        if self._open():
            self._conn.execute(RELEASE)
            self._conn.execute(SAVEPOINT)

    def rollback(self) -> None:
        """Undo what was written since the savepoint; after the worker has ended the transaction, nothing."""
        if self._open():
            self._conn.execute(ROLLBACK)

    def close(self) -> None:
        """The worker's pool keeps it."""

    def add_notice_handler(self, callback: object) -> None:
        """SQLAlchemy's, for its log: it would stay with the connection, one more for each job."""

    def _open(self) -> bool:
        """Whether the worker has not ended the transaction yet."""
        status = self._conn.info.transaction_status
        return not self._left and status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def leave(self) -> None:
        """The worker ends the transaction: from now on the connection is not touched.

        SQLAlchemy rolls back once more when the session is no longer referenced, whenever that is. By then another job
        may have the connection.
        """
        object.__setattr__(self, "_left", True)


class AsyncSavepointConnection:
    """The same around an async connection. `begin` it before SQLAlchemy has it."""

    _left: bool

    def __init__(self, conn: AsyncConnection[Any]) -> None:
        object.__setattr__(self, "_conn", conn)
        object.__setattr__(self, "_left", False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._conn, name, value)

    async def begin(self) -> None:
        await self._conn.execute(SAVEPOINT)

    async def commit(self) -> None:
        if self._open():
            await self._conn.execute(RELEASE)
            await self._conn.execute(SAVEPOINT)

    async def rollback(self) -> None:
        if self._open():
            await self._conn.execute(ROLLBACK)

    async def close(self) -> None:
        """The worker's pool keeps it."""

    def add_notice_handler(self, callback: object) -> None:
        """As of `SavepointConnection`."""

    def _open(self) -> bool:
        status = self._conn.info.transaction_status
        return not self._left and status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def leave(self) -> None:
        """The worker ends the transaction: from now on the connection is not touched."""
        object.__setattr__(self, "_left", True)


def session(conn: HandlerConnection) -> Session:
    """A session on this connection; `finish` it before the transaction ends, and `leave` it afterwards.

    commit() and rollback() on it raise; `begin_nested()` is free. ImportError without SQLAlchemy.
    """
    face = SavepointConnection(conn)
    token = _for_engine.set(face)
    try:
        made: Any = _session_class()(bind=_engine().connect())
        made.face = face
        return made  # type: ignore[no-any-return]
    finally:
        _for_engine.reset(token)


@cache
def _engine() -> Engine:
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    return create_engine(
        "postgresql+psycopg://", creator=lambda: _for_engine.get(), poolclass=NullPool, use_native_hstore=False
    )


@cache
def _session_class() -> type[Session]:
    from sqlalchemy.orm import Session

    class JobSession(Session):
        """A session in a transaction that the worker ends, together with the job's completion."""

        face: SavepointConnection | AsyncSavepointConnection | Borrowed

        def commit(self) -> None:
            raise Error(NO_COMMIT)

        def rollback(self) -> None:
            raise Error(NO_ROLLBACK)

        def close(self) -> None:
            """Write what is to be written: `with job.session() as session:` closes nothing, the worker does."""
            if self.is_active:
                self.flush()

        def finish(self) -> None:
            """Before the worker commits."""
            self.flush()
            if isinstance(self.face, Borrowed):
                super().commit()  # the savepoint of the session

        def leave(self) -> None:
            """After the worker's transaction: forget everything."""
            self.face.leave()
            super().close()

    return JobSession


class Borrowed:
    """In place of the connection that a session has made: `within` makes none. What ends that does nothing here."""

    def leave(self) -> None: ...

    async def close(self) -> None: ...


def within(conn: object) -> Session:
    """A session in a savepoint of a connection of SQLAlchemy, on any driver: for a drain, which is given one."""
    made: Any = _session_class()(bind=conn, join_transaction_mode="create_savepoint")  # type: ignore[arg-type]
    made.face = Borrowed()
    return made  # type: ignore[no-any-return]


def awithin(conn: object) -> AsyncSession:
    """`within` for an async connection of SQLAlchemy."""
    made: Any = _async_session_class()(
        bind=conn,  # type: ignore[arg-type]
        sync_session_class=_session_class(),
        join_transaction_mode="create_savepoint",
    )
    made.sync_session.face = made.engine_connection = Borrowed()
    return made  # type: ignore[no-any-return]


async def asession(conn: AsyncConnection[Any]) -> AsyncSession:
    """An async session on this connection; await its `finish` before the transaction ends, and its `leave` afterwards.

    commit() and rollback() on it raise; `begin_nested()` is free. ImportError without SQLAlchemy.
    """
    face = AsyncSavepointConnection(conn)
    await face.begin()
    token = _for_async_engine.set(face)
    try:
        connection = await _async_engine().connect()
    finally:
        _for_async_engine.reset(token)
    made: Any = _async_session_class()(bind=connection, sync_session_class=_session_class())
    made.sync_session.face = face
    made.engine_connection = connection
    return made  # type: ignore[no-any-return]


@cache
def _async_engine() -> AsyncEngine:
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    async def given() -> Any:
        return _for_async_engine.get()

    try:
        return create_async_engine(
            "postgresql+psycopg://", async_creator=given, poolclass=NullPool, use_native_hstore=False
        )
    except TypeError as error:  # the argument `async_creator` is unknown
        raise Error(OLD_SQLALCHEMY) from error


@cache
def _async_session_class() -> type[AsyncSession]:
    from sqlalchemy.exc import InvalidRequestError
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.util.concurrency import greenlet_spawn

    class JobAsyncSession(AsyncSession):
        """An async session in a transaction that the worker ends, together with the job's completion."""

        engine_connection: EngineConnection | Borrowed

        async def commit(self) -> None:
            raise Error(NO_COMMIT)

        async def rollback(self) -> None:
            raise Error(NO_ROLLBACK)

        async def close(self) -> None:
            """Write what is to be written: `async with await job.asession()` closes nothing, the worker does."""
            if self.is_active:
                await self.flush()

        async def finish(self) -> None:
            """Before the worker commits."""
            sync: Any = self.sync_session
            await greenlet_spawn(sync.finish)

        async def leave(self) -> None:
            """After the worker's transaction: forget everything. A task that the handler has left may be in the middle
            of a statement: then SQLAlchemy refuses, and the connection is not touched any more all the same."""
            sync: Any = self.sync_session
            sync.face.leave()
            with suppress(InvalidRequestError):
                await greenlet_spawn(sync.leave)
                await self.engine_connection.close()

    return JobAsyncSession
