"""Which jobs have a limit, and which wait for a limit or a rate: the first ones of each, to look at.

Called by the dashboard. `limits` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pgqueue.admin.locks import Holder
from pgqueue.database import drivers
from pgqueue.database.asking import said
from pgqueue.errors import InvalidOption

Kind = Literal["limit", "rate"]

JOBS_MOST = 100
"""So many jobs that have a limit are read, and so many that wait."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A job that has waited for `waited` seconds. `key` is what it waits for: a rate may have many keys."""

    id: int
    task: str
    queue: str
    key: str
    waited: float


@dataclass(frozen=True, slots=True)
class LimitJobs:
    """At most 100 jobs that have the limit, and the first 100 that wait for it. A rate has no holders."""

    holders: tuple[Holder, ...]
    waiters: tuple[Waiter, ...]


async def alimit_jobs(conn: object, kind: Kind, name: str) -> LimitJobs:
    """The jobs of the limit or the rate of this name; none if there is no such name. Raises InvalidOption."""
    if not name.isprintable():
        raise InvalidOption(f"{kind} {name!r:.80}: use a name of printable text")
    return await drivers.arun(conn, said("limit_jobs_list", LimitJobs, kind=kind, name=name))


async def asingle_keys(conn: object) -> dict[str, str | None]:
    """By `lock`, `limit` and `rate`: the key, such as `lock:customer:7`, if all its blocked jobs wait for this one."""
    return await drivers.arun(conn, said("limit_jobs_single_keys", dict[str, str | None]))
