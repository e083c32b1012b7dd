"""The transaction of one attempt on the event loop: what `transaction` is in threads; why it is right stands there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from time import monotonic
from typing import Any

import psycopg

from pgqueue.database.backoff import to_its_end
from pgqueue.database.statements import Row, Statement
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import WRITTEN, Completed, Outcome
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.transactions.handler_connection import AsyncHandlerConnection
from pgqueue.worker.transactions.in_doubt import asend, asettle
from pgqueue.worker.transactions.transaction import AnyTransaction, TransactionServices, ended_before, lost


class AsyncTransaction(AnyTransaction):
    """The transaction of one attempt on the loop."""

    _conn: AsyncHandlerConnection | None

    def __init__(self, home: TransactionServices, job: Job, *, lent: bool = False) -> None:
        super().__init__(home, job, lent=lent)
        self._beginning = asyncio.Lock()

    async def connection(self) -> AsyncHandlerConnection:
        """The connection; begins the transaction at the first call, whichever of the handler's tasks that is."""
        conn = self._conn
        if conn is None:
            async with self._beginning:
                conn = self._conn or await self._begin()
        return conn

    async def end(self, retry: RetryPolicy, what: object) -> Outcome:
        """Commit with what the handler returned. Raises what prevents it; then nothing is committed."""
        outcome, kept = self._outcome(retry, what)
        conn = self._conn
        if conn is None or not kept:
            return outcome
        self._open(conn)
        await self._home.running.auninterruptible(self._job)
        self.ending = monotonic()
        try:
            await self._commit(conn, outcome)
        except psycopg.Error as error:
            self._known(error, conn)
            self._ended(error, *await self._settle(conn, error, self._settled()))
        self._job.ended = outcome
        return WRITTEN

    async def look(self, statement: Statement[Any]) -> list[Row]:
        """The rows of a statement that only reads, in a transaction of its own."""
        conn = await self.connection()
        rows = await (await asend(conn, statement)).fetchall()
        await self._commit_with(conn, [])
        await self.undo()
        return rows

    async def keep(self, statements: Sequence[Statement[Any]], kept: Statement[Any]) -> None:
        """`Transaction.keep`. Nor does a cancellation of the handler's own, of a timeout around the loop, break into
        it."""
        conn = await self.connection()
        await self._home.running.auninterruptible(self._job, reopens=True)
        self.ending = monotonic()
        try:
            await to_its_end(self._keep(conn, statements, kept))
        finally:
            self._home.running.interruptible(self._job)

    async def _settle(self, conn: AsyncHandlerConnection, error: psycopg.Error, done: Statement[Any]) -> list[bool]:
        questions = self._questions(conn, error, done)
        with self._home.pool.kept(conn):
            await self.undo()
            return await asettle(error, self._home.pool, questions)

    async def finish(self) -> None:
        """`undo` for good (see `Transaction.finish`)."""
        self.over = True
        await self.undo()

    async def undo(self) -> None:
        """Give the connection back: after a commit as it is, else closed (see `Transaction.undo`). The last step."""
        if left := self.leave():
            await left

    def leave(self) -> Coroutine[Any, Any, None] | None:
        """`undo` in two steps: from now on this transaction is not seen any more; what is returned undoes it."""
        conn, self._conn, committed = self._conn, None, self._committed
        self._committing = self._committed = False
        self.ending = 0.0
        return None if conn is None else self._undo(conn, committed)

    async def _undo(self, conn: AsyncHandlerConnection, committed: bool) -> None:
        try:
            if not committed:
                await conn.close()
        finally:
            await self._home.pool.arelease(conn)
            self._look_at_the_clock()

    async def _begin(self) -> AsyncHandlerConnection:
        while True:
            conn = await self._home.pool.aacquire(begun=self._first)
            try:
                self._look()  # Python 3.11's wait_for, in the pool, may swallow a cancellation
                await conn.begin(self._job.claim)
            except BaseException as error:
                dead = conn.closed
                await conn.close()
                await self._home.pool.arelease(conn)
                if dead and isinstance(error, psycopg.OperationalError):
                    continue
                raise
            if not self.over:
                self._conn, self._began, self._first = conn, monotonic(), False
                return conn
            await conn.close()
            await self._home.pool.arelease(conn)
            raise ended_before(self._job)

    async def _commit(self, conn: AsyncHandlerConnection, outcome: Outcome) -> None:
        if isinstance(outcome, Completed):
            await self._commit_with(conn, self._within(outcome), completes=True)
            return
        await asend(conn, self.statement("complete_mine"))
        ending = self._ending(outcome)
        if ending.read(await (await asend(conn, ending)).fetchall()) is not None:
            raise lost(self._job)
        await self._commit_with(conn, [])

    async def _commit_with(
        self, conn: AsyncHandlerConnection, statements: Sequence[Statement[Any]], completes: bool = False
    ) -> None:
        settled = self._home.begin_early(True) if completes else None
        along = statements[0] if len(statements) == 1 and conn.can_take(statements[0]) else None
        for statement in statements if along is None else ():
            await asend(conn, statement)
        self._committing = True
        await conn.end(along, settled)
        self._committed = True

    async def _keep(
        self, conn: AsyncHandlerConnection, statements: Sequence[Statement[Any]], kept: Statement[Any]
    ) -> None:
        try:
            self._open(conn)
            await self._commit_with(conn, statements)
        except psycopg.Error as error:
            self._known(error, conn)
            self._kept(error, *await self._settle(conn, error, kept))
        finally:
            await self.undo()
