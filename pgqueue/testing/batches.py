"""Iterations in a drain: a batch is the part of the test's transaction between two savepoints.

Used by `context`. If the job fails later, its earlier batches are kept, as a worker would keep them. A drain runs a
handler in a savepoint, which moves on with every batch. On a connection that `drain()` has opened itself there is no
savepoint, and each batch is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from pgqueue.database.asking import named
from pgqueue.database.statements import Row, Statement
from pgqueue.jobs.job import Job
from pgqueue.worker.transactions.steps import asend, send
from pgqueue.worker.transactions.transactional import BEFORE_ITERATION, BEFORE_STEP, asked_before

NEXT = b"RELEASE SAVEPOINT pgqueue_job; SAVEPOINT pgqueue_job"


class BatchContext(Protocol):
    """The part of `context` that batches use."""

    worker_id: int
    alone: bool
    iterating: bool
    spoilt: bool

    @property
    def begun(self) -> bool: ...
    def connection(self, job: Job) -> Any: ...
    async def aconnection(self, job: Job) -> Any: ...
    def end(self, *, kept: bool) -> None: ...
    async def aend(self, *, kept: bool) -> None: ...


class Batch:
    """Used instead of `transaction.Transaction`: the batches of one job on the connection of the test."""

    def __init__(self, context: BatchContext, job: Job) -> None:
        self._context = context
        self._job = job

    def statement(self, name: str, **params: object) -> Statement[list[Row]]:
        fence = {"id": self._job.id, "claim": self._job.claim, "worker_id": self._context.worker_id, "mark": None}
        return named(name, **fence | params)

    def look(self, statement: Statement[Any]) -> list[Row]:
        rows = send(self._context.connection(self._job), statement).fetchall()
        self._context.end(kept=True)  # the handler has not asked for the connection
        return rows

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
    """`Batch` for an async handler."""

    async def look(self, statement: Statement[Any]) -> list[Row]:  # type: ignore[override]
        rows = await (await asend(await self._context.aconnection(self._job), statement)).fetchall()
        await self._context.aend(kept=True)
        return rows

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


B = TypeVar("B", bound=Batch)


class Batches:
    """Used instead of `transactional.Transactional`: gives the connection of the test to one iteration."""

    def __init__(self, context: BatchContext) -> None:
        self._context = context

    def owns(self, job: Job) -> bool:
        """Whether an iteration or a step has the connection."""
        return self._context.iterating

    def for_iteration(self, job: Job, begin: Callable[[Batch], object]) -> Batch:
        return self._given(Batch(self._context, job), job, begin, BEFORE_ITERATION)

    def afor_iteration(self, job: Job, begin: Callable[[AsyncBatch], object]) -> AsyncBatch:
        return self._given(AsyncBatch(self._context, job), job, begin, BEFORE_ITERATION)

    def for_step(self, job: Job, begin: Callable[[Batch], object]) -> Batch:
        return self._given(Batch(self._context, job), job, begin, BEFORE_STEP)

    def afor_step(self, job: Job, begin: Callable[[AsyncBatch], object]) -> AsyncBatch:
        return self._given(AsyncBatch(self._context, job), job, begin, BEFORE_STEP)

    def _given(self, batch: B, job: Job, begin: Callable[[B], object], before: str) -> B:
        if self._context.begun:
            raise asked_before(job, before)
        begin(batch)
        self._context.iterating = True
        return batch

    def end_iteration(self, job: Job, work: Any) -> None:
        self._context.iterating = False

    def leave(self, work: Any) -> None:
        """The loop was left: its last batch is undone when the connection is used next, or at the end."""
        self._context.spoilt = True

    def drop(self, job: Job, work: Any) -> None:
        """Do nothing: in a drain the handler has always ended by now."""
