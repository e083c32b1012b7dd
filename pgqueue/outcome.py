"""What became of one run of a job: the words between executor and completer.

The executor turns a result or an exception into one of these; the completer writes it down. No I/O here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Completed:
    """It returned. `result` is the JSON text of what it returned, None for None."""

    result: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """What went wrong in an attempt, for the row in `attempt`."""

    outcome: str
    error_type: str | None = None
    message: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Retried:
    """It will be tried again after `delay` seconds; `spent` says whether this attempt counts."""

    delay: float
    problem: Problem
    spent: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """It will not be tried again. `reason` is one of error, timeout, crashed, deadline, refused."""

    reason: str
    problem: Problem


@dataclass(frozen=True, slots=True)
class Released:
    """It is given back unfinished, the attempt not spent: it never started, or a shutdown stopped it."""


Outcome = Completed | Retried | Failed | Released

COMPLETED = Completed()
RELEASED = Released()
