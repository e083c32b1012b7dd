"""Sees that what is due has a worker that leads, in a worker that does not: it asks a second after each due time.

A leader that is killed is replaced by the worker that finds its lock free. While polls are frequent, each fetcher asks
for that once a second, beside its own statements. An idle worker sends no polls. So this asks by itself, when it
matters:

1. It knows the time of the next job that is due, and of the next tick. `WAIT_SECONDS` after that it asks whether the
   lock is free, and for the next time. A leader that has died before is replaced then.
2. If something is still due that the leader should have done by then, this asks again after as long, and so on.
3. A new job or schedule may be due earlier. Its notification wakes this, which asks for the next time within a second.

So what is due is late by little more than `WAIT_SECONDS` because a leader has died. If its notification was lost as
well, the listener's ping finds the lock free. However much there is to do, one question in a second is all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pgqueue.database.sessions import Session
from pgqueue.database.statements import Statement
from pgqueue.steady_clock import monotonic

WAIT_SECONDS = 1.0
LOOK_SECONDS = 15.0
"""A worker that leads looks so often whether it still does. It sends nothing."""
FAR_SECONDS = 3_600.0
DENSE_SECONDS = 15.0
"""If things are due one right after the other, this asks for their times no more than once in so many seconds."""


class LeadWatch:
    """Asks over the given session. `free` are the statements that ask whether the lock is free, if that is due."""

    def __init__(
        self, session: Session, *, leads: Callable[[], bool], free: Callable[[], list[Statement[None]]]
    ) -> None:
        self.woken = asyncio.Event()
        self._session = session
        self._leads = leads
        self._free = free
        self._told = True
        self._ask_at = self._read_at = 0.0
        self._asked_at = -WAIT_SECONDS

    def wake(self) -> None:
        """Something may be due earlier than was known."""
        self._told = True
        self.woken.set()

    async def round(self) -> float:
        """Ask, if it is time; answer the seconds until the next time."""
        if self._leads():
            self._told = True  # what is due is known to the leader; another one may lead when it ends
            return LOOK_SECONDS
        now = monotonic()
        if self._told:
            self._ask_at = min(self._ask_at, max(now, self._asked_at + WAIT_SECONDS))
        if now >= self._ask_at:
            await self._ask(now)
        return max(0.0, self._ask_at - monotonic())

    async def _ask(self, now: float) -> None:
        self._asked_at, self._ask_at = now, now + WAIT_SECONDS
        statements: list[Statement[Any]] = list(self._free())
        if not statements:  # asked just now, or there is no listener that could lead
            return
        self._told = False
        reads = now >= self._read_at
        if reads:
            statements.append(self._session.link.statement("lead_watch_next"))
        *_, last = await self._session.run(*statements)  # if it fails, it comes again in a second
        if reads:
            [times] = last
            left = min((float(each) for each in times if each is not None), default=FAR_SECONDS)
            if left <= WAIT_SECONDS:
                self._read_at = now + DENSE_SECONDS
            else:
                self._ask_at = now + min(left + WAIT_SECONDS, FAR_SECONDS)
