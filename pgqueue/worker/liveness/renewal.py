"""Gives a worker another id, in order, before the numbers of its claims end.

Near the last number the worker takes no more jobs (`WorkerState.renewing`), as while its heartbeats are late. The jobs
that it holds run to their ends. Then it signs off, registers anew, and its numbers begin with 1. No job is interrupted,
and no worker is taken for dead. The proof is in `claims`.

A worker that claims a thousand times a second comes here every 24 days. A job that runs for hours then keeps its other
slots empty for as long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pgqueue.database.backoff import persist
from pgqueue.plain_text import plural
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

LOOK_SECONDS = 60.0
DRAIN_SECONDS = 0.1
"""How often it looks whether the last job has ended."""


class Renewal:
    """Looks at the numbers once a minute. A transaction that was begun early is used for `early` seconds.

    `unwritten` counts outcomes that are not in the database. `renew` gives the worker another id. `renewed` wakes what
    takes jobs.
    """

    def __init__(
        self,
        state: WorkerState,
        *,
        early: float,
        unwritten: Callable[[], int],
        renew: Callable[[], Awaitable[None]],
        renewed: Callable[[], None],
    ) -> None:
        self._state = state
        self._early = early
        self._unwritten = unwritten
        self._renew = renew
        self._renewed = renewed

    async def run(self) -> None:
        """Look until cancelled."""
        await persist(self._step, name="renewal")

    async def _step(self) -> None:
        if self._state.claims.spent:
            await self._begin_anew()
        await asyncio.sleep(LOOK_SECONDS)

    async def _begin_anew(self) -> None:
        state, old = self._state, self._state.id
        held = plural(len(state.held), "job that it holds has", "jobs that it holds have")
        said = "worker %d takes no jobs until %s ended: the numbers of its claims end, it registers anew"
        log.warning(said, old, held)
        state.renewing = True
        try:
            while not self._drained_and_closed():
                if state.phase != "running":
                    return
                await asyncio.sleep(DRAIN_SECONDS)
            # A transaction that was begun early knows old numbers: from here on none is young enough to be used.
            await asyncio.sleep(2 * self._early)
            await self._renew()
            log.info("worker %d goes on as worker %d", old, state.id)
        finally:
            state.renewing = False
            state.claims.open()
        self._renewed()

    def _drained_and_closed(self) -> bool:
        """Whether nothing has an old number. From then on no number begins."""
        return not self._state.held and not self._unwritten() and self._state.claims.close()
