"""Sees to it that a suspect with two crashes is run although the workers are busy.

Such a job runs only in a process that holds nothing else. An idle worker takes it by itself; one under steady flow is
never idle. So a worker that could not ask for such jobs looks for them, and when one has waited for its patience, it
*makes way*: it fetches nothing until it holds nothing, asks for that job alone, runs it, goes on. The leader is the
first to do so; the others are slower, for the leader may not serve the queue.

A long job must not close a worker for hours for the sake of one suspect: it makes way for a minute at first, then works
on for ten times as long, and each time tries for twice as long. So it loses a tenth of its time at most, and in the end
the suspect runs. An idle worker sends nothing for this.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from time import monotonic

from pgqueue.loops import persist
from pgqueue.sessions import Session

log = logging.getLogger("pgqueue")

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
CLOSED_SECONDS = 60.0
OPEN_TIMES = 10


class Turn:
    """Decides when to make way for what is waiting. Pure: time is passed in."""

    def __init__(self) -> None:
        self._waiting: int | None = None
        self._since = 0.0
        self._closed_at: float | None = None
        self._open_until = 0.0
        self._most = CLOSED_SECONDS

    def taken(self) -> None:
        """We could ask for such jobs: what waits now, if any, has not waited for us."""
        self._waiting, self._closed_at, self._most = None, None, CLOSED_SECONDS

    def make_way(self, waiting: int | None, patience: float, now: float) -> bool:
        """Whether to make way for the job `waiting`, the first in its line; None: nothing waits."""
        if waiting is None:
            self.taken()
            return False
        if waiting != self._waiting:
            self._waiting, self._since = waiting, now
        if self._closed_at is not None:
            if now - self._closed_at < self._most:
                return True
            self._closed_at, self._open_until = None, now + OPEN_TIMES * self._most
            self._most *= 2
        elif now - self._since >= patience and now >= self._open_until:
            self._closed_at = now
        return self._closed_at is not None


class Isolation:
    """Looks while we are busy. `asked()` counts how often we could ask for such jobs; `make_way` says yes or no, and
    for which rate the job waits, if it does."""

    def __init__(
        self,
        session: Session,
        queues: list[str],
        *,
        leads: Callable[[], bool],
        asked: Callable[[], int],
        make_way: Callable[[bool, str | None], None],
    ) -> None:
        self._session = session
        self._queues = queues
        self._leads = leads
        self._asked = asked
        self._asked_before = -1
        self._make_way = make_way
        self._turn = Turn()
        # Not all at once: each that makes way stands still for a while.
        self._slower = random.uniform(2.0, 3.0)

    async def run(self) -> None:
        """Look every five seconds while busy, until cancelled."""
        await persist(self._step, name="isolation")

    async def _step(self) -> None:
        await asyncio.sleep(LOOK_SECONDS)
        asked = self._asked()
        if asked != self._asked_before:
            self._asked_before = asked
            self._turn.taken()
            return
        patience = PATIENCE_SECONDS * (1.0 if self._leads() else self._slower)
        # For one whose rate stays closed until we would have given up, way is made in vain. Not "closed now": a rate
        # that many wait for is open for moments only.
        look = self._session.link.statement("isolation_waiting", queues=self._queues, seconds=patience + CLOSED_SECONDS)
        [rows] = await self._session.run(look)
        waiting, rate = rows[0] if rows else (None, None)
        self._make_way(self._turn.make_way(waiting, patience, monotonic()), rate)
