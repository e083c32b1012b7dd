"""Iterations in a drain: a batch is what stands between two savepoints of the test's transaction, and is kept by a
later failure of its job as a worker would keep it.

Used by `context`. The savepoint in which a drain runs a handler moves on with every batch; on the connection that
`drain()` opens itself there is none, and each batch is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pgqueue.config import config
from pgqueue.database.statements import Row, Statement, text
from pgqueue.jobs.job import Job
from pgqueue.worker.transactions.in_doubt import asend, send

NEXT = b"RELEASE SAVEPOINT pgqueue_job; SAVEPOINT pgqueue_job"


class BatchContext(Protocol):
    """What `context` is for the work of a batch."""

    worker_id: int
    alone: bool
    iterating: bool
    spoilt: bool

    def connection(self, job: Job) -> Any: ...
    async def aconnection(self, job: Job) -> Any: ...
    def end(self, *, kept: bool) -> None: ...
    async def aend(self, *, kept: bool) -> None: ...


class Batch:
    """Stands for `transaction.Transaction`: the batches of one job on the connection of the test."""

    def __init__(self, context: BatchContext, job: Job) -> None:
        self._context = context
        self._job = job

    def statement(self, name: str, **params: object) -> Statement[list[Row]]:
        fence = {"id": self._job.id, "claim": self._job.claim, "worker_id": self._context.worker_id}
        return Statement(text(name, config().schema), fence | params, list)

    def look(self, statement: Statement[Any]) -> list[Row]:
        return send(self._context.connection(self._job), statement).fetchall()

    def keep(self, statements: Sequence[Statement[Any]], kept: Statement[Any]) -> None:
        conn = self._context.connection(self._job)
        for statement in statements:
            send(conn, statement)
        self._context.end(kept=True)
        if self._context.alone:
            conn.commit()
        else:
            conn.execute(NEXT)

    def undo(self) -> None:
        self._context.end(kept=False)


class AsyncBatch(Batch):
    """The same for an async handler."""

    async def look(self, statement: Statement[Any]) -> list[Row]:  # type: ignore[override]
        return await (await asend(await self._context.aconnection(self._job), statement)).fetchall()

    async def keep(self, statements: Sequence[Statement[Any]], kept: Statement[Any]) -> None:  # type: ignore[override]
        conn = await self._context.aconnection(self._job)
        for statement in statements:
            await asend(conn, statement)
        await self._context.aend(kept=True)
        if self._context.alone:
            await conn.commit()
        else:
            await conn.execute(NEXT)

    async def undo(self) -> None:  # type: ignore[override]
        await self._context.aend(kept=False)


class Batches:
    """Stands for `transactional.Transactional`: lends the connection of the test to one iteration."""

    def __init__(self, context: BatchContext) -> None:
        self._context = context

    def for_iteration(self, job: Job, begin: Callable[[Batch], object]) -> Batch:
        batch = Batch(self._context, job)
        begin(batch)
        self._context.iterating = True
        return batch

    def afor_iteration(self, job: Job, begin: Callable[[AsyncBatch], object]) -> AsyncBatch:
        batch = AsyncBatch(self._context, job)
        begin(batch)
        self._context.iterating = True
        return batch

    def end_iteration(self, job: Job, work: Any) -> None:
        self._context.iterating = False

    def leave(self, work: Any) -> None:
        """The loop was left: what its batch wrote is undone when the connection is asked for next, or at the end."""
        self._context.spoilt = True

    def drop(self, job: Job, work: Any) -> None:
        """In a drain the handler has always come to its end."""
