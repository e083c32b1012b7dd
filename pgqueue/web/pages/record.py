"""The record of changes by hand, the newest first. Each entry leads to what was changed.

A target is hidden as the page of its kind hides it. What is hidden, or has letters that are not printable, has no link:
the link would have to contain it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from pgqueue.admin.audit import AuditEntry, aaudit_page
from pgqueue.jobs.values import HIGHEST_ID, digits
from pgqueue.plain_text import plural
from pgqueue.web.pages.jobs import hides_class
from pgqueue.web.pages.page import Asked, Page, plain, read_time
from pgqueue.web.problems import Problem
from pgqueue.web.redaction import HIDDEN, Redaction

SHOWN = 50
LINKED_MOST = 3
"""So many jobs or workers of an entry are named."""
ACTIONS = (
    "bulk cancel", "bulk discard", "bulk reschedule", "bulk retry", "bulk stop", "cancel", "discard", "enqueue",
    "limits set", "locks release", "pause", "prune", "quiet", "reschedule", "restart", "resume", "retry", "scale",
    "schedules add", "schedules pause", "schedules remove", "schedules resume", "schedules run",
)  # fmt: skip
FILTER = {"states": "state", "queue": "queue", "task": "task", "flow": "flow", "error_type": "error_type"}
"""The parts of a target that a list of jobs can be asked for, and how its URL calls them."""
TOLD = ("note", "reason", "n", "size", "at", "again", "changed", "forced")
"""What is told of an entry beside its target."""


async def changes(asked: Asked) -> Page:
    """The entries by an actor, of an action, or of a job; as JSON `after` is the place behind which others follow."""
    actor, action, job = asked.value("actor"), asked.value("action"), asked.number("job")
    if actor is not None and asked.redaction.hides(("actor",), actor):
        raise Problem(400, "This cannot be asked", "this actor is redacted, so changes cannot be asked for by it")
    if job is not None and not 1 <= job <= HIGHEST_ID:
        raise Problem(400, "This cannot be asked", "job: use the id of a job")
    place = _place(asked.value("after"))
    found = await asked.read(
        lambda conn: aaudit_page(conn, job=job, actor=actor, action=action, after=place, limit=SHOWN)
    )
    again = [(name, value) for name, value in asked.given if name in ("actor", "action")]
    behind = None if found.after is None else f"{found.after[0].isoformat()}/{found.after[1]}"
    view = {
        "asked": {name: asked.value(name) or "" for name in ("actor", "action", "job")},
        "actions": ACTIONS if action is None else sorted({*ACTIONS, action}),
        "next": None if behind is None else urlencode([*again, ("after", behind)]),
        "first": asked.value("after") is None,
        "is_full": len(found.entries) == SHOWN,
        "now": found.now,
    }
    return Page("changes.html", [_item(each, asked.redaction) for each in found.entries], {"after": behind}, view)


def _place(text: str | None) -> tuple[datetime, int] | None:
    """Where a page begins: behind the entry of this time and id. Raises Problem."""
    if text is None:
        return None
    at, _, id = text.rpartition("/")
    try:
        if (number := digits(id)) is not None and number <= HIGHEST_ID:
            return read_time(at), number
    except ValueError:
        pass
    raise Problem(400, "This cannot be asked", "after: take it from the link to older changes")


def _item(entry: AuditEntry, redaction: Redaction) -> dict[str, Any]:
    """The entry with what is said of it. A reason may quote an argument, which is not at hand here."""
    target = _shown(entry.target, redaction)
    details = dict(redaction.shown(plain(entry.details)))
    if redaction.active and details.get("reason") is not None:
        details["reason"] = HIDDEN
    told = {name: details[name] for name in TOLD if _says(details, name)}
    item: dict[str, Any] = plain(entry)
    return item | {"target": target, "details": details, "links": _links(entry, target), "told": told}


def _says(details: Mapping[str, Any], name: str) -> bool:
    return details.get(name) not in (None, False, {})


def _shown(target: Mapping[str, Any], redaction: Redaction) -> dict[str, Any]:
    """The target without what is hidden where the job, or the page of its kind, shows it."""
    shown = dict(redaction.shown(plain(target)))
    if isinstance(key := target.get("lock"), str):
        shown["lock"] = redaction.shown({"key": redaction.key("lock", key)})["key"]
    for kind in ("limit", "rate"):
        if isinstance(name := target.get(kind), str) and redaction.hides((f"{kind}s", "name"), name):
            shown[kind] = HIDDEN
    if isinstance(host := target.get("host"), str) and redaction.hides(("supervisors", "host"), host):
        shown["host"] = HIDDEN
    if hides_class(target.get("error_type"), redaction):
        shown["error_type"] = HIDDEN
    return shown


def _links(entry: AuditEntry, shown: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was changed: texts, each with its path below the mount, or None if it leads nowhere."""
    target = {name: value for name, value in entry.target.items() if shown.get(name) == value and _may_link(value)}
    found: list[dict[str, Any]] = []
    for name, value in shown.items():
        if (name in FILTER and name != "flow" and "states" in shown) or name == "ids":
            continue  # the list says it; a flow also has a page of its own
        found.append({"text": _said(name, value), "path": _path(name, target.get(name))})
    if "states" in shown:
        found.insert(0, {"text": _filter(shown), "path": _list(shown, target)})
    if isinstance(bulk := entry.details.get("bulk"), int):
        found.append({"text": f"operation {bulk}", "path": f"/bulk/{bulk}"})
    if not shown or entry.action in ("enqueue", "schedules run"):
        found += [{"text": f"job {id}", "path": f"/jobs/{id}"} for id in entry.jobs[:LINKED_MOST]]
        if more := max(0, len(entry.jobs) - LINKED_MOST):
            found.append({"text": f"and {more:,} more", "path": None})
    return found


def _may_link(value: object) -> bool:
    return value.isprintable() if isinstance(value, str) else True


def _said(name: str, value: Any) -> str:
    if name == "supervisors" and isinstance(value, list):
        more = f" and {len(value) - LINKED_MOST:,} more" if len(value) > LINKED_MOST else ""
        return f"{'supervisor' if len(value) == 1 else 'supervisors'} {', '.join(map(str, value[:LINKED_MOST]))}{more}"
    if name == "older_than":
        return f"older than {value:g} s" if isinstance(value, int | float) else "older"
    return f"{'operation' if name == 'bulk' else name} {value}"


def _filter(shown: Mapping[str, Any]) -> str:
    """The filter of jobs in words."""
    parts = [" or ".join(map(str, shown["states"]))]
    if ids := shown.get("ids"):
        parts.insert(0, plural(len(ids), "chosen job", "chosen jobs"))
    parts += [str(shown[name]) for name in ("task", "queue", "error_type") if name in shown]
    parts += [f"flow {shown['flow']}"] if "flow" in shown else []
    return "jobs: " + ", ".join(part for part in parts if part)


def _list(shown: Mapping[str, Any], target: Mapping[str, Any]) -> str | None:
    """The list of jobs with the same filter; None if it knows a part of it not, or a part is hidden."""
    if {*shown} - {*FILTER, "limit"} or any(name not in target for name in shown):
        return None
    if "flow" in shown and not _is_id(shown["flow"]):
        return None
    query = {field: target[name] for name, field in FILTER.items() if name in target}
    return f"/jobs?{urlencode(query, doseq=True)}"


def _path(name: str, value: Any) -> str | None:
    """Where what was changed can be seen. None also if it is hidden."""
    if value is None:
        return None
    if name in ("queue", "task"):
        return f"/{name}?{urlencode({'name': value})}"
    if name in ("limit", "rate") and isinstance(value, str):
        return f"/limits/jobs?{urlencode({name: value})}"
    if name == "lock":
        return f"/jobs?{urlencode({'key': value})}"
    if name == "bulk":
        return f"/bulk/{value}"
    if name == "flow":
        return f"/flows/{value}" if _is_id(value) else None
    if name == "host":
        return f"/workers?{urlencode({'host': value})}" if isinstance(value, str) else None
    return {"schedule": "/schedules", "supervisors": "/workers"}.get(name)


def _is_id(value: object) -> bool:
    return type(value) is int and 1 <= value <= HIGHEST_ID
