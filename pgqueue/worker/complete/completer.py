"""Writes outcomes down: one flush in flight, everything that finishes meanwhile goes with the next.

The end of the flow. The executor calls `finish` (from the loop or from a thread) with a job and its Outcome; a flush
is one transaction that ends the jobs by their fence (id, worker, claim). It batches by itself: the busier the worker,
the larger the batch. Durable: a job that is reported as done here has been flushed to disk by the server (its
synchronous_commit).

A job that the statement did not end is looked up. If its row is gone, the job was given to another worker (rescue), and
this run's outcome is dropped and counted; unless an earlier try of ours had ended it and only the answer was lost. If
the row is still there, it is locked, and the job goes with the next flush. So a foreign lock on a row delays that row
only.

The rows of plain jobs are hardly ever locked, and a lock before the DELETE costs a record of the log. So many plain
jobs at once are deleted without it, by a statement that fails if it meets another lock. The server has then undone the
transaction. The same flush goes again with the statement that skips locked rows, and so do all of the next second.

An outcome that the server refuses to store (a number that its JSON has not, a text that is too long) harms its own job
only: a flush that is refused is tried again with half as many, until that one is alone, and then ends as failed. What
does not get through in time goes in smaller flushes, too.

If the successors of a job want unique keys, it is ended in a transaction of its own, after the others. To take a key is
to wait for another transaction that is just taking it; and a successor that got a part of its keys gives that back.

A transactional job is written down already when it comes here; only others have to hear that it is over. If it holds no
key, nothing waits for that: such jobs wake the loop once in `CALM_SECONDS`, not each by itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import psycopg

from pgqueue.database.backoff import persist, transient, wait
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement, integers
from pgqueue.jobs.job import Job, fields
from pgqueue.jobs.outcomes import COMPLETED, WRITTEN, Completed, Handed, Outcome, Released, Retried, unstorable
from pgqueue.worker.complete.job_logger import report
from pgqueue.worker.complete.outcome_sql import LOST, Ended, OutcomeSql
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

FLUSH_MOST = 2_000
# How long the end of a transactional job may wait to be told, where nothing waits for it.
CALM_SECONDS = 0.005
LOCKED_PAUSE = 0.05
# So long after a lock was met every row is locked before it is deleted: meeting one costs 20 ms and a new connection.
CAREFUL_SECONDS = 1.0
# Jobs with successors that want a key which another transaction is just taking: so many are tried at once, each costs
# the flush 5 ms and the server's log a line, and so long is the pause between two tries in the end.
BUSY_MOST, BUSY_PAUSE = 4, 1.0
IDLE_SECONDS = 30.0
# What the server says of contents that it cannot store, whatever is tried again.
REFUSALS = (psycopg.DataError, psycopg.IntegrityError, UnicodeError)
PROGRAM_LIMITS = "54"  # a class of SQLSTATEs: too long, too deep
LIMITS = (PROGRAM_LIMITS, "53", "57014", "XX")  # it may get through with less at once: memory, statement_timeout


class Completer:
    """Collects outcomes and writes them in batches. `written` is told which jobs are no longer ours; before that `kept`
    of those among them with which a key has not become free, or perhaps not."""

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        outcome_sql: OutcomeSql,
        *,
        written: Callable[[Sequence[Job]], None],
        kept: Callable[[Sequence[Job]], None] = lambda jobs: None,
    ) -> None:
        self.fenced = 0
        """Outcomes dropped because the job had been given to another worker."""
        self.ended = 0
        """How many jobs have left here: it moves, also where there was nothing to send."""
        self._session = session
        self._state = state
        self._outcome_sql = outcome_sql
        self._written = written
        self._kept = kept
        self._tidies = True
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._wake = asyncio.Event()
        self._signalled = False
        self._calm = False
        """Whether the loop looks soon by itself: it has just seen jobs that nothing waits for."""
        # Never replaced, only emptied from the left: a thread may be in the middle of an append.
        self._waiting: deque[Ended] = deque()
        self._in_flight: list[Ended] = []
        self._locked: list[Ended] = []
        self._careful_until = 0.0
        self._busy: list[Ended] = []
        self._busy_at = 0.0
        self._patience = LOCKED_PAUSE
        self._most = FLUSH_MOST
        self._unsure: set[int] = set()
        self._ids = {state.id}
        """Under which ids outcomes have been sent: another one after it was taken for dead and came back."""
        self._flushed = asyncio.Event()
        self._flushed.set()

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Take the outcome of a job; from any thread. One signal to the loop per batch, not per job."""
        self._waiting.append((job, outcome))
        if not self._signalled and not (self._calm and _nobody_waits(job, outcome)):
            self._signalled = True
            if threading.get_ident() == self._thread:
                self._wake.set()
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._wake.set)
        if outcome is not COMPLETED:
            report(job, outcome)

    def unwritten(self) -> int:
        """How many outcomes are not in the database yet."""
        return len(self._waiting) + len(self._in_flight) + len(self._locked) + len(self._busy)

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
            calm = self._calm
            woken = await wait(self._wake, CALM_SECONDS if calm else self._pause())
            if not woken and not calm and not self._locked and not self._busy:
                await self._session.rest()  # an idle worker has three connections, not four
                await self._wake.wait()
            self._wake.clear()
            self._signalled = self._calm = False  # before the look: an outcome that comes later gives a signal
            waiting = self._waiting
            self._in_flight = self._locked + [waiting.popleft() for _ in range(min(len(waiting), FLUSH_MOST))]
            self._locked = []
            if self._busy and monotonic() >= self._busy_at:
                self._in_flight += self._busy
                self._busy = []
            if waiting:
                self._wake.set()
            self._calm = (
                bool(self._in_flight) and not self._busy and all(_nobody_waits(*each) for each in self._in_flight)
            )
        if self._in_flight:
            await self._flush(self._in_flight)
        if not self.unwritten():
            self._flushed.set()

    def _pause(self) -> float:
        """How long to wait for more."""
        pause = LOCKED_PAUSE if self._locked else IDLE_SECONDS
        return min(pause, max(0.0, self._busy_at - monotonic())) if self._busy else pause

    async def _flush(self, batch: list[Ended]) -> None:
        self._ids.add(self._state.id)
        batch, later = batch[: self._most], batch[self._most :]
        alone = [entry for entry in batch if entry[1] is not COMPLETED and _wants_keys(entry[1])]
        others = [entry for entry in batch if not _wants_keys(entry[1])] if alone else batch
        if (not others or await self._end(others, alone + later)) and alone:
            await self._end_alone(alone, later)

    async def _end_alone(self, entries: list[Ended], later: list[Ended]) -> None:
        """One after the other, each in its own transaction, for it may wait for a key; those that would wait for long
        are tried again with a later flush, the others first. So a key that is kept open delays the jobs that want it.
        """
        busy: list[Ended] = []
        refused: list[Ended] = []
        tried = 0
        for job, outcome in entries:
            if len(busy) == BUSY_MOST:
                break
            tried += 1
            assert isinstance(outcome, Completed)
            try:
                await self._session.run(*self._outcome_sql.alone(job, outcome, self._state.id))
            except psycopg.errors.LockNotAvailable:
                busy.append((job, outcome))
                continue
            except (psycopg.Error, UnicodeError) as error:
                if _refused(error):
                    refused.append((job, _otherwise(job, outcome, error)))
                    continue
                if transient(error):
                    self._unsure.add(job.id)
                    raise
                if getattr(error, "sqlstate", None) != LOST:
                    log.error(
                        "job %d (%s) has run, but cannot end, for its successors cannot be made: %s; it is tried again "
                        "each second (a missing right: run `pgqueue grants` for this role)",
                        job.id,
                        job.task,
                        error,
                    )
                    busy.append((job, outcome))
                    continue
                await self._look_up([job], set())
            except BaseException:
                self._unsure.add(job.id)
                raise
            self._unsure.discard(job.id)
            self._in_flight = [entry for entry in self._in_flight if entry[0] is not job]
            self._let_go([job])
        self._patience = min(BUSY_PAUSE, 2 * self._patience) if busy else LOCKED_PAUSE
        again_at = monotonic() + self._patience
        self._busy_at = min(self._busy_at, again_at) if self._busy else again_at
        self._busy += entries[tried:] + busy
        self._in_flight = refused + later

    async def _end(self, batch: list[Ended], rest: list[Ended]) -> bool:
        """End these; the `rest` is in flight then. False: nothing was ended, and it is all to be tried again."""
        careful = monotonic() < self._careful_until
        endings = self._outcome_sql.many(batch, self._state.id, careful=careful)
        messages: list[Statement[Any]] = [ending for ending, _ in endings]
        if self._tidies and (release := self._outcome_sql.release(batch)) is not None:
            messages.append(release)
        try:
            answers = await self._session.run(*messages) if messages else []
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if careful:
                raise
            self._careful_until = monotonic() + CAREFUL_SECONDS
            return False
        except psycopg.errors.InsufficientPrivilege:
            if len(messages) == len(endings):
                raise
            self._tidies = False  # a role that was granted before there were unique keys; the batch goes again, without
            log.error("unique keys are not tidied up: this role needs its rights again, `pgqueue grants`")
            return False
        except psycopg.errors.UniqueViolation as error:
            [doubles] = await self._session.run(self._about("complete_refuse_doubles", [job for job, _ in batch]))
            if doubles:
                log.error("jobs %s ran, and waited too: the second rows are failed: refused", doubles)
            else:  # an index that is not ours
                self._make_smaller(batch, rest, error)
            return False
        except BaseException as error:
            if _refused(error):
                self._make_smaller(batch, rest, error)
                return False
            if str(getattr(error, "sqlstate", None)).startswith(LIMITS):
                self._most = max(1, len(batch) // 2)
            # It may have been committed all the same: then the next try finds them gone, and that is no loss.
            self._unsure.update(job.id for job, _ in batch)
            raise
        self._most = min(FLUSH_MOST, 2 * self._most)
        left: list[Job] = []
        for (_, group), answer in zip(endings, answers[: len(endings)], strict=True):
            if answer is not None:
                left += _not_in(group, answer)
        locked: set[int] = set()
        if left:
            released = {job.id for job, outcome in batch if isinstance(outcome, Released)}
            locked = await self._look_up(left, released)
        self._unsure &= locked | {job.id for job, _ in rest}
        self._in_flight = rest
        if locked:  # beside those that an earlier part of the same flush has left
            self._careful_until = monotonic() + CAREFUL_SECONDS
            self._locked += [entry for entry in batch if entry[0].id in locked]
        for job, outcome in batch:
            if outcome.__class__ is Handed and job not in left:  # its handler's transaction did not commit
                report(job, outcome.otherwise)
        # A job that was handed over, and was not ended here, was ended by its handler; or was looked up.
        ours = (each for each in batch if each[1].__class__ is not Handed or each[0] not in left)
        kept = [job for job, outcome in ours if outcome is not COMPLETED and self._outcome_sql.keeps(job, outcome)]
        if kept:
            self._kept([job for job in kept if job.id not in locked])
        self._let_go([job for job, _ in batch if job.id not in locked])
        return True

    def _let_go(self, jobs: list[Job]) -> None:
        self.ended += len(jobs)
        self._written(jobs)

    def _make_smaller(self, batch: list[Ended], rest: list[Ended], error: BaseException) -> None:
        """Nothing of the batch was ended, for the server refuses what one of them wants stored: half as many next time.
        One alone ends otherwise."""
        self._most = max(1, len(batch) // 2)
        if len(batch) == 1:
            [(job, outcome)] = batch
            self._in_flight = [(job, _otherwise(job, outcome, error)), *rest]

    async def _look_up(self, left: list[Job], released: set[int]) -> set[int]:
        """Of jobs that were not ended: those that are still ours. The others are fenced, or ended by an earlier try, or
        were to be given back unfinished, with no outcome that could be dropped."""
        [answer] = await self._session.run(self._about("complete_missing", left))
        locked = {row[0] for row in answer}
        gone = [job for job in left if job.id not in locked | released]
        unsure = [job for job in gone if job.id in self._unsure or job.written]
        ended: set[int] = set()
        if unsure:
            attempts, ids = integers([job.attempt for job in unsure]), integers(self._ids)
            settled = self._about("complete_settled", unsure, attempts=attempts, worker_ids=ids)
            [answer] = await self._session.run(settled)
            ended = {row[0] for row in answer}
        self._kept([job for job in gone if job.id not in ended])
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
        return self._outcome_sql.about(name, jobs, self._state.id, **params)


def _nobody_waits(job: Job, outcome: Outcome) -> bool:
    """Whether nothing has to be done at once for this job's end: it is written, has no key, and was no poison job."""
    if outcome is not WRITTEN or job.crashes:
        return False
    keys = job.lock_key, job.limit_key, job.rate_key, job.unique_key, job.idempotency_key
    return all(key is None for key in keys)


def _wants_keys(outcome: Outcome) -> bool:
    return isinstance(outcome, Completed) and any([new.keys is not None for new in outcome.successors])


def _refused(error: BaseException) -> bool:
    """Whether the server, or the way there, cannot store what was sent."""
    if isinstance(error, psycopg.errors.UniqueViolation):
        return False  # a second row with its id
    return isinstance(error, REFUSALS) or str(getattr(error, "sqlstate", None)).startswith(PROGRAM_LIMITS)


def _otherwise(job: Job, outcome: Outcome, error: BaseException) -> Outcome:
    """How a job ends if its outcome is refused; raises the error if that was tried already."""
    instead = unstorable(outcome, str(error).strip().splitlines()[0])
    if instead is None:
        raise error
    said = "job %d (%s) has run, but the server refuses to store its outcome, so it %s: %s"
    ends = "is failed" if not isinstance(outcome, Retried) else "is tried again without it"
    log.error(said, job.id, job.task, ends, error, extra=fields(job))
    return instead


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
