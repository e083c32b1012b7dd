"""Says what this worker's code declares of limits, once, when the worker has been told to work.

Not before: a process that is started and found to be broken, or that waits beside the old ones, changes nothing. What
people have set by hand stays. Where workers of two versions declare different numbers, the last one started decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pgqueue.errors import InvalidOption
from pgqueue.loops import persist
from pgqueue.sessions import Session
from pgqueue.statements import integers
from pgqueue.tasks import Task

log = logging.getLogger("pgqueue")


def limits_of(tasks: Iterable[Task[..., Any]]) -> dict[str, int]:
    """How many jobs at once these tasks allow, by the names of their limits. Raises InvalidOption if two disagree."""
    limits: dict[str, int] = {}
    for task in sorted(tasks, key=lambda task: task.name):
        if task.limiting is not None and task.limiting.limit is not None and task.limiting.limit_name is not None:
            name, n = task.limiting.limit_name, task.limiting.limit.n
            if limits.setdefault(name, n) != n:
                raise InvalidOption(
                    f"task {task.name!r}: limit {name!r} is {n} here and {limits[name]} in another task; "
                    "tasks that share a limit give the same number"
                )
    return limits


class Declarer:
    """Writes `limits` down, by name; `changed` is called if that has made a difference."""

    def __init__(
        self, session: Session, *, limits: Mapping[str, int], changed: Callable[[], None], notify: bool
    ) -> None:
        self.declared = not limits
        self._session = session
        self._limits = limits
        self._changed = changed
        self._notify = notify

    async def run(self) -> None:
        """Declare, however often it takes."""
        await persist(self._step, name="declare", until=lambda: self.declared)

    async def _step(self) -> None:
        names, ns = list(self._limits), integers(self._limits.values())
        declare = self._session.link.statement("limits_declare", names=names, ns=ns, notify=self._notify)
        [[(changed, *_)]] = await self._session.run(declare)
        self.declared = True
        if changed:
            log.info("limits declared: %s", ", ".join(f"{name} {self._limits[name]}" for name in sorted(changed)))
            self._changed()
