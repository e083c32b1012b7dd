"""What the methods of `Job` call: the services that the runner of a job gives to its handler.

A worker gives all of them (`worker.context`), `pgqueue.testing` some. If the job is not run, each method refuses.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from inspect import isawaitable
from typing import Any, TypeVar

from pgqueue.errors import Error

Job = Any
NewJob = Any
"""A Job, a NewJob. Their module imports this one, so their types cannot be imported here."""
T = TypeVar("T")

Source = Callable[[Any], Iterable[tuple[Any, T]]]
"""The source of an iteration. Called with a cursor (None: from the beginning), it gives the (cursor, item) after it."""
AnySource = Callable[[Any], Iterable[tuple[Any, T]] | AsyncIterable[tuple[Any, T]]]


class JobContext:
    """What the methods of `Job` call.

    The methods of this class refuse or do nothing. A worker and `pgqueue.testing` have classes that do more.
    """

    over = False
    """Whether the run is over: then calls have no effect any more."""

    def __init__(self, resources: Any = None) -> None:
        self.resources = resources
        """What the lifespan yielded."""

    def connection(self, job: Job) -> Any:
        raise self._refusal(job, "connection")

    async def aconnection(self, job: Job) -> Any:
        raise self._refusal(job, "aconnection()")

    def session(self, job: Job) -> Any:
        raise self._refusal(job, "session()")

    async def asession(self, job: Job) -> Any:
        raise self._refusal(job, "asession()")

    def complete(self, job: Job, conn: object, result: object) -> None:
        raise self._refusal(job, "complete()")

    async def acomplete(self, job: Job, conn: object, result: object) -> None:
        raise self._refusal(job, "acomplete()")

    def successor(self, new: NewJob) -> NewJob:
        """The successor that a handler has made, as it is to be written."""
        return new

    def checkpoint(self, job: Job) -> None:
        """Do nothing: no service can stop the job here."""

    def stopping(self, job: Job) -> bool:
        """False: no service can stop the job here."""
        return False

    def progress(self, job: Job, done: float, total: float | None) -> None:
        """Do nothing: no service stores the progress here."""

    def iterate(self, job: Job, source: Source[Any], size: int) -> Iterator[list[Any]]:
        raise self._refusal(job, "iterate()")

    def aiterate(self, job: Job, source: AnySource[Any], size: int) -> AsyncIterator[list[Any]]:
        raise self._refusal(job, "aiterate()")

    def results(self, job: Job, name: str) -> Iterator[Any]:
        raise self._refusal(job, "results()")

    def aresults(self, job: Job, name: str) -> AsyncIterator[Any]:
        raise self._refusal(job, "aresults()")

    def step(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        """The answer of `call`: no service records it here."""
        return call()

    async def astep(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        """The answer of `call`, awaited if it is awaitable: no service records it here."""
        answer = call()
        return await answer if isawaitable(answer) else answer

    def left(self, job: Job) -> str | None:
        """Why the job is not complete although its handler has returned; None if it is complete."""
        return None

    def raised(self, job: Job) -> None:
        """The job's handler has raised: note at the job what became of what it has begun. Sends nothing."""

    def abandoned(self, job: Job) -> None:
        """The job was taken away from its handler, which goes on."""

    def anew(self, job: Job) -> None:
        """The job's handler is about to be called again, as if it had not been called before."""
        job.successors, job.written = None, False

    def _refusal(self, job: Job, what: str) -> Error:
        where = f"job {job.id} ({job.task})"
        return Error(f"{where}: there is no job.{what} here; a worker has it, or pgqueue.testing.drain")


NO_CONTEXT = JobContext()
