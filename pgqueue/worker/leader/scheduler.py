"""Promotes due jobs: from scheduled to available, at their time. Runs in the worker that leads.

Sleeps until the earliest job is due; an enqueue for an earlier time notifies. A walk starts one minute before the time
of the last complete walk, because transactions commit late. The first walk starts at zero, and now and then another
one does: it finds rows that were locked before, or were committed later than a minute.

A notification may be missing: LISTEN is off or does not work, the enqueuer sends none, the server's queue is full. So
while this worker leads, it is asked whether a job is due. The question is sent beside the fetcher's own look, which
comes every one to two polls (`statements`), and by itself if the fetcher sends nothing: it has no room, or its polls
are slow because notifications are known to come (`pace`). Then this asks once in two slow polls, and a job that was not
told is promoted late by that at most.

A trigger of the application, or a value of a row, may refuse one job, and with it the whole batch. `mover` says what
is done then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement, integers
from pgqueue.steady_clock import monotonic
from pgqueue.worker.left_alone import LeftAlone, Notice
from pgqueue.worker.mover import Mover
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

BATCH = 500
LOOK_SECONDS = 15.0
# The fetcher's looks are one to two polls apart. If none has come for so many, the fetcher has no room.
BUSY_POLLS = 2.5
# The same while notifications are known to come: so many slow polls.
TOLD_POLLS = 2.0
# If a job is due so long before the time at which this would have looked anyway, no notification had told of it.
UNTOLD_SECONDS = 2.0
# If a due row is locked, it is tried again soon, because most locks end at once. Later it is tried once a second.
LOCKED_FIRST, LOCKED_MOST = 0.01, 1.0
# Walks that start at zero (as the watermark's do) are at least ZERO_SECONDS apart, and ZERO_SHARE times as long as one
# takes. But ZERO_MOST is the most: one slow answer must not put off the jobs that only these walks find.
ZERO_SECONDS, ZERO_SHARE, ZERO_MOST = 5.0, 100, 300.0
# Walks are so many times their own time apart, and GATHER_MOST at most. Ten thousand jobs that have failed together are
# due one right after the other. To promote, claim and complete each by itself costs many times what they cost together.
GATHER_TIMES, GATHER_MOST = 10.0, 0.05
# A job that was refused is left alone for a while, longer the more there are: so the walks get beyond all of them. One
# line of the log in SAID_SECONDS stands for all.
LEFT_SECONDS, LEFT_EACH, SAID_SECONDS = 3.0, 0.2, 10.0
EVER = "-infinity"


class Scheduler:
    """Moves due jobs at their time while this worker leads. Else it looks now and then whether jobs are overdue."""

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        *,
        leads: Callable[[], bool],
        overdue: Callable[[], None] = lambda: None,
        promoted: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._state = state
        self._leads = leads
        self._ticks_overdue = overdue
        self._promoted = promoted
        self.woken = asyncio.Event()
        self._told = False
        self._next_at = 0.0
        """When the next promotion is due, if nothing is told."""
        self._after = EVER
        self._gathers_until = 0.0
        """When the next walk may come, whatever is due or told."""
        self._asked_at = monotonic()
        self._zero_at = 0.0
        self._locked = LOCKED_FIRST
        self._mover = Mover(session, notify=state.settings.notify)
        notice = Notice("is due, and cannot be made available", seconds=SAID_SECONDS)
        self._left = LeftAlone[int](notice, seconds=LEFT_SECONDS, each=LEFT_EACH)

    def wake(self) -> None:
        """A job was scheduled, or this worker leads now."""
        self._told = True
        self.woken.set()

    def statements(self) -> list[Statement[None]]:
        """The statement that asks whether a job is due, twice a poll at most; to be sent beside other statements.

        A look that comes just before a poll is over asks again: the one after it may come too late.
        """
        if not self._leads() or monotonic() < self._asked_at + self._state.settings.poll / 2:
            return []
        self._asked_at = monotonic()
        due = self._session.link.statement("scheduler_due", after=self._after)
        return [Statement(due.sql, due.params, self._answered)]

    def _answered(self, rows: list[Row]) -> None:
        if rows[0][0]:
            if self._next_at > monotonic() + UNTOLD_SECONDS:
                self._state.pace.untold()
            self.wake()

    async def round(self) -> float:
        """Promote what is due; answer the seconds until the next look. A worker that does not lead promotes only what
        is overdue. If the fetcher has no room, and so sends nothing, this asks whether a job is due."""
        if not self._leads():
            if await self._overdue():
                await self._promote()
        elif (self._told or monotonic() >= self._next_at) and (early := self._gathers_until - monotonic()) > 0:
            return early
        elif self._told or monotonic() >= self._next_at:
            self._told, self._next_at = False, 0.0  # if it fails, it is tried again
            self._next_at = monotonic() + await self._promote()
        elif monotonic() >= self._ask_at():
            await self._session.run(*self.statements())
        return max(0.0, min(self._next_at, self._ask_at()) - monotonic())

    def _ask_at(self) -> float:
        pace = self._state.pace
        return self._asked_at + (TOLD_POLLS if pace.told else BUSY_POLLS) * pace.poll

    async def _overdue(self) -> bool:
        """Whether due jobs were not promoted: the leader may hold the lead and not do its duty.

        Asks for overdue ticks in the same message, because a worker that does not lead sends nothing else for ticks.
        """
        self._after = EVER
        link = self._session.link
        [(late, _, _)], [(ticks,)] = await self._session.run(
            link.statement("scheduler_next", after=EVER, passed=integers(self._left.rows())),
            link.statement("ticks_overdue"),
        )
        if ticks:
            self._ticks_overdue()
        return bool(late)

    async def _promote(self) -> float:
        """Promote the jobs that are due; return the seconds to sleep until the next one."""
        self._asked_at = monotonic()
        from_zero = self._after == EVER or monotonic() >= self._zero_at
        if from_zero:
            self._after = EVER
        took, late, after = 0.0, True, EVER
        due: float | None = None
        async for answers in self._mover.walk(BATCH, self._left, self._moves, self._first):
            [(moved, *_)], [(late, due, after)] = answers
            if moved:
                self._promoted()
            took += self._session.took  # without the wait for our turn, or for a server that was away
        if self._mover.rested:
            self._after = EVER
            return self._patience(True)
        self._after = after
        now = monotonic()
        self._gathers_until = now + min(GATHER_TIMES * took, GATHER_MOST)
        if from_zero:
            self._zero_at = now + max(ZERO_SECONDS, min(ZERO_SHARE * took, ZERO_MOST))
        # The job that woke us may have been committed too late for a walk that starts at `after`.
        look = self._look()
        wanted = look if from_zero else min(look, self._zero_at - now)
        wanted = min(wanted, self._left.next() - now)
        return max(0.0, min(wanted, look if due is None else due, self._patience(late)))

    def _moves(self, n: int, passed: str) -> list[Statement[list[Row]]]:
        link, where, notify = self._session.link, {"after": self._after, "passed": passed}, self._state.settings.notify
        return [
            link.statement("scheduler_promote", **where, n=n, notify=notify),
            link.statement("scheduler_next", **where),
        ]

    def _first(self, passed: str) -> Statement[list[Row]]:
        return self._session.link.statement("scheduler_first", after=self._after, passed=passed)

    def _look(self) -> float:
        """Seconds from one walk to the next while nothing is due."""
        return self._state.pace.later(LOOK_SECONDS)

    def _patience(self, late: bool) -> float:
        """Seconds until due jobs that were not moved are tried again: their row was locked, or they just became due."""
        pause = self._locked if late else self._look()
        self._locked = min(LOCKED_MOST, 2 * self._locked) if late else LOCKED_FIRST
        return pause
