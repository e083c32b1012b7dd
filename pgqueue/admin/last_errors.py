"""The last error of each job of a list: what it says at a glance. All attempts of one job are told by `get`.

Called by the dashboard. Only reads, in the caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from pgqueue.admin.queries import STEPS_ROOM, JobInfo, JobStep, read_steps
from pgqueue.database.asking import asks, named, twin
from pgqueue.database.statements import Row, Statement
from pgqueue.jobs.outcomes import NO_FAILURES
from pgqueue.jobs.states import DONE


@dataclass(frozen=True, slots=True)
class LastError:
    """The class of an error, else the outcome of the attempt, such as `crashed`; and 10,000 characters of its text.

    `steps` are those of the job: they say what of the text is to be hidden. Those that were too many or too large to be
    read say so, as arguments do.
    """

    id: int
    error_type: str
    message: str | None
    steps: tuple[JobStep, ...] = ()


@asks
def last_errors(conn: object, jobs: Iterable[JobInfo]) -> Statement[list[LastError]]:
    """Return the last error of each of these jobs that has failed in an attempt, and has not completed since."""
    asked = [job for job in jobs if job.state not in DONE]
    return named(
        "last_errors_list",
        _listed,
        ids=[job.id for job in asked],
        since=[job.enqueued_at.isoformat() for job in asked],
        quiet=list(NO_FAILURES),
        room=STEPS_ROOM,
    )


alast_errors = twin(last_errors)
"""`last_errors` for async connections."""


def _listed(rows: list[Row]) -> list[LastError]:
    return [LastError(**each | {"steps": read_steps(each["steps"])}) for each in json.loads(rows[0][0])]
