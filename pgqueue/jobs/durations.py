"""Durations: seconds, a timedelta, or a text such as "30s". Every option that is a duration takes all three.

Used by tasks, policies and workers at declaration, and wherever a call is given a duration. Pure arithmetic.
"""

from __future__ import annotations

import re
from datetime import timedelta

from pgqueue.errors import InvalidOption

Duration = float | timedelta | str
"""Seconds, a timedelta, or a number with a unit: "250ms", "30s", "5m", "2h", "1.5d"."""

MAX_SECONDS = 100 * 365 * 86_400
"""The longest duration: with 100 years every time can be written by Python and PostgreSQL."""

_TEXT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def seconds(value: Duration, what: str) -> float:
    """Return a duration as seconds. Anything else raises InvalidOption; `what` names it there.

    >>> seconds(timedelta(minutes=5), "delay"), seconds("5m", "delay")
    (300.0, 300.0)
    """
    number: object = value
    if isinstance(value, timedelta):
        number = value.total_seconds()
    elif isinstance(value, str) and (found := _TEXT.fullmatch(value)):
        number = float(found[1]) * _UNITS[found[2]]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= MAX_SECONDS:
        raise InvalidOption(
            f'{what} {value!r:.80}: give seconds, a timedelta or "30s", "5m", "2h", from 0 to 100 years'
        )
    return float(number)
