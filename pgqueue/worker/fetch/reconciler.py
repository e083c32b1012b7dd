"""Compares the jobs this worker holds with its rows in job_running.

It does so after every doubt, and once a minute. A doubt is a claim without an answer, or a session that was lost.

1. Rows that this worker does not know are handed back. The connection of a claim may have broken between COMMIT and the
   rows. Only claims that are settled count: a claim in flight will still be answered. One that was given up is handed
   back when it has ended.
2. Jobs with a lock or a limit that have no row any more are stopped (`gone`): another job of their key may start beside
   them. A failover to an asynchronous standby forgets rows, and a restored backup does.

Why no job is stopped that is still ours. Only jobs that were held before the comparison was sent can be stopped. Their
claims were committed by then, so the comparison sees their rows. If a job has none, its end was committed, or its row
was taken away, or it was claimed again meanwhile. If its end was, `gone` finds that it does not run any more, or that
its transaction is written. If it was claimed again, its run has another claim by now.

Why a lost row is found soon, not within the minute:

1. Sessions that broke off are ended before the comparison is sent (see sessions). So each of their claims is committed,
   and seen, or never will be.
2. A row may be of a claim that is not settled: an older claim, of another service, waits for its answer over a dead
   connection. Or a row is locked. While there are rows of these kinds, the worker compares again after a second.
3. If the server refuses to move a row, as because a trigger of the application raises, fewer are handed back at once.
   The row that is alone then stays, and every other row is handed back. After `REFUSED_MOST` such rows parts are not
   divided any more: a part with another such row stays. The next comparison divides them in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from random import shuffle
from time import monotonic

import psycopg

from pgqueue.database.backoff import described, jittered, without_values
from pgqueue.database.row_errors import refuses_move
from pgqueue.database.sessions import Session
from pgqueue.database.statements import integers
from pgqueue.jobs.job import Job
from pgqueue.plain_text import plural
from pgqueue.worker.doubles import is_double, resolve
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

EVERY_SECONDS = 60.0
# Under an old snapshot the comparison walks the dead rows of all jobs since, and claims wait for it. So it takes a
# quarter of a percent of the time at most, until it comes every `SELDOM_SECONDS`.
DEAR_SHARE, SELDOM_SECONDS = 400, 300.0
AGAIN_SECONDS = 1.0
REFUSED_MOST, REFUSED_SECONDS, SAID_SECONDS = 20, 5.0, 60.0
"""How many jobs may be refused by themselves in one comparison, when the next one comes, and how often one is named."""


class Reconciler:
    """Reconciles over the given session, at once when `state` is in doubt. `gone` stops jobs that have no row."""

    def __init__(self, session: Session, state: WorkerState, *, gone: Callable[[list[Job]], None]) -> None:
        self._session = session
        self._state = state
        self._gone = gone
        self._took = 0.0
        self._refusals = 0
        """How many jobs the server has refused to move in this comparison, each by itself."""
        self._said_at = -inf

    async def round(self) -> float:
        """Reconcile after a doubt, and once a minute; answer the seconds until the next time. The doubt is taken back
        before: one that comes meanwhile is about a later claim."""
        try:
            sure = await self.reconcile()
        except BaseException:
            self._state.doubt.set()
            raise
        seldom = max(EVERY_SECONDS, min(DEAR_SHARE * self._took, SELDOM_SECONDS))
        again = REFUSED_SECONDS if self._refusals else AGAIN_SECONDS
        return jittered(seldom if sure else again)

    async def reconcile(self) -> bool:
        """Hand back the jobs that are ours in the database and unknown here. False if some rows are left to decide
        on."""
        settled, link, worker_id = self._state.claims.settled, self._session.link, self._state.id
        self._refusals = 0
        keyed = [(job, job.claim) for job in self._state.held.values() if job.lock_key or job.limit_key]
        [rows] = await self._session.run(link.statement("reconciler_held", worker_id=worker_id))
        self._took = self._session.took
        ours = set(rows) if keyed else set()
        if gone := [job for job, claim in keyed if (job.id, claim) not in ours and job.claim == claim]:
            self._gone(gone)
        unknown = [(job_id, claim) for job_id, claim in rows if not self._state.knows(job_id, claim)]
        lost = [(job_id, claim) for job_id, claim in unknown if claim <= settled]
        if not lost:
            return not unknown
        shuffle(lost)  # so that it is not behind the same refused rows that a row stays
        released = await self._release(lost)
        if released:
            log.warning("the answer to a claim was lost: %s handed back", plural(released, "job is", "jobs are"))
        return released == len(unknown)

    async def _release(self, lost: list[tuple[int, int]]) -> int:
        """Hand these jobs back; return how many. If the server refuses to move one, that one stays, and no other."""
        link, worker_id, notify = self._session.link, self._state.id, self._state.settings.notify
        ours_lost = {
            "ids": integers(job_id for job_id, _ in lost),
            "claims": integers(claim for _, claim in lost),
            "worker_id": worker_id,
            "notify": notify,
        }
        try:
            # Which keys they wait for is not known here, so no worker would ask for these.
            [[(some, _)], _] = await self._session.run(
                link.statement("complete_release", **ours_lost), link.statement("sweep_tell", notify=notify)
            )
        except psycopg.Error as error:
            if is_double(error):
                if not await resolve(self._session, error, notify=notify):
                    said = "%s of a claim whose answer was lost cannot be handed back yet: %s"
                    log.error(said, plural(len(lost), "job", "jobs"), without_values(error))
                return 0
            if not refuses_move(error):
                raise
            return await self._narrow(lost, error)
        # A job that was completed between the two statements has no row any more: not lost, only late.
        return len(lost) if some is None else len(some)

    async def _narrow(self, lost: list[tuple[int, int]], error: psycopg.Error) -> int:
        """The server refuses to move one of these jobs: put aside what fits nowhere, or hand back fewer at once."""
        refuse = self._session.link.statement("rescue_refuse_unfit", worker_id=self._state.id)
        [unfit] = await self._session.run(refuse)
        if unfit:
            log.error("jobs %s fit into no lane: they are failed: refused (%s)", unfit, without_values(error))
            return 0
        if len(lost) > 1 and self._refusals < REFUSED_MOST:
            half = len(lost) // 2
            return await self._release(lost[:half]) + await self._release(lost[half:])
        self._refusals += 1
        if monotonic() >= self._said_at + SAID_SECONDS:
            self._said_at = monotonic()
            said = "job %d of a claim whose answer was lost cannot be handed back: %s. It is tried again"
            log.error(said, lost[0][0], described(error))
        return 0
