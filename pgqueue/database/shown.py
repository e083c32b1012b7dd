"""What people are shown of a row: what Python cannot read of it says so, and hides nothing else of the page.

Rows are read as JSON. PostgreSQL's JSON has numbers of any length, and its times have infinity and years that Python's
have not. Used by the questions about jobs and schedules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from math import isfinite
from typing import Any


def value(text: str | None) -> Any:
    """The value of this JSON. If Python cannot read it, an object that says why: a number of more than 4,300 digits, or
    a value that is nested as deeply as PostgreSQL allows. A fraction beyond the numbers of Python stays a text."""
    if text is None:
        return None
    try:
        return json.loads(text, parse_float=_fraction)
    except (ValueError, RecursionError) as error:
        return {"pgqueue": f"not shown: {error}"}


def _fraction(text: str) -> float | str:
    """Not `inf`: no JSON has it, so nothing could be answered with it."""
    number = float(text)
    return number if isfinite(number) else text


def at(seconds: float) -> datetime:
    """A time in seconds since 1970, in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def moment(text: str | None) -> datetime | None:
    """A time of PostgreSQL. Infinity, and years before 1 and after 9999, become the nearest that there is."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        early = text.startswith("-") or text.endswith("BC")
        return (datetime.min if early else datetime.max).replace(tzinfo=UTC)


def timed(row: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The values of a row that the dataclass `kind` has, times as datetimes."""
    return {name: moment(row[name]) if time else row[name] for name, time in _columns(kind).items() if name in row}


@cache
def _columns(kind: Any) -> dict[str, bool]:
    """The fields of what is read from a row, and whether each is a time."""
    return {field.name: "datetime" in str(field.type) for field in fields(kind)}
