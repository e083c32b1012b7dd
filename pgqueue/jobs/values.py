"""Values that people give: durations, rates, moments, whole numbers, names. Each check and each reading stands once.

A check returns the value as it is kept, or raises InvalidOption; values that need a task's signature are checked in
`concurrency` and `unique`. A reading of a text returns None if it is not one: its caller says what to write. Nothing
but arithmetic: a command line that only shows its help loads this, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Literal, TypeGuard

from pgqueue.errors import InvalidOption

# Numbers --------------------------------------------------------------------------------------------------------------

HIGHEST_ID = 2**63 - 1


def whole(value: object, least: int, most: int = HIGHEST_ID) -> TypeGuard[int]:
    """Whether this is a whole number in these bounds. A truth value is none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def number(value: object, least: float, most: float = inf) -> TypeGuard[float]:
    """Whether this is a finite number in these bounds. A truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most and value != inf


def digits(text: str, most: int = 19) -> int | None:
    """The whole number that this text is: `most` ASCII digits at most. None: it is none.

    >>> digits("12"), digits("-1"), digits("٣"), digits("")
    (12, None, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= most else None


def check_id(id: object, what: str) -> int:
    """Return the id of a job. A text, a truth value or a handle is no id: InvalidOption, which says what to give."""
    if not whole(id, 1):
        shown = f"{type(id).__name__} {id!r}"[:200]
        hint = " (did you mean its .id?)" if isinstance(getattr(id, "id", None), int) else ""
        if isinstance(id, list | tuple | set):
            hint = " (did you mean *ids?)"
        raise InvalidOption(f"{what}: {shown} is no id of a job{hint}; an id is a whole number, such as handle.id")
    return id


def check_limit(limit: int, most: int) -> int:
    """Return how many are asked for. Raises InvalidOption if this is no whole number from 1 to `most`."""
    if whole(limit, 1, most):
        return limit
    raise InvalidOption(f"limit {limit!r}: give a whole number from 1 to {most}")


def check_priority(priority: int) -> int:
    """Return `priority` if it is one (0, first, to 9), else raise InvalidOption."""
    if whole(priority, 0, 9):
        return priority
    raise InvalidOption(f"priority {priority!r}: use a whole number from 0 (first) to 9 (last)")


# Durations ------------------------------------------------------------------------------------------------------------

Duration = float | timedelta | str
"""Seconds, a timedelta, or a number with a unit: "250ms", "30s", "5m", "2h", "1.5d"."""

MAX_SECONDS = 100 * 365 * 86_400
"""The longest duration: with 100 years every time can be written by Python and PostgreSQL."""

UNITS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
"""The units of durations, the longest first, in seconds."""
PERIODS = {word: UNITS[word[0]] for word in ("second", "minute", "hour", "day")}
"""The same in words."""
_LENGTH = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(ms|s|m|h|d)?")


def length(text: str, unit: str = "") -> float | None:
    """The seconds of a text such as "30s"; None if it is none. `unit` is that of a text without one.

    >>> length("1.5m"), length("250 ms"), length("30"), length("30", "s")
    (90.0, 0.25, None, 30.0)
    """
    found = _LENGTH.fullmatch(text)
    size = UNITS.get(found[2] or unit) if found else None
    return None if found is None or size is None else float(found[1]) * size


def seconds(value: Duration, what: str) -> float:
    """Return a duration as seconds. Anything else raises InvalidOption; `what` names it there.

    >>> seconds(timedelta(minutes=5), "delay"), seconds("5m", "delay")
    (300.0, 300.0)
    """
    given: object = value
    if isinstance(value, timedelta):
        given = value.total_seconds()
    elif isinstance(value, str):
        given = length(value)
    if not number(given, 0, MAX_SECONDS):
        raise InvalidOption(
            f'{what} {value!r:.80}: give seconds, a timedelta or "30s", "5m", "2h", from 0 to 100 years'
        )
    return float(given)


def positive(duration: Duration | None, what: str) -> float | None:
    if duration is None:
        return None
    given = seconds(duration, what)
    if given == 0:
        raise InvalidOption(f"{what} {duration!r}: give more than 0 seconds, or None for no limit")
    return given


# Rates ----------------------------------------------------------------------------------------------------------------

COUNT_MOST, PERIOD_MOST = 1_000_000, 366 * 86_400.0
_RATE = re.compile(
    r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*/\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)?\s*(" + "|".join([*PERIODS, *"smhd"]) + r")s?"
)


def per(text: str) -> tuple[float, float] | None:
    """The count and the seconds of a text such as "100/minute" or "5/10s"; None if it is none.

    >>> per("100/minute"), per("0.5 / 10s"), per("100")
    ((100.0, 60.0), (0.5, 10.0), None)
    """
    found = _RATE.fullmatch(text)
    return None if found is None else (float(found[1]), float(found[2] or 1) * UNITS[found[3][0]])


def parse_rate(rate: object) -> tuple[int, float]:
    """The count and the period in seconds: for "100/minute" these are 100 and 60.0. Raises InvalidOption."""
    found = per(rate) if isinstance(rate, str) else None
    if found is None or "." in str(rate).partition("/")[0]:
        raise InvalidOption(f"rate {rate!r}: write COUNT/PERIOD, such as 100/minute or 5/10s (units: s, m, h, d)")
    count, period = int(found[0]), found[1]
    if not 1 <= count <= COUNT_MOST or not 1.0 <= period <= PERIOD_MOST:
        raise InvalidOption(f"rate {rate!r}: use a count from 1 to {COUNT_MOST} and a period of 1 second to 366 days")
    return count, period


# Moments --------------------------------------------------------------------------------------------------------------

UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""From where PostgreSQL counts, in microseconds."""


def is_moment(value: object) -> TypeGuard[datetime]:
    """Whether this is a datetime with a time zone."""
    return isinstance(value, datetime) and value.utcoffset() is not None


def aware(run_at: datetime | None) -> datetime | None:
    if run_at is not None and not is_moment(run_at):
        raise InvalidOption(f"{run_at!r}: give a datetime with a time zone, such as datetime.now(timezone.utc)")
    return run_at


def start_by(deadline: datetime | Duration) -> datetime | float | None:
    return aware(deadline) if isinstance(deadline, datetime) else seconds(deadline, "deadline")


def utc(moment: datetime) -> datetime:
    """The time in UTC: PostgreSQL knows offsets up to 16 hours, Python up to 24."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise InvalidOption(f"{moment!r}: give a time between the years 1 and 9999, in UTC") from None


def check_moment(value: datetime | None, what: str) -> str | None:
    """A time as a parameter; None if none is given. Raises InvalidOption if this is no datetime with a time zone."""
    if value is None:
        return None
    if not is_moment(value):
        raise InvalidOption(f"{what} {value!r}: give a datetime with a time zone")
    return value.isoformat()


# Texts ----------------------------------------------------------------------------------------------------------------

_QUEUE = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_task_name(name: str) -> str:
    """Return `name` if it can name a task (1 to 200 printable characters, no space), else raise InvalidOption."""
    if isinstance(name, str) and 1 <= len(name) <= 200 and name.isprintable() and " " not in name:
        return name
    raise InvalidOption(f"task name {name!r}: use 1 to 200 printable characters without spaces")


def check_queue(queue: str) -> str:
    """Return `queue` if it can name a queue, else raise InvalidOption."""
    if isinstance(queue, str) and _QUEUE.fullmatch(queue):
        return queue
    raise InvalidOption(f"queue {queue!r}: use 1 to 40 letters, digits, '_', '.' or '-'")


def check_states(state: str | Iterable[str] | None, may: Collection[str]) -> tuple[str, ...]:
    """Return the states that are asked for, one or several; () for None. InvalidOption if one is not in `may`."""
    if state is None:
        return ()
    if not isinstance(state, Iterable):
        raise InvalidOption(f"state {state!r:.80}: use one or more of {', '.join(may)}")
    states = (state,) if isinstance(state, str) else tuple(state)
    for each in states:
        if each not in may:
            raise InvalidOption(f"state {each!r:.80}: use one of {', '.join(may)}")
    if not states:
        raise InvalidOption("state: give at least one, or leave it out")
    return states


def check_text(value: str | None, what: str) -> None:
    """Raise InvalidOption if this is given and no text that PostgreSQL can read.

    Not every driver refuses such a text itself. One that sends it has the server end the caller's transaction.
    """
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidOption(f"{what} {value!r}: give a text")
    if "\0" in value or _SURROGATE.search(value):
        raise InvalidOption(f"{what} {value!a:.80}: a text for PostgreSQL has no NUL and no lone surrogate")


def flag(value: bool, what: str) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidOption(f"{what}: {value!r} is neither True nor False")


def choice(value: Literal["cancel", "keep"], what: str) -> Literal["cancel", "keep"]:
    if value in ("cancel", "keep"):
        return value
    raise InvalidOption(f'{what}: {value!r}; give "cancel" or "keep"')
