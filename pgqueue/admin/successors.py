"""The successors of a job, and the job that it succeeds.

A successor is enqueued by a handler with `job.enqueue`, and names its job in a header. Nothing has an index on that, so
successors are looked for near the time at which the job ended (function `successors` of the schema). Called by the
dashboard. It only reads, in the connection's own transaction.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue.admin.queries import JobInfo
from pgqueue.database import drivers
from pgqueue.database.asking import said
from pgqueue.jobs.headers import PARENT, parent_of

SUCCESSORS_MOST = 100
RETRY_OF = "retry_of"
"""The header in which a job that runs a completed one again names that job."""


@dataclass(frozen=True, slots=True)
class Successor:
    """A job that another job has enqueued with its end."""

    id: int
    state: str
    queue: str
    task: str


async def asuccessors(conn: object, job: JobInfo) -> tuple[Successor, ...]:
    """The successors of a job that has completed, the first ones first: at most 100, and not those that were removed.

    Those that are not near the end of the job by their ids are not found. A job that has not completed has none.
    """
    if job.state != "completed" or job.finished_at is None:
        return ()
    ended = job.finished_at.isoformat()
    return await drivers.arun(conn, said("successors_list", tuple[Successor, ...], id=job.id, ended=ended))


def predecessor(job: JobInfo) -> int | None:
    """The job that has enqueued this one with its end; None if there is none."""
    return parent_of((job.headers or {}).get(PARENT))


def retried(job: JobInfo) -> int | None:
    """The completed job that this one runs again; None if there is none."""
    return parent_of((job.headers or {}).get(RETRY_OF))
