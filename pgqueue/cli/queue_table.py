"""The table of queues, for `status` and `queues`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from pgqueue.admin.depth import Count, QueueInfo
from pgqueue.cli.tables import fitting, span, table

QUEUES_MOST = 40


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
        yield f"… and {rest} more queues; --json prints all"


def counted(queues: Sequence[QueueInfo], now: datetime | None = None) -> Iterator[str]:
    """The line that says how old the numbers are; nothing if they are those of now."""
    times = [queue.counted_at for queue in queues if queue.counted_at is not None]
    age = (now or datetime.now(UTC)) - min(times) if times else timedelta()
    if age > timedelta(seconds=1):
        yield f"Counted {span(age)} ago, by the leading worker."


def _stuck(queue: QueueInfo) -> bool:
    return queue.unserved and _waiting(queue.available, queue.scheduled, queue.blocked, queue.running) > 0


def _waiting(*counts: Count) -> int:
    return sum(count.n for count in counts)


def _served(queue: QueueInfo) -> str:
    served = "NOT SERVED" if queue.unserved else str(queue.workers)
    return f"PAUSED {served}" if queue.paused_at else served
