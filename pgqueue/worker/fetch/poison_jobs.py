"""Poison jobs: jobs that ran when their worker died. They run one at a time, so that the third crash names the killer.

A poison job with one crash runs beside ordinary jobs, but never beside another poison job. A poison job with two
crashes runs alone in its process. Kept by the worker, asked by the fetcher; decides only, moves nothing.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence

from pgqueue.database.sessions import Session
from pgqueue.database.statements import texts
from pgqueue.jobs.job import Job
from pgqueue.steady_clock import monotonic
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

ONE_CRASH, MORE_CRASHES = -2, -1
"""The ranks of their lanes."""


class PoisonJobs:
    """The poison jobs this process holds now: one at most."""

    def __init__(self) -> None:
        self._held: dict[int, Job] = {}
        self.draining = False
        """Whether to fetch nothing until this worker holds no job, and then only a poison job that must run alone."""
        self.asked = 0
        """How often a poison job that must run alone could be asked for."""

    @property
    def alone(self) -> bool:
        """Whether the poison job that we hold must run alone."""
        return any(job.crashes > 1 for job in self._held.values())

    def ranks(self, *, idle: bool) -> Sequence[int]:
        """The ranks of poison jobs to ask for.

        None while another poison job is held; poison jobs of two crashes only if no job is held.
        """
        if self._held:
            return ()
        if not idle:
            return (ONE_CRASH,)
        self.asked += 1
        return (MORE_CRASHES,) if self.draining else (ONE_CRASH, MORE_CRASHES)

    def keep(self, jobs: list[Job], *, idle: bool = True) -> list[Job]:
        """The jobs to keep of a fetch; the others go back.

        1. One poison job at most.
        2. Beside a poison job with two crashes no other job is kept.
        3. A poison job with two crashes is not kept while other jobs are held (not `idle`).

        `draining` ends with a fetch that brings a poison job with two crashes, or no job. If the process dies before
        the others have gone back, `rescue_jobs` must know which job was kept: most crashes, least id.
        """
        if not jobs:
            self.draining = False
        closed = self.alone
        if closed:
            return []
        if not idle:
            jobs = [job for job in jobs if job.crashes < 2]
        poison = [job for job in jobs if job.crashes]
        if not poison:
            return jobs
        worst = max(poison, key=lambda job: (job.crashes, -job.id))
        self._held[worst.id] = worst
        if self.alone:
            self.draining = False
        return [worst] if self.alone else [job for job in jobs if job is worst or not job.crashes]

    def ended(self, jobs: Iterable[Job]) -> bool:
        """Whether the poison job we hold was among these: the next one may come.

        An earlier run of it does not count, from before we seemed dead and were given it anew.
        """
        if not self._held:
            return False
        ours = [job for job in jobs if self._held.get(job.id) is job]
        for job in ours:
            del self._held[job.id]
        return bool(ours)


LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
CLOSED_SECONDS = 60.0
OPEN_TIMES = 10


class SpareSlot:
    """Decides when to make room for a poison job that must run alone. Pure: time is passed in."""

    def __init__(self) -> None:
        self._waiting: int | None = None
        self._since = 0.0
        self._closed_at: float | None = None
        self._open_until = 0.0
        self._most = CLOSED_SECONDS

    def taken(self) -> None:
        """This worker could ask for poison jobs that must run alone: one that waits now has not waited for us."""
        self._waiting, self._closed_at, self._most = None, None, CLOSED_SECONDS

    def drains(self, waiting: int | None, patience: float, now: float) -> bool:
        """Whether to make room for the job `waiting`, the first of the waiting poison jobs; None: none waits."""
        if waiting is None:
            self.taken()
            return False
        if waiting != self._waiting:
            self._waiting, self._since = waiting, now
        if self._closed_at is not None:
            if now - self._closed_at < self._most:
                return True
            self._closed_at, self._open_until = None, now + OPEN_TIMES * self._most
            self._most *= 2
        elif now - self._since >= patience and now >= self._open_until:
            self._closed_at = now
        return self._closed_at is not None


class PoisonDrain:
    """Looks for poison jobs that must run alone while the worker is busy.

    `drain` receives whether to take no jobs, so that a poison job can run alone, and the rate that this job waits for.
    """

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        poison_jobs: PoisonJobs,
        *,
        leads: Callable[[], bool],
        drain: Callable[[bool, str | None], None],
    ) -> None:
        self._session = session
        self._state = state
        self._queues = list(state.settings.queues)
        self._tasks = texts(state.tasks)
        self._poison_jobs = poison_jobs
        self._leads = leads
        self._asked_before = -1
        self._drain = drain
        self._turn = SpareSlot()
        # Not all workers at once: each that makes room stands still for a while.
        self._slower = random.uniform(2.0, 3.0)

    async def round(self) -> float:
        """Look, if this worker is busy: if it could not ask for such a job since the last round. Every five seconds."""
        asked = self._poison_jobs.asked
        if asked != self._asked_before or not self._state.held:  # an idle worker asks seldom, and could at any time
            self._asked_before = asked
            self._turn.taken()
        else:
            await self._look()
        return LOOK_SECONDS

    async def _look(self) -> None:
        patience = PATIENCE_SECONDS * (1.0 if self._leads() else self._slower)
        # If the rate of the job stays closed until we would have given up, making room is in vain. "Closed now" is no
        # test: a rate with many waiters is open for moments only.
        look = self._session.link.statement(
            "poison_jobs_waiting", queues=self._queues, tasks=self._tasks, seconds=patience + CLOSED_SECONDS
        )
        [rows] = await self._session.run(look)
        waiting, rate = rows[0] if rows else (None, None)
        self._drain(self._turn.drains(waiting, patience, monotonic()), rate)
