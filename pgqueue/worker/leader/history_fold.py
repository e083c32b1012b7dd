"""Folds what workers have counted into the history: parts into minutes, and the minutes of past hours into hours.
Notes there, too, how many jobs wait.

Runs in the worker that leads, every 30 to 60 seconds. Any other worker does a round every five minutes, because the
leader may not do its duty although it lives. If no round is made for days, parts wait in their table.

Why each part counts once in the minutes and once in the hours, also beside a second leader and after a crash:

1. Each round is one transaction. Its first statement locks the row `history` of `duty`. If another session has that
   row, the statement changes no setting, and the others do nothing. So one session folds at a time.
2. The later statements read after the row was locked, each with a snapshot of its own. So they see all that the round
   before has committed, `done_at` among it.
3. A part is deleted by the statement that appends its minutes. After a crash both are undone, or neither.
4. An hour is made from its minutes when `done_at` moves beyond it, in one statement. `done_at` only grows.
5. A minute before `done_at` is appended to its hour by the statement that appends it, and an hour is never made again.
   A minute from `done_at` on is appended to no hour yet, and is there when its hour is made: no minute is thrown away
   before it is a day old. So each minute goes into its hour once, however late its part comes, and however clocks step.

How many jobs wait is noted by the same message: the last measurement of table `depth`, once for each minute. So it
costs no round trip of its own. Such a number is not added up: an hour has the largest of its minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

import psycopg

from pgqueue.database.backoff import jittered, of_data, persist, wait
from pgqueue.database.sessions import Session

log = logging.getLogger("pgqueue")

ROUND_SECONDS, OTHERS_SECONDS = 30.0, 300.0
PARTS_MOST = 500
GROUPS_MOST, IDS_MOST = 2_000, 5
"""How many groups of errors are kept, and how many jobs of each are named."""


class HistoryFold:
    """Folds over the given session."""

    def __init__(self, session: Session, *, leads: Callable[[], bool]) -> None:
        self._session = session
        self._leads = leads
        self._others_at = monotonic() + jittered(OTHERS_SECONDS)
        self._wake = asyncio.Event()
        self._most = PARTS_MOST

    def wake(self) -> None:
        """This worker leads now."""
        self._wake.set()

    async def run(self) -> None:
        """One round in 30 to 60 seconds until cancelled."""
        await persist(self._step, name="history fold", answers=self._session.answers, past_data=True, only_counts=True)

    async def _step(self) -> None:
        await wait(self._wake, jittered(ROUND_SECONDS))
        self._wake.clear()
        if self._leads() or monotonic() >= self._others_at:
            self._others_at = monotonic() + jittered(OTHERS_SECONDS)
            await self.round()

    async def round(self) -> None:
        """Fold all parts that there are, and the hours that are over."""
        try:
            full = True
            while full:
                most = self._most
                full = await self._fold() == most
        except psycopg.errors.InsufficientPrivilege:  # granted before there was a history
            log.error("the history is not folded: this role needs its rights again, `pgqueue grants`")
        except Exception as error:
            if not of_data(error):
                raise
            await self._narrow(error)

    async def _fold(self) -> int:
        """One transaction; how many parts it has folded."""
        link = self._session.link
        _, [(parts, _, _)], *_ = await self._session.run(
            link.statement("history_fold_lock"),
            link.statement("history_fold_parts", n=self._most, ids=IDS_MOST),
            link.statement("history_fold_depth"),
            link.statement("history_fold_hours"),
            link.statement("history_fold_forget", n=GROUPS_MOST),
        )
        self._most = PARTS_MOST
        return int(parts)

    async def _narrow(self, error: Exception) -> None:
        """A part does not fit, as one that was inserted by hand. Fold one by one, and drop the one that fails alone."""
        if self._most > 1:
            self._most = 1
        else:
            link = self._session.link
            await self._session.run(link.statement("history_fold_lock"), link.statement("history_fold_drop"))
            log.error("a part of the history cannot be read, and is dropped: %s", error)
        self.wake()
