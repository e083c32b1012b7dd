"""The list of jobs: all filters stand in the URL, and a page goes on behind the place that was looked at last.

A search looks at 20,000 jobs of the states at a time, and says so. A filter that would find out what is redacted is
refused (redaction.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from pgqueue.admin.bulk.operations import STATES
from pgqueue.admin.queries import SEARCHED_MOST, asearch
from pgqueue.jobs.states import ASKED
from pgqueue.jobs.values import digits, length
from pgqueue.web.pages.page import Asked, Page, TooDeep, plain, read_time
from pgqueue.web.problems import Problem
from pgqueue.web.redaction import Redaction

LIMIT = 50
LIMIT_MOST = 500
DEPTH_MOST = 20
ROOM = 1 << 20
"""So many bytes of values a list reads. It shows none of them as HTML, but must know them to hide them in texts."""
BULK = ("state", "queue", "task", "error_type")
"""The filters that an operation on all jobs knows, too."""
KEYS = ("key", "lock_key", "limit_key", "rate_key", "unique_key", "idempotency_key")
"""Where a job shows what the filter `key` looks for."""
KINDS = ("lock", "limit", "rate")
ERROR_TYPES = (("error_type",), ("attempts", "error_type"))
"""Where a group of errors, and a job, show what the filter `error_type` looks for."""


async def jobs(asked: Asked) -> Page:
    """The jobs that fit, in the order of `find`. With `id` the page of that job instead."""
    if (id := asked.number("id")) is not None:
        return Page("jobs.html", [], to=f"/jobs/{id}")
    criteria = _criteria(asked)
    found = await asked.read(lambda conn: asearch(conn, room=ROOM, **criteria))
    items = [
        {name: value for name, value in plain(job).items() if name != "attempts"}
        | {"key": job.key and asked.redaction.awaited(job.key)}
        for job in found.jobs
    ]
    more = {"searched": found.searched, "complete": found.complete, "after": found.after}
    return Page("jobs.html", items, more, _view(asked, found.after))


def _criteria(asked: Asked) -> dict[str, Any]:
    args = arguments(asked.values("arg"))
    key, error_type, error = asked.value("key"), asked.value("error_type"), asked.value("error")
    if refused := refused_filter(args, key, error, asked.redaction, error_type):
        raise Problem(400, "This cannot be asked", refused)
    limit = LIMIT if (limit := asked.number("limit")) is None else limit
    if not 1 <= limit <= LIMIT_MOST:
        raise Problem(400, "This cannot be asked", f"limit: use 1 to {LIMIT_MOST}")
    return {
        **chosen(asked.values, asked.value),
        "key": key,
        "args": args,
        "worker": asked.number("worker"),
        "error": error,
        "since": moment(asked.value("since"), "since"),
        "until": moment(asked.value("until"), "until"),
        "limit": limit,
        "after": _after(asked.value("after")),
    }


def chosen(values: Callable[[str], Sequence[str]], value: Callable[[str], str | None]) -> dict[str, Any]:
    """The parts of a filter that a list and an operation have, of the URL or of a form (`Asked`)."""
    found: dict[str, Any] = {name: value(name) for name in BULK}
    return found | {"state": values("state") or None}


def _after(place: str | None) -> int | str | None:
    """Where a page goes on: an id, or in the order of a time a text that `find` reads."""
    return place if place is None or (id := digits(place)) is None else id


def _view(asked: Asked, after: int | str | None) -> dict[str, Any]:
    """What the form shows again, and the URL of the page behind this one."""
    again = [(key, value) for key, value in asked.given if key not in ("after", "did", "chosen")]
    named = {key for key, _ in again} - {"limit"}
    return {
        "states": ASKED,
        "chosen": asked.values("state"),
        "asked": {key: value for key, value in again},
        "args": asked.values("arg"),
        "searches_errors": not asked.redaction.active,
        "searched_most": SEARCHED_MOST,
        "next": None if after is None else urlencode([*again, ("after", after)]),
        "filtered": any(key != "limit" for key, _ in again),
        "first": asked.value("after") is None,
        "bulk": [
            (action, urlencode([("action", action), *again]))
            for action in offered(asked.values("state"), named, asked.rights)
        ],
        "actions": possible(asked.values("state"), asked.rights),
        "all_chosen": asked.value("chosen") == "page",
        "choose_all": urlencode([*asked.given, ("chosen", "page")]),
    }


def offered(chosen: Sequence[str], filters: Iterable[str], rights: Iterable[str]) -> list[str]:
    """The actions that can be done to all jobs of a list: what the rights allow, if an operation knows the filters.

    >>> offered(["failed"], ["state", "task"], {"bulk", "retry", "cancel"})
    ['retry']
    >>> offered(["failed"], ["state", "key"], {"bulk", "retry", "cancel"})
    []
    """
    if not set(filters) & set(BULK) or set(filters) - set(BULK):
        return []
    return possible(chosen, rights)


def possible(chosen: Sequence[str], rights: Iterable[str]) -> list[str]:
    """The actions that can be done to chosen jobs of a list of these states: what the rights allow."""
    if "bulk" not in rights:
        return []
    return [
        action for action, (states, others) in STATES.items() if action in rights and set(chosen) <= {*states, *others}
    ]


def arguments(given: Iterable[str]) -> dict[str, Any] | None:
    """The arguments that a job must have. A value that is no JSON is a text; a dot goes into an object.

    >>> arguments(["order_id=7", "customer.name=Zoë", "customer.vip=true"])
    {'order_id': 7, 'customer': {'name': 'Zoë', 'vip': True}}
    """
    found: dict[str, Any] = {}
    for each in given:
        path, separator, text = each.partition("=")
        names = [name.strip() for name in path.split(".")]
        if not separator or not all(names) or len(names) > DEPTH_MOST:
            raise Problem(400, "This cannot be asked", "arg: write name=value or name.inner=value, such as order_id=7")
        place = found
        for name in names[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise Problem(400, "This cannot be asked", f"arg: {path} is asked for as a value and as an object")
        place[names[-1]] = _value(text.strip())
    try:
        return plain(found) or None
    except TooDeep:
        raise Problem(400, "This cannot be asked", "arg: the value is nested too deeply") from None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def refused_filter(
    args: dict[str, Any] | None,
    key: str | None,
    error: str | None,
    redaction: Redaction,
    error_type: str | None = None,
) -> str | None:
    """Why these filters are refused: they would find out what is redacted. None if they would not.

    The class of an error is a name from code, and is compared whole.
    """
    if args is not None and redaction.hides(("args",), args):
        return "this argument is redacted, so jobs cannot be filtered by it"
    if key is not None and (
        any(redaction.hides((name,), key) for name in KEYS)
        or any(redaction.hides(("key",), f"{kind}:{key}") for kind in KINDS)
    ):
        return "this key is redacted, so jobs cannot be filtered by it"
    if hides_class(error_type, redaction):
        return "this class of errors is redacted, so jobs cannot be filtered by it"
    if error is not None and redaction.active:
        return "errors cannot be searched while anything is redacted; the page of errors groups them"
    return None


def hides_class(error_type: str | None, redaction: Redaction) -> bool:
    """Whether a job or a group of errors does not show this class of errors."""
    return error_type is not None and any(redaction.hides(path, error_type) for path in ERROR_TYPES)


def moment(text: str | None, name: str) -> datetime | None:
    """A time of the URL: `2h` is two hours ago, without a zone it is UTC. Raises Problem."""
    if text is None:
        return None
    try:
        if (ago := length(text)) is not None:
            return datetime.now(UTC) - timedelta(seconds=ago)
        return read_time(text)
    except (ValueError, OverflowError):  # OverflowError: before the year 1
        raise Problem(400, "This cannot be asked", f"{name}: write 2h, or a time like 2026-12-24T18:00") from None
