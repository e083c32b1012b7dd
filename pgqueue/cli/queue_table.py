"""The table of queues, for `status` and `queues`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from pgqueue.admin.depth import Count, QueueInfo
from pgqueue.cli.tables import columns_of, fitting, short, span, table, width
from pgqueue.plain_text import plain, plural

QUEUES_MOST = 40
PAUSES_MOST = 20


def queue_table(queues: Sequence[QueueInfo], here: Mapping[str, int] | None = None) -> Iterator[str]:
    """The lines of the table. `here`: how many tasks of the modules that were named declare each queue."""
    # Queues that need an operator come first.
    urgent = sorted(queues, key=lambda queue: (not _stuck(queue), -queue.available.n, queue.name))
    shown, rest = fitting(urgent, QUEUES_MOST)
    stuck = any(queue.longest_blocked is not None for queue in queues)
    rows = [
        [
            *(queue.name, queue.available, queue.scheduled, queue.blocked, queue.running, span(queue.oldest)),
            *([span(queue.longest_blocked)] if stuck else []),
            _served(queue),
            *([] if here is None else [here.get(queue.name, 0)]),
        ]
        for queue in shown
    ]
    heads = [
        "QUEUE",
        "AVAILABLE",
        "SCHEDULED",
        "BLOCKED",
        "RUNNING",
        "OLDEST",
        *(["STUCK"] if stuck else []),
        "WORKERS",
    ]
    heads += [] if here is None else ["HERE"]
    yield from table(heads, rows, right="AVAILABLE SCHEDULED BLOCKED RUNNING OLDEST STUCK WORKERS HERE", gives="QUEUE")
    if rest:
        yield f"… and {plural(rest, 'more queue', 'more queues')}; --json prints all"


def counted(at: datetime, now: datetime) -> Iterator[str]:
    """The line that says how old the numbers are; nothing if they are those of now. Both times are the database's."""
    if now - at > timedelta(seconds=1):
        yield f"Counted {span(now - at)} ago, by the leading worker."


def pauses(found: Iterable[tuple[str, str, datetime | None, str | None]], now: datetime) -> Iterator[str]:
    """A line for each pause: what (`queue` or `task`) and which one, since when, by which actor if there is room."""
    shown, rest = fitting([each for each in found if each[2] is not None], PAUSES_MOST)
    for what, name, since, by in shown:
        yield paused_line(f"PAUSED {what} {plain(name)}", since, by, now)
    if rest:
        yield f"… and {plural(rest, 'more pause', 'more pauses')}; --json prints all"


def paused_line(start: str, since: datetime | None, by: str | None, now: datetime) -> str:
    """`start`, and for how long; a name that has no room on the terminal is shortened, the actor left out."""
    age, columns = f" for {span(now - since)}" if since else "", width()
    actor = "" if by is None else f" by {plain(by)}"
    if columns is None:
        return start + age + actor
    line = short(start, columns - len(age)) + age
    return line + actor if columns_of(line + actor) <= columns else line


def _stuck(queue: QueueInfo) -> bool:
    return queue.unserved and _waiting(queue.available, queue.scheduled, queue.blocked, queue.running) > 0


def _waiting(*counts: Count) -> int:
    return sum(count.n for count in counts)


def _served(queue: QueueInfo) -> str:
    served = "NOT SERVED" if queue.unserved else str(queue.workers)
    return f"PAUSED {served}" if queue.paused_at else served
