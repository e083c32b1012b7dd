"""Data as HTML or as JSON, with the headers that every answer has.

Foreign text is escaped always: Jinja's autoescape is on for every template; no template and no code switches it off.
What is not printable is replaced, so that a text cannot turn the direction of the line that shows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import Response

from pgqueue.admin.depth import Count
from pgqueue.admin.why.reasons import lasting
from pgqueue.manual import is_published, page
from pgqueue.plain_text import plural
from pgqueue.web.pages.job import folded

HERE = Path(__file__).parent

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`: browsers would then send `Origin: null` with the forms of this site.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
    "vary": "Accept, Cookie, Authorization",
}
FILES = {"icon.svg": "image/svg+xml", "pgqueue.css": "text/css", "pgqueue.js": "text/javascript"}
"""The files that are served. No other name is looked for."""


def html(template: str, data: Mapping[str, Any], status: int = 200) -> Response:
    """A page of this template."""
    text = _environment().get_template(template).render(data)
    return Response(text, status, HEADERS, "text/html")


def as_json(document: Mapping[str, Any], status: int = 200) -> Response:
    """The document `{"items": […], …}`; times are ISO 8601 with their offset."""
    text = json.dumps(document, default=_plain, ensure_ascii=True, allow_nan=False)
    return Response(text, status, HEADERS, "application/json")


def file(name: str) -> Response | None:
    """One of our own files; None if there is none of this name."""
    if name not in FILES:
        return None
    return Response(_bytes(name), 200, HEADERS | {"cache-control": "public, max-age=3600"}, FILES[name])


def wants_json(accept: str) -> bool:
    """Whether this Accept header asks for JSON. A browser asks for HTML first.

    >>> [wants_json(each) for each in ("application/json", "text/html,application/json;q=0.9", "*/*", "")]
    [True, False, False, False]
    """
    kinds = [each.partition(";")[0].strip().lower() for each in accept.split(",")]
    return "application/json" in kinds and "text/html" not in kinds


@cache
def asset(name: str) -> str:
    """The address of one of our own files, below the mount. It is another one when the file is."""
    return f"/static/{name}?v={sha256(_bytes(name)).hexdigest()[:8]}"


@cache
def _bytes(name: str) -> bytes:
    return (HERE / "static" / name).read_bytes()


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    made.globals |= {"asset": asset, "manual": page}
    made.tests |= {"published": is_published}
    made.filters |= {
        "ago": ago,
        "arguments": _arguments,
        "clock": lambda at, form: at.astimezone(UTC).strftime(_CLOCKS[form]),
        "count": _count,
        "differs": differs,
        "folded": folded,
        "iso": lambda at: f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z",
        "json_line": _json_line,
        "json_text": lambda value: json.dumps(value, default=_plain, ensure_ascii=False, indent=2),
        "lasting": lambda seconds: "" if seconds is None else lasting(seconds),
        "jobs": lambda value, one, more: plural(value["n"], one, more, _count(value)),
        "minute": lambda at: f"{at.astimezone(UTC):%Y-%m-%dT%H:%M}",
        "number": lambda value: "" if value is None else f"{value:,}",
        "pieces": pieces,
        "percent": lambda share: "" if share is None else f"{share:.1%}".replace("%", " %"),
        "plural": plural,
        "query": urlencode,
        "sentence": lambda text: f"{text[:1].upper()}{text[1:].rstrip('.')}.",
        "short": lambda value: "" if value is None else f"{value:,.10g}",
        "took": lambda seconds: "" if seconds is None else took(seconds),
        "utc": lambda at: f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}",
    }
    return made


_CLOCKS = {"clock": "%H:%M", "date": "%m-%d", "moment": "%m-%d %H:%M"}


def _printable(value: Any) -> Any:
    """What a template writes: nothing for None, `�` for what is not printable. Lines stay lines."""
    if value is None:
        return ""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in value)


def differs(items: Sequence[Mapping[str, Any]], *names: str) -> bool:
    """Whether these fields of the rows differ. If not, a table says them once. Of one row each column is shown.

    >>> [differs([{"queue": "a"}, {"queue": other}], "queue") for other in "ab"], differs([{"queue": "a"}], "queue")
    ([False, True], True)
    """
    return len(items) < 2 or len({repr([item[name] for name in names]) for item in items}) > 1


_CODE = re.compile(r"`([^`\n]+)`")


def pieces(text: object) -> list[tuple[bool, str]]:
    """The text in pieces: whether each stood between two backticks, so that it is code, and the piece.

    An application may show a number instead of a text (see redaction).

    >>> pieces("run `pgqueue why 7`, or `"), pieces(7)
    ([(False, 'run '), (True, 'pgqueue why 7'), (False, ', or `')], [(False, '7')])
    """
    return [(at % 2 == 1, each) for at, each in enumerate(_CODE.split(str(text)))]


def ago(at: datetime, now: datetime) -> str:
    """How long ago a time was, or in how long it is, in one unit.

    >>> from datetime import timedelta
    >>> now = datetime(2026, 12, 24, 18, 0, tzinfo=UTC)
    >>> [ago(now - timedelta(seconds=n), now) for n in (0, 59, 60, 7_199, 172_800, -1, -300)]
    ['0 s ago', '59 s ago', '1 min ago', '1 h ago', '2 d ago', 'in 1 s', 'in 5 min']
    """
    seconds = (now - at).total_seconds()
    size, unit = next(each for each in _UNITS if abs(seconds) >= each[0] or each[0] == 1)
    n = int(abs(seconds) // size)
    return f"{n:,} {unit} ago" if seconds >= 0 else f"in {n:,} {unit}"


_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def took(seconds: float) -> str:
    """How long something took: below ten seconds as exactly as histograms know it.

    >>> [took(each) for each in (0.0004, 0.098, 0.175, 0.9996, 1.94, 9.8, 75, 11_460)]
    ['0.4 ms', '98 ms', '175 ms', '1 s', '1.9 s', '9.8 s', '1 m 15 s', '3 h 11 m']
    """
    if round(seconds, 3) < 1:
        number = seconds * 1_000
        return f"{number:.2g} ms" if number < 99 else f"{number:.0f} ms"
    return f"{round(seconds, 1):g} s" if seconds < 10 else lasting(seconds)


def _arguments(args: Any) -> str:
    """The arguments of a job on one line: `order_id=7, to="a@example.com"`. If they are no object, they are hidden as a
    whole: this is what is shown instead."""
    if not isinstance(args, Mapping):
        return args if isinstance(args, str) else _json_line(args)
    return ", ".join(f"{name}={_json_line(value)}" for name, value in args.items())


def _json_line(value: Any) -> str:
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _count(value: Mapping[str, Any]) -> str:
    return str(Count(value["n"], value["exact"]))


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)
