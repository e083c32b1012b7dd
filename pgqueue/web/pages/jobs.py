"""The list of jobs: all filters stand in the URL, and a page goes on behind the place that was looked at last.

What is typed into a search field becomes such a URL. If only one job fits what was typed on another page, its page is
the answer.

A search looks at 20,000 jobs of the states at a time, and says so. A filter that would find out what is redacted is
refused (redaction.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from pgqueue.admin.bulk.operations import STATES, acount_bulk
from pgqueue.admin.depth import Count
from pgqueue.admin.known_names import KnownNames, aknown_names
from pgqueue.admin.last_errors import LastError, alast_errors
from pgqueue.admin.queries import SEARCHED_MOST, JobInfo, asearch, astate_counts
from pgqueue.admin.queries import Page as Found
from pgqueue.jobs.states import ASKED, ENDED, RETRYING
from pgqueue.jobs.values import digits, length
from pgqueue.web.connections import Connections
from pgqueue.web.pages.causes import first_line
from pgqueue.web.pages.page import Asked, Page, TooDeep, part_of, plain, read_time
from pgqueue.web.problems import Problem
from pgqueue.web.redaction import Redaction
from pgqueue.web.search_field import MANY, SAID, added, parts_of

LIMIT = 50
NAMES_MOST = 20
"""So many names of each kind are suggested."""
LIMIT_MOST = 500
DEPTH_MOST = 20
ROOM = 1 << 20
"""So many bytes of values a list reads. It shows a line of them as HTML, but must know them to hide them in texts."""
BULK = ("state", "queue", "task", "error_type")
"""The filters that an operation on all jobs knows, too."""
APART = ("after", "did", "chosen", "listed")
"""What a URL says beside the filter: it does not go on to the next list."""
LISTED = ("listed", "1")
"""The mark of a link to a job that carries the filter of its list (neighbours.py)."""
TABS = ("failed", RETRYING, "blocked", "available", "running", "scheduled", "completed", "cancelled", "skipped")
KEYS = ("key", "lock_key", "limit_key", "rate_key", "unique_key", "idempotency_key")
"""Where a job shows what the filter `key` looks for."""
KINDS = ("lock", "limit", "rate")
ERROR_TYPES = (("error_type",), ("attempts", "error_type"))
"""Where a group of errors, and a job, show what the filter `error_type` looks for."""


async def jobs(asked: Asked) -> Page:
    """The jobs that fit, in the order of `find`, with the last error of each. With `id` the page of that job instead.

    `counts` are the numbers of all jobs by state; None if no worker has counted them lately.
    """
    if (typed := asked.values("q")) or asked.values("and"):
        return await _typed(asked, " ".join([*typed, *asked.values("and")]), alone=bool(typed))
    if (id := asked.number("id")) is not None:
        return Page("jobs.html", [], to=f"/jobs/{id}")
    if (step := asked.value("during")) is not None:
        others = [part for part in asked.given if part[0] != "during"]
        return Page("jobs.html", [], to=f"/jobs?{urlencode([*_during(step), *others])}")
    given = criteria(asked)
    found, errors = await asked.read_shared(lambda conn: _found(conn, given), "jobs found", given)
    items = [_item(job, plain(errors.get(job.id)), asked.redaction) for job in found.jobs]
    known, counted = await asked.shared("jobs", _of_all)
    at, counts = counted or (datetime.now(UTC), None)
    actions = possible(asked.values("state"), asked.rights)
    fit = await _fit(asked, found, counts, actions) if actions else None
    more = {"searched": found.searched, "complete": found.complete, "after": found.after, "counts": plain(counts)}
    view = _view(asked, found.after) | {"at": at, "fit": plain(fit), "actions": actions}
    view |= {"tabs": _tabs(asked), "chips": _chips(asked), "known": _suggested(known, asked.redaction)}
    view |= {"shown": _columns(items, asked.values("state"))}
    return Page("jobs.html", items, more, view, items_are_shown=True)


async def _of_all(connections: Connections) -> tuple[KnownNames, tuple[datetime, dict[str, Count] | None] | None]:
    """What every list shows, whatever its filter: names to choose from, and the numbers of all jobs by state."""
    known = await connections.read(lambda conn: aknown_names(conn, NAMES_MOST))
    counted, _ = await part_of(connections, astate_counts)
    return known, counted


def _during(step: str) -> list[tuple[str, str]]:
    """The filter of a step of a chart, which is its first minute and its seconds: `2026-12-24T18:00/60`."""
    first, _, seconds = step.partition("/")
    try:
        at = read_time(first)
        until = at + timedelta(seconds=int(seconds))
    except (ValueError, OverflowError):
        raise Problem(400, "This cannot be asked", "during: take it from a chart") from None
    return [(name, f"{each.astimezone(UTC):%Y-%m-%dT%H:%M}") for name, each in (("since", at), ("until", until))]


async def _typed(asked: Asked, text: str, *, alone: bool) -> Page:
    """To the list that the text means; `alone`: to the job, if the text means just one."""
    known = await asked.read(lambda conn: aknown_names(conn, NAMES_MOST * 50))
    parts = added([part for part in asked.given if part[0] not in (*APART, "q", "and", "id")], parts_of(text, known))
    meant = replace(asked, query=parts)
    if alone and meant.value("id") is None:
        found = await asked.read(lambda conn: asearch(conn, room=ROOM, **criteria(meant) | {"limit": 2}))
        if found.complete and len(found.jobs) == 1:
            return Page("jobs.html", [], to=f"/jobs/{found.jobs[0].id}")
    return Page("jobs.html", [], to=f"/jobs?{urlencode(parts)}")


async def _found(conn: object, given: dict[str, Any]) -> tuple[Found, dict[int, LastError]]:
    """What fits, and the last error of each job that has one. Visitors share it: nothing is hidden."""
    found = await asearch(conn, room=ROOM, **given)
    return found, {each.id: each for each in await alast_errors(conn, found.jobs)}


def _item(job: JobInfo, error: dict[str, Any] | None, redaction: Redaction) -> dict[str, Any]:
    """The job without its attempts, and without what is hidden. Its last error is hidden as on the page of the job: by
    the job's own values. What is hidden of the error alone is hidden in the job's other texts."""
    attempts = [] if error is None else [{name: error[name] for name in ("error_type", "message")}]
    also = {"attempts": attempts, "steps": [] if error is None else error["steps"]}
    item = redaction.shown(plain(job) | {"key": job.key and redaction.awaited(job.key), **also})
    shown = item.pop("attempts")
    said = shown[0] if shown else None
    if isinstance(said, dict) and said["message"]:
        said = said | {"message": first_line(str(said["message"]))}
    item = redaction.joined(item, {"error": said})
    del item["steps"]  # a search does not read them
    return item


async def _fit(asked: Asked, found: Found, counts: dict[str, Count] | None, actions: Sequence[str]) -> Count | None:
    """How many jobs fit, if the list names states, or shows all of them; None: that is not known."""
    if found.complete and asked.value("after") is None:
        return Count(len(found.jobs))
    states, named = asked.values("state"), _named(asked)
    if not states or named - {*BULK}:
        return None
    if counts is not None and len(states) == 1 and named == {"state"}:
        return counts[states[0]]
    action, filters = actions[0], chosen(asked.values, asked.value)
    counted, _ = await asked.shared(
        repr(("jobs fit", action, filters)),
        lambda connections: part_of(connections, lambda conn: acount_bulk(conn, action, **filters)),
    )
    return counted


def _named(asked: Asked) -> set[str]:
    return {name for name, _ in asked.given} - {"limit", *APART}


def _tabs(asked: Asked) -> list[dict[str, Any]]:
    """The states, each with the URL of the list of it with the same filter; first all states."""
    others = [part for part in asked.given if part[0] not in ("state", *APART)]
    here = asked.values("state")
    tabs = [{"state": None, "query": urlencode(others), "is_here": not here}]
    for state in TABS:
        tabs.append({"state": state, "query": urlencode([("state", state), *others]), "is_here": here == [state]})
    return tabs


def _chips(asked: Asked) -> list[dict[str, str]]:
    """The parts of the filter but a single state, each with the URL of the list without it."""
    parts = [part for part in asked.given if part[0] not in APART]
    one_state = len(asked.values("state")) == 1
    chips = []
    for place, (field, value) in enumerate(parts):
        if field in SAID and not (field == "state" and one_state):
            name, text = (SAID[field], value) if field != "arg" else ("argument", value)
            without = [part for at, part in enumerate(parts) if at != place and (field in MANY or part[0] != field)]
            chips.append({"name": name, "text": text, "query": urlencode(without)})
    return chips


def _suggested(known: KnownNames, redaction: Redaction) -> list[str]:
    """What a search field suggests. A class of errors that is hidden is not among it."""
    errors = [each for each in known.errors if not hides_class(each, redaction)]
    return [
        *(f"queue:{name}" for name in known.queues),
        *(f"task:{name}" for name in known.tasks),
        *(f"error:{name}" for name in errors),
    ]


def _columns(items: Sequence[dict[str, Any]], states: Sequence[str]) -> dict[str, Any]:
    """Which columns differ from row to row, and which time is told. What is the same in all rows is said once."""

    def differs(*names: str) -> bool:
        return len({tuple(item[name] for name in names) for item in items}) > 1

    time = "enqueued_at"
    if states and set(states) <= {*ENDED}:
        time = "finished_at"
    elif states and set(states) <= {"scheduled", RETRYING}:
        time = "run_at"
    elif states == ["running"]:
        time = "started_at"
    columns = {"state": differs("state"), "queue": differs("queue"), "attempt": differs("attempt", "max_attempts")}
    return columns | {"time": time, "same": items[0] if len(items) > 1 else None}


def criteria(asked: Asked) -> dict[str, Any]:
    """What the URL of a list asks of a search. Raises Problem for what cannot be asked."""
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
        "flow": asked.number("flow"),
        "node": asked.number("node"),
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
    again = [(key, value) for key, value in asked.given if key not in APART]
    named = _named(asked)
    return {
        "states": ASKED,
        "chosen": asked.values("state"),
        "asked": {key: value for key, value in again},
        "args": asked.values("arg"),
        "again": again,
        "searches_errors": not asked.redaction.active,
        "searched_most": SEARCHED_MOST,
        "next": None if after is None else urlencode([*again, ("after", after)]),
        "filtered": any(key != "limit" for key, _ in again),
        "first": asked.value("after") is None,
        "bulk": [
            (action, urlencode([("action", action), *again]))
            for action in offered(asked.values("state"), named, asked.rights)
        ],
        "all_chosen": asked.value("chosen") == "page",
        "of_list": urlencode([LISTED, *(each for each in asked.given if each[0] == "after" or each[0] not in APART)]),
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
