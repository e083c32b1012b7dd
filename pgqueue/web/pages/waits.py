"""Why jobs wait, for the overview: each reason with what an operator looks at next.

Called by the overview. Pure: it reads no database. It is made of the numbers that the status is made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pgqueue.admin.depth import Group, Measured, total
from pgqueue.database import shown
from pgqueue.web.pages.page import plain
from pgqueue.web.redaction import Redaction

MOST, QUEUES_MOST = 8, 3
"""So many reasons are shown, and so many queues of a reason."""
WAITING = ("available", "blocked", "scheduled")
BY_QUEUE = frozenset({"paused", "unserved", "unknown"})
BY_TASK = frozenset({"unknown", "task_paused"})
USUAL = frozenset({"slot", "time"})
"""Of each working queue some jobs wait for these. So they come last."""


def single(keys: Mapping[str, str | None], redaction: Redaction) -> dict[str, str]:
    """By reason, the key without its kind: only such as its page shows, since the link to it has to contain it."""
    found = {}
    for kind, key in keys.items():
        if key is not None and key.isprintable() and redaction.awaited(key) == key:
            name = key.partition(":")[2]
            path = ("key",) if kind == "lock" else (f"{kind}s", "name")
            if not redaction.hides(path, name) and not redaction.hides(("key",), key):
                found[kind] = name
    return found


def waits(found: Measured, single: Mapping[str, str]) -> tuple[list[dict[str, Any]], int]:
    """The reasons, those of most jobs first, and how many more there are.

    `single`: the only lock, limit or rate for which jobs wait. A pause, and a queue without a worker, is a reason of
    its own; so is a task that is paused, or that no worker knows.
    """
    groups: dict[tuple[str, str, str, str], list[Group]] = defaultdict(list)
    for group in found.groups:
        if group.state in WAITING:
            queue = group.queue if group.reason in BY_QUEUE else ""
            groups[group.state, group.reason, queue, group.task if group.reason in BY_TASK else ""].append(group)
    ordered = sorted(groups.items(), key=lambda each: (each[0][1] in USUAL, -total(each[1]).n, each[0]))
    return [_wait(*named, of, found) | {"key": single.get(named[1])} for named, of in ordered[:MOST]], len(
        ordered[MOST:]
    )


def _wait(state: str, reason: str, queue: str, task: str, groups: list[Group], found: Measured) -> dict[str, Any]:
    numbers: dict[str, int] = defaultdict(int)
    for group in groups:
        numbers[group.queue] += group.n
    queues = sorted(numbers, key=lambda name: (-numbers[name], name))
    paused = found.paused.get(queue) if reason == "paused" else None
    return {
        "state": state,
        "reason": reason,
        "queue": queue or None,
        "task": task or None,
        "jobs": plain(total(groups)),
        "queues": queues[:QUEUES_MOST],
        "more_queues": len(queues[QUEUES_MOST:]),
        "paused_at": None if paused is None else shown.at(paused),
        "paused_by": found.paused_by.get(queue) if reason == "paused" else None,
    }
