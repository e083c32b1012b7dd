"""The last error of each job of a list: what it says at a glance. All attempts of one job are told by `get`.

Called by the dashboard. Only reads, in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pgqueue.admin.queries import JobInfo
from pgqueue.database.asking import asks, said, twin
from pgqueue.database.statements import Statement
from pgqueue.jobs.outcomes import NO_FAILURES
from pgqueue.jobs.states import DONE


@dataclass(frozen=True, slots=True)
class LastError:
    """The class of an error, else the outcome of the attempt, such as `crashed`; and the first line of its text."""

    id: int
    error_type: str
    message: str | None


@asks
def last_errors(conn: object, jobs: Iterable[JobInfo]) -> Statement[list[LastError]]:
    """Return the last error of each of these jobs that has failed in an attempt, and has not completed since."""
    asked = [job for job in jobs if job.state not in DONE]
    return said(
        "last_errors_list",
        list[LastError],
        ids=[job.id for job in asked],
        since=[job.enqueued_at.isoformat() for job in asked],
        quiet=list(NO_FAILURES),
    )


alast_errors = twin(last_errors)
"""`last_errors` for async connections."""
