"""Goes on with operations by filter: the worker that leads makes their steps, one operation after the other.

A step is the same that the command makes which has begun the operation. Why each job is dealt with once, whichever
processes work on it: the head of `admin/bulk/steps.py`. The leader is told of a new operation by a NOTIFY, and looks
every 15 to 30 s for those whose process has died. Another worker goes on with one that is overdue by a minute, because
the leader may not do its duty although it lives.

Steps have a session of their own, so that no claim waits for them. It is open while there is an operation. Each step is
one message with its COMMIT: if this process is suspended, it holds no lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

import psycopg

from pgqueue.admin.bulk.steps import Claim, Steps, claiming, due
from pgqueue.database.backoff import described, jittered, persist, wait
from pgqueue.database.sessions import Session
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

BULK = "bulk"
"""What the control channel says of a new operation."""
LOOK_SECONDS, OTHERS_SECONDS = 15.0, 300.0
OVERDUE_SECONDS = 60.0
TURN_SECONDS = 1.0
"""So long the steps of one operation follow each other, before another operation that is due has its turn."""
REFUSED_SECONDS = 120.0
"""The pause if this role lacks a right."""


class Bulks:
    """Looks for operations over the `shared` session, and makes their steps over its `own`."""

    def __init__(self, shared: Session, own: Session, state: WorkerState, *, leads: Callable[[], bool]) -> None:
        self._shared = shared
        self._own = own
        self._state = state
        self._leads = leads
        self._wake = asyncio.Event()
        self._due = monotonic() + jittered(LOOK_SECONDS)
        self._others_due = monotonic() + jittered(OTHERS_SECONDS)

    def wake(self) -> None:
        """This worker leads now, or there is a new operation."""
        self._wake.set()

    async def run(self) -> None:
        """Make the steps that are due, until cancelled."""
        await persist(self._step, name="bulk", answers=self._shared.answers, past_data=True)

    async def _step(self) -> None:
        at = self._due if self._leads() else self._others_due
        told = await wait(self._wake, max(0.0, at - monotonic()))
        self._wake.clear()
        if not self._leads() and told:
            return
        self._others_due = monotonic() + jittered(OTHERS_SECONDS)
        self._due = monotonic() + jittered(LOOK_SECONDS)  # unless what follows says something else
        try:
            self._due = monotonic() + await self.round()
        except psycopg.errors.InsufficientPrivilege:  # granted by a version before this one
            log.error("operations by filter wait: this role needs its rights again, `pgqueue grants`")
            self._due = monotonic() + REFUSED_SECONDS

    async def round(self) -> float:
        """Make the steps that are due. Answer the seconds until the next look."""
        while (left := await self._next()) is not None and left <= 0.0:
            claim = await self._ask(claiming(self._link.schema, self._holder))
            if claim is None:  # another process was faster
                break
            await self._work(claim)
        if left is None:
            await self._own.rest()
            return jittered(LOOK_SECONDS)
        return min(max(left, 0.1), jittered(LOOK_SECONDS))

    async def _next(self) -> float | None:
        """In how many seconds an operation is due for this worker; None: there is none."""
        left: float | None
        [left] = await self._shared.run(due(self._link.schema, self._holder))
        if left is None or self._leads():
            return left
        return 0.0 if left <= -OVERDUE_SECONDS else None

    async def _work(self, claim: Claim) -> None:
        """Make steps until the operation is over, its pace says to wait, or others have their turn."""
        steps, until = Steps(claim, self._link.schema, self._state.settings.notify), monotonic() + TURN_SECONDS
        while steps.open and steps.pause <= 0.0 and monotonic() < until:
            try:
                rows = await self._ask(steps.step())
            except Exception as error:
                if not steps.refused(error):
                    raise
                continue
            if (job := steps.stepped(rows)) is not None and steps.error is not None:
                log.warning("operation %d: job %d was left out: %s", claim.id, job, described(steps.error))

    async def _ask(self, statement: Any) -> Any:
        [answer] = await self._own.run(statement)
        return answer

    @property
    def _link(self) -> Any:
        return self._own.link

    @property
    def _holder(self) -> str:
        return f"worker {self._state.id}"
