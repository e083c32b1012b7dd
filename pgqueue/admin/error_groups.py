"""Failures by their cause: failed attempts of one task, with one type of error, from one place in the application.

Called by applications and by the CLI. Only reads, inside the caller's transaction, on any connection. Workers group
what fails, and the leader adds the groups up: a new failure is seen about two minutes later.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pgqueue.database.asking import asks, said, twin
from pgqueue.database.statements import Statement
from pgqueue.jobs.values import check_limit, check_moment, check_text

LIMIT_MOST = 2_000


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Failed attempts of one cause, also those that were retried.

    `message`, `version_tag` and `queue` are of the last one. The same `fingerprint` stands in the rows of `attempt`.
    """

    fingerprint: str
    queue: str
    task: str
    error_type: str
    """The class of the exception, or `timeout`."""
    place: str | None
    """The application's innermost function, as `module.function`; None if the failure has no traceback."""
    message: str | None
    """Its first 500 characters."""
    first_at: datetime
    """UTC, by the database's clock."""
    last_at: datetime
    count: int
    job_ids: tuple[int, ...]
    """The ids of up to five jobs, the highest first. Their rows may have been removed by retention."""
    version_tag: str | None
    first_version: str | None = None
    """The version that failed so first, of those failures that are kept."""


@asks
def error_groups(
    conn: object,
    *,
    queue: str | None = None,
    task: str | None = None,
    since: datetime | None = None,
    limit: int = 50,
) -> Statement[list[ErrorGroup]]:
    """Return the groups of failed attempts, the one that occurred last first.

    `since`: those that have occurred at that time or later. Groups are kept for 30 days after their last failure, 2,000
    of them at most. Raises InvalidOption for a time without a zone, and for a limit that is not 1 to 2000.

        for group in pgqueue.error_groups(conn, task="mail.send"):
            print(group.count, group.error_type, group.place, group.job_ids)
    """
    check_text(queue, "queue")
    check_text(task, "task")
    after, n = check_moment(since, "since"), check_limit(limit, LIMIT_MOST)
    return said("error_groups_list", list[ErrorGroup], queue=queue, task=task, since=after, n=n)


aerror_groups = twin(error_groups)
"""`error_groups` for async connections."""
