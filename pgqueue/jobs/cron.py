"""`Cron` and `Every`: when a schedule ticks, and which of its ticks are to be made at a given moment.

Used by declarations, by rows of `pgqueue.schedule` (`parse`), and by the service that makes ticks (`pending`). Pure,
except that a new Cron asks the clock, to refuse a line that never fires. The package cronsim decides what a cron line
means, also when a zone's clocks are turned. Every time here is UTC, and each tick is later than the one before.
Because cronsim and zoneinfo are slow to import, this is done when a cron line is declared or read, not for an enqueue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any, Literal

from pgqueue.errors import InvalidOption
from pgqueue.jobs.values import PERIODS, UNIX_EPOCH, Duration, seconds
from pgqueue.options import names_options
from pgqueue.plain_text import plural

CatchUp = Literal["latest", "all", "none"]
CATCH_UP = ("latest", "all", "none")

MISSED_SECONDS = 60.0
"""With `catch_up="none"` a tick that is later than this is not made. A new leader takes over in less time."""
EVERY_LEAST = 1.0  # seconds: no row is changed more often than about once a second
LINE_MOST = 200
# Up to this many ticks in a row are looked at one by one. Behind a longer gap the latest is searched from its end.
FEW = 16

_MICROSECOND = timedelta(microseconds=1)
_FIELDS = (
    ("second", "0 to 59"),
    ("minute", "0 to 59"),
    ("hour", "0 to 23"),
    ("day-of-month", "1 to 31, L or LW"),
    ("month", "1 to 12 or JAN to DEC"),
    ("day-of-week", "0 to 7 or SUN to SAT (0 and 7 are Sunday), 5L, 5#2"),
)
_BAD = re.compile(r"Bad (.+)")


@names_options
@dataclass(frozen=True, slots=True)
class Cron:
    """Ticks by a cron line of five fields, or of six with the seconds first, in the time of a zone.

    `catch_up` says what becomes of ticks that were missed: "latest" (default) makes the last of them, "all" makes each,
    "none" makes none. When clocks are turned, cronsim does as Debian's cron does. A wrong cron line, zone or catch_up
    raises InvalidOption, which names the field and its value.

    >>> Cron("*/15 * * * *").next(datetime(2026, 3, 1, 10, 20, tzinfo=UTC)).isoformat()
    '2026-03-01T10:30:00+00:00'
    >>> Cron("0 25 * * *")
    Traceback (most recent call last):
    ...
    pgqueue.errors.InvalidOption: cron '0 25 * * *': hour '25': use 0 to 23, *, or lists, ranges and steps of these
    """

    expr: str
    tz: str = "UTC"
    catch_up: CatchUp = "latest"

    def __post_init__(self) -> None:
        if not isinstance(self.expr, str) or not 0 < len(self.expr) <= LINE_MOST:
            raise InvalidOption(f"cron {self.expr!r:.80}: give a line of 5 or 6 fields, such as '*/15 * * * *'")
        zone = _zone(self.tz, f"cron {self.expr!r}")
        _check_catch_up(self.catch_up, f"cron {self.expr!r}")
        _check_fields(self.expr, zone)
        if self.next(datetime.now(UTC)) is None:
            raise InvalidOption(f"cron {self.expr!r}: it has no time in the next 50 years")

    @property
    def line(self) -> str:
        """The text stored in the row."""
        return " ".join(self.expr.split())

    @property
    def words(self) -> str:
        """The cron line and its zone in words.

        >>> Cron("0 9 * * *", tz="Europe/Berlin").words
        'At 09:00 every day, Europe/Berlin'
        """
        return f"{_explained(self.line)}, {self.tz}"

    def next(self, after: datetime) -> datetime | None:
        """The first tick after this moment; None if there is none in the next 50 years."""
        return _next(self.expr, self.tz, after)


@names_options
@dataclass(frozen=True, slots=True)
class Every:
    """A tick every `seconds` (a duration), at least 1, counted from 1970-01-01 00:00 UTC.

    >>> Every(900).next(datetime(2026, 3, 1, 10, 20, tzinfo=UTC)).isoformat()
    '2026-03-01T10:30:00+00:00'
    """

    seconds: Duration
    catch_up: CatchUp = "latest"

    def __post_init__(self) -> None:
        given = self.seconds
        if seconds(given, "every") < EVERY_LEAST:
            raise InvalidOption(f"every {given!r}: it is 1 second at least")
        if isinstance(given, str):
            object.__setattr__(self, "seconds", seconds(given, "every"))
        _check_catch_up(self.catch_up, f"every {given!r}")

    @property
    def tz(self) -> str:
        return "UTC"

    @property
    def line(self) -> str:
        """The text stored in the row."""
        return f"every {self._step / 1_000_000:.15g}"

    @property
    def words(self) -> str:
        """The interval in words.

        >>> Every(5_400).words
        'Every 1 hour 30 minutes, counted from 1970-01-01 00:00 UTC'
        """
        return f"Every {_span(self._step)}, counted from 1970-01-01 00:00 UTC"

    def next(self, after: datetime) -> datetime | None:
        """The first tick after this moment."""
        passed = (after - UNIX_EPOCH) // _MICROSECOND
        return UNIX_EPOCH + timedelta(microseconds=(passed // self._step + 1) * self._step)

    @property
    def _step(self) -> int:
        given = self.seconds
        return given // _MICROSECOND if isinstance(given, timedelta) else round(float(given) * 1_000_000)


When = Cron | Every

TICK, SCHEDULE, LINE, ZONE = "pgqueue:tick", "pgqueue:schedule", "pgqueue:line", "pgqueue:zone"
"""The headers in which a job keeps its tick, and the name, the line and the zone of its schedule (ticks.sql)."""


@lru_cache(maxsize=4096)
def parse(line: str, tz: str, catch_up: str) -> When:
    """The schedule of a row of `pgqueue.schedule`: a cron line, or `every 900` (seconds). Raises InvalidOption."""
    word, _, rest = line.partition(" ")
    if word != "every":
        return Cron(line, tz, catch_up)  # type: ignore[arg-type]  # checked there
    try:
        seconds = float(rest)
    except ValueError:
        raise InvalidOption(f"{line!r}: {rest!r} is no number of seconds") from None
    return Every(seconds, catch_up)  # type: ignore[arg-type]


def check_when(given: object, what: str) -> When:
    """Return `given` if it is a Cron or Every, else raise InvalidOption."""
    if isinstance(given, Cron | Every):
        return given
    hint = ""
    if isinstance(given, str):
        period = given.removeprefix("every ")
        meant = f"Cron({given!r})" if len(given.split()) in (5, 6) else f"Every({period!r})"
        hint = f"; did you mean {meant}?"
    raise InvalidOption(f"{what} {given!r}: give Cron(…) or Every(…){hint}")


def tick_of(headers: Mapping[str, Any]) -> datetime | None:
    """The tick that a job was made for, from its headers. None if there is none, or if it is no time."""
    try:
        return datetime.fromisoformat(headers[TICK]).astimezone(UTC)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def ticks(when: When, first: datetime, most: int) -> list[datetime]:
    """The tick `first` and those behind it, at most `most` in all.

    >>> [each.hour for each in ticks(Cron("0 6,18 * * *"), datetime(2026, 3, 1, 6, tzinfo=UTC), 3)]
    [6, 18, 6]
    """
    found: list[datetime] = []
    after: datetime | None = first
    while after is not None and len(found) < most:
        found.append(after)
        after = when.next(after)
    return found


def local(at: datetime, tz: str) -> str:
    """A time by the clocks of this zone, with its weekday and the zone's short name. Raises InvalidOption.

    >>> local(datetime(2026, 7, 1, 7, 0, tzinfo=UTC), "Europe/Berlin")
    'Wed 2026-07-01 09:00:00 CEST'
    """
    return f"{at.astimezone(_zone(tz, 'zone')):%a %Y-%m-%d %H:%M:%S %Z}"


def pending(when: When, due: datetime, now: datetime, most: int) -> tuple[list[datetime], datetime | None]:
    """The ticks to make, at most `most`, and the schedule's next tick after them.

    `due` is the schedule's next tick so far, not later than `now`. With catch_up "all" there may be more ticks than
    `most`: then the next one is not later than `now` either. "latest" makes the last tick that is not later than `now`.
    "none" makes that tick only if it was not missed.
    """
    if when.catch_up == "all":
        return _each(when, due, now, most)
    latest, after = _latest(when, due, now)
    missed = when.catch_up == "none" and (now - latest).total_seconds() > MISSED_SECONDS
    return ([] if missed else [latest]), after


def _each(when: When, due: datetime, now: datetime, most: int) -> tuple[list[datetime], datetime | None]:
    ticks, after = [due], when.next(due)
    while after is not None and after <= now and len(ticks) < most:
        ticks.append(after)
        after = when.next(after)
    return ticks, after


def _latest(when: When, due: datetime, now: datetime) -> tuple[datetime, datetime | None]:
    ticks, after = _each(when, due, now, FEW)
    if after is None or after > now:
        return ticks[-1], after
    back = timedelta(minutes=1)
    while (found := when.next(max(due, now - back))) is None or found > now:
        back *= 2  # the first span that contains a tick contains few
    while (after := when.next(found)) is not None and after <= now:
        found = after
    return found, after


@lru_cache(maxsize=1024)  # many schedules share a line
def _next(expr: str, tz: str, after: datetime) -> datetime | None:
    from cronsim import CronSim

    try:
        for moment in CronSim(expr, after.astimezone(_zone(tz, expr))):
            found = moment.astimezone(UTC)
            if found > after:  # in an hour that comes twice cronsim may answer with the first one
                return found
    except OverflowError:
        pass
    return None


@lru_cache(maxsize=1024)
def _explained(line: str) -> str:
    from cronsim.explain import explain

    return explain(line)


def _span(step: int) -> str:
    """Microseconds in words."""
    words = []
    for name in ("day", "hour", "minute"):
        n, step = divmod(step, round(PERIODS[name] * 1_000_000))
        if n:
            words.append(f"{n} {name}{'' if n == 1 else 's'}")
    if step or not words:
        words.append(f"{step / 1_000_000:.15g} second{'' if step == 1_000_000 else 's'}")
    return " ".join(words)


@lru_cache(maxsize=64)
def _zone(tz: str, what: str) -> tzinfo:
    if tz == "UTC":
        return UTC
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(tz)
    except (ValueError, KeyError, OSError, TypeError, AttributeError):
        raise InvalidOption(f"{what}: tz {tz!r:.80}: no such time zone; use a name such as 'Europe/Berlin'") from None


def _check_catch_up(given: object, what: str) -> None:
    if given not in CATCH_UP:
        raise InvalidOption(f'{what}: catch_up {given!r}: use "latest", "all" or "none"')


def _check_fields(expr: str, zone: tzinfo) -> None:
    """Let cronsim read the cron line, and name the field it does not understand."""
    from cronsim import CronSim, CronSimError

    fields = expr.split()
    if len(fields) not in (5, 6):
        raise InvalidOption(
            f"cron {expr!r}: {plural(len(fields), 'field', 'fields')}; use 5 (minute, hour, day-of-month, month, "
            "day-of-week), or 6 with the second first"
        )
    try:
        CronSim(expr, UNIX_EPOCH.astimezone(zone))
    except CronSimError as error:
        found = _BAD.fullmatch(str(error))
        place = next((n for n, (name, _) in enumerate(_FIELDS) if found and name == found[1]), 0)
        name, range_ = _FIELDS[place]
        value = fields[place - 6 + len(fields)]
        if name == "day-of-month" and value.isdigit() and 1 <= int(value) <= 31:
            raise InvalidOption(f"cron {expr!r}: day-of-month {value!r}: month {fields[-2]!r} never has it") from None
        raise InvalidOption(
            f"cron {expr!r}: {name} {value!r}: use {range_}, *, or lists, ranges and steps of these"
        ) from None
    except Exception as error:
        raise InvalidOption(f"cron {expr!r}: cannot be read ({type(error).__name__}: {error})") from None
