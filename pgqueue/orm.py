"""A SQLAlchemy session inside a transaction that is somebody else's: `job.session()`.

SQLAlchemy is imported only when a handler asks. The engine is made once per worker, knows one trick, and owns nothing:
its "driver connection" is the job's psycopg connection behind a face on which commit, rollback and close do nothing,
because the worker alone ends that transaction.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from pgqueue.errors import Error

if TYPE_CHECKING:
    from psycopg import Connection
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

_lent: ContextVar[Connection[Any]] = ContextVar("pgqueue_lent")


class Face:
    """The connection as SQLAlchemy sees it: it may use it, not end what it is in."""

    def __init__(self, conn: Connection[Any]) -> None:
        object.__setattr__(self, "_conn", conn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._conn, name, value)

    def commit(self) -> None:
        """The worker commits."""

    def rollback(self) -> None:
        """The worker rolls back."""

    def close(self) -> None:
        """The worker's pool keeps it."""


def session(conn: Connection[Any]) -> Session:
    """A session on this connection. The caller flushes it before the transaction ends, and closes it afterwards.

    commit() and rollback() on it raise; `begin_nested()` is free. ImportError without SQLAlchemy.
    """
    token = _lent.set(conn)
    try:
        made: Session = _session_class()(bind=_engine().connect())
        return made
    finally:
        _lent.reset(token)


@cache
def _engine() -> Engine:
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    return create_engine(
        "postgresql+psycopg://", creator=lambda: Face(_lent.get()), poolclass=NullPool, use_native_hstore=False
    )


@cache
def _session_class() -> type[Session]:
    from sqlalchemy.orm import Session

    class JobSession(Session):
        """A session whose transaction is ended by the worker, together with the job's completion."""

        def commit(self) -> None:
            raise Error("the worker commits this session, together with the job's completion; to write now: flush()")

        def rollback(self) -> None:
            raise Error("the worker rolls this session back when the handler raises; for a part of it: begin_nested()")

    return JobSession
