"""The pages that are one list each: queues, limits with locks and rates, schedules, workers, errors."""

from __future__ import annotations

from pgqueue.admin.depth import aqueues
from pgqueue.admin.error_groups import aerror_groups
from pgqueue.admin.limits import alimits, arates
from pgqueue.admin.locks import alocks
from pgqueue.admin.workers import aworkers
from pgqueue.client.schedules import aschedules
from pgqueue.web.pages.jobs import moment
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.redaction import HIDDEN

ERRORS_SHOWN = 100


async def queues(asked: Asked) -> Page:
    """The queues with the jobs in them."""
    return Page("queues.html", plain(await asked.read(aqueues)))


async def limits(asked: Asked) -> Page:
    """The locks that are held or waited for as items, the limits and the rates beside them."""
    locks = await asked.read(alocks)
    found = await asked.read(alimits)
    rates = await asked.read(arates)
    return Page("limits.html", plain(locks), {"limits": plain(found), "rates": plain(rates)})


async def schedules(asked: Asked) -> Page:
    """The schedules by name."""
    return Page("schedules.html", plain(await asked.read(aschedules)))


async def workers(asked: Asked) -> Page:
    """The workers that are not known to be dead, and what runs on them."""
    return Page("workers.html", plain(await asked.read(aworkers)))


async def errors(asked: Asked) -> Page:
    """Failed attempts by their cause, the one that occurred last first.

    A message may quote an argument. Which ones are hidden is known on the page of a job only, where the arguments are.
    So no message is shown here while anything is redacted.
    """
    queue, task, since = asked.value("queue"), asked.value("task"), moment(asked.value("since"), "since")
    found = await asked.read(lambda conn: aerror_groups(conn, queue=queue, task=task, since=since, limit=ERRORS_SHOWN))
    view = {
        "asked": {name: asked.value(name) or "" for name in ("queue", "task", "since")},
        "shows_messages": not asked.redaction.active,
    }
    items = [plain(each) | ({"message": HIDDEN} if asked.redaction.active else {}) for each in found]
    return Page("errors.html", items, view=view)
