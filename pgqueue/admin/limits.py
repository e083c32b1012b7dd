"""Limits and rates by hand: list them with the jobs that run and wait, and set how many jobs may run or start.

Called by the CLI, inside the caller's transaction, on any connection. A limit is a row that every statement reads that
gives a job its key. A change therefore works without a notification; the notification only makes it quick. Waiting
jobs are unblocked by a sweep, which counts holders as always. No job is stopped: after a limit was lowered, no job
starts until enough have ended. Rates work in the same way: every statement that lets a job start reads the row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TypeVar

from pgqueue.admin.bounded import Bounded
from pgqueue.config import client
from pgqueue.database.asking import asks, named, said, twin
from pgqueue.database.statements import Row, Statement
from pgqueue.errors import InvalidOption, LimitNotFound
from pgqueue.jobs.actors import actor_of
from pgqueue.jobs.values import PERIODS, check_text, parse_rate, whole

T = TypeVar("T")

FIRST_RATE = "rate:"
KEYS_MOST = 1_000
LIMIT_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class LimitInfo:
    """A limit and its jobs.

    - `n`: how many jobs may run at once. None: the limit is neither declared nor set, and no job may start.
    - `declared`: the number that the code declares; None if it declares none.
    - `by_hand`: whether `n` was set by hand; else it is `declared`.
    - `running`: number of jobs that run under the limit.
    - `held`: number of jobs that have the limit and wait for a slot, a rate or their retry.
    - `waiting`: number of jobs that wait for the limit; 10,001 means more than 10,000.
    - `waited`: seconds that the first of them has waited.
    - `undeclared`: jobs wait for the limit, and it is neither declared nor set.
    """

    name: str
    n: int | None
    declared: int | None
    by_hand: bool
    running: int
    held: int
    waiting: int
    waited: float | None
    undeclared: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """The present number of a limit."""

    name: str
    n: int
    declared: int | None
    by_hand: bool


@dataclass(frozen=True, slots=True)
class RateInfo:
    """A rate and the jobs that wait for it.

    - `rate`: how many jobs may start, such as 100/minute. None: the rate is not declared, and no job may start.
    - `burst`: how many jobs may start at once after a rest.
    - `declared`: the rate that the code declares; None if it declares none.
    - `by_hand`: whether `rate` was set by hand; else it is `declared`.
    - `lines`: number of keys with waiting jobs. Of very many keys 1,000 are looked at.
    - `waiting`: number of waiting jobs.
    - `waited`: seconds that the first of them has waited.
    - `undeclared`: jobs wait for the rate, and no worker has declared it.
    """

    name: str
    rate: str | None
    burst: int | None
    declared: str | None
    by_hand: bool
    lines: int
    waiting: int
    waited: float | None
    undeclared: bool = False


@dataclass(frozen=True, slots=True)
class Undeclared:
    """A limit or a rate (`kind`) that is neither declared nor set, while `waiting` jobs wait for it.

    None of these jobs may start. A `waiting` of 10,001 means more than 10,000. `waited`: for how many seconds the first
    job in line has waited.
    """

    kind: str
    name: str
    waiting: int
    waited: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Pace:
    """The present value of a rate."""

    name: str
    rate: str
    declared: str | None
    by_hand: bool


@asks
def undeclared(conn: object) -> Statement[list[Undeclared]]:
    """The limits and rates that jobs wait for and that are neither declared nor set, by name. Of very many keys of
    rates 1,000 are looked at."""
    return said("limits_undeclared", list[Undeclared], after=FIRST_RATE, n=KEYS_MOST)


def unknown(found: str) -> list[Undeclared]:
    """Read the answer of `limits_undeclared`."""
    return [Undeclared(**each) for each in json.loads(found)]


@asks
def rates(conn: object, *, begins: str = "") -> Statement[list[RateInfo]]:
    """All rates whose names begin so and that were declared or that jobs wait for, by name."""
    check_text(begins, "begins")
    return named("limits_list_rates", _rates_listed, begins=begins)


@asks
def bounded_rates(conn: object, *, begins: str = "") -> Statement[Bounded[RateInfo]]:
    """As `rates`, and also says whether jobs may wait for other keys: of these 1,000 are looked at."""
    check_text(begins, "begins")
    return named("limits_list_rates", lambda rows: _bounded(_rates_listed(rows), rows), begins=begins)


abounded_rates = twin(bounded_rates)
"""`bounded_rates` for async connections."""


@asks
def change_rate(conn: object, name: str, rate: str | None, *, actor: str | None = None) -> Statement[Pace]:
    """Set a rate by hand, such as "50/minute"; None sets it back to what the code declares.

    The burst stays as declared. Raises InvalidOption for an invalid rate, LimitNotFound if no worker has declared it.
    """
    check_text(name, "rate")
    count, period = (None, None) if rate is None else parse_rate(rate)

    def read(rows: list[Row]) -> Pace:
        if not rows:
            raise LimitNotFound(
                f"there is no rate {name!r} to set: no worker has declared it; pgqueue limits shows what there is"
            )
        now, per, _, declared, declared_per, by_hand = rows[0][:6]
        return Pace(name, shown(now, per), None if declared is None else shown(declared, declared_per), by_hand)

    by = actor_of(actor)
    return named("limits_set_rate", read, name=name, count=count, period=period, notify=client()[1], actor=by)


achange_rate = twin(change_rate)
"""`change_rate` for async connections."""


def shown(count: int, period: float) -> str:
    """A rate as people write it.

    >>> shown(100, 60.0), shown(5, 10.0), shown(3, 7200.0)
    ('100/minute', '5/10s', '3/2h')
    """
    for unit in ("day", "hour", "minute", "second"):
        times, rest = divmod(period, PERIODS[unit])
        if times >= 1 and not rest:
            return f"{count}/{unit}" if times == 1 else f"{count}/{times:g}{unit[0]}"
    return f"{count}/{period:g}s"


@asks
def limits(conn: object, *, begins: str = "") -> Statement[list[LimitInfo]]:
    """All limits whose names begin so and that were declared or set, or that jobs wait for, by name."""
    check_text(begins, "begins")
    return named("limits_list", _listed, begins=begins)


@asks
def bounded_limits(conn: object, *, begins: str = "") -> Statement[Bounded[LimitInfo]]:
    """As `limits`, and also says whether jobs may wait for others that are not declared: 1,000 are looked at."""
    check_text(begins, "begins")
    return named("limits_list", lambda rows: _bounded(_listed(rows), rows), begins=begins)


abounded_limits = twin(bounded_limits)
"""`bounded_limits` for async connections."""


@asks
def change(conn: object, name: str, n: int | None, *, actor: str | None = None) -> Statement[Setting]:
    """Set a limit by hand: `n` jobs may run at once from now on. None sets it back to what the code declares.

    With 0 no further job starts. Raises InvalidOption for an invalid number. Raises LimitNotFound if no worker has
    declared the limit; with a number only if no job waits for it either.
    """
    if not name.isprintable():
        raise InvalidOption(f"limit {name!r:.80}: use a name of printable text")
    if n is not None and not whole(n, 0, LIMIT_MOST):
        raise InvalidOption(f"limit {name}: {n!r} jobs at once: use a whole number from 0 to {LIMIT_MOST}")

    def read(rows: list[Row]) -> Setting:
        if rows:
            return Setting(name, *rows[0][:3])
        why = "no worker has declared it" + (" and no job waits for it" if n is not None else "")
        raise LimitNotFound(f"there is no limit {name!r} to set: {why}; pgqueue limits shows what there is")

    return named("limits_set", read, name=name, n=n, notify=client()[1], actor=actor_of(actor))


achange = twin(change)
"""`change` for async connections."""


def _rates_listed(rows: list[Row]) -> list[RateInfo]:
    return [
        RateInfo(
            each["name"],
            None if each["count"] is None else shown(each["count"], each["period"]),
            each["burst"],
            None if each["declared_count"] is None else shown(each["declared_count"], each["declared_period"]),
            each["by_hand"],
            each["lines"],
            each["waiting"],
            each["waited"],
            each["count"] is None,
        )
        for each in json.loads(rows[0][0])
    ]


def _listed(rows: list[Row]) -> list[LimitInfo]:
    return [LimitInfo(**each, undeclared=each["n"] is None) for each in json.loads(rows[0][0])]


def _bounded(found: list[T], rows: list[Row]) -> Bounded[T]:
    return Bounded(found, KEYS_MOST if rows[0][1] else None)
