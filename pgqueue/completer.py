"""Writes outcomes down: one flush in flight, everything that finishes meanwhile goes with the next.

The end of the flow. The executor calls `finish` (from the loop or from a thread) with a job and its Outcome; a flush
is one transaction that ends the jobs by their fence (id, worker, claim). It batches by itself: the busier the worker,
the larger the batch. Durable: a job that is reported as done here has been flushed to disk by the server (its
synchronous_commit).

A job the statement did not end is looked up: gone means that somebody else was given it (rescue) and this run's
outcome is dropped and counted, unless an earlier try of ours had ended it and only the answer was lost; still there
means that its row is locked, and it goes with the next flush. So a stranger who locks a row delays that row only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from pgqueue.endings import Ended, Endings
from pgqueue.job import Job
from pgqueue.joblog import report
from pgqueue.logs import fields
from pgqueue.loops import persist, wait
from pgqueue.outcome import COMPLETED, Handed, Outcome, Released
from pgqueue.sessions import Session
from pgqueue.statements import Row, Statement, integers

log = logging.getLogger("pgqueue")

FLUSH_MOST = 2_000
LOCKED_PAUSE = 0.05
IDLE_SECONDS = 30.0


class Completer:
    """Collects outcomes and writes them in batches. `written` is told which jobs are no longer ours."""

    def __init__(
        self,
        session: Session,
        worker_id: Callable[[], int],
        endings: Endings,
        *,
        written: Callable[[Sequence[Job]], None],
    ) -> None:
        self.fenced = 0
        """Outcomes dropped because the job had been given to somebody else."""
        self._session = session
        self._worker_id = worker_id
        self._endings = endings
        self._written = written
        self._tidies = True
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._wake = asyncio.Event()
        self._signalled = False
        # Never replaced, only emptied from the left: a thread may be in the middle of an append.
        self._waiting: deque[Ended] = deque()
        self._in_flight: list[Ended] = []
        self._locked: list[Ended] = []
        self._unsure: set[int] = set()
        self._flushed = asyncio.Event()
        self._flushed.set()

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Take the outcome of a job; from any thread. One signal to the loop per batch, not per job."""
        self._waiting.append((job, outcome))
        if not self._signalled:
            self._signalled = True
            if threading.get_ident() == self._thread:
                self._wake.set()
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._wake.set)
        if outcome is not COMPLETED:
            report(job, outcome)

    def unwritten(self) -> int:
        """How many outcomes are not in the database yet."""
        return len(self._waiting) + len(self._in_flight) + len(self._locked)

    async def flushed(self) -> None:
        """Wait until everything finished so far has been written or dropped."""
        while self.unwritten():
            self._flushed.clear()
            await self._flushed.wait()

    async def run(self) -> None:
        """Flush until cancelled; the database being away is waited out, nothing is dropped for it."""
        await persist(self._step, name="complete")

    async def _step(self) -> None:
        if not self._in_flight:
            if not await wait(self._wake, LOCKED_PAUSE if self._locked else IDLE_SECONDS) and not self._locked:
                await self._session.close()  # an idle worker has three connections, not four
                await self._wake.wait()
            self._wake.clear()
            self._signalled = False
            waiting = self._waiting
            self._in_flight = self._locked + [waiting.popleft() for _ in range(min(len(waiting), FLUSH_MOST))]
            self._locked = []
            if waiting:
                self._wake.set()
        if self._in_flight:
            await self._flush(self._in_flight)
        if not self.unwritten():
            self._flushed.set()

    async def _flush(self, batch: list[Ended]) -> None:
        endings = self._endings.many(batch, self._worker_id())
        messages: list[Statement[Any]] = [ending for ending, _ in endings]
        if self._tidies and (release := self._endings.release(batch)) is not None:
            messages.append(release)
        try:
            answers = await self._session.run(*messages) if messages else []
        except psycopg.errors.InsufficientPrivilege:
            if len(messages) == len(endings):
                raise
            self._tidies = False  # a role that was granted before there were unique keys; the batch goes again, without
            log.error("unique keys are not tidied up: this role needs its rights again, `pgqueue grants`")
            return
        except psycopg.errors.UniqueViolation:
            [doubles] = await self._session.run(self._about("complete_refuse_doubles", [job for job, _ in batch]))
            log.error("jobs %s ran, and waited too: the second rows are failed: refused", doubles)
            return
        except BaseException:
            # It may have been committed all the same: then the next try finds them gone, and that is no loss.
            self._unsure.update(job.id for job, _ in batch)
            raise
        left: list[Job] = []
        for (_, group), answer in zip(endings, answers[: len(endings)], strict=True):
            if answer is not None:
                left += _not_in(group, answer)
        locked: set[int] = set()
        if left:
            released = {job.id for job, outcome in batch if isinstance(outcome, Released)}
            locked = await self._look_up(left, released)
        self._unsure &= locked
        self._in_flight = []
        self._locked = [entry for entry in batch if entry[0].id in locked] if locked else []
        for job, outcome in batch:
            if outcome.__class__ is Handed and job not in left:  # its handler's transaction did not commit
                report(job, outcome.otherwise)
        self._written([job for job, _ in batch if job.id not in locked])

    async def _look_up(self, left: list[Job], released: set[int]) -> set[int]:
        """Of jobs that were not ended: those that are still ours. The others are fenced, or ended by an earlier try, or
        were to be given back unfinished, with no outcome that could be dropped."""
        [answer] = await self._session.run(self._about("complete_missing", left))
        locked = {row[0] for row in answer}
        gone = [job for job in left if job.id not in locked | released]
        unsure = [job for job in gone if job.id in self._unsure or job.written]
        ended: set[int] = set()
        if unsure:
            attempts = integers([job.attempt for job in unsure])
            [answer] = await self._session.run(self._about("complete_settled", unsure, attempts=attempts))
            ended = {row[0] for row in answer}
        for job in gone:
            if job.id not in ended:
                self.fenced += 1
                log.warning(
                    "job %d (%s): had been given to another worker; the outcome of this run is dropped",
                    job.id,
                    job.task,
                    extra=fields(job),
                )
        return locked

    def _about(self, name: str, jobs: list[Job], **params: object) -> Statement[list[Row]]:
        return self._endings.about(name, jobs, self._worker_id(), **params)


def _not_in(jobs: list[Job], ended: list[int]) -> list[Job]:
    """The jobs that were not ended. One that we were given twice, having been taken for dead, was ended once."""
    gone = Counter(ended)
    left: list[Job] = []
    for job in jobs:
        if gone[job.id]:
            gone[job.id] -= 1
        else:
            left.append(job)
    return left
