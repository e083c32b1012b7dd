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
3. If the server refuses to move a row, that row stays, and every other one is handed back (see mover). As because a
   trigger of the application raises, or because an open transaction of it has the row's id. After many such rows, a
   part with another one stays as a whole. The next comparison divides them in another order.

A worker that holds no job compares every five minutes only, once a comparison has left nothing to decide on. A row of
ours that is unknown here comes from a claim whose answer was lost, or from a server that has forgotten an end. Either
breaks a session, which is a doubt. Behind a pooler it may break none of ours, so there the minute stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import inf
from random import shuffle

import psycopg

from pgqueue.database.backoff import jittered
from pgqueue.database.sessions import Session
from pgqueue.database.statements import integers
from pgqueue.jobs.job import Job
from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic
from pgqueue.worker.left_alone import LeftAlone, Notice
from pgqueue.worker.mover import REFUSED_MOST, Mover
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

EVERY_SECONDS = 60.0
# Under an old snapshot the comparison walks the dead rows of all jobs since, and claims wait for it. So it takes a
# quarter of a percent of the time at most, until it comes every `SELDOM_SECONDS`.
DEAR_SHARE, SELDOM_SECONDS = 400, 300.0
AGAIN_SECONDS = 1.0
REFUSED_SECONDS = 5.0
"""How long a row is left alone that the server refuses to move: each refusal closes the connection, and that is a doubt
by itself. The next comparison comes then."""


class Reconciler:
    """Reconciles over the given session, at once when `state` is in doubt. `gone` stops jobs that have no row."""

    def __init__(self, session: Session, state: WorkerState, *, gone: Callable[[list[Job]], None]) -> None:
        self._session = session
        self._state = state
        self._gone = gone
        self._took = 0.0
        self._sure_at = -inf
        self._sure_on: int | None = None
        """When the last comparison was sent that has left nothing to decide on, and over which connection."""
        self._due = 0.0
        self._doubts = 0
        """How many doubts there had been before the last comparison was sent."""
        self._mover = Mover(
            session,
            notify=state.settings.notify,
            unfit=lambda: session.link.statement(
                "rescue_refuse_unfit", worker_id=state.id, notify=state.settings.notify
            ),
        )
        notice = Notice("of a claim whose answer was lost cannot be handed back")
        self._left = LeftAlone[tuple[int, int]](notice, seconds=REFUSED_SECONDS)

    async def round(self) -> float:
        """Reconcile after a doubt, and once a minute; answer the seconds until the next time. The doubt is taken back
        before: one that comes meanwhile is about a later claim."""
        if monotonic() >= self._due and self._is_sure():
            return self._sleeps(self._state.pace.later(jittered(EVERY_SECONDS)))
        on, now, self._doubts = self._session.lasting, monotonic(), self._state.doubts
        try:
            sure = await self.reconcile()
        except BaseException:
            self._state.in_doubt()
            raise
        self._sure_at, self._sure_on = now if sure and not self._state.held else -inf, on
        seldom = max(EVERY_SECONDS, min(DEAR_SHARE * self._took, SELDOM_SECONDS))
        again = REFUSED_SECONDS if self._left.rows() else AGAIN_SECONDS
        return self._sleeps(self._state.pace.later(jittered(seldom)) if sure else jittered(again))

    def _sleeps(self, seconds: float) -> float:
        """The next round comes after so many seconds. If one comes earlier, there is a doubt."""
        self._due = monotonic() + seconds
        return seconds

    def _is_sure(self) -> bool:
        """Whether there can be no row of ours: see the head."""
        lasting = self._session.lasting
        known = lasting is not None and lasting == self._sure_on and not self._state.held
        return known and self._doubts == self._state.doubts and monotonic() < self._sure_at + SELDOM_SECONDS

    async def reconcile(self) -> bool:
        """Hand back the jobs that are ours in the database and unknown here. False if some rows are left to decide
        on."""
        settled, link, worker_id = self._state.claims.settled, self._session.link, self._state.id
        released, left = 0, self._left.rows()
        keyed = [(job, job.claim) for job in self._state.held.values() if job.lock_key or job.limit_key]
        [rows] = await self._session.run(link.statement("reconciler_held", worker_id=worker_id))
        self._took = self._session.took
        ours = set(rows) if keyed else set()
        if gone := [job for job, claim in keyed if (job.id, claim) not in ours and job.claim == claim]:
            self._gone(gone)
        unknown = [(job_id, claim) for job_id, claim in rows if not self._state.knows(job_id, claim)]
        lost = [(job_id, claim) for job_id, claim in unknown if claim <= settled and (job_id, claim) not in left]
        if not lost:
            return not unknown
        shuffle(lost)  # so that it is not behind the same refused rows that a row stays

        async def release(some: Sequence[tuple[int, int]]) -> None:
            nonlocal released
            released += await self._release(some)

        try:
            await release(lost)
        except psycopg.Error as error:
            await self._mover.divide(error, lost, release, self._refuse, most=REFUSED_MOST)
        if released:
            log.warning("the answer to a claim was lost: %s handed back", plural(released, "job is", "jobs are"))
        return released == len(unknown)

    async def _release(self, lost: Sequence[tuple[int, int]]) -> int:
        """Hand these jobs back, in one transaction; return how many."""
        link, notify = self._session.link, self._state.settings.notify
        release = link.statement(
            "complete_release",
            ids=integers(job_id for job_id, _ in lost),
            claims=integers(claim for _, claim in lost),
            worker_id=self._state.id,
            notify=notify,
        )
        # Which keys they wait for is not known here, so no worker would ask for these.
        [[(some, *_)], _] = await self._session.run(release, link.statement("sweep_tell", notify=notify))
        # A job that was completed between the two statements has no row any more: not lost, only late.
        return len(lost) if some is None else len(some)

    async def _refuse(self, lost: tuple[int, int], error: psycopg.Error) -> None:
        """The server refuses to move this row: it stays for a while."""
        self._left.leave(lost, f"job {lost[0]}", error, extra={"job_id": lost[0]})
