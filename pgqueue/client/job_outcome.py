"""`JobOutcome`: what became of one attempt of a job, as hooks and observers are told. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pgqueue.jobs.outcomes import (
    BatchEnds,
    Cancelled,
    Completed,
    Failed,
    Handed,
    Outcome,
    Problem,
    Released,
    Retried,
    Written,
)

# From the outcome in an attempt's row to the reason in a JobOutcome.
_REASONS = {"failed": "error", "retried": "error"}


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of one attempt of a job, for `@on_finish`.

    `name` is one of these:
    - `completed`
    - `retried`: another attempt follows in `delay` seconds.
    - `snoozed`: the same, but this attempt is not spent.
    - `failed`: for good.
    - `cancelled`
    - `released`: given back unfinished by a worker that stops.

    If the attempt failed, for good or not, `reason` is `error`, `timeout` or another word of `pgqueue jobs`. If the job
    was cancelled, it is the text that was given. `seconds` is how long the attempt ran.

    >>> JobOutcome("retried", 0.25, reason="error", error_type="KeyError", error="'sku'", delay=7.5).name
    'retried'
    """

    name: Literal["completed", "retried", "snoozed", "failed", "cancelled", "released"]
    seconds: float
    reason: str | None = None
    error_type: str | None = None
    error: str | None = None
    delay: float | None = None

    @classmethod
    def of(cls, outcome: Outcome, seconds: float) -> JobOutcome:
        """The public form of an outcome."""
        match outcome:
            case Completed() | Written() | Handed() | BatchEnds():
                return cls("completed", seconds)
            case Released(Problem() as problem):
                return cls("released", seconds, problem.outcome, problem.error_type, problem.message)
            case Released():
                return cls("released", seconds)
            case Cancelled(reason):
                return cls("cancelled", seconds, reason)
            case Retried(delay, _, _, True):
                return cls("snoozed", seconds, delay=delay)
            case Failed(reason, problem):
                return cls("failed", seconds, reason, problem.error_type, problem.message)
            case Retried(delay, problem):
                reason = _REASONS.get(problem.outcome, problem.outcome)
                return cls("retried", seconds, reason, problem.error_type, problem.message, delay)
