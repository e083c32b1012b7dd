"""Says what this worker's code declares of limits and rates, once, when the worker has been told to work.

Not before: a process that is started and found to be broken, or that waits beside the old ones, changes nothing. What
people have set by hand stays. Where workers of two versions declare different numbers, the last one started decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pgqueue.errors import InvalidOption
from pgqueue.loops import persist
from pgqueue.options import Rate
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


def rates_of(tasks: Iterable[Task[..., Any]]) -> dict[str, Rate]:
    """The rates of these tasks by name. Raises InvalidOption if two disagree."""
    rates: dict[str, Rate] = {}
    for task in sorted(tasks, key=lambda task: task.name):
        if task.limiting is not None and task.limiting.rate is not None and task.limiting.rate_name is not None:
            name, rate = task.limiting.rate_name, task.limiting.rate
            other = rates.setdefault(name, rate)
            if (other.count, other.period, other.burst) != (rate.count, rate.period, rate.burst):
                raise InvalidOption(
                    f"task {task.name!r}: rate {name!r} is {rate.rate} here (burst {rate.burst}) and {other.rate} "
                    f"(burst {other.burst}) in another task; tasks that share a rate give the same"
                )
    return rates


class Declarer:
    """Writes `limits` and `rates` down, by name; `changed` is called if that has made a difference."""

    def __init__(
        self,
        session: Session,
        *,
        limits: Mapping[str, int],
        rates: Mapping[str, Rate],
        changed: Callable[[], None],
        notify: bool,
    ) -> None:
        self.declared = not limits and not rates
        self._session = session
        self._limits = limits
        self._rates = rates
        self._changed = changed
        self._notify = notify

    async def run(self) -> None:
        """Declare, however often it takes."""
        await persist(self._step, name="declare", until=lambda: self.declared)

    async def _step(self) -> None:
        link, limits, rates = self._session.link, self._limits, self._rates
        [[(limited, *_)], [(rated, *_)]] = await self._session.run(
            link.statement("limits_declare", names=list(limits), ns=integers(limits.values()), notify=self._notify),
            link.statement(
                "rates_declare",
                names=list(rates),
                counts=integers([rate.count for rate in rates.values()]),
                periods=[rate.period for rate in rates.values()],
                bursts=integers([rate.burst for rate in rates.values()]),
                notify=self._notify,
            ),
        )
        self.declared = True
        if limited:
            log.info("limits declared: %s", ", ".join(f"{name} {limits[name]}" for name in sorted(limited)))
        if rated:
            log.info("rates declared: %s", ", ".join(f"{name} {rates[name].rate}" for name in sorted(rated)))
        if limited or rated:
            self._changed()
