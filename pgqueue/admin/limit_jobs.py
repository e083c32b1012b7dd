"""Which jobs have a limit, and which wait for a limit or a rate: the first ones of each, to look at.

Called by the dashboard. `limits` counts them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pgqueue.admin.locks import Holder
from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text
from pgqueue.errors import InvalidOption

Kind = Literal["limit", "rate"]


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
    schema, _ = client()
    return await drivers.arun(conn, Statement(text("limit_jobs_list", schema), {"kind": kind, "name": name}, _read))


def _read(rows: list[Row]) -> LimitJobs:
    found: dict[str, Any] = json.loads(rows[0][0])
    return LimitJobs(
        tuple(Holder(**each) for each in found["holders"]), tuple(Waiter(**each) for each in found["waiters"])
    )
