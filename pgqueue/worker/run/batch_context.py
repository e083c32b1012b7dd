"""The context of the jobs of one batch: what is of the run is that of the job that leads it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container, Iterator
from typing import Any

from pgqueue.jobs.context import JobContext
from pgqueue.jobs.job import Job, NewJob


class BatchContext(JobContext):
    """Behind each job of one batch while its handler runs. The transaction, the connection and the stop are one for
    all; progress, successors and a cancel are each job's own. What ends one job, or walks a list, is refused."""

    def __init__(self, before: JobContext, lead: Job, cancelled: Container[Job]) -> None:
        self._before = before
        self._lead = lead
        self._cancelled = cancelled

    @property
    def resources(self) -> Any:
        """As before."""
        return self._before.resources

    def connection(self, job: Job) -> Any:
        return self._before.connection(self._lead)

    async def aconnection(self, job: Job) -> Any:
        return await self._before.aconnection(self._lead)

    def session(self, job: Job) -> Any:
        return self._before.session(self._lead)

    async def asession(self, job: Job) -> Any:
        return await self._before.asession(self._lead)

    def successor(self, new: NewJob[Any]) -> NewJob[Any]:
        made: NewJob[Any] = self._before.successor(new)
        return made

    def checkpoint(self, job: Job) -> None:
        self._before.checkpoint(self._lead)

    def stopping(self, job: Job) -> bool:
        return job in self._cancelled or self._before.stopping(self._lead)

    def progress(self, job: Job, done: float, total: float | None) -> None:
        self._before.progress(job, done, total)

    def results(self, job: Job, name: str) -> Iterator[Any]:
        return self._before.results(job, name)

    def aresults(self, job: Job, name: str) -> AsyncIterator[Any]:
        return self._before.aresults(job, name)

    def step(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        raise self._refusal(job, "step()")

    async def astep(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        raise self._refusal(job, "astep()")

    def anew(self, job: Job) -> None:
        self._before.anew(job)
