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
from pgqueue.database.statements import Row, Statement

log = logging.getLogger("pgqueue")

ROUND_SECONDS = 30.0
PARTS_MOST = 500
GROUPS_MOST, IDS_MOST = 2_000, 5
"""How many groups of errors are kept, and how many jobs of each are named."""


class HistoryFold:
    """Folds over the given session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def round(self) -> float | None:
        """Fold all parts that there are, and the hours that are over."""
        link = self._session.link
        others = (
            link.statement("history_fold_depth"),
            link.statement("history_fold_hours"),
            link.statement("history_fold_forget", n=GROUPS_MOST),
        )
        try:
            while await self._fold(PARTS_MOST, *others) == PARTS_MOST:
                pass
        except Exception as error:
            if not refuses_row(error):
                raise
            if not await self._parts_alone():
                raise  # it was one of the other statements
            return 0.0
        return None

    async def _fold(self, most: int, *others: Statement[list[Row]]) -> int:
        """One transaction; how many parts it has folded."""
        lock = self._session.link.statement("history_fold_lock")
        parts = self._session.link.statement("history_fold_parts", n=most, ids=IDS_MOST)
        _, [(folded, _, _)], *_ = await self._session.run(lock, parts, *others)
        return int(folded)

    async def _parts_alone(self) -> bool:
        """Fold all parts, and nothing else. One that does not fit, as one that was inserted by hand, is dropped.

        Whether there was one.
        """
        most, dropped = PARTS_MOST, False
        while True:
            try:
                if await self._fold(most) < most:
                    return dropped
            except Exception as error:
                if not refuses_row(error):
                    raise
                if most == 1:
                    await self._drop(error)
                    dropped = True
                most = PARTS_MOST if most == 1 else 1

    async def _drop(self, error: Exception) -> None:
        link = self._session.link
        await self._session.run(link.statement("history_fold_lock"), link.statement("history_fold_drop"))
        log.error("a part of the history cannot be read, and is dropped: %s", described(error))
