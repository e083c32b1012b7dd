"""Transactional tasks: what a handler writes on its job's connection is committed together with the job's completion.

Used by the worker: `transactional` puts the transaction (`work`) into the call path of the tasks that want one. A
handler asks for its connection by `job.connection` or `await job.aconnection()`; only then is one taken from the pool
and a transaction begun. A handler that never asks is completed like any other.

Nobody stops a run from the moment it begins to commit: no job is committed and cancelled both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from psycopg import AsyncConnection, Connection

from pgqueue.errors import Error
from pgqueue.job import Job, current_job
from pgqueue.outcome import Outcome
from pgqueue.tasks import Task
from pgqueue.work import Around, AsyncWork, Work

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class Transactions:
    """Runs transactional tasks of one worker, and knows which transaction is whose."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._open: dict[Job, Work | AsyncWork] = {}

    def transactional(self, tasks: Mapping[str, Task[..., Any]]) -> dict[str, Task[..., Any]]:
        """These tasks, with a transaction around the handlers that are declared so."""
        return {name: self._wrapped(task) if task.transactional else task for name, task in tasks.items()}

    def connection(self, job: Job) -> Connection[Any]:
        """The connection of the job's transaction, which begins here if it has not begun."""
        work = self._open.get(job)
        if isinstance(work, Work):
            return work.connection()
        raise _no_connection(job, work, "connection")

    async def aconnection(self, job: Job) -> AsyncConnection[Any]:
        """The same for an async handler."""
        work = self._open.get(job)
        if isinstance(work, AsyncWork):
            return await work.connection()
        raise _no_connection(job, work, "aconnection()")

    def session(self, job: Job) -> Session:
        """A SQLAlchemy session on that connection."""
        work = self._open.get(job)
        if isinstance(work, Work):
            return work.session()
        raise _no_connection(job, work, "session()")

    def owns(self, job: Job) -> bool:
        """Whether the worker completes this job in a transaction of the job's own."""
        return job in self._open

    def _wrapped(self, task: Task[..., Any]) -> Task[..., Any]:
        fn = task.fn

        def in_thread(*args: Any, **kwargs: Any) -> Outcome:
            job = current_job()
            work = self._open[job] = Work(self._around, job)
            try:
                return work.end(task.retry, fn(*args, **kwargs))
            finally:
                work.undo()
                del self._open[job]

        async def on_loop(*args: Any, **kwargs: Any) -> Outcome:
            job = current_job()
            work = self._open[job] = AsyncWork(self._around, job)
            try:
                return await work.end(task.retry, await fn(*args, **kwargs))
            finally:
                await work.undo()
                del self._open[job]

        return replace(task, fn=on_loop if task.is_async else in_thread)


def _no_connection(job: Job, work: Work | AsyncWork | None, what: str) -> Error:
    if work is None:
        why = "declare the task with transactional=True, and ask while its handler runs"
    elif isinstance(work, AsyncWork):
        why = "its handler is async: use `await job.aconnection()` (a session is for sync handlers)"
    else:
        why = "its handler is sync: use `job.connection`"
    return Error(f"job {job.id} ({job.task}): no job.{what} here: {why}", job_id=job.id)
