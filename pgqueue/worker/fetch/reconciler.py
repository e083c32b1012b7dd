"""Compares the jobs this worker holds with its rows in job_running, and hands back the rows that it does not know.

If the connection of a claim broke between COMMIT and the rows, it has moved jobs to this worker that the worker never
heard of. After every doubt of this kind, and once a minute, the rows in job_running are compared. Only claims that are
settled count: a claim in flight will still be answered.

Why a lost row is found soon, not within the minute:

1. Sessions that broke off are ended before the comparison is sent (see sessions). So each of their claims is committed,
   and seen, or never will be.
2. A row may be of a claim that is not settled: an older claim, of another service, waits for its answer over a dead
   connection. Or a row is locked. While there are rows of these kinds, the worker compares again after a second.
"""

from __future__ import annotations

import logging

from pgqueue.database.backoff import jittered, persist, wait
from pgqueue.database.sessions import Session
from pgqueue.database.statements import integers
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

EVERY_SECONDS = 60.0
# Under an old snapshot the comparison walks the dead rows of all jobs since, and claims wait for it. So it takes a
# quarter of a percent of the time at most, until it comes every `SELDOM_SECONDS`.
DEAR_SHARE, SELDOM_SECONDS = 400, 300.0
AGAIN_SECONDS = 1.0


class Reconciler:
    """Reconciles over the given session, at once when `state` is in doubt."""

    def __init__(self, session: Session, state: WorkerState) -> None:
        self._session = session
        self._state = state
        self._pause = jittered(EVERY_SECONDS)
        self._took = 0.0

    async def run(self) -> None:
        """Reconcile after every doubt and once a minute, until cancelled."""
        await persist(self._step, name="reconcile")

    async def _step(self) -> None:
        await wait(self._state.doubt, self._pause)
        self._state.doubt.clear()  # before: a doubt that comes meanwhile is about a later claim
        try:
            sure = await self._compare()
            seldom = max(EVERY_SECONDS, min(DEAR_SHARE * self._took, SELDOM_SECONDS))
            self._pause = jittered(seldom if sure else AGAIN_SECONDS)
        except BaseException:
            self._state.doubt.set()
            raise

    async def reconcile(self) -> None:
        """Hand back the jobs that are ours in the database and unknown here."""
        await self._compare()

    async def _compare(self) -> bool:
        """False if some rows are left to decide on."""
        settled, link = self._state.claims.settled, self._session.link
        [rows] = await self._session.run(link.statement("reconciler_held", worker_id=self._state.id))
        self._took = self._session.took
        unknown = [(job_id, claim) for job_id, claim in rows if not self._state.knows(job_id, claim)]
        lost = [(job_id, claim) for job_id, claim in unknown if claim <= settled]
        if not lost:
            return not unknown
        [[(some, _)]] = await self._session.run(
            link.statement(
                "complete_release",
                ids=integers(job_id for job_id, _ in lost),
                claims=integers(claim for _, claim in lost),
                worker_id=self._state.id,
                notify=self._state.settings.notify,
            )
        )
        # A job that was completed between the two statements has no row any more: not lost, only late.
        released = len(lost) if some is None else len(some)
        if released:
            log.warning("the answer to a claim was lost: %d jobs are handed back", released)
        return released == len(unknown)
