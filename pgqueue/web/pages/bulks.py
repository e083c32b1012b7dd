"""Operations by filter: what one would find, how far each is, and its end. A preview is a page; to begin is a POST.

The filter stands in the URL of the preview, as in the list of jobs; so do the jobs that were chosen there. The worker
that leads makes the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

from pgqueue.admin.answers import WORDS
from pgqueue.admin.bulk.operations import STATES, Bulk, BulkPreview, abulk, abulks, aget_bulk, apreview_bulk, astop_bulk
from pgqueue.admin.queries import JobInfo, aget
from pgqueue.errors import BulkNotFound, JobNotFound
from pgqueue.jobs.values import HIGHEST_ID, digits
from pgqueue.plain_text import plural
from pgqueue.web.pages.changes import time_of
from pgqueue.web.pages.jobs import BULK, chosen, hides_class
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.problems import Problem
from pgqueue.web.redaction import HIDDEN, Redaction

SHOWN = 50
FIRST = 3
"""So many jobs a preview shows."""
NAMES = {"error_type": "error"}
"""How a part of a filter is called on a page."""


async def bulks(asked: Asked) -> Page:
    """The newest operations."""
    found = await asked.read(lambda conn: abulks(conn, limit=SHOWN, before=asked.number("before")))
    last = found[-1].id if len(found) == SHOWN else None
    return Page("bulks.html", [_item(each, asked.redaction) for each in found], {"before": last})


async def bulk(asked: Asked) -> Page:
    """One operation, with the first jobs of each reason."""
    found = await asked.read(lambda conn: aget_bulk(conn, asked.id))
    return Page(
        "bulk.html",
        [_item(found, asked.redaction)],
        view={"words": {did: words.reason for did, words in WORDS.items()}},
    )


async def preview(asked: Asked) -> Page:
    """How many jobs an operation would find now, and the form that begins it."""
    action, given = allowed_action(asked, asked.value("action")), _meant(asked, asked.values, asked.value)
    again = _again(action, given["state"])

    async def ask(conn: object) -> tuple[BulkPreview, list[JobInfo]]:
        found = await apreview_bulk(conn, action, again=again, **given)
        return found, await _jobs(conn, found.ids[:FIRST])

    found, first = await asked.read_shared(ask, "preview", action, again, given)
    fields = [("action", action), ("up_to", str(found.up_to))]
    fields += [("state", each) for each in given["state"] or ()]
    fields += [(name, given[name]) for name in ("queue", "task", "error_type") if given[name] is not None]
    fields += [("id", str(each)) for each in given["ids"] or ()]
    query = urlencode([field for field in fields if field[0] in BULK])
    more = {"action": action, "first": [asked.redaction.shown(plain(job)) for job in first]}
    return Page("preview.html", [plain(found)], more, {"fields": fields, "filter": _named(given), "query": query})


async def begin(asked: Asked) -> Page:
    """Begin what the preview has shown: only ids that had been given by then."""
    action = allowed_action(asked, asked.field("action"))
    options = _meant(asked, asked.fields, asked.field) | {"note": asked.field("note")}
    if asked.field("up_to") is not None:
        options["up_to"] = asked.whole("up_to", "use a whole number")
    pace = asked.field("pace")
    if pace is not None:
        options["pace"] = float(pace) if pace.replace(".", "", 1).isdecimal() else pace
    if action == "reschedule":
        options["at"] = time_of(asked)
    begun = await asked.change(lambda conn: abulk(conn, action, again=_again(action, options["state"]), **options))
    return Page("", [_item(begun, asked.redaction)], {"changed": True}, after=f"/bulk/{begun.id}", did="begun")


async def stop(asked: Asked) -> Page:
    """No further step of it begins. It needs the right to the action of the operation, as its begin does."""
    stopped = await asked.change(lambda conn: _stopping(conn, asked))
    items = [] if stopped is None else [_item(stopped, asked.redaction)]
    did = "over before" if stopped is None else "stopped"
    return Page("", items, {"changed": stopped is not None}, after=f"/bulk/{asked.id}", did=did)


async def _stopping(conn: object, asked: Asked) -> Bulk | None:
    try:
        found = await aget_bulk(conn, asked.id)
    except BulkNotFound:
        return None
    allowed_action(asked, found.action)
    return await astop_bulk(conn, asked.id)


def _meant(asked: Asked, values: Callable[[str], Sequence[str]], value: Callable[[str], str | None]) -> dict[str, Any]:
    """The filter of an operation, of the URL or of a form, with the chosen jobs. Raises Problem.

    `chosen` says that jobs were to be chosen: without one nothing is meant, and not all that fit.
    """
    given, ids = chosen(values, value), [digits(each) for each in values("id")]
    if hides_class(given["error_type"], asked.redaction):
        raise Problem(400, "This cannot be asked", "this class of errors is redacted, so jobs cannot be chosen by it")
    if not ids and value("chosen") is not None:
        raise Problem(400, "No job is chosen", "Choose jobs by their boxes first.")
    if any(id is None or not 1 <= id <= HIGHEST_ID for id in ids):
        raise Problem(400, "This cannot be asked", "id: use whole numbers")
    return given | {"ids": ids or None}


async def _jobs(conn: object, ids: Sequence[int]) -> list[JobInfo]:
    """These jobs, without those that are gone by now."""
    found = []
    for id in ids:
        with suppress(JobNotFound):
            found.append(await aget(conn, id))
    return found


def allowed_action(asked: Asked, action: str | None) -> str:
    """The action, if there is one of this name, and the visitor may do it. Raises Problem."""
    if action is None or action not in STATES:
        raise Problem(400, "This cannot be done", f"action: use one of {', '.join(STATES)}")
    if action not in asked.rights:
        raise Problem(403, "Not allowed", f"You may not do this: it needs the right to {action}.")
    return action


def _again(action: str, states: Sequence[str] | None) -> bool:
    """Completed jobs are run again only if they are named."""
    return action == "retry" and bool(set(states or ()) & set(STATES["retry"][1]))


def _named(given: dict[str, Any]) -> str:
    parts = {NAMES.get(name, name): value for name, value in given.items() if value and name != "ids"}
    said = [f"{name} {value if isinstance(value, str) else ' or '.join(value)}" for name, value in parts.items()]
    if given["ids"]:
        said.insert(0, plural(len(given["ids"]), "chosen job", "chosen jobs"))
    return ", ".join(said)


def _item(found: Bulk, redaction: Redaction) -> dict[str, Any]:
    item, query = dict(plain(found)), _query(found)
    if hides_class(found.target.get("error_type"), redaction):
        item["target"], query = item["target"] | {"error_type": HIDDEN}, {}
    ids = found.target.get("ids") or ()
    missed = max(0, len(ids) - sum(found.counts.values())) if found.state == "done" else 0
    jobs = None if ids or not query else urlencode(query, doseq=True)
    return item | {"left_out": found.left_out, "missed": missed, "jobs": jobs}


def _query(found: Bulk) -> dict[str, Any]:
    """The list of jobs with the same filter."""
    named = {"states": "state", "queue": "queue", "task": "task", "error_type": "error_type"}
    return {named[name]: value for name, value in found.target.items() if name in named}
