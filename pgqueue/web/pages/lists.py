"""The pages that are one list each: queues, schedules, errors."""

from __future__ import annotations

from typing import Any

from pgqueue.admin.bounded import cut_at
from pgqueue.admin.cause_errors import acause_errors
from pgqueue.admin.depth import QUEUES_MOST, aqueues
from pgqueue.admin.error_groups import LIMIT_MOST as GROUPS_MOST
from pgqueue.admin.error_groups import aerror_groups
from pgqueue.admin.versions import aversions, brought
from pgqueue.client.schedules import ScheduleInfo, aschedules
from pgqueue.errors import InvalidOption
from pgqueue.jobs import cron
from pgqueue.web.pages import causes
from pgqueue.web.pages.jobs import moment
from pgqueue.web.pages.page import Asked, Page, plain, rows_of, said_of

TICKS_SHOWN = 3


async def queues(asked: Asked) -> Page:
    """The queues with the jobs in them."""
    rows = rows_of(asked)
    found = await asked.read_shared(aqueues, "queues")
    more = {"after": rows.after(found), "cut_at": cut_at(found, QUEUES_MOST)}
    return Page("queues.html", plain(rows.of(found)), more, rows.view(found))


async def schedules(asked: Asked) -> Page:
    """The schedules by name, each in words, with its next ticks."""
    rows = rows_of(asked)
    found = await asked.read_shared(aschedules, "schedules")
    items = [_schedule(each) for each in rows.of(found)]
    return Page("schedules.html", items, {"after": rows.after(found)}, rows.view(found))


def _schedule(info: ScheduleInfo) -> dict[str, Any]:
    """Without words if the line or the zone cannot be read: then `refused` says why. Only an active schedule ticks."""
    words, ticks = None, []
    try:
        when = cron.parse(info.line, info.tz, info.catch_up)
        words = when.words
        if info.state == "active" and info.next_at is not None:
            ticks = cron.ticks(when, info.next_at, TICKS_SHOWN)
        shown = [{"at": at, "local": cron.local(at, info.tz)} for at in ticks]
    except InvalidOption:
        shown = []
    return dict(plain(info)) | {"words": words, "ticks": shown}


async def errors(asked: Asked) -> Page:
    """Failed attempts by their cause, the one that occurred last first, each with what its newest job says."""
    queue, task, since = asked.value("queue"), asked.value("task"), moment(asked.value("since"), "since")
    rows = rows_of(asked)
    most = min(rows.needed, GROUPS_MOST)
    given: dict[str, Any] = {"queue": queue, "task": task, "since": since, "limit": most}
    found = await asked.read_shared(lambda conn: aerror_groups(conn, **given), "errors", given)
    view = rows.view(found) | {
        "asked": {name: asked.value(name) or "" for name in ("queue", "task", "since")},
        "may_retry": {"bulk", "retry"} <= set(asked.rights),
    }
    versions = await asked.read_shared(aversions, "versions")
    shown = rows.of(found)
    errors, problem = await asked.part_shared(lambda conn: acause_errors(conn, shown), "errors of causes", shown)
    said = causes.messages(errors or [], shown, asked.redaction)
    items = [
        plain(each) | {"message": said.get(each.fingerprint), "is_new": brought(versions, each.first_version)}
        for each in shown
    ]
    more = {"after": rows.after(found), "cut_at": cut_at(found, GROUPS_MOST), "problems": said_of(problem)}
    return Page("errors.html", items, more, view)
