"""Batches: the option of a task whose handler takes many jobs in one call, and what such a handler answers.

A task is declared with a `Batch`; the worker gathers its jobs (`pgqueue.worker.run.job_batches`). Decides only, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pgqueue.errors import Error, InvalidOption
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import ASKS, NEVER_RUN, Outcome, given
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.jobs.values import Duration, seconds, whole
from pgqueue.options import names_options

SIZE_MOST = 10_000
WAIT_MOST = 60.0


@names_options
@dataclass(frozen=True, slots=True)
class Batch:
    """Let one call of the handler run up to `size` jobs of its task, each enqueued by itself.

    The handler has one parameter, a list: each job has one element of it as its argument. `wait` is a duration: how
    long the first job waits, claimed, for others to come. A full batch does not wait. Raises InvalidOption unless
    `size` is from 1 to 10,000 and `wait` from 0 to 60 s.

    >>> @pgqueue.task(name="search.index", batch=Batch(100, wait="200ms"))
    ... def index(documents: list[str]) -> None:
    ...     print(len(documents), "documents in one request")
    >>> index.new("first").args
    '{"documents":"first"}'
    >>> index(["first", "second"])
    2 documents in one request
    """

    size: int
    wait: Duration = 0.2

    def __post_init__(self) -> None:
        if not whole(self.size, 1, SIZE_MOST):
            raise InvalidOption(f"batch {self.size!r}: use a whole number of jobs, from 1 to {SIZE_MOST:,}")
        if not 0 <= self.seconds <= WAIT_MOST:
            raise InvalidOption(f"batch {self.size}: wait {self.wait!r}: use a duration from 0 to {WAIT_MOST:g} s")

    @property
    def seconds(self) -> float:
        """`wait` in seconds."""
        return seconds(self.wait, f"batch {self.size!r}: wait")


class WrongAnswer(Error):
    """What the handler of a batch has answered says nothing of each of its jobs."""


def values(answer: object, number: int) -> Sequence[Any]:
    """What the handler answered, for each of so many jobs. Raises WrongAnswer if it is neither None nor such a list.

    >>> values(None, 2), values(["a", "b"], 2)
    ([None, None], ['a', 'b'])
    >>> values(["a"], 2)
    Traceback (most recent call last):
    ...
    pgqueue.jobs.batch.WrongAnswer: the batch has 2 jobs, and its handler has answered a list of 1: it must be as long
    """
    if answer is None:
        return [None] * number
    if isinstance(answer, NEVER_RUN):  # each job says why its handler has not run
        return [answer] * number
    if not isinstance(answer, list | tuple):
        kind = type(answer).__name__
        raise WrongAnswer(f"the handler of a batch answers None or a list, one value for each job; this is a {kind}")
    if len(answer) != number:
        raise WrongAnswer(
            f"the batch has {number} jobs, and its handler has answered a list of {len(answer)}: it must be as long"
        )
    return answer


def ended(job: Job, retry: RetryPolicy, value: object, *, stored: bool) -> Outcome:
    """The outcome of one job of a batch: `value` is what the handler answered for it. An exception counts as raised."""
    if isinstance(value, BaseException):
        return given(job, retry, value, raised=not isinstance(value, ASKS))
    return given(job, retry, value if stored or isinstance(value, NEVER_RUN) else None)
