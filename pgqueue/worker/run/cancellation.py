"""Stops running jobs that were asked to stop: reads the requests of `job_signal` for the jobs that run here.

A NOTIFY wakes it at once. While a job runs here, it also looks by itself every few seconds. A request stays in its
table until its job has ended, however often the job changes workers. So if this process dies with the job half stopped,
the next worker of the job finds the request. A request may come too late, because the attempt has just failed and the
job waits for the next one. `settle` carries out these requests, and deletes those that are done. A worker that stopped
a job calls it, and housekeeping does.

Never locks a running row, never writes an outcome: the executor stops the job, the completer writes its outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pgqueue.database.backoff import doubled, jittered
from pgqueue.database.sessions import Session
from pgqueue.jobs.outcomes import Cancelled, Outcome
from pgqueue.plain_text import plural
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

SIGNAL = "signal"
"""What a NOTIFY of `:control` says when there is a request."""
LOOK_SECONDS = 5.0
# The first pause if a requested job is not known here. Its claim is still being answered, or its outcome is on the way.
SOON_FIRST = 0.05
SETTLED_MOST = 1_000


class Cancellation:
    """Reads requests over the given session; `interrupt` stops a job. `late` is the session of housekeeping."""

    def __init__(
        self,
        session: Session,
        late: Session,
        state: WorkerState,
        *,
        interrupt: Callable[[int, Outcome], bool],
    ) -> None:
        self.woken = asyncio.Event()
        self._told = False
        self._session = session
        self._late = late
        self._state = state
        self._interrupt = interrupt
        self._stopped: dict[int, int] = {}
        """The jobs already stopped, or being stopped, with their claims."""
        self._pause, self._misses = LOOK_SECONDS, 0

    def wake(self) -> None:
        """There is a request for some job, here or elsewhere."""
        self._told = True
        self.woken.set()

    async def settle(self) -> None:
        """Carry out requests to jobs that run no longer: housekeeping."""
        await self._settle(self._late)

    async def _settle(self, session: Session) -> None:
        settle = session.link.statement("cancellation_settle", n=SETTLED_MOST, notify=self._state.settings.notify)
        [[(cancelled, deleted, _)]] = await session.run(settle)
        if cancelled:
            jobs = plural(cancelled, "job was", "jobs were")
            log.info("%s cancelled that had stopped running before the request came", jobs)
        if deleted:
            log.debug("%s done with", plural(deleted, "request is", "requests are"))

    async def round(self) -> float:
        """Carry out requests, if there may be any: else no statement. Answers the seconds until the next look."""
        if self._told or self._state.held or self._stopped:
            told, self._told = self._told, False
            try:
                await self._read()
            except BaseException:
                self._told |= told
                raise
        return jittered(self._pause)

    async def _read(self) -> None:
        link = self._session.link
        [rows] = await self._session.run(link.statement("cancellation_read", worker_id=self._state.id))
        asked = {job_id: (claim, reason) for job_id, claim, reason in rows}
        over = [job_id for job_id, claim in self._stopped.items() if asked.get(job_id, (None,))[0] != claim]
        for job_id in over:
            del self._stopped[job_id]
        new = {job_id: request for job_id, request in asked.items() if job_id not in self._stopped}
        self._again_soon(missed=[job_id for job_id, request in new.items() if not self._stop(job_id, *request)])
        if over:
            await self._settle(self._session)

    def _again_soon(self, missed: list[int]) -> None:
        self._misses = self._misses + 1 if missed else 0
        self._pause = doubled(SOON_FIRST, self._misses, LOOK_SECONDS) if missed else LOOK_SECONDS

    def _stop(self, job_id: int, claim: int, reason: str) -> bool:
        if not self._interrupt(job_id, Cancelled(reason)):
            return False
        log.info("job %d is being cancelled: %s", job_id, reason, extra={"job_id": job_id, "reason": reason})
        self._stopped[job_id] = claim
        return True
