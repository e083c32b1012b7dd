"""What people see of limits and rates, and set by hand: how many jobs of each may run at once, or start in a period,
how many run and how many wait.

Called by the CLI, inside the caller's transaction, on any connection. A limit is a row that every admit reads, so a
change needs no worker to be told; that it is told all the same makes it quick. Waiting jobs are let in by a sweep,
which counts as always. No job is stopped: a smaller limit lets none in until enough have ended. With rates it is the
same: every statement that lets a job start reads the row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text
from pgqueue.errors import InvalidOption, LimitNotFound
from pgqueue.jobs.validation import UNITS, parse_rate

FIRST_RATE = "rate:"
KEYS_MOST = 1_000
LIMIT_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class LimitInfo:
    """A limit: `n` jobs at once (None: neither declared nor set, so none is let in), `declared` by the code (None: it
    is not), other than that only if it was set `by_hand`. `running` jobs run under it, `held` have it and wait for a
    slot, a rate or their retry; `waiting` wait for it (10,001: more than 10,000), the first of them for `waited`
    seconds. `undeclared`: jobs wait for it, and it is neither declared nor set."""

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
    """What a limit is now."""

    name: str
    n: int
    declared: int | None
    by_hand: bool


@dataclass(frozen=True, slots=True)
class RateInfo:
    """A rate: what may start (`rate`, such as 100/minute; None: not declared, so no job may), `burst` at once,
    `declared` by the code (None: it is not), other than that only if it was set `by_hand`. `waiting` jobs wait, in so
    many `lines` (one for each key), the first of them for `waited` seconds; of very many lines 1,000 are looked at.
    `undeclared`: jobs wait for it, and no worker has declared it."""

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
    """A `limit` or a `rate` (`kind`) that `waiting` jobs wait for (10,001: more than 10,000), and that is
    neither declared nor set: none of them is let in."""

    kind: str
    name: str
    waiting: int


@dataclass(frozen=True, slots=True)
class Pace:
    """What a rate is now."""

    name: str
    rate: str
    declared: str | None
    by_hand: bool


def undeclared(conn: object) -> list[Undeclared]:
    """What jobs wait for and is neither declared nor set, by name; of very many keys of rates 1,000 are looked at."""
    schema, _ = client()
    params = {"after": FIRST_RATE, "n": KEYS_MOST}
    return drivers.run(conn, Statement(text("limits_undeclared", schema), params, lambda rows: unknown(rows[0][0])))


def unknown(found: str) -> list[Undeclared]:
    """What `limits_undeclared` has found."""
    return [Undeclared(**each) for each in json.loads(found)]


def rates(conn: object) -> list[RateInfo]:
    """Every rate that was declared, or that jobs wait for, by name."""
    schema, _ = client()
    return drivers.run(conn, Statement(text("limits_list_rates", schema), {}, _rates_listed))


def change_rate(conn: object, name: str, rate: str | None) -> Pace:
    """Let so many jobs of this rate start from now on, such as "50/minute"; None: as the code declares.

    The burst stays what the code says. Raises InvalidOption for a rate that cannot be; LimitNotFound if no worker has
    declared it.
    """
    count, period = (None, None) if rate is None else parse_rate(rate)
    schema, notify = client()
    params = {"name": name, "count": count, "period": period, "notify": notify}
    found = drivers.run(conn, Statement(text("limits_set_rate", schema), params, list))
    if not found:
        raise LimitNotFound(
            f"there is no rate {name!r} to set: no worker has declared it; pgqueue limits shows what there is"
        )
    now, per, _, count, period, by_hand = found[0][:6]
    return Pace(name, shown(now, per), None if count is None else shown(count, period), by_hand)


def shown(count: int, period: float) -> str:
    """A rate as people write it.

    >>> shown(100, 60.0), shown(5, 10.0), shown(3, 7200.0)
    ('100/minute', '5/10s', '3/2h')
    """
    for unit in ("day", "hour", "minute", "second"):
        times, rest = divmod(period, UNITS[unit])
        if times >= 1 and not rest:
            return f"{count}/{unit}" if times == 1 else f"{count}/{times:g}{unit[0]}"
    return f"{count}/{period:g}s"


def limits(conn: object) -> list[LimitInfo]:
    """Every limit that was declared or set, or that jobs wait for, by name."""
    schema, _ = client()
    return drivers.run(conn, Statement(text("limits_list", schema), {}, _listed))


def change(conn: object, name: str, n: int | None) -> Setting:
    """Let `n` jobs of this limit run at once from now on, whatever the code declares; None: what the code declares.

    0 lets no job in any more. Raises InvalidOption for a number that cannot be; LimitNotFound if no worker has declared
    the limit and no job waits for it, or what it is to be again is not declared.
    """
    if not name.isprintable():
        raise InvalidOption(f"limit {name!r:.80}: use a name of printable text")
    if n is not None and (isinstance(n, bool) or not 0 <= n <= LIMIT_MOST):
        raise InvalidOption(f"limit {name}: {n!r} jobs at once: use a whole number from 0 to {LIMIT_MOST}")
    schema, notify = client()
    params = {"name": name, "n": n, "notify": notify}
    found = drivers.run(conn, Statement(text("limits_set", schema), params, list))
    if not found:
        why = "no worker has declared it" + (" and no job waits for it" if n is not None else "")
        raise LimitNotFound(f"there is no limit {name!r} to set: {why}; pgqueue limits shows what there is")
    return Setting(name, *found[0][:3])


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
