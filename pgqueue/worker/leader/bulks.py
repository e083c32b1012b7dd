"""Goes on with operations by filter: the worker that leads makes their steps, one operation after the other. It is
housekeeping.

A step is the same that the command makes which has begun the operation. Why each job is dealt with once, whichever
processes work on it: the head of `admin/bulk/steps.py`. The leader is told of a new operation by a NOTIFY, and looks
every 15 to 30 s for those whose process has died. Another worker goes on with one that is overdue by a minute, because
the leader may not do its duty although it lives.

Each step is one message with its COMMIT: if this process is suspended, it holds no lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from pgqueue.admin.bulk.steps import Claim, Steps, claiming, due
from pgqueue.database.backoff import described, jittered
from pgqueue.database.sessions import Session
from pgqueue.steady_clock import monotonic
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

BULK = "bulk"
"""What the control channel says of a new operation."""
LOOK_SECONDS = 15.0
OVERDUE_SECONDS = 60.0
TURN_SECONDS = 1.0
"""So long the steps of one operation follow each other, before another operation that is due has its turn."""


class Bulks:
    """Looks for operations, and makes their steps, over the given session."""

    def __init__(self, session: Session, state: WorkerState, *, leads: Callable[[], bool]) -> None:
        self.woken = asyncio.Event()
        self._session = session
        self._state = state
        self._leads = leads

    def wake(self) -> None:
        """There is a new operation."""
        self.woken.set()

    async def round(self) -> float:
        """Make the steps that are due. Answer the seconds until the next look."""
        while (left := await self._next()) is not None and left <= 0.0:
            claim = await self._ask(claiming(self._link.schema, self._holder))
            if claim is None:  # another process was faster
                break
            await self._work(claim)
            if self._leads():
                return 0.0  # go on in the next round: this one is known to have gone well
        return (
            self._state.pace.later(jittered(LOOK_SECONDS))
            if left is None
            else min(max(left, 0.1), jittered(LOOK_SECONDS))
        )

    async def _next(self) -> float | None:
        """In how many seconds an operation is due for this worker; None: there is none."""
        left: float | None
        left = await self._ask(due(self._link.schema, self._holder))
        if left is None or self._leads():
            return left
        return 0.0 if left <= -OVERDUE_SECONDS else None

    async def _work(self, claim: Claim) -> None:
        """Make steps until the operation is over, its pace says to wait, or others have their turn. One step at least
        goes well: a turn that only finds out which job is refused would begin with that each time."""
        steps, until = Steps(claim, self._link.schema, self._state.settings.notify), monotonic() + TURN_SECONDS
        went_well = False
        while steps.open and steps.pause <= 0.0 and (monotonic() < until or not went_well):
            try:
                rows = await self._ask(steps.step())
            except Exception as error:
                if not steps.refused(error):
                    raise
                continue
            if (job := steps.stepped(rows)) is not None and steps.error is not None:
                log.warning("operation %d: job %d was left out: %s", claim.id, job, described(steps.error))
            went_well = went_well or not steps.of_one

    async def _ask(self, statement: Any) -> Any:
        [answer] = await self._session.run(statement)
        return answer

    @property
    def _link(self) -> Any:
        return self._session.link

    @property
    def _holder(self) -> str:
        return f"worker {self._state.id}"
