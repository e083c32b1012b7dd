"""What a handler can ask for instead of a plain end: `Snooze`, `Retry`, `Cancel`, `Fail`.

Returned or raised, whichever reads better: they are exceptions, and a returned one means the same. The executor gives
them to `outcome.given`, which makes the outcome. Only the asking is here; no I/O.
"""

from __future__ import annotations

from datetime import timedelta

from pgqueue.errors import InvalidOption
from pgqueue.retry import seconds


class Snooze(Exception):
    """Run this job again after `delay` (seconds or timedelta); the attempt is not spent.

    >>> @pgqueue.task
    ... def collect(order_id: int) -> int | pgqueue.Snooze:
    ...     return stock(order_id) or pgqueue.Snooze(60)
    """

    def __init__(self, delay: float | timedelta) -> None:
        self.delay = seconds(delay, "Snooze: delay")
        super().__init__(f"again in {self.delay:g} s")


class Retry(Exception):
    """This attempt did not succeed: make another after `delay` (seconds or timedelta; None: as the policy says).

    Spends the attempt, so the last one ends the job as failed. `raise Retry(60) from error` keeps the error in the row
    of the attempt. What `retry_on` and `fail_on` say does not matter here.
    """

    def __init__(self, delay: float | timedelta | None = None) -> None:
        self.delay = None if delay is None else seconds(delay, "Retry: delay")
        super().__init__("again as the policy says" if self.delay is None else f"again in {self.delay:g} s")


class Cancel(Exception):
    """End this job as cancelled, with this reason: it is no longer wanted. It is not tried again."""

    def __init__(self, reason: str) -> None:
        self.reason = _text(reason, "Cancel")
        super().__init__(self.reason)


class Fail(Exception):
    """End this job as failed, with this reason as its error: no further attempt can help."""

    def __init__(self, reason: str) -> None:
        self.reason = _text(reason, "Fail")
        super().__init__(self.reason)


def _text(reason: str, what: str) -> str:
    if isinstance(reason, str):
        return reason
    raise InvalidOption(f"{what}: the reason is a text for people, not {reason!r:.80}")
