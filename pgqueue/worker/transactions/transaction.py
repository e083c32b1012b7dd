"""The transaction of one attempt in a thread: `commit` decides, and here is what an Interrupted must not break into.

An Interrupted may be raised in the run's thread at any instruction. So the connection is taken and released under
`shield`, and nothing is raised any more once the job is `uninterruptible`. The handler's own threads may ask for the
connection, too: locks keep them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from pgqueue.database.dead_link import hang_up
from pgqueue.database.statements import Row, Statement
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import Outcome
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.transactions import sqlalchemy
from pgqueue.worker.transactions.commit import Commit, TransactionServices
from pgqueue.worker.transactions.handler_connection import HandlerConnection
from pgqueue.worker.transactions.steps import run, send

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class Transaction:
    """The transaction of one attempt in a thread: begun when first asked for."""

    def __init__(self, around: TransactionServices, job: Job, *, for_iteration: bool = False) -> None:
        self.commit = Commit(around, job, around.pool.threads, Lock(), for_iteration)
        self.statement = self.commit.statement
        self._around = around
        self._job = job
        self._beginning = Lock()
        self._finished = False

    def connection(self) -> HandlerConnection:
        """The connection; begins the transaction at the first call, whichever of the handler's threads that is."""
        conn: HandlerConnection | None = self.commit.conn
        if conn is None:
            with self._around.running.shield(self._job), self._beginning:
                conn = self.commit.conn or run(self.commit.begin())
        return conn

    def session(self) -> Session:
        """A SQLAlchemy session on that connection, the same at every call."""
        if self.commit.session is None:
            self.commit.session = sqlalchemy.session(self.connection())
        session: Session = self.commit.session
        return session

    def end(self, retry: RetryPolicy, what: object) -> Outcome:
        """Commit with what the handler returned. Raises what prevents it; then nothing is committed."""
        outcome, kept = self.commit.outcome(retry, what)
        conn = self.commit.conn
        if conn is None or not kept:
            return outcome
        self._flush(conn)
        self._around.running.uninterruptible(self._job)
        return run(self.commit.end(conn, outcome))

    def look(self, statement: Statement[Any]) -> list[Row]:
        """The rows of a statement that only reads, in a transaction of its own."""
        conn = self.connection()
        rows = send(conn, statement).fetchall()
        self._around.running.uninterruptible(self._job, reopens=True)
        try:
            run(self.commit.end_reading(conn))
        finally:
            self._around.running.interruptible(self._job)
        return rows

    def keep(self, statements: Sequence[Statement[Any]], kept: Statement[Any]) -> None:
        """Commit what was written, with these statements (`Commit.keep`); then the job can be stopped again."""
        conn = self.connection()
        self._flush(conn)
        self._around.running.uninterruptible(self._job, reopens=True)
        try:
            run(self.commit.keep(conn, statements, kept))
        finally:
            self._around.running.interruptible(self._job)

    def _flush(self, conn: HandlerConnection) -> None:
        """Only into a transaction that can be committed."""
        self.commit.check_open(conn)
        if conn.lock.locked():
            with self._around.running.shield(self._job):
                run(self.commit.check_left_open(conn))
        if self.commit.session is not None:
            self.commit.session.finish()

    def discard(self) -> None:
        """End its session for good: the job was taken from its handler. On the loop, when it is `over`."""
        with self.commit.having:
            conn = self.commit.conn
            if conn is not None:
                hang_up(conn)
                self._around.pool.threads.discard(conn)

    def finish(self) -> None:
        """`undo` for good. A thread of the handler's that is just asking for a connection gets none."""
        self.commit.over = True
        if not self._finished:
            self.undo()
            self._finished = True  # a thread that asks after that sees that it is over

    def undo(self) -> None:
        """Release the connection (`Commit.undo`). Safe to repeat, also after an Interrupted."""
        with self._around.running.shield(self._job, leaving=True):
            if left := self.commit.leave():
                run(left)
