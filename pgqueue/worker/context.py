"""The context of a worker's jobs: carries out the methods of `Job`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pgqueue.client import observers
from pgqueue.database import drivers
from pgqueue.database.statements import Statement
from pgqueue.errors import Error
from pgqueue.jobs.context import AnySource, JobContext, Source
from pgqueue.jobs.job import Job, NewJob
from pgqueue.jobs.outcomes import Completed, completed
from pgqueue.worker.complete.outcome_sql import LOST, OutcomeSql
from pgqueue.worker.run.node_results import NodeResults
from pgqueue.worker.run.running_jobs import RunningJobs
from pgqueue.worker.run.serialization_retries import sqlstate
from pgqueue.worker.state import WorkerState
from pgqueue.worker.transactions.commit import lost
from pgqueue.worker.transactions.durable_steps import DurableSteps
from pgqueue.worker.transactions.iteration import Iterations
from pgqueue.worker.transactions.transactional import Transactional


@dataclass(frozen=True, slots=True)
class LoopServices:
    """What handlers ask of the worker's loop, from any thread: to write their progress, and to read results."""

    report: Callable[[Job, float, float | None], None]
    results: NodeResults


class WorkerContext(JobContext):
    """The context of the jobs of one worker."""

    def __init__(
        self,
        state: WorkerState,
        running: RunningJobs,
        transactional: Transactional,
        iterations: Iterations,
        outcome_sql: OutcomeSql,
        loop_services: LoopServices,
    ) -> None:
        super().__init__()
        self._transactional = transactional
        self._steps = DurableSteps(transactional, outcome_sql)
        self._iterations = iterations
        self._results = loop_services.results
        self._outcome_sql = replace(outcome_sql, array=list)
        self._state = state
        self._running = running
        self._report = loop_services.report

    def connection(self, job: Job) -> Any:
        return self._transactional.connection(job)

    async def aconnection(self, job: Job) -> Any:
        return await self._transactional.aconnection(job)

    def session(self, job: Job) -> Any:
        return self._transactional.session(job)

    async def asession(self, job: Job) -> Any:
        return await self._transactional.asession(job)

    def successor(self, new: NewJob[Any]) -> NewJob[Any]:
        return observers.successor(new)

    def checkpoint(self, job: Job) -> None:
        self._running.checkpoint(job)

    def stopping(self, job: Job) -> bool:
        return self._running.stopping(job)

    def progress(self, job: Job, done: float, total: float | None) -> None:
        self._report(job, done, total)

    def iterate(self, job: Job, source: Source[Any], size: int) -> Iterator[list[Any]]:
        return self._iterations.iterate(job, source, size)

    def aiterate(self, job: Job, source: AnySource[Any], size: int) -> AsyncIterator[list[Any]]:
        return self._iterations.aiterate(job, source, size)

    def results(self, job: Job, name: str) -> Iterator[Any]:
        return self._results.results(job, name)

    def aresults(self, job: Job, name: str) -> AsyncIterator[Any]:
        return self._results.aresults(job, name)

    def step(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        return self._steps.step(job, name, call, fn)

    async def astep(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        return await self._steps.astep(job, name, call, fn)

    def left(self, job: Job) -> str | None:
        return self._iterations.left(job)

    def raised(self, job: Job) -> None:
        self._transactional.raised(job)

    def abandoned(self, job: Job) -> None:
        self._transactional.abandoned(job)

    def anew(self, job: Job) -> None:
        super().anew(job)
        self._iterations.drop([job])
        job.steps = None

    def complete(self, job: Job, conn: object, result: object) -> None:
        try:
            for statement in self._completion(job, conn, result):
                drivers.run(conn, statement)
        except Exception as error:
            raise _explained(job, error) from error

    async def acomplete(self, job: Job, conn: object, result: object) -> None:
        if drivers.is_django(conn):
            raise Error(
                f"job {job.id} ({job.task}): Django has no async transactions, so job.acomplete on its connection "
                "would complete it at once, whatever comes after; use a plain def, and job.complete inside of atomic()",
                job_id=job.id,
            )
        try:
            for statement in self._completion(job, conn, result):
                await drivers.arun(conn, statement)
        except Exception as error:
            raise _explained(job, error) from error

    def _completion(self, job: Job, conn: object, result: object) -> list[Statement[Any]]:
        check_own(job, conn, owned=self._transactional.owns(job))
        done = own_end(job, result, stored=self._state.tasks[job.task].store_result)
        return self._outcome_sql.within(job, done, self._state.id)


def check_own(job: Job, conn: object, *, owned: bool) -> None:
    """Raise unless this connection is in a transaction, which is the handler's own: not `owned` by the worker."""
    if drivers.alone(conn):
        raise Error(
            f"job {job.id} ({job.task}): job.complete(conn) outside of a transaction would complete it at once, "
            "whatever comes after; open a transaction on this connection first",
            job_id=job.id,
        )
    if owned:
        raise Error(
            f"job {job.id} ({job.task}): its task is transactional, or it is inside job.iterate, so the worker "
            "completes it; job.complete(conn) is for handlers that open a transaction themselves",
            job_id=job.id,
        )


def own_end(job: Job, result: object, *, stored: bool) -> Completed:
    """What `job.complete` writes: the successors, and the result if the task stores results."""
    done = completed(result if stored else None)
    if not isinstance(done, Completed):
        raise Error(f"job {job.id} ({job.task}): {done.problem.message}", job_id=job.id)
    return replace(done, successors=tuple(job.successors or ()))


def _explained(job: Job, error: Exception) -> Exception:
    """The error itself, or JobLost if the statement found that the job is not this run's any more."""
    return lost(job) if sqlstate(error) == LOST else error
