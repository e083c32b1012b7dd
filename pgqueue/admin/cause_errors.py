"""What the newest job of a cause says of it. With the job: its arguments and steps say what is to be hidden.

Called by the dashboard. Only reads, in the caller's transaction: one statement for all causes of a page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from pgqueue.admin.error_groups import ErrorGroup
from pgqueue.admin.queries import JobInfo, read_job, read_steps
from pgqueue.database.asking import asks, named, twin
from pgqueue.database.statements import Row, Statement

ROOM = 1 << 20
"""So many bytes the arguments, headers and results of the jobs take, and so many their steps."""


@dataclass(frozen=True, slots=True)
class CauseError:
    """A job that has failed with this class of error, or in this way; and what it said: 10,000 characters at most.

    The job has its durable steps. Values and steps that were too many or too large to be read say so.
    """

    job: JobInfo
    error_type: str
    message: str


@asks
def cause_errors(conn: object, groups: Iterable[ErrorGroup]) -> Statement[list[CauseError]]:
    """Return what the newest job of each of these causes says, of those whose job and attempt are kept."""
    asked = [(group.job_ids[0], group.error_type) for group in groups if group.job_ids]
    ids, types = [id for id, _ in asked], [error_type for _, error_type in asked]
    return named("cause_errors_list", _listed, ids=ids, types=types, room=ROOM)


acause_errors = twin(cause_errors)
"""`cause_errors` for async connections."""


def _listed(rows: list[Row]) -> list[CauseError]:
    return [
        CauseError(read_job(each["job"], (), read_steps(each["steps"])), each["error_type"], each["message"])
        for each in json.loads(rows[0][0])
    ]
