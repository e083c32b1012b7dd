"""Folds what workers have counted into the history: parts into minutes, and the minutes of past hours into hours.
Notes there, too, how many jobs wait.

A duty of the leader, as housekeeping. If no round is made for days, parts wait in their table.

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

A part that cannot be read is dropped, for nothing will ever read it. So the fold leaves no row alone, as a mover does.
If a trigger of the application refuses a minute, the duty fails as a whole. The parts wait until the trigger is gone.
"""

from __future__ import annotations

import logging

from pgqueue.database.backoff import described
from pgqueue.database.row_errors import refuses_row
from pgqueue.database.sessions import Session

log = logging.getLogger("pgqueue")

ROUND_SECONDS = 30.0
PARTS_MOST = 500
GROUPS_MOST, IDS_MOST = 2_000, 5
"""How many groups of errors are kept, and how many jobs of each are named."""


class HistoryFold:
    """Folds over the given session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._most = PARTS_MOST

    async def round(self) -> float | None:
        """Fold all parts that there are, and the hours that are over."""
        try:
            full = True
            while full:
                most = self._most
                full = await self._fold() == most
        except Exception as error:
            if not refuses_row(error):
                raise
            await self._narrow(error)
            return 0.0
        return None

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
        """A part does not fit, as one that was inserted by hand. Fold one by one, and drop the one that fails alone.

        If it fails only beside the other statements of a round, it is one of these that was refused.
        """
        if self._most > 1:
            self._most = 1
            return
        link = self._session.link
        lock = link.statement("history_fold_lock")
        try:
            await self._session.run(lock, link.statement("history_fold_parts", n=1, ids=IDS_MOST))
        except Exception as alone:
            if not refuses_row(alone):
                raise
            await self._session.run(lock, link.statement("history_fold_drop"))
            log.error("a part of the history cannot be read, and is dropped: %s", described(alone))
        else:
            raise error
