"""The queues on the overview, those in need first: no worker, stuck, behind, paused; then those with most jobs.

Called by the overview. Pure: it reads no database.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pgqueue.admin.depth import Count, Measured, QueueInfo, queue_list
from pgqueue.admin.doctor import STUCK_SECONDS
from pgqueue.admin.history import DepthRow
from pgqueue.web import charts
from pgqueue.web.pages.figures import LEAST, STEP, STEPS
from pgqueue.web.pages.history import begin
from pgqueue.web.pages.page import plain
from pgqueue.web.pages.queue import TREND, slope

MOST = 8
BEHIND_SECONDS = 60.0
"""A queue is behind if a job that could run has waited for so long."""
NEEDS = ("no worker", "stuck", "behind", "paused")


@dataclass(frozen=True, slots=True)
class InNeed:
    """A queue that needs somebody: the word of `NEEDS` for it, and how many jobs wait in it."""

    queue: str
    need: str
    waiting: Count


def ordered(found: Measured) -> list[QueueInfo]:
    """All queues in this order; the first `MOST` of them are shown."""
    return sorted(queue_list(found, None), key=_order)


def in_need(listed: Iterable[QueueInfo]) -> tuple[InNeed, ...]:
    """Those of the queues that need somebody, in the same order."""
    return tuple(InNeed(each.name, need, _waiting(each)) for each in listed if (need := _need(each)) is not None)


def queues(shown: Iterable[QueueInfo], depths: Sequence[DepthRow] | None, now: datetime) -> list[dict[str, Any]]:
    """What is said of them. `trend` is in jobs a minute, above 0 if a queue rises; None if too little was measured."""
    of_queue: dict[str, list[DepthRow]] = defaultdict(list)
    for row in depths or ():
        of_queue[row.queue].append(row)
    return [_queue(each, of_queue[each.name], now) for each in shown]


def _queue(queue: QueueInfo, depths: Sequence[DepthRow], now: datetime) -> dict[str, Any]:
    line = _line(depths, now)
    return {
        "queue": queue.name,
        "need": _need(queue),
        "waiting": plain(_waiting(queue)),
        "running": plain(queue.running),
        "oldest": queue.oldest,
        "workers": queue.workers,
        "paused_at": queue.paused_at,
        "paused_by": queue.paused_by,
        "trend": slope([(row.at, row.waiting) for row in depths if row.at >= now - TREND]),
        "line": plain(line) if line.lines else None,
    }


def _order(queue: QueueInfo) -> tuple[int, float, int, str]:
    need = _need(queue)
    place = len(NEEDS) if need is None else NEEDS.index(need)
    return place, -(queue.oldest or 0.0) if need == "behind" else 0.0, -_waiting(queue).n, queue.name


def _need(queue: QueueInfo) -> str | None:
    if queue.paused_at is not None:
        return "paused" if _waiting(queue).n else None
    if queue.unserved and (_waiting(queue).n or queue.oldest is not None):
        return "no worker"
    if queue.longest_blocked is not None and queue.longest_blocked > STUCK_SECONDS:
        return "stuck"
    return "behind" if queue.oldest is not None and queue.oldest >= BEHIND_SECONDS else None


def _waiting(queue: QueueInfo) -> Count:
    parts = (queue.available, queue.blocked)
    return Count(sum(each.n for each in parts), all(each.exact for each in parts))


def _line(depths: Iterable[DepthRow], now: datetime) -> charts.Chart:
    """The most jobs of each step of the last hour."""
    first, most = begin(now, STEP) - (STEPS - 1) * STEP, dict[int, int]()
    for row in depths:
        place = (row.at - first) // STEP
        most[place] = max(row.waiting, most.get(place, 0))
    return charts.line_of([most.get(place) for place in range(STEPS)], LEAST)
