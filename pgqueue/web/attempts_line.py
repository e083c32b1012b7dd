"""The attempts of a job on one line of time, with the waits between them.

Pure. The page of a job draws it: a bar for each attempt, a thinner one for each wait. A bar of a moment is drawn wide
enough to be seen and pointed at; the rest of the width is shared by time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pgqueue.admin.queries import JobInfo
from pgqueue.jobs.outcomes import NO_FAILURES

WIDTH = 1_000.0
"""Of the view box, in its own units."""
LEAST = 5.0
"""An attempt is not drawn narrower than this."""
MOST = 100
"""So many attempts are drawn, the last ones."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time of the job's life. `kind`: `wait`, `completed`, `failed`, `retried`, `whole` (it says nothing of an error)
    or `running`. `attempt` and `outcome` are None for a wait."""

    kind: str
    begin: datetime
    seconds: float
    attempt: int | None = None
    outcome: str | None = None
    x: float = 0.0
    width: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """The stretches in the order of time. `left_out` attempts came before them."""

    begin: datetime
    end: datetime
    stretches: tuple[Stretch, ...]
    left_out: int = 0

    @property
    def attempts(self) -> int:
        """How many attempts are drawn."""
        return sum(each.attempt is not None for each in self.stretches)

    @property
    def seconds(self) -> float:
        """How long all of it took."""
        return (self.end - self.begin).total_seconds()

    @property
    def worked(self) -> float:
        """How long the attempts took that are drawn."""
        return sum(each.seconds for each in self.stretches if each.attempt is not None)


def line_of(job: JobInfo, now: datetime) -> Line | None:
    """The line of a job; None if no attempt of it has begun."""
    runs = list(_runs(job, now))
    if not runs:
        return None
    shown = runs[-MOST:]
    begin = job.enqueued_at if len(runs) == len(shown) else shown[0].begin
    found, at = list[Stretch](), begin
    for run in shown:
        if run.begin > at:
            found.append(Stretch("wait", at, (run.begin - at).total_seconds()))
        found.append(run)
        at = max(at, run.begin + timedelta(seconds=run.seconds))
    end = job.finished_at or now
    if end > at and job.state != "running":
        found.append(Stretch("wait", at, (end - at).total_seconds()))
    return Line(begin, max(end, at), tuple(_placed(found)), len(runs) - len(shown))


def _runs(job: JobInfo, now: datetime) -> Iterator[Stretch]:
    """The attempts: those that did not complete, and the one that did, or runs."""
    last = len(job.attempts) - 1
    for place, each in enumerate(job.attempts):
        seconds = max(0.0, (each.finished_at - each.started_at).total_seconds())
        kind = "whole" if each.outcome in NO_FAILURES else "retried"
        if place == last and job.state == "failed":
            kind = "failed"
        yield Stretch(kind, each.started_at, seconds, each.attempt, each.outcome)
    if job.started_at is None:
        return
    if job.state == "running":
        yield Stretch("running", job.started_at, max(0.0, (now - job.started_at).total_seconds()), job.attempt, "runs")
    elif job.state == "completed" and job.finished_at is not None:
        seconds = max(0.0, (job.finished_at - job.started_at).total_seconds())
        yield Stretch("completed", job.started_at, seconds, job.attempt, "completed")


def _placed(stretches: list[Stretch]) -> Iterator[Stretch]:
    """The stretches beside each other: each attempt LEAST units and its share of the rest, each wait its share."""
    least = [LEAST if each.attempt is not None else 0.0 for each in stretches]
    seconds = sum(each.seconds for each in stretches)
    rest, x = WIDTH - sum(least), 0.0
    for each, own in zip(stretches, least, strict=True):
        width = own + (rest * each.seconds / seconds if seconds else rest / len(stretches))
        yield replace(each, x=round(x, 2), width=round(width, 2))
        x += width
