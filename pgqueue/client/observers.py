"""What watches jobs beside the application: traces and reports of errors. By default there is none.

`pgqueue.telemetry` adds observers (`observers.append`). An enqueue looks whether there is one; a worker takes those
that there are when it starts, as it takes hooks. So without observers nothing here is called.

An observer never fails an enqueue or a job:
1. Each call of an observer is guarded. An exception of it is logged, at most once a minute, and goes no further.
2. What an observer does to the jobs of an enqueue (`Sending.jobs`) takes effect only when its call has returned.
3. What it keeps back is sent in a thread when a worker process ends, and only so long (`flush`).
4. The exceptions that stop a handler (`CancelledError`, `Interrupted`) are no Exception, and pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from pgqueue.client.handle import JobHandle
from pgqueue.client.job_outcome import JobOutcome
from pgqueue.jobs.job import Job, NewJob
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

LOG_SECONDS = 60.0

End = Callable[[BaseException | None], object]
"""Called when what is watched is over, with the exception that it raised; where it began, in the same context."""


@dataclass(slots=True)
class Sending:
    """The jobs of one enqueue. An observer may put others in their place, such as with more headers.

    `batch`: they came by `enqueue_many`. `successor`: the job is written when the running job completes. Else `handles`
    are there when the enqueue has succeeded.
    """

    jobs: list[NewJob[Any]]
    batch: bool = False
    successor: bool = False
    handles: Sequence[JobHandle[Any]] = ()


class Observer(Protocol):
    """Is told of enqueues, and of runs of handlers."""

    def enqueuing(self, sending: Sending) -> End:
        """These jobs are about to be sent."""
        ...

    def running(self, job: Job) -> End:
        """The job's handler is about to be called, here. It may be called again within the same attempt."""
        ...

    def finished(self, job: Job, outcome: JobOutcome) -> None:
        """The attempt has this outcome; its handler may not have been called. From the loop or a thread."""
        ...

    def flush(self, seconds: float) -> object:
        """Send what is kept back, in about so many seconds. Called in a thread, which may be left behind."""
        ...


observers: list[Observer] = []
"""Those of this process."""


class Watched:
    """A block that observers watch: `begin` is called with each of them before it, what that returns after it."""

    __slots__ = ("_begin", "_ends", "_observers")

    def __init__(self, observers: Iterable[Observer], begin: Callable[[Observer], End]) -> None:
        self._observers = observers
        self._begin = begin
        self._ends: list[tuple[Observer, End]] = []

    def __enter__(self) -> None:
        for observer in self._observers:
            try:
                self._ends.append((observer, self._begin(observer)))
            except Exception:
                _complain(observer)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for observer, end in reversed(self._ends):
            try:
                end(error)
            except Exception:
                _complain(observer)


def sent(sending: Sending) -> Watched:
    """A block in which these jobs are sent."""
    return Watched(tuple(observers), lambda observer: observer.enqueuing(sending))


def successor(new: NewJob[Any]) -> NewJob[Any]:
    """A job that is to be written with the completion of the running one, as it is to be written."""
    if not observers:
        return new
    sending = Sending([new], successor=True)
    with sent(sending):
        return sending.jobs[0]


def tell(observers: Iterable[Observer], job: Job, outcome: JobOutcome) -> None:
    """Tell these observers what became of an attempt."""
    for observer in observers:
        try:
            observer.finished(job, outcome)
        except BaseException:  # an exception that leaves here would cost the worker a slot
            _complain(observer)


def flush(observer: Observer, seconds: float) -> None:
    """Let this observer send what it keeps back. It may hang, so this is called in a thread."""
    try:
        observer.flush(seconds)
    except BaseException:  # in a bare thread some kinds of exceptions would be lost
        _complain(observer)


_told: dict[str, float] = {}


def _complain(observer: Observer) -> None:
    """Log the exception of an observer, unless one of its kind was logged within the last minute."""
    kind, now = type(observer).__qualname__, monotonic()
    if now - _told.get(kind, -LOG_SECONDS) >= LOG_SECONDS:
        _told[kind] = now
        log.exception("%s failed; enqueues and jobs go on without it (said once a minute)", kind)
