"""Operations by filter: what one would find, how far each is, and its end. A preview is a page; to begin is a POST.

The filter stands in the URL of the preview, as in the list of jobs. The worker that leads makes the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from pgqueue.admin.answers import WORDS
from pgqueue.admin.bulk.operations import STATES, Bulk, abulk, abulks, aget_bulk, apreview_bulk, astop_bulk
from pgqueue.errors import BulkNotFound
from pgqueue.web.pages.changes import time_of
from pgqueue.web.pages.jobs import chosen
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.problems import Problem

SHOWN = 50


async def bulks(asked: Asked) -> Page:
    """The newest operations."""
    found = await asked.read(lambda conn: abulks(conn, limit=SHOWN, before=asked.number("before")))
    last = found[-1].id if len(found) == SHOWN else None
    return Page("bulks.html", [_item(each) for each in found], {"before": last})


async def bulk(asked: Asked) -> Page:
    """One operation, with the first jobs of each reason."""
    found = await asked.read(lambda conn: aget_bulk(conn, asked.id))
    return Page("bulk.html", [_item(found)], view={"words": {did: words.reason for did, words in WORDS.items()}})


async def preview(asked: Asked) -> Page:
    """How many jobs an operation would find now, and the form that begins it."""
    action, given = _action(asked, asked.value("action")), chosen(asked.values, asked.value)
    found = await asked.read(lambda conn: apreview_bulk(conn, action, **given))
    fields = [("action", action), ("up_to", str(found.up_to))]
    fields += [("state", each) for each in given["state"] or ()]
    fields += [(name, given[name]) for name in ("queue", "task") if given[name] is not None]
    return Page("preview.html", [plain(found)], {"action": action}, {"fields": fields, "filter": _named(given)})


async def begin(asked: Asked) -> Page:
    """Begin what the preview has shown: only ids that had been given by then."""
    action = _action(asked, asked.field("action"))
    options = chosen(asked.fields, asked.field)
    if asked.field("up_to") is not None:
        options["up_to"] = asked.whole("up_to", "use a whole number")
    pace = asked.field("pace")
    if pace is not None:
        options["pace"] = float(pace) if pace.replace(".", "", 1).isdecimal() else pace
    if action == "reschedule":
        options["at"] = time_of(asked)
    begun = await asked.change(lambda conn: abulk(conn, action, again=_again(action, options["state"]), **options))
    return Page("", [_item(begun)], {"changed": True}, after=f"/bulk/{begun.id}", did="begun")


async def stop(asked: Asked) -> Page:
    """No further step of it begins. It needs the right to the action of the operation, as its begin does."""
    stopped = await asked.change(lambda conn: _stopping(conn, asked))
    items = [] if stopped is None else [_item(stopped)]
    did = "over before" if stopped is None else "stopped"
    return Page("", items, {"changed": stopped is not None}, after=f"/bulk/{asked.id}", did=did)


async def _stopping(conn: object, asked: Asked) -> Bulk | None:
    try:
        found = await aget_bulk(conn, asked.id)
    except BulkNotFound:
        return None
    _action(asked, found.action)
    return await astop_bulk(conn, asked.id)


def _action(asked: Asked, action: str | None) -> str:
    if action is None or action not in STATES:
        raise Problem(400, "This cannot be done", f"action: use one of {', '.join(STATES)}")
    if action not in asked.rights:
        raise Problem(403, "Not allowed", f"You may not do this: it needs the right to {action}.")
    return action


def _again(action: str, states: Sequence[str] | None) -> bool:
    """Completed jobs are run again only if they are named."""
    return action == "retry" and bool(set(states or ()) & set(STATES["retry"][1]))


def _named(given: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str) else ' or '.join(value)}" for name, value in given.items() if value
    )


def _item(found: Bulk) -> dict[str, Any]:
    return dict(plain(found)) | {"left_out": found.left_out, "jobs": urlencode(_query(found), doseq=True)}


def _query(found: Bulk) -> dict[str, Any]:
    """The list of jobs with the same filter."""
    named = {"states": "state", "queue": "queue", "task": "task"}
    return {named[name]: value for name, value in found.target.items() if name in named}
