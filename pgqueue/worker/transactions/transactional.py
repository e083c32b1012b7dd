"""Transactional tasks: what a handler writes on its job's connection is committed together with the job's completion.

A layer of the worker's chain: it puts a transaction around the handlers of the tasks that want one. A handler asks for
its connection by `job.connection` or `await job.aconnection()`. Only then is a connection taken from the pool and a
transaction begun. If a handler never asks, its job is completed like any other.

A run is not stopped from the moment it begins to commit: no job is both committed and cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from psycopg import AsyncConnection, Connection

from pgqueue.client.middleware import Handler
from pgqueue.client.tasks import Task
from pgqueue.database.drivers import running_loop
from pgqueue.database.sessions import Identity
from pgqueue.errors import Error
from pgqueue.jobs.job import Job, current_job
from pgqueue.jobs.outcomes import Outcome
from pgqueue.worker.transactions.async_transaction import AsyncTransaction
from pgqueue.worker.transactions.commit import TransactionServices
from pgqueue.worker.transactions.transaction import Transaction

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


W = TypeVar("W", Transaction, AsyncTransaction)

BEFORE_ITERATION = "iteration, whose first batch would commit what was written there; ask inside the loop, or after it"
BEFORE_STEP = "step, which would commit what was written there; ask inside the step, or after the last one"
"""Why a connection that was asked for too early is refused."""


class Transactional:
    """Runs the transactional tasks of one worker, and knows the transaction of each job."""

    def __init__(self, around: TransactionServices) -> None:
        self._around = around
        self._open: dict[Job, Transaction | AsyncTransaction] = {}
        self._loop = asyncio.get_running_loop()
        self._undoing: set[asyncio.Task[None]] = set()

    def wraps(self, task: Task[..., Any]) -> bool:
        """Whether the handler of this task is in a transaction."""
        return bool(task.transactional)

    def connection(self, job: Job) -> Connection[Any]:
        """The connection of the job's transaction, which begins here if it has not begun."""
        work = self._open.get(job)
        if isinstance(work, Transaction):
            return work.connection()
        raise _no_connection(job, work, "connection")

    async def aconnection(self, job: Job) -> AsyncConnection[Any]:
        """The same for an async handler."""
        work = self._open.get(job)
        if isinstance(work, AsyncTransaction):
            return await work.connection()
        raise _no_connection(job, work, "aconnection()")

    def session(self, job: Job) -> Session:
        """A SQLAlchemy session on that connection."""
        work = self._open.get(job)
        if isinstance(work, Transaction):
            return work.session()
        raise _no_connection(job, work, "session()")

    async def asession(self, job: Job) -> AsyncSession:
        """The same for an async handler."""
        work = self._open.get(job)
        if isinstance(work, AsyncTransaction):
            return await work.session()
        raise _no_connection(job, work, "asession()")

    def owns(self, job: Job) -> bool:
        """Whether the worker ends the transaction this job is in."""
        return job in self._open

    def for_iteration(self, job: Job, begin: Callable[[Transaction], object]) -> Transaction:
        """What an iteration commits its batches by. A job that is not transactional has it until `end_iteration`.

        `begin` is told before the transaction is known here: so an iteration stopped at any step knows what to end.
        """
        return self._for_iteration(
            Transaction, job, begin, running_loop() is None, "async: `async for batch in job.aiterate(…)`"
        )

    def afor_iteration(self, job: Job, begin: Callable[[AsyncTransaction], object]) -> AsyncTransaction:
        """The same for an async handler."""
        here = running_loop() is self._loop
        return self._for_iteration(AsyncTransaction, job, begin, here, "sync: `for batch in job.iterate(…)`")

    def for_step(self, job: Job, begin: Callable[[Transaction], object]) -> Transaction:
        """What a durable step is committed by; otherwise as `for_iteration`."""
        otherwise = "async: `await job.astep(…)`"
        return self._for_iteration(Transaction, job, begin, running_loop() is None, otherwise, BEFORE_STEP)

    def afor_step(self, job: Job, begin: Callable[[AsyncTransaction], object]) -> AsyncTransaction:
        """The same for an async handler."""
        here = running_loop() is self._loop
        return self._for_iteration(AsyncTransaction, job, begin, here, "sync: `job.step(…)`", BEFORE_STEP)

    def _for_iteration(
        self,
        kind: type[W],
        job: Job,
        begin: Callable[[W], object],
        here: bool,
        otherwise: str,
        before: str = BEFORE_ITERATION,
    ) -> W:
        work = self._open.get(job)
        if work is None and here:
            work = kind(self._around, job, for_iteration=True)
        if not isinstance(work, kind):
            raise Error(f"job {job.id} ({job.task}): its handler is {otherwise}", job_id=job.id)
        if work.commit.conn is not None:
            raise asked_before(job, before)
        begin(work)
        if work.commit.for_iteration:
            self._open[job] = work
        return work

    def end_iteration(self, job: Job, work: Transaction | AsyncTransaction) -> None:
        """The iteration is over: a job that is not transactional has no connection any more."""
        if work.commit.for_iteration and self._open.get(job) is work:
            work.commit.over = True
            del self._open[job]

    def raised(self, job: Job) -> None:
        """The handler has raised. The loop over an iteration may still be there: its frame is kept by the error."""
        work = self._open.get(job)
        if work is not None:
            work.commit.note_end()

    def drop(self, job: Job, work: Transaction | AsyncTransaction) -> None:
        """The job has ended, and its handler goes on, or has left its loop: end its session."""
        work.commit.over = True
        self.end_iteration(job, work)
        if isinstance(work, AsyncTransaction):
            self.leave(work)
        else:
            work.discard()

    def cut_overdue(self) -> None:
        """Hang up where a COMMIT waits over a dead link: it is settled on another one. Called with each heartbeat."""
        for work in list(self._open.values()):
            if work.commit.overdue():
                work.commit.cut()

    def jobs_by_session(self) -> dict[Identity, int]:
        """The jobs that have a transaction now, by the session that it is in. From any thread."""
        found = {}
        for job, work in list(self._open.items()):
            conn = work.commit.conn
            identity = None if conn is None else self._around.pool.identity(conn)
            if identity is not None:
                found[identity] = job.id
        return found

    def abandoned(self, job: Job) -> None:
        """The job was taken from its handler, which goes on: its transaction must not."""
        work = self._open.get(job)
        if work is not None:
            self.drop(job, work)

    def leave(self, work: AsyncTransaction) -> None:
        """Undo what this has begun; it is not seen any more. From any thread."""
        left = work.commit.leave()
        if left is not None:
            self._loop.call_soon_threadsafe(self._undo, left)

    def _undo(self, left: Coroutine[Any, Any, None]) -> None:
        undoing = self._loop.create_task(left)
        self._undoing.add(undoing)  # the loop itself keeps no task alive
        undoing.add_done_callback(self._undoing.discard)

    def in_thread(self, task: Task[..., Any], call: Handler) -> Handler:
        """A sync handler with a transaction around it."""

        def in_thread(*args: Any, **kwargs: Any) -> Outcome:
            job = current_job()
            work = self._open[job] = Transaction(self._around, job)
            try:
                try:
                    try:
                        return work.end(task.retry, call(*args, **kwargs))
                    except Exception:
                        work.commit.raised()  # what was committed already must not be done again
                        raise
                    finally:
                        work.finish()
                finally:  # an Interrupted comes once: a step that it broke into is done here
                    work.finish()
                    self._open.pop(job, None)
            finally:
                self._open.pop(job, None)

        return in_thread

    def on_loop(self, task: Task[..., Any], call: Handler) -> Handler:
        """An async handler with a transaction around it."""

        async def on_loop(*args: Any, **kwargs: Any) -> Outcome:
            job = current_job()
            work = self._open[job] = AsyncTransaction(self._around, job)
            try:
                return await work.end(task.retry, await call(*args, **kwargs))
            except Exception:
                work.commit.raised()
                raise
            finally:
                try:
                    await work.finish()
                finally:
                    del self._open[job]

        return on_loop


def asked_before(job: Job, before: str) -> Error:
    """What is raised if `job.connection` was asked for too early: `before` an iteration, or a step."""
    return Error(f"job {job.id} ({job.task}): job.connection was asked for before the {before}", job_id=job.id)


def _no_connection(job: Job, work: Transaction | AsyncTransaction | None, what: str) -> Error:
    if work is None:
        why = "declare the task with transactional=True and ask while its handler runs, or ask inside job.iterate"
    elif isinstance(work, AsyncTransaction):
        why = "its handler is async: use `await job.aconnection()` or `await job.asession()`"
    else:
        why = "its handler is sync: use `job.connection` or `job.session()`"
    return Error(f"job {job.id} ({job.task}): no job.{what} here: {why}", job_id=job.id)
