"""Locks, limits and rates: which jobs hold them and wait for them, and what an operator changes of them by hand.

By the functions that `pgqueue locks` and `pgqueue limits` call. A key or a name that is hidden, or is shown with other
letters because it is not printable, has no buttons: a form would have to contain it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Literal, TypeVar

from pgqueue.admin.bounded import Bounded, cut_at
from pgqueue.admin.limit_jobs import JOBS_MOST, Kind, alimit_jobs
from pgqueue.admin.limits import Pace, Setting, abounded_limits, abounded_rates, achange, achange_rate
from pgqueue.admin.locks import abounded_locks, arelease
from pgqueue.web.pages.page import Asked, Page, lists_of, part_of, plain, said_of
from pgqueue.web.problems import Problem

T = TypeVar("T")

PLACE = "/limits"
FIRST = {"locks": 15, "limits": 15, "rates": 15}
"""So many rows of each list are shown where all three are."""


async def limits(asked: Asked) -> Page:
    """The locks that are held or waited for as items; limits and rates beside them. With `lock` only that one.

    With `name` those that begin so. What is hidden is left out of these: it would tell how it begins.
    """
    only, begins, lists = asked.value("lock"), asked.value("name") or "", lists_of(asked, FIRST)
    if only is not None and _is_hidden(asked, "lock", ("key",), only):
        raise Problem(400, "This cannot be asked", "this key is redacted, so it cannot be asked for")
    (of_locks, no_locks), (of_limits, no_limits), (of_rates, no_rates) = (
        await _part(asked, lists.has("locks"), partial(abounded_locks, key=only, begins=begins), "locks", only, begins),
        await _part(asked, lists.has("limits"), partial(abounded_limits, begins=begins), "limits", begins),
        await _part(asked, lists.has("rates"), partial(abounded_rates, begins=begins), "rates", begins),
    )
    locks, found, rates = of_locks.rows, of_limits.rows, of_rates.rows
    problems = [each for each in (no_locks, no_limits, no_rates) if each is not None]
    if problems and len(problems) == sum(map(lists.has, FIRST)):
        raise problems[0]
    is_lock = partial(_is_shown, asked, "lock", ("key",))
    is_limit, is_rate = (partial(_is_shown, asked, None, (each, "name")) for each in ("limits", "rates"))
    if begins:
        locks = [each for each in locks if is_lock(each.key)]
        found = [each for each in found if is_limit(each.name)]
        rates = [each for each in rates if is_rate(each.name)]
    every: dict[str, Sequence[object]] = {"locks": locks, "limits": found, "rates": rates}
    locks, found, rates = [*lists.of("locks", locks)], [*lists.of("limits", found)], [*lists.of("rates", rates)]
    view = {
        "only": only,
        "begins": begins,
        "shown_locks": [is_lock(each.key) for each in locks],
        "shown_limits": [is_limit(each.name) for each in found],
        "shown_rates": [is_rate(each.name) for each in rates],
    }
    items = [plain(each) | {"key": asked.redaction.key("lock", each.key)} for each in locks]
    more = {"limits": plain(found), "rates": plain(rates), "after": lists.after(every)}
    more |= {"cut_at": of_locks.cut_at, "limits_cut_at": of_limits.cut_at, "rates_cut_at": of_rates.cut_at}
    more |= {"problems": said_of(*problems)}
    return Page("limits.html", items, more, view | lists.view(every))


async def _part(
    asked: Asked, has: bool, ask: Callable[[object], Awaitable[Bounded[T]]], *about: object
) -> tuple[Bounded[T], Problem | None]:
    """A list of the page, if it is shown; empty with the problem if that could not be read."""
    if not has:
        return Bounded([], None), None
    found, problem = await asked.shared(repr(about), lambda connections: part_of(connections, ask))
    return found or Bounded([], None), problem


async def jobs(asked: Asked) -> Page:
    """The jobs that have a limit, and the first that wait for a limit or a rate."""
    limit, rate = asked.value("limit"), asked.value("rate")
    if (limit is None) == (rate is None):
        raise Problem(400, "This cannot be asked", "Name a limit or a rate, and not both.")
    kind: Kind = "rate" if limit is None else "limit"
    name = str(rate if limit is None else limit)
    # The name of a rate has no colon: with one it would be the key of a job.
    of_job = kind if kind == "limit" or ":" in name else None
    if _is_hidden(asked, of_job, (f"{kind}s", "name"), name):
        raise Problem(400, "This cannot be asked", "this name is redacted, so its jobs cannot be asked for")
    found = await asked.read(lambda conn: alimit_jobs(conn, kind, name))
    waiters = [
        plain(each) | asked.redaction.shown({"key": asked.redaction.awaited(each.key)}) for each in found.waiters
    ]
    cut = {f"{each}_cut_at": cut_at(getattr(found, each), JOBS_MOST) for each in ("holders", "waiters")}
    return Page("limit_jobs.html", [{"kind": kind, "name": name, **plain(found), "waiters": waiters, **cut}])


async def set_limit(asked: Asked) -> Page:
    """Let `n` jobs of the limit run at once."""
    name, n = _name(asked), asked.whole("n", "use a whole number; with 0 no further job starts")
    return _set(await asked.change(lambda conn: achange(conn, name, n)), "limit set")


async def reset_limit(asked: Asked) -> Page:
    """Let the limit be what the code declares."""
    name = _name(asked)
    return _set(await asked.change(lambda conn: achange(conn, name, None)), "limit back")


async def set_rate(asked: Asked) -> Page:
    """Let jobs start at this rate, such as `50/minute`."""
    name, rate = _name(asked), asked.needed("rate", "write it like 50/minute")
    return _set(await asked.change(lambda conn: achange_rate(conn, name, rate)), "rate set")


async def reset_rate(asked: Asked) -> Page:
    """Let the rate be what the code declares."""
    name = _name(asked)
    return _set(await asked.change(lambda conn: achange_rate(conn, name, None)), "rate back")


async def release(asked: Asked) -> Page:
    """Take a key from the jobs that hold it and do not run. Raises Problem for a key that is redacted."""
    key = asked.needed("key", "give the key of a lock")
    if _is_hidden(asked, "lock", ("key",), key):
        raise Problem(400, "This cannot be done", "this key is redacted; release it by `pgqueue locks release`")
    done = await asked.change(lambda conn: arelease(conn, key))
    did = "released" if done.ids else "key kept" if done.running else "key free"
    return Page("", [{"key": key, **plain(done)}], {"changed": bool(done.ids)}, after=PLACE, did=did)


def _is_hidden(asked: Asked, kind: Kind | Literal["lock"] | None, path: tuple[str, ...], key: str) -> bool:
    """Whether it is hidden at its path on the page, or where a job has it as its key of this kind."""
    return asked.redaction.hides(path, key) or (kind is not None and asked.redaction.key(kind, key) != key)


def _is_shown(asked: Asked, kind: Kind | Literal["lock"] | None, path: tuple[str, ...], key: str) -> bool:
    return key.isprintable() and not _is_hidden(asked, kind, path, key)


def _name(asked: Asked) -> str:
    return asked.needed("name", "give the name of a limit or of a rate")


def _set(done: Setting | Pace, did: str) -> Page:
    return Page("", [asdict(done)], {"changed": True}, after=PLACE, did=did)
