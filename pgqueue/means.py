"""What a worker lends to its handlers: behind `job.connection`, `job.session()`, `job.complete(conn)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pgqueue import connections
from pgqueue.aborts import sqlstate
from pgqueue.endings import Endings
from pgqueue.errors import Error
from pgqueue.job import Job, Means
from pgqueue.outcome import Completed
from pgqueue.statements import Statement
from pgqueue.transactions import Transactions
from pgqueue.work import LOST, lost


class WorkerMeans(Means):
    """The means of one worker."""

    def __init__(self, transactions: Transactions, endings: Endings, worker_id: Callable[[], int]) -> None:
        super().__init__()
        self._transactions = transactions
        self._endings = replace(endings, array=list)
        self._worker_id = worker_id

    def connection(self, job: Job) -> Any:
        return self._transactions.connection(job)

    async def aconnection(self, job: Job) -> Any:
        return await self._transactions.aconnection(job)

    def session(self, job: Job) -> Any:
        return self._transactions.session(job)

    def complete(self, job: Job, conn: object) -> None:
        try:
            for statement in self._completion(job):
                connections.run(conn, statement)
        except Exception as error:
            raise _explained(job, error) from error

    async def acomplete(self, job: Job, conn: object) -> None:
        try:
            for statement in self._completion(job):
                await connections.arun(conn, statement)
        except Exception as error:
            raise _explained(job, error) from error

    def _completion(self, job: Job) -> list[Statement[Any]]:
        if self._transactions.owns(job):
            raise Error(
                f"job {job.id} ({job.task}): its task is transactional, so the worker completes it on job.connection; "
                "job.complete(conn) is for handlers that open a transaction themselves",
                job_id=job.id,
            )
        return self._endings.within(job, Completed(successors=tuple(job.successors or ())), self._worker_id())


def _explained(job: Job, error: Exception) -> Exception:
    """What was raised, or JobLost if the statement found that the job is not this run's any more."""
    return lost(job) if sqlstate(error) == LOST else error
