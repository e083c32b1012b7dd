"""When a failed job runs again, and when it is given up.

A policy belongs to the code (`@task(retry=…)`), not to the row: the executor asks it once per failed attempt, so a new
deploy changes the waits of jobs that already wait for their turn. Pure arithmetic; knows no clock and no database.

The default gives up after ten attempts, 7 to 15 hours after the first: long enough to outlive an outage and be seen by
a person in the morning. Jitter only shortens a wait, by up to half: jobs that failed together do not return together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from pgqueue.errors import InvalidOption

RetryFunction = Callable[[int, BaseException], "float | timedelta | None"]
"""`f(attempt, exc)`: the seconds until the next attempt, or None to give up."""

MAX_ATTEMPTS = 32_767
"""The most attempts a job can have (the column is a smallint)."""

MAX_SECONDS = 100 * 365 * 86_400
"""The longest wait that can be asked for: 100 years keep every time inside what Python and PostgreSQL can write."""


@dataclass(frozen=True, slots=True, init=False)
class RetryPolicy:
    """How often a task is tried, how long it waits in between (seconds or timedelta), and for which exceptions.

    The wait after attempt n is `min(most, first * factor ** (n - 1))` times a random 0.5 to 1. Exceptions of `fail_on`,
    and those not of `retry_on`, end the job at once. Raises InvalidOption for values that make no sense.

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
        first: float | timedelta = 10,
        factor: float = 3,
        most: float | timedelta = 21_600,
        retry_on: tuple[type[BaseException], ...] = (Exception,),
        fail_on: tuple[type[BaseException], ...] = (),
        *,
        function: RetryFunction | None = None,
    ) -> None:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
            raise InvalidOption(f"retry: factor {factor!r} must be a finite number of at least 1")
        keep = object.__setattr__
        keep(self, "attempts", check_attempts(attempts))
        keep(self, "first", seconds(first, "retry: first"))
        keep(self, "factor", float(factor))
        keep(self, "most", seconds(most, "retry: most"))
        keep(self, "retry_on", _exceptions(retry_on, "retry_on"))
        keep(self, "fail_on", _exceptions(fail_on, "fail_on"))
        keep(self, "function", function)

    @staticmethod
    def of(short: RetryPolicy | RetryFunction | int) -> RetryPolicy:
        """Return the policy for its short forms: a number of attempts, or a function `f(attempt, exc) -> delay | None`.

        A function decides alone; only a number of attempts given with the job itself ends it earlier.

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
        """Return the seconds to wait after this attempt (1 is the first); `uniform` draws the jitter from [0, 1)."""
        return self._longest(attempt) * (0.5 + 0.5 * uniform())

    def decide(
        self,
        attempt: int,
        exc: BaseException,
        max_attempts: int | None = None,
        uniform: Callable[[], float] = random.random,
    ) -> float | None:
        """Return the seconds until the next attempt after `exc` in this one, or None to give up.

        `max_attempts`, given with the job, goes before the policy's own. What a user's function raises comes through,
        and what it returns must be a duration: InvalidOption otherwise.
        """
        if self.spent(attempt, max_attempts) or isinstance(exc, self.fail_on) or not isinstance(exc, self.retry_on):
            return None
        return self.wait(attempt, exc, uniform)

    def spent(self, attempt: int, max_attempts: int | None = None) -> bool:
        """Whether this attempt was the last one."""
        return attempt >= (self.attempts if max_attempts is None else max_attempts)

    def wait(self, attempt: int, exc: BaseException, uniform: Callable[[], float] = random.random) -> float | None:
        """Return the seconds to wait if another attempt follows, whatever `exc` is; a function may still say None."""
        if self.function is None:
            return self.delay(attempt, uniform)
        wait = self.function(attempt, exc)
        return None if wait is None else seconds(wait, "retry: the function's answer")

    def _longest(self, attempt: int) -> float:
        try:
            return min(self.most, self.first * self.factor ** (attempt - 1))
        except OverflowError:  # 3.0 ** 700 is no float; and no job waits for so long
            return self.most if self.first else 0.0


def seconds(value: float | timedelta, what: str) -> float:
    """Return a duration (seconds or timedelta) as seconds; `what` names it in the InvalidOption for anything else.

    >>> seconds(timedelta(minutes=5), "delay")
    300.0
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= MAX_SECONDS:
        raise InvalidOption(f"{what} {value!r}: give seconds or a timedelta, from 0 to 100 years")
    return float(number)


def check_attempts(attempts: int) -> int:
    """Return `attempts` if a job can have so many, else raise InvalidOption."""
    if isinstance(attempts, bool) or not isinstance(attempts, int) or not 1 <= attempts <= MAX_ATTEMPTS:
        raise InvalidOption(f"retry: attempts {attempts!r} must be a whole number from 1 to {MAX_ATTEMPTS:,}")
    return attempts


def _exceptions(classes: tuple[type[BaseException], ...], what: str) -> tuple[type[BaseException], ...]:
    if isinstance(classes, tuple) and all(isinstance(c, type) and issubclass(c, BaseException) for c in classes):
        return classes
    raise InvalidOption(f"retry: {what} {classes!r} must be a tuple of exception classes, such as (OSError,)")
