"""Promotes due jobs: from scheduled to available, at their time. Runs in the worker that leads.

Sleeps until the earliest one is due; an enqueue for an earlier time notifies. A walk starts where the last complete one
ended minus a minute (transactions commit late), and at zero when it is new and now and then, because a row that was
locked then, or committed later than that, must be found too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

from pgqueue.loops import persist, wait
from pgqueue.sessions import Session

log = logging.getLogger("pgqueue")

BATCH = 500
LOOK_SECONDS = 15.0
LOCKED_SECONDS = 0.05
ZERO_SECONDS = 60.0
EVER = "-infinity"


class Scheduler:
    """Moves due jobs while `leads()` says that this worker is the one to do it."""

    def __init__(self, session: Session, *, notify: bool, leads: Callable[[], bool]) -> None:
        self._session = session
        self._notify = notify
        self._leads = leads
        self._wake = asyncio.Event()
        self._after = EVER
        self._zero_at = 0.0

    def news(self) -> None:
        """Something was scheduled, or this worker leads now."""
        self._wake.set()

    async def run(self) -> None:
        """Promote until cancelled."""
        await persist(self._step, name="schedule")

    async def _step(self) -> None:
        self._wake.clear()
        if not self._leads():
            self._after = EVER
            await self._wake.wait()
            return
        await wait(self._wake, await self._promote())

    async def _promote(self) -> float:
        """Promote what is due; the seconds to sleep until the next one."""
        if monotonic() >= self._zero_at:
            self._after, self._zero_at = EVER, monotonic() + ZERO_SECONDS
        link = self._session.link
        while True:
            [(moved, _)], [(due, after)] = await self._session.run(
                link.statement("schedule_promote", after=self._after, n=BATCH, notify=self._notify),
                link.statement("schedule_next", after=self._after),
            )
            if moved < BATCH:
                break
        self._after = after
        if due is None:
            return LOOK_SECONDS
        # Due, and yet not moved: somebody holds its row. Not a reason to spin.
        return min(LOOK_SECONDS, due) if due > 0 else LOCKED_SECONDS
