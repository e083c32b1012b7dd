"""Workers and supervisors: what runs where, and the orders that an operator gives to supervisors.

By the functions that `pgqueue restart`, `quiet` and `scale` call. An order is a row: a supervisor carries it out when
it has heard of it. So the page shows the last order of each supervisor, and what became of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pgqueue.admin.bounded import cut_at
from pgqueue.admin.workers import WORKERS_MOST, Kind, asupervisors, atell, aworkers
from pgqueue.web.pages.page import Asked, Page, lists_of, plain
from pgqueue.web.problems import Problem

SIZE_MOST = 1_000
FIRST = {"workers": 50, "supervisors": 10}
"""So many rows of each list are shown where both are."""


async def workers(asked: Asked) -> Page:
    """The workers that are not known to be dead as items, with what runs on them; the supervisors beside them. With
    `host` those of that host."""
    host, lists = asked.value("host"), lists_of(asked, FIRST)
    if host is not None and any(asked.redaction.hides(path, host) for path in (("host",), ("supervisors", "host"))):
        raise Problem(400, "This cannot be asked", "this host is redacted, so workers cannot be asked for by it")
    found = await asked.read_shared(partial(aworkers, host=host), "workers", host) if lists.has("workers") else []
    supervisors = []
    if lists.has("supervisors"):
        supervisors = await asked.read_shared(partial(asupervisors, host=host), "supervisors", host)
    every: dict[str, Sequence[object]] = {"workers": found, "supervisors": supervisors}
    told = [plain(each) | {"is_heard": each.is_heard} for each in lists.of("supervisors", supervisors)]
    more = {"supervisors": told, "after": lists.after(every), "cut_at": cut_at(found, WORKERS_MOST)}
    more |= {"supervisors_cut_at": cut_at(supervisors, WORKERS_MOST)}
    view = {"host": host or "", "hears": any(each.is_heard for each in supervisors)}
    return Page("workers.html", plain(lists.of("workers", found)), more, view | lists.view(every))


async def restart(asked: Asked) -> Page:
    """Let supervisors replace their worker processes, new ones first."""
    return await _order(asked, "restart")


async def quiet(asked: Asked) -> Page:
    """Let supervisors finish what runs, and start no process until a restart."""
    return await _order(asked, "quiet")


async def scale(asked: Asked) -> Page:
    """Let supervisors keep `size` worker processes."""
    size = asked.whole("size", f"use a whole number from 1 to {SIZE_MOST}", 1, SIZE_MOST)
    return await _order(asked, "scale", size)


async def _order(asked: Asked, kind: Kind, size: int | None = None) -> Page:
    target = _target(asked)
    told = await asked.change(lambda conn: atell(conn, kind, size=size, **target))
    if not told:
        raise Problem(404, "No such supervisor", "No supervisor that fits has sent a heartbeat in the last minute.")
    return Page("", plain(told), {"changed": True}, after="/workers", did="ordered")


def _target(asked: Asked) -> dict[str, Any]:
    """One supervisor, those of a host, or all. That nothing is named does not mean all."""
    supervisor, host, all_of_them = asked.field("supervisor"), asked.field("host"), asked.field("all")
    if (supervisor is not None) + (host is not None) + (all_of_them is not None) != 1:
        raise Problem(400, "This cannot be done", "Name a supervisor, a host, or all, and not more than one of these.")
    if supervisor is not None:
        return {"supervisor": asked.whole("supervisor", "use its id")}
    return {} if host is None else {"host": host}
