"""What holds back a job that waits for its keys: its lock, then its limit, then its rate.

A blocked job waits for one key, and says which. It has what comes before that key, and has not asked for what comes
after. A job that is available has asked for nothing yet, unless it holds its lock and its limit. Each key that it has
not is looked at: it will be blocked for one that has no room. Decides from what a statement has answered; asks nothing
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pgqueue.admin.queries import JobInfo
from pgqueue.admin.why.reasons import Facts, Reason, counted, holders_of, lasting
from pgqueue.database import shown
from pgqueue.jobs.keys import LIMIT, LOCK, RATE
from pgqueue.plain_text import plural


def wanted(job: JobInfo, *, holds: bool) -> list[str]:
    """The keys that the job waits for, or will, in the order in which it asks for them."""
    given = ((LOCK, job.lock_key), (LIMIT, job.limit_key), (RATE, job.rate_key))
    keys = [kind + key for kind, key in given if key is not None]
    if job.state == "blocked":
        return [] if job.key is None else [job.key, *_after(job.key, keys)]
    if job.state != "available":
        return []
    return [key for key in keys if key.startswith(RATE)] if holds else keys


def _after(waits_for: str, keys: Sequence[str]) -> Sequence[str]:
    """The keys that are asked for when the job has this one."""
    return keys[keys.index(waits_for) + 1 :] if waits_for in keys else ()


def reasons(job: JobInfo, key: str, facts: Facts) -> list[Reason]:
    """Why the job has not this key."""
    kind, _, name = key.partition(":")
    now = shown.moment(facts["now"])
    assert now is not None
    if kind == "lock":
        return _lock(job, name, facts, now)
    return _limit(job, name, facts, now) if kind == "limit" else _rate(job, name, facts)


def _lock(job: JobInfo, name: str, facts: Facts, now: datetime) -> list[Reason]:
    most, held = facts["most"], len(facts["holders"])
    if held < most and not facts["before"]:
        return []
    details = {"key": name, "most": most, "holders": held, **_place_in_line(job, facts)}
    return [_held(job, "lock", f"lock {name!r}", facts, now, details)]


def _limit(job: JobInfo, name: str, facts: Facts, now: datetime) -> list[Reason]:
    most, held = facts["most"], len(facts["holders"])
    if most is None:
        text = f"no live worker has declared limit {name!r}: no job is let in"
        return [Reason("limit_undeclared", text, None, {"name": name})]
    if held < most and not facts["before"]:
        return []
    details = {"name": name, "most": most, "holders": held, **_place_in_line(job, facts)}
    if not most:
        return [Reason("limit", f"limit {name!r} is 0: no job is let in", None, details)]
    return [_held(job, "limit", f"limit {name!r}", facts, now, details)]


def _held(job: JobInfo, code: str, what: str, facts: Facts, now: datetime, details: dict[str, object]) -> Reason:
    holders, most, place = holders_of(facts["holders"]), facts["most"], facts["before"] + 1
    held = len(facts["holders"])
    since = next((holder.since for holder in holders if holder.since is not None), None)
    if held < most:
        text = f"{what} has room"
    elif held > most:
        text = f"{what} is held by {held:,} jobs, and {most:,} may: {', '.join(map(str, holders[:3]))}"
        text += ", …" if held > 3 else ""
    elif most == 1 and holders:
        text = f"{what} is held by {holders[0]}"
        text += f" for {lasting((now - since).total_seconds())}" if since else f", which is {_later(holders[0].state)}"
    else:
        text = f"{what} is held by {held:,} of {most:,}" + (f": {', '.join(map(str, holders[:3]))}" if holders else "")
        text += ", …" if held > 3 else ""
    # A job that has not asked for the key is not in line yet, and may never be: its task may say `skip`.
    text += f"; the job {'is' if job.state == 'blocked' else 'would be'} {_ordinal(place, facts['whole'])} in line"
    return Reason(code, text, since, details, holders)


def _rate(job: JobInfo, name: str, facts: Facts) -> list[Reason]:
    rate = facts["rate"]
    if rate is None:
        text = f"no live worker has declared rate {name.partition(':')[0]!r}: no job is let in"
        return [Reason("rate_undeclared", text, None, {"name": name})]
    before, pause = facts["before"], rate["pause"]
    if pause <= 0 and not before:
        return []
    seconds = pause + before * rate["gap"]
    details = {
        "name": name,
        "count": rate["count"],
        "period": rate["period"],
        "next_start": pause,
        "seconds": seconds,
        **_place_in_line(job, facts),
    }
    text = f"rate {name!r} ({rate['count']} in {lasting(rate['period'])}): the next start is in {lasting(pause)}"
    if before:
        text += f"; the job is {_ordinal(before + 1, facts['whole'])} in line, so it starts in about {lasting(seconds)}"
    return [Reason("rate", text, None, details)]


def _place_in_line(job: JobInfo, facts: Facts) -> dict[str, object]:
    before = facts["before"]
    return {"before": min(before, 1_000), "exact": facts["whole"] and before <= 1_000}


def _later(state: str) -> str:
    return {"available": "granted and waits for a slot", "scheduled": "to run again later"}.get(state, state)


def _ordinal(place: int, whole: bool) -> str:
    """4th; from ~1,000 on, or if not all were looked at, behind at least so many."""
    if place > 1_000 or not whole:
        return f"behind {plural(place - 1, 'other', 'others', counted(place - 1, whole))}"
    ending = "th" if 10 < place % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place:,}{ending}"
