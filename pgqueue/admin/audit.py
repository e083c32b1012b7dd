"""The record of what is written by hand: by which actor, what, on what, how many jobs.

Each function that changes something by hand writes its row in the statement that makes the change. So a row is there
exactly when the change is. Here the record is read. Called by applications and by the CLI.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pgqueue.database import shown
from pgqueue.database.asking import Asked, asks, named, twin
from pgqueue.database.statements import Row, Statement
from pgqueue.database.steps import Steps
from pgqueue.errors import InvalidOption
from pgqueue.jobs.values import check_limit, check_moment, check_text

WALKED_MOST = 20_000
LIMIT_MOST = 10_000
OF_JOB_MOST = 200
BULKS_MOST = 1_000
"""In the newest operations by filter, so many, a job is looked for."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change by hand.

    `actor` is what the writer said of itself, else its role. `role` is the database role that was logged in. `target`
    is what was changed: a queue, a task, a limit, or the filter that chose jobs. It is empty if jobs were named by
    their ids. `jobs` are the jobs that were changed, `count` is their number, and 1 if it was something else.
    """

    id: int
    at: datetime
    actor: str
    role: str
    action: str
    target: dict[str, Any]
    jobs: tuple[int, ...]
    count: int
    details: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries of the record, the newest first, and the time by the database's clock.

    `after` is the place behind which the next page begins; None if the record ends there. A page may have fewer entries
    than were asked for, and others behind it: one page looks at 20,000 rows.
    """

    entries: tuple[AuditEntry, ...]
    after: tuple[datetime, int] | None
    now: datetime


@asks
def audit(
    conn: object,
    *,
    job: int | None = None,
    actor: str | None = None,
    action: str | None = None,
    since: datetime | None = None,
    before: AuditEntry | None = None,
    limit: int = 50,
) -> Asked[list[AuditEntry]]:
    """What was changed by hand, the newest first: by this `actor`, this `action` (such as "cancel"), `since` a time.

    With `job` only what changed that job, and no other filter. An operation by filter is among that if it is one of the
    newest 1,000, and the job one of the first 1,000 that it has changed in the same way.

    `before` goes on behind the last entry of a page. The record is kept for 90 days, and at most the newest million of
    its rows. Raises InvalidOption for a `limit` that is not a whole number from 1 to 10,000, or a `since` without a
    time zone.

        [last] = pgqueue.audit(conn, job=job.id, limit=1)
    """
    if job is not None:
        return _of_job(job, limit, actor, action, since, before)
    return _walking(actor, action, since, before, limit)


aaudit = twin(audit)
"""`audit` for async connections."""


@asks
def audit_page(
    conn: object,
    *,
    job: int | None = None,
    actor: str | None = None,
    action: str | None = None,
    after: tuple[datetime, int] | None = None,
    limit: int = 50,
) -> Steps[AuditPage]:
    """Return the entries by this `actor`, of this `action`, that come `after` a place; for pages that must be quick.

    Only 20,000 rows are looked at. Without an actor and an action only as many as are returned. With `job` the newest
    200 that changed that job, as `audit` finds them, and no place.
    """
    check_text(actor, "actor")
    check_text(action, "action")
    behind = None
    if job is not None:
        found = yield _of_job(job, OF_JOB_MOST)
        entries = [each for each in found if actor in (None, each.actor) and action in (None, each.action)]
    else:
        n = check_limit(limit, LIMIT_MOST) + 1
        place = {"at": None, "id": None} if after is None else {"at": after[0].isoformat(), "id": after[1]}
        most = n if actor is None and action is None else WALKED_MOST
        rows = yield named("audit_list", **place, since=None, by=actor, action=action, most=most, n=n)
        entries, (_, at, id) = _read(rows), rows[0]
        if len(entries) == n:
            entries.pop()
            behind = (entries[-1].at, entries[-1].id)
        elif at is not None:
            behind = (datetime.fromisoformat(at), id)
    [[clock]] = yield named("why_now")
    return AuditPage(tuple(entries), behind, datetime.fromisoformat(json.loads(clock)["now"]))


aaudit_page = twin(audit_page)
"""`audit_page` for async connections."""


def _of_job(job: int, limit: int, *others: object) -> Statement[list[AuditEntry]]:
    if any(other is not None for other in others):
        raise InvalidOption("give a job, or actor, action, since and before; not both")
    return named("audit_of_job", _read, job=job, n=check_limit(limit, LIMIT_MOST), most=BULKS_MOST)


def _walking(
    actor: str | None, action: str | None, since: datetime | None, before: AuditEntry | None, limit: int
) -> Steps[list[AuditEntry]]:
    """The entries that fit. Each statement looks at up to 20,000 rows."""
    check_text(actor, "actor")
    check_text(action, "action")
    newer = check_moment(since, "since")
    found: list[AuditEntry] = []
    at, id = (None, None) if before is None else (before.at.isoformat(), before.id)
    left = check_limit(limit, LIMIT_MOST)
    while True:
        place, asked = {"at": at, "id": id}, {"since": newer, "by": actor, "action": action}
        rows = yield named("audit_list", **place, **asked, most=WALKED_MOST, n=left)
        found += _read(rows)
        left = limit - len(found)
        _, at, id = rows[0]
        if not left or at is None:
            return found


def _read(rows: Sequence[Row]) -> list[AuditEntry]:
    return [
        AuditEntry(**each | {"at": shown.moment(each["at"]), "jobs": tuple(each["jobs"])})
        for each in json.loads(rows[0][0])
    ]
