"""Writes down which limits and rates this worker's code declares, once, when the worker begins to work.

Not before: a process that is found to be broken, or that waits beside the old ones, changes nothing. What was set by
hand stays. If workers of two versions declare different numbers, the last one started decides.

Also warns in the log of limits and rates that jobs wait for and no worker has declared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pgqueue.admin.limits import FIRST_RATE, KEYS_MOST, unknown
from pgqueue.client.tasks import limitings
from pgqueue.database.backoff import persist
from pgqueue.database.sessions import Session
from pgqueue.database.statements import integers
from pgqueue.jobs.concurrency import limits_of, rates_of
from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

PATIENCE_SECONDS = 30.0
"""How long an undeclared limit is not mentioned: code that enqueues is often deployed before the workers."""
AGAIN_SECONDS = 600.0


class DeclaredLimits:
    """Writes down what the tasks declare; `changed` is called if that has made a difference."""

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        *,
        changed: Callable[[], None],
    ) -> None:
        said = limitings(state.tasks.values())
        self._limits, self._rates = limits_of(said), rates_of(said)
        self.declared = not self._limits and not self._rates
        self._session = session
        self._state = state
        self._changed = changed

    async def run(self) -> None:
        """Declare, however many attempts that takes."""
        answers = self._session.answers
        await persist(self._step, name="declare", answers=answers, until=lambda: self.declared, past_data=True)

    async def _step(self) -> None:
        link, limits, rates = self._session.link, self._limits, self._rates
        notify = self._state.settings.notify
        [[(limited, *_)], [(rated, *_)]] = await self._session.run(
            link.statement(
                "declared_limits_put",
                names=list(limits),
                ns=integers(limits.values()),
                notify=notify,
            ),
            link.statement(
                "declared_limits_put_rates",
                names=list(rates),
                counts=integers([rate.count for rate in rates.values()]),
                periods=[rate.period for rate in rates.values()],
                bursts=integers([rate.burst for rate in rates.values()]),
                notify=notify,
            ),
        )
        self.declared = True
        if limited:
            log.info("limits declared: %s", ", ".join(f"{name} {limits[name]}" for name in sorted(limited)))
        if rated:
            log.info("rates declared: %s", ", ".join(f"{name} {rates[name].rate}" for name in sorted(rated)))
        if limited or rated:
            self._changed()


class UndeclaredLimits:
    """Warns of limits and rates that jobs wait for and no worker has declared: of each once in ten minutes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._after = FIRST_RATE
        self._since: dict[tuple[str, str], float] = {}
        self._said: dict[tuple[str, str], float] = {}
        self._seen: set[tuple[str, str]] = set()

    async def look(self) -> None:
        """Look at all keys of limits, and at 1,000 keys of rates from where the last look stopped. Called about once a
        minute."""
        link, now = self._session.link, monotonic()
        asked = link.statement("limits_undeclared", after=self._after, n=KEYS_MOST)
        [[(found, after)]] = await self._session.run(asked)
        for each in unknown(found):
            key = (each.kind, each.name)
            self._seen.add(key)
            waited = now - self._since.setdefault(key, now)
            if waited >= PATIENCE_SECONDS and now - self._said.get(key, -AGAIN_SECONDS) >= AGAIN_SECONDS:
                self._said[key] = now
                most = "more than 10,000" if each.waiting > 10_000 else None
                jobs = plural(each.waiting, "job waits", "jobs wait", most)
                said = "%s for the %s %s, which no worker has declared; none starts until one does"
                log.warning(said, jobs, each.kind, each.name)
        self._after = after or FIRST_RATE
        if after is None:  # a key that has gone counts as new when it comes back
            self._since = {key: since for key, since in self._since.items() if key in self._seen}
            self._said = {key: said for key, said in self._said.items() if key in self._seen}
            self._seen.clear()
