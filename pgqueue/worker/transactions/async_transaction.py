"""The transaction of one attempt on the loop: `commit` decides, and here is what a cancellation must not break into.

A cancellation lands at an `await`. The job itself is not cancelled once it is uninterruptible. A handler may cancel its
own tasks all the same, by a timeout around its iteration, say: so `keep` runs to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pgqueue.database.backoff import to_its_end
from pgqueue.database.statements import Row, Statement
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import Outcome
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.transactions import sqlalchemy
from pgqueue.worker.transactions.commit import Commit, TransactionServices
from pgqueue.worker.transactions.handler_connection import AsyncHandlerConnection
from pgqueue.worker.transactions.steps import asend

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


class AsyncTransaction:
    """The transaction of one attempt on the loop: begun when first asked for."""

    def __init__(self, around: TransactionServices, job: Job, *, for_iteration: bool = False) -> None:
        self.commit = Commit(around, job, around.pool.on_loop, nullcontext(), for_iteration)
        self.statement = self.commit.statement
        self.undo = self.commit.undo
        self._around = around
        self._job = job
        self._beginning = asyncio.Lock()

    async def connection(self) -> AsyncHandlerConnection:
        """The connection; begins the transaction at the first call, whichever of the handler's tasks that is."""
        conn: AsyncHandlerConnection | None = self.commit.conn
        if conn is None:
            async with self._beginning:
                conn = self.commit.conn or await self.commit.begin()
        return conn

    async def session(self) -> AsyncSession:
        """A SQLAlchemy session on that connection, the same at every call."""
        if self.commit.session is None:
            conn = await self.connection()
            async with self._beginning:
                if self.commit.session is None:
                    self.commit.session = await sqlalchemy.asession(conn)
        session: AsyncSession = self.commit.session
        return session

    async def end(self, retry: RetryPolicy, what: object) -> Outcome:
        """Commit with what the handler returned. Raises what prevents it; then nothing is committed."""
        outcome, kept = self.commit.outcome(retry, what)
        conn = self.commit.conn
        if conn is None or not kept:
            return outcome
        await self._flush(conn)
        await self._around.running.auninterruptible(self._job)
        return await self.commit.end(conn, outcome)

    async def look(self, statement: Statement[Any]) -> list[Row]:
        """The rows of a statement that only reads, in a transaction of its own."""
        conn = await self.connection()
        rows = await (await asend(conn, statement)).fetchall()
        await self.commit.end_reading(conn)
        return rows

    async def keep(self, statements: Sequence[Statement[Any]], kept: Statement[Any]) -> None:
        """Commit what was written, with these statements (`Commit.keep`); then the job can be stopped again."""
        conn = await self.connection()
        await self._flush(conn)
        await self._around.running.auninterruptible(self._job, reopens=True)
        try:
            await to_its_end(self.commit.keep(conn, statements, kept))
        finally:
            self._around.running.interruptible(self._job)

    async def _flush(self, conn: AsyncHandlerConnection) -> None:
        """Only into a transaction that can be committed."""
        self.commit.check_open(conn)
        if conn.lock.locked():
            await self.commit.check_left_open(conn)
        if self.commit.session is not None:
            await self.commit.session.finish()

    async def finish(self) -> None:
        """`undo` for good. A task of the handler's that is just asking for a connection gets none."""
        self.commit.over = True
        await self.undo()
