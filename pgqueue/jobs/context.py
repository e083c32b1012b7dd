"""What the runner of a job lends to its handler: behind every method of `Job` that does something.

A worker lends what stands in `means`, `pgqueue.testing` some of it. Where the job is not run, all of it refuses.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeVar

from pgqueue.errors import Error

Job = Any
"""A Job; its module stands on this one."""
T = TypeVar("T")

Source = Callable[[Any], Iterable[tuple[Any, T]]]
"""What an iteration goes through: called with a cursor (None: from the beginning), it gives (cursor, item) after it."""
AnySource = Callable[[Any], Iterable[tuple[Any, T]] | AsyncIterable[tuple[Any, T]]]


class JobContext:
    """What the runner of a job lends to its handler: behind every method of `Job` that does something.

    These here refuse: a worker, and `pgqueue.testing`, lend more.
    """

    over = False
    """Whether the run is over: nothing that is said now is heard any more."""

    def __init__(self, resources: Any = None) -> None:
        self.resources = resources
        """What the lifespan yielded."""

    def connection(self, job: Job) -> Any:
        raise self._refusal(job, "connection")

    async def aconnection(self, job: Job) -> Any:
        raise self._refusal(job, "aconnection()")

    def session(self, job: Job) -> Any:
        raise self._refusal(job, "session()")

    def complete(self, job: Job, conn: object) -> None:
        raise self._refusal(job, "complete()")

    async def acomplete(self, job: Job, conn: object) -> None:
        raise self._refusal(job, "acomplete()")

    def checkpoint(self, job: Job) -> None:
        """Nothing can stop the job here."""

    def stopping(self, job: Job) -> bool:
        """Nor is it told."""
        return False

    def progress(self, job: Job, done: float, total: float | None) -> None:
        """Nothing shows it here."""

    def iterate(self, job: Job, source: Source[Any], size: int) -> Iterator[list[Any]]:
        raise self._refusal(job, "iterate()")

    def aiterate(self, job: Job, source: AnySource[Any], size: int) -> AsyncIterator[list[Any]]:
        raise self._refusal(job, "aiterate()")

    def left(self, job: Job) -> str | None:
        """Why the job is not complete although its handler has returned; None if it is."""
        return None

    def abandoned(self, job: Job) -> None:
        """It was taken away from its handler, which goes on."""

    def anew(self, job: Job) -> None:
        """Its handler is about to be called once more, as if it had not been called."""
        job.successors, job.written = None, False

    def _refusal(self, job: Job, what: str) -> Error:
        where = f"job {job.id} ({job.task})"
        return Error(f"{where}: there is no job.{what} here; a worker has it, or pgqueue.testing.drain")


NO_CONTEXT = JobContext()
