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

import psycopg

from pgqueue.database.backoff import jittered, persist, wait
from pgqueue.database.sessions import Session
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

BATCH = 500
LOOK_SECONDS = 15.0
# A due row that is locked: asked for again soon at first, for most are let go at once, then once a second.
LOCKED_FIRST, LOCKED_MOST = 0.01, 1.0
# Starts at zero, as the watermark's: this far apart at least, and at least so many times as long as one takes; but no
# later, for one slow answer must not put off what only they find.
ZERO_SECONDS, ZERO_SHARE, ZERO_MOST = 5.0, 100, 300.0
EVER = "-infinity"


class Scheduler:
    """Moves due jobs at their time while `leads()` says that this worker does it; else looks whether it must."""

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        *,
        leads: Callable[[], bool],
        overdue: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._state = state
        self._leads = leads
        self._ticks_overdue = overdue
        self._wake = asyncio.Event()
        self._after = EVER
        self._zero_at = 0.0
        self._locked = LOCKED_FIRST
        self._look_at = monotonic() + jittered(2 * LOOK_SECONDS)

    def wake(self) -> None:
        """Something was scheduled, or this worker leads now."""
        self._wake.set()

    async def run(self) -> None:
        """Promote until cancelled."""
        await persist(self._step, name="schedule")

    async def _step(self) -> None:
        self._wake.clear()
        if self._leads():
            await wait(self._wake, await self._promote())
        elif not await wait(self._wake, self._look_at - monotonic()) or monotonic() >= self._look_at:
            # News may come all the time and are the leader's: they must not put off the look.
            self._look_at = monotonic() + jittered(2 * LOOK_SECONDS)
            if await self._overdue():
                await self._promote()

    async def _overdue(self) -> bool:
        """Whether something due lies about: the leader's loop may hang while its session keeps the lead.

        Asks for the ticks along with it: a worker that does not lead sends nothing for them.
        """
        self._after = EVER
        link = self._session.link
        [(late, _, _)], [(ticks,)] = await self._session.run(
            link.statement("scheduler_next", after=EVER), link.statement("ticks_overdue")
        )
        if ticks:
            self._ticks_overdue()
        return bool(late)

    async def _promote(self) -> float:
        """Promote what is due; the seconds to sleep until the next one."""
        from_zero = self._after == EVER or monotonic() >= self._zero_at
        if from_zero:
            self._after = EVER
        link, took = self._session.link, 0.0
        while True:
            try:
                [(moved, _)], [(late, due, after)] = await self._session.run(
                    link.statement("scheduler_promote", after=self._after, n=BATCH, notify=self._state.settings.notify),
                    link.statement("scheduler_next", after=self._after),
                )
            except psycopg.errors.UniqueViolation:
                [doubles] = await self._session.run(link.statement("scheduler_refuse_doubles"))
                log.error("jobs %s are available, and were scheduled too: the second rows are failed: refused", doubles)
                continue
            took += self._session.took  # not the wait for our turn, or for a server that was away
            if moved < BATCH:
                break
        self._after = after
        now = monotonic()
        if from_zero:
            self._zero_at = now + max(ZERO_SECONDS, min(ZERO_SHARE * took, ZERO_MOST))
        # What woke us may have been committed too late for a walk from `after`.
        wanted = LOOK_SECONDS if from_zero else min(LOOK_SECONDS, self._zero_at - now)
        return max(0.0, min(wanted, LOOK_SECONDS if due is None else due, self._patience(late)))

    def _patience(self, late: bool) -> float:
        """How long to leave alone what is due and was not moved: its row is locked, or it became due just now."""
        pause = self._locked if late else LOOK_SECONDS
        self._locked = min(LOCKED_MOST, 2 * self._locked) if late else LOCKED_FIRST
        return pause
