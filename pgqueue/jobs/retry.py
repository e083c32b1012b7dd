"""When a failed job runs again, and when it is given up.

A policy belongs to the code (`@task(retry=…)`), not to the row. The executor asks it once per failed attempt: after a
deploy with a new policy, jobs enqueued before follow it, too. Pure arithmetic, without clock and database.

The default gives up after ten attempts, 7 to 15 hours after the first. This is long enough to outlive an outage, and to
be seen by a person in the morning. Jitter only shortens a wait, by up to half, so that jobs that failed together do
not return together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Never

from pgqueue.errors import InvalidOption
from pgqueue.jobs.functions import check_answers, check_takes
from pgqueue.jobs.values import Duration, number, seconds, whole
from pgqueue.options import no_option

RetryFunction = Callable[[int, BaseException], Duration | None]
"""`f(attempt, exc)` returns how long to wait for the next attempt, or None to give up."""

MAX_ATTEMPTS = 32_767
"""The most attempts a job can have (the column is a smallint)."""


@dataclass(frozen=True, slots=True, init=False)
class RetryPolicy:
    """How often a task is tried, how long it waits in between (durations), and for which exceptions.

    The wait after attempt n is `min(most, first * factor ** (n - 1))` times a random 0.5 to 1. An exception of
    `fail_on`, or one that is not of `retry_on`, ends the job at once. Raises InvalidOption for values that make no
    sense.

    >>> policy = RetryPolicy(attempts=3, first=60, fail_on=(KeyError,))
    >>> policy.decide(1, OSError("down"), uniform=lambda: 1.0)
    60.0
    >>> policy.decide(3, OSError("down")) is None, policy.decide(1, KeyError("id")) is None
    (True, True)
    """

    attempts: int
    first: float
    factor: float
    most: float
    retry_on: tuple[type[BaseException], ...]
    fail_on: tuple[type[BaseException], ...]
    function: RetryFunction | None

    def __init__(
        self,
        attempts: int = 10,
        first: Duration = 10,
        factor: float = 3,
        most: Duration = 21_600,
        retry_on: tuple[type[BaseException], ...] = (Exception,),
        fail_on: tuple[type[BaseException], ...] = (),
        *,
        function: RetryFunction | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise no_option("RetryPolicy", unknown, RetryPolicy)
        if not number(factor, 1):
            raise InvalidOption(f"retry: factor {factor!r} must be a finite number of at least 1")
        keep = object.__setattr__
        keep(self, "attempts", check_attempts(attempts))
        keep(self, "first", seconds(first, "retry: first"))
        keep(self, "factor", float(factor))
        keep(self, "most", seconds(most, "retry: most"))
        keep(self, "retry_on", _exceptions(retry_on, "retry_on"))
        keep(self, "fail_on", _exceptions(fail_on, "fail_on"))
        if function is not None:
            what = f"retry {function!r:.80}"
            check_answers(function, what)
            check_takes(function, what, "attempt", "exc")
        keep(self, "function", function)

    @staticmethod
    def of(short: RetryPolicy | RetryFunction | int) -> RetryPolicy:
        """Return the policy for its short forms: a number of attempts, or a function `f(attempt, exc) -> delay | None`.

        A function decides alone, except that a number of attempts given with the job itself may end it earlier.

        >>> RetryPolicy.of(3).attempts
        3
        """
        if isinstance(short, RetryPolicy):
            return short
        if isinstance(short, int):
            return RetryPolicy(attempts=short)
        if callable(short) and not isinstance(short, type):
            return RetryPolicy(attempts=MAX_ATTEMPTS, function=short)
        raise InvalidOption(f"retry {short!r}: give a number of attempts, a RetryPolicy or a function f(attempt, exc)")

    def delay(self, attempt: int, uniform: Callable[[], float] = random.random) -> float:
        """Return the seconds to wait after this attempt (the first is 1); `uniform` draws the jitter from [0, 1)."""
        return self._longest(attempt) * (0.5 + 0.5 * uniform())

    def decide(
        self,
        attempt: int,
        exc: BaseException,
        max_attempts: int | None = None,
        uniform: Callable[[], float] = random.random,
    ) -> float | None:
        """Return the seconds until the next attempt after `exc` in this one, or None to give up.

        `max_attempts`, given with the job, comes before the policy's own number. An exception of the user's function
        passes through. Its answer must be a duration, else InvalidOption is raised.
        """
        if self.spent(attempt, max_attempts) or isinstance(exc, self.fail_on) or not isinstance(exc, self.retry_on):
            return None
        return self.wait(attempt, exc, uniform)

    def spent(self, attempt: int, max_attempts: int | None = None) -> bool:
        """Whether this attempt was the last one."""
        return attempt >= (self.attempts if max_attempts is None else max_attempts)

    def wait(self, attempt: int, exc: BaseException, uniform: Callable[[], float] = random.random) -> float | None:
        """Return the seconds to wait if another attempt follows. `exc` is not checked; a function may return None."""
        if self.function is None:
            return self.delay(attempt, uniform)
        wait = self.function(attempt, exc)
        return None if wait is None else seconds(wait, "retry: the function's answer")

    def _longest(self, attempt: int) -> float:
        try:
            return min(self.most, self.first * self.factor ** (attempt - 1))
        except OverflowError:  # 3.0 ** 700 is too large for a float
            return self.most if self.first else 0.0


def for_one_job(policy: RetryPolicy, what: str) -> RetryPolicy:
    """Return `policy` if it can travel with a job, which only numbers can; else raise InvalidOption."""
    if policy.function is not None or policy.retry_on != (Exception,) or policy.fail_on:
        raise InvalidOption(f"{what}: retry_on, fail_on and a function belong to the code: give them to @task(retry=…)")
    return policy


def check_attempts(attempts: int) -> int:
    """Return `attempts` if a job can have that many, else raise InvalidOption."""
    if not whole(attempts, 1, MAX_ATTEMPTS):
        raise InvalidOption(f"retry: attempts {attempts!r} must be a whole number from 1 to {MAX_ATTEMPTS:,}")
    return attempts


def _exceptions(classes: tuple[type[BaseException], ...], what: str) -> tuple[type[BaseException], ...]:
    if isinstance(classes, tuple) and all(isinstance(c, type) and issubclass(c, BaseException) for c in classes):
        return classes
    raise InvalidOption(f"retry: {what} {classes!r} must be a tuple of exception classes, such as (OSError,)")
