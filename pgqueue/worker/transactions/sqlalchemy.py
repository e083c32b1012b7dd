"""A SQLAlchemy session inside a transaction that it does not own: `job.session()`.

SQLAlchemy is imported only when a handler asks. The engine is made once per worker, and owns nothing. Its "driver
connection" is a `SavepointConnection` around the job's psycopg connection. What SQLAlchemy takes for transactions are
savepoints there, because only the worker ends the transaction they are in.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from psycopg.pq import TransactionStatus

from pgqueue.errors import Error

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

    from pgqueue.worker.transactions.handler_connection import HandlerConnection

_for_engine: ContextVar[SavepointConnection] = ContextVar("pgqueue_session_connection")


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

        face: SavepointConnection

        def commit(self) -> None:
            raise Error("the worker commits this session, together with the job's completion; to write now: flush()")

        def rollback(self) -> None:
            raise Error("the worker rolls this session back when the handler raises; for a part of it: begin_nested()")

        def close(self) -> None:
            """Write what is to be written: `with job.session() as session:` closes nothing, the worker does."""
            if self.is_active:
                self.flush()

        def finish(self) -> None:
            """Before the worker commits."""
            self.flush()

        def leave(self) -> None:
            """After the worker's transaction: forget everything."""
            self.face.leave()
            super().close()

    return JobSession
