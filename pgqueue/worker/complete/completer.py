"""Writes outcomes to the database. One flush is in flight; all jobs that finish meanwhile go with the next one.

This is the end of the flow. The executor calls `finish` with a job and its Outcome, from the loop or from a thread. A
flush is one transaction that ends its jobs by their fence (id, worker, claim). The busier the worker, the larger the
batch. The result is durable: before a job is reported as done here, the server has flushed it to disk (as its
synchronous_commit says).

If a statement did not end one of its jobs, the completer looks that job up:
1. If the job's row is still there, it is locked, and the job goes with the next flush. A lock of another transaction
   delays only the job whose row it locks.
2. If the row is gone, an earlier try of ours may have ended the job while its answer was lost. Then nothing is wrong.
3. Otherwise the job was given to another worker (rescue). This run's outcome is dropped and counted.

The rows of plain jobs are hardly ever locked, and locking them before the DELETE costs a WAL record each. If a flush
has many plain jobs, they are deleted without that lock. That statement fails if it meets a lock of another transaction.
The server has then undone the transaction. The same flush is sent again with the statement that skips locked rows, and
all flushes of the next second use that one.

The server may refuse to store an outcome: a number that its JSON lacks, or a text that is too long. A refused flush is
sent again with half as many jobs, until the refused outcome is alone. If the error is about it (`row_errors`), its job
ends as failed. Else the outcome is kept, and is tried again each second. A flush that does not get through in time is
made smaller, too.

If the successors of a job want unique keys, the job is ended in a transaction of its own, after the others. Taking a
key waits for another transaction that is just taking the same key. If a successor got only a part of its keys, it gives
that part back.

A trigger of the application on the tables of jobs may raise, for one row or for each. That says nothing of the outcome.
A flush that meets it is sent again with half as many jobs. The job that is then alone is tried by itself from then on,
again and again, until the trigger lets it through; the other jobs end as usual.

The id of a job that goes on, as for another attempt, may stand in a transaction of the application that is open. That
happens if the sequence of ids was set back, as by a restore. Such a job is put aside as one that a trigger refuses is.
Why it keeps no other waiting, and is neither lost nor run twice:
1. Its statement waits 20 ms for that transaction (`impatience`). Then it fails, and the server has undone the flush.
2. Each such failure halves the flush, or puts the job aside that is alone. So 2,000 jobs end after eleven of them.
3. Until then the job's row in `job_running` stays as it is, and its outcome here. So no worker claims it.
4. If the transaction commits, the id stands twice, and is resolved (doubles.py). If it rolls back, the id is free.

When a transactional job comes here, its outcome is in the database already. The worker only has to note that the job is
over. If the job holds no key, nothing waits for that note. Jobs without keys therefore wake the loop once in
`CALM_SECONDS`, not each by itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from pgqueue.database.backoff import described, emptied, hides_rows, is_loss, persist, transient, wait
from pgqueue.database.row_errors import is_about_row, may_be_about_row, meets_open_id
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement, integers
from pgqueue.database.triggers import trigger_of
from pgqueue.jobs.job import Job, fields
from pgqueue.jobs.outcomes import COMPLETED, WRITTEN, Completed, Handed, Outcome, Released, Retried, unstorable
from pgqueue.jobs.totals import Times
from pgqueue.steady_clock import monotonic
from pgqueue.worker.complete.job_logger import report
from pgqueue.worker.complete.outcome_sql import LOST, Ended, OutcomeSql
from pgqueue.worker.complete.refusals import question
from pgqueue.worker.doubles import resolve
from pgqueue.worker.left_alone import Notice
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

# The end of a transactional job may be reported this late, if nothing waits for it.
CALM_SECONDS = 0.005
LOCKED_PAUSE = 0.05
# For this long after a statement met a lock, rows are locked before they are deleted: meeting one costs 20 ms.
CAREFUL_SECONDS = 1.0
# Jobs whose successors want a key that another transaction is just taking: how many a flush tries, and the longest
# pause between two tries. Each try that fails costs the flush 5 ms and writes an error to the server's log.
BUSY_MOST, BUSY_PAUSE = 4, 1.0
# Jobs that a trigger of the application, or an open transaction, would not let end more than once. Each try that fails
# costs a connection, and the other outcomes wait for it: so few may fail before the others rest. Then come the pause
# until the next tries, and the least time between two lines in the log.
TRAPPED_MOST, TRAPPED_PAUSE, TRAPPED_LOG_SECONDS = 4, 5.0, 10.0
IDLE_SECONDS = 30.0
LIMITS = ("53", "57014", "XX")  # fewer jobs at once may get through: memory, statement_timeout
# How often it is said that outcomes are kept because the server refuses them.
KEPT_SECONDS = 60.0


class Completer:
    """Collects outcomes and writes them in batches.

    `written(jobs)`: these jobs have left this worker. Before that, `kept(jobs)`: those of them whose key is still
    taken, or may be. `goes_on(job)`: another job of its lock starts here when its end is written.
    """

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        outcome_sql: OutcomeSql,
        *,
        written: Callable[[Sequence[Job]], None],
        kept: Callable[[Sequence[Job]], None] = lambda jobs: None,
        goes_on: Callable[[Job], bool] = lambda job: False,
    ) -> None:
        self.fenced = 0
        """Outcomes dropped because the job had been given to another worker."""
        self.ended = 0
        """Number of jobs that have left the completer; it grows also if there was nothing to send."""
        self.flush_times = Times()
        """How long each round trip of a flush took."""
        self.counted: Callable[[Sequence[Ended]], None] = lambda entries: None
        """Told which jobs this worker has ended, with the outcomes that count. Set by `services`."""
        self._leaves_out: Outcome | None = None
        self._left_out: list[Ended] = []
        self._session = session
        self._state = state
        self._outcome_sql = outcome_sql
        self._written = written
        self._kept = kept
        self._goes_on = goes_on
        self._tidies = True
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._wake = asyncio.Event()
        self._signalled = False
        self._calm = False
        """Whether the loop looks again soon by itself, because it has just seen jobs that nothing waits for."""
        # Never replaced, only emptied from the left: a thread may be appending to it just now.
        self._waiting: deque[Ended] = deque()
        self._in_flight: list[Ended] = []
        self._locked: list[Ended] = []
        self._careful_until = 0.0
        self._busy: list[Ended] = []
        self._busy_at = 0.0
        self._patience = LOCKED_PAUSE
        self._trapped: set[Job] = set()
        """Jobs that a trigger of the application, or an open transaction, would not let end: each is sent by itself."""
        self._tries = TRAPPED_MOST
        """How many of them may still fail before the others rest, too."""
        self._trap_notice = Notice("has run, but cannot end", seconds=TRAPPED_LOG_SECONDS)
        self._cannot_end_at = 0.0
        self._most = state.settings.batch_most
        self._unsure: set[int] = set()
        self._ids = {state.id}
        """The worker ids under which outcomes were sent. A worker that was taken for dead comes back under a new id."""
        self._flushed = asyncio.Event()
        self._flushed.set()

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Take the outcome of a job, from any thread. The loop gets one signal per batch, not per job."""
        self._waiting.append((job, outcome))
        if not self._signalled and not (self._calm and _can_wait(job, outcome)):
            self._signalled = True
            if threading.get_ident() == self._thread:
                self._wake.set()
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._wake.set)
        if outcome is not COMPLETED:
            report(job, outcome)

    def leave_out(self, outcome: Outcome) -> None:
        """From now on jobs with this very outcome are not written: they count as flushed, and are in `left_out`."""
        self._leaves_out = outcome

    def left_out(self) -> list[Ended]:
        """The jobs with the outcome of `leave_out` so far."""
        return self._left_out + [each for each in list(self._waiting) if each[1] is self._leaves_out]

    def begin_anew(self) -> None:
        """The worker has another id, under which the numbers of claims begin anew. Nothing is unwritten."""
        self._ids = {self._state.id}

    def unwritten(self) -> int:
        """Number of outcomes that are not in the database yet."""
        return len(self._waiting) + len(self._in_flight) + len(self._locked) + len(self._busy)

    async def flushed(self) -> None:
        """Wait until everything finished so far has been written or dropped."""
        while self.unwritten():
            self._flushed.clear()
            await self._flushed.wait()

    async def run(self) -> None:
        """Flush until cancelled. While the database is away, outcomes are kept and sent again."""
        await persist(self._step, name="complete", answers=self._session.answers)

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
            many = min(len(waiting), self._state.settings.batch_most)
            self._in_flight = self._locked + [waiting.popleft() for _ in range(many)]
            self._locked = []
            if self._leaves_out is not None:
                self._left_out += [each for each in self._in_flight if each[1] is self._leaves_out]
                self._in_flight = [each for each in self._in_flight if each[1] is not self._leaves_out]
            if self._busy and monotonic() >= self._busy_at:
                self._in_flight += self._busy
                self._busy = []
                self._tries = TRAPPED_MOST
            if waiting:
                self._wake.set()
            self._calm = bool(self._in_flight) and not self._busy and all(_can_wait(*each) for each in self._in_flight)
        if self._in_flight:
            await self._flush(self._in_flight)
        if not self.unwritten():
            self._flushed.set()

    def _pause(self) -> float:
        """How long to wait for more outcomes."""
        pause = LOCKED_PAUSE if self._locked else IDLE_SECONDS
        return min(pause, max(0.0, self._busy_at - monotonic())) if self._busy else pause

    async def _flush(self, batch: list[Ended]) -> None:
        self._ids.add(self._state.id)
        trapped = [entry for entry in batch if entry[0] in self._trapped] if self._trapped else []
        batch = [entry for entry in batch if entry[0] not in self._trapped] if trapped else batch
        if not batch:
            await self._end_trapped(trapped)
            return
        batch, later = batch[: self._most], batch[self._most :] + trapped
        alone = [entry for entry in batch if entry[1] is not COMPLETED and _wants_keys(entry[1])]
        others = [entry for entry in batch if not _wants_keys(entry[1])] if alone else batch
        if (not others or await self._end(others, alone + later)) and alone:
            await self._end_alone(alone, later)

    async def _end_trapped(self, trapped: list[Ended]) -> None:
        """Try one of these jobs. If enough have failed, the others rest as well, and come first the next time."""
        if self._tries == 0:
            self._busy = trapped + self._busy
            self._in_flight = []
            return
        self._tries -= 1
        if await self._end(trapped[:1], trapped[1:]):
            self._tries += 1

    async def _end_alone(self, entries: list[Ended], later: list[Ended]) -> None:
        """End these jobs one after the other, each in its own transaction, because each may wait for a key.

        A job that would wait for long is tried again with a later flush, the others first. If a transaction keeps a key
        for long, it delays only the jobs that want this key.
        """
        busy: list[Ended] = []
        refused: list[Ended] = []
        tried = 0
        for job, outcome in entries:
            if len(busy) == BUSY_MOST:
                break
            tried += 1
            assert isinstance(outcome, Completed)
            stored = await self._try_alone(job, outcome)
            if stored is None:
                busy.append((job, outcome))
            elif stored is not outcome:
                refused.append((job, stored))
            else:
                self._unsure.discard(job.id)
                self._in_flight = [entry for entry in self._in_flight if entry[0] is not job]
                self._let_go([job])
        if not busy:
            self._patience = LOCKED_PAUSE
        self._try_later(entries[tried:] + busy)
        self._in_flight = refused + later

    async def _try_alone(self, job: Job, outcome: Completed) -> Outcome | None:
        """End this job in a transaction of its own; return its outcome.

        If the server refuses to store that, another outcome is returned, to be sent instead. None: not now.
        """
        try:
            await self._session.run(*self._outcome_sql.alone(job, outcome, self._state.id))
        except psycopg.errors.LockNotAvailable:
            return None
        except (psycopg.Error, UnicodeError) as error:
            return await self._recover_alone(job, outcome, error)
        except BaseException:
            self._unsure.add(job.id)
            raise
        self.flush_times.add(self._session.took)
        self.counted([(job, outcome)])
        return outcome

    async def _recover_alone(self, job: Job, outcome: Completed, error: Exception) -> Outcome | None:
        """What `_try_alone` returns after this error."""
        if trigger_of(error) is not None:
            self._warn_of_trigger(job, error)
            return None
        if isinstance(error, psycopg.errors.UniqueViolation):  # of a successor's id: its sequence lags, and is advanced
            await resolve(self._session, error, notify=self._state.settings.notify)
        if may_be_about_row(error) and (instead := await self._instead(job, outcome, error)) is not None:
            return instead
        if is_loss(error):
            self._unsure.add(job.id)
            raise error
        if transient(error):  # answered, and too late or too much for the server: others need not wait for it
            self._unsure.add(job.id)
        elif getattr(error, "sqlstate", None) == LOST:
            if (await self._look_up([job], set()))[1]:
                self.counted([(job, outcome)])
            return outcome
        self._cannot_end(job, error)
        return None

    def _try_later(self, entries: list[Ended]) -> None:
        """These are sent again after a pause, which grows, and no other outcome waits for them."""
        if entries:
            self._patience = min(BUSY_PAUSE, 2 * self._patience)
        again_at = monotonic() + self._patience
        self._busy_at = min(self._busy_at, again_at) if self._busy else again_at
        self._busy += entries

    async def _end(self, batch: list[Ended], rest: list[Ended]) -> bool:
        """End `batch`; afterwards `rest` is in flight. False: nothing was ended, and all of it is to be sent again."""
        careful = monotonic() < self._careful_until
        endings = self._outcome_sql.many(batch, self._state.id, careful=careful)
        release = self._outcome_sql.release(batch) if self._tidies else None
        try:
            answers = await self._send(batch, rest, [ending for ending, _ in endings], release)
        except BaseException as error:
            await self._recover(error, batch, rest, careful=careful, released=release is not None)
            return False
        if answers is None:
            return False
        self._most = min(self._state.settings.batch_most, 2 * self._most)
        self._trapped.difference_update([job for job, _ in batch])
        left: list[Job] = []
        for (_, group), answer in zip(endings, answers[: len(endings)], strict=True):
            if answer is not None:
                left += _not_in(group, answer)
        locked, ended = set[int](), set[int]()
        if left:
            released = {job.id for job, outcome in batch if isinstance(outcome, Released)}
            locked, ended = await self._look_up(left, released)
        self._go_on_with(rest, [entry for entry in batch if entry[0].id in locked])
        self._report_ends(batch, left, locked)
        self.counted(_counting(batch, left, ended))
        self._let_go([job for job, _ in batch if job.id not in locked])
        return True

    async def _send(
        self, batch: list[Ended], rest: list[Ended], endings: list[Statement[Any]], release: Statement[Any] | None
    ) -> list[Any] | None:
        """Send the flush of these jobs. None: it was refused for what is not about them, which is put right here."""
        messages = endings if release is None else [*endings, release]
        if messages and any([self._goes_on(job) for job, _ in batch]):
            messages = [*messages, self._outcome_sql.durably()]
        if not messages:
            return []
        try:
            answers: list[Any] = await self._session.run(*messages)
        except psycopg.Error as error:
            if emptied(error):
                [answer] = await self._session.run(self._session.link.statement("registration_restore_settings"))
                if not answer[0][0]:  # none was missing: another worker has put it back, or the leaf is unknown
                    raise
            elif trigger_of(error) is not None or meets_open_id(error):
                self._trap(batch, rest, error)
            else:
                raise
            return None
        self.flush_times.add(self._session.took)
        return answers

    async def _recover(
        self, error: BaseException, batch: list[Ended], rest: list[Ended], *, careful: bool, released: bool
    ) -> None:
        """The flush of this batch has failed. See to it that the next one differs, or raise the error.

        `careful`: it skipped locked rows. `released`: it tidied up unique keys.
        """
        if isinstance(error, psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected):
            if careful:
                raise error
            self._careful_until = monotonic() + CAREFUL_SECONDS
        elif isinstance(error, psycopg.errors.InsufficientPrivilege):
            if not released or hides_rows(error):
                raise error
            # The role's grants are older than the schema. The batch is sent again without the removal of unique keys.
            self._tidies = False
            log.error("unique keys are not tidied up: this role needs its rights again, `pgqueue grants`")
        elif isinstance(error, psycopg.errors.UniqueViolation):
            if not await resolve(self._session, error, notify=self._state.settings.notify):
                await self._find_refused(batch, rest, error)
        elif may_be_about_row(error):
            await self._find_refused(batch, rest, error)
        else:
            if str(getattr(error, "sqlstate", None)).startswith(LIMITS):
                self._most = max(1, len(batch) // 2)
            # The flush may have been committed all the same. Then the next try finds the rows gone; nothing is lost.
            self._unsure.update(job.id for job, _ in batch)
            raise error

    def _go_on_with(self, rest: list[Ended], locked: list[Ended]) -> None:
        """A flush was committed: `rest` comes next, and what is `locked` with the flush after a pause."""
        self._unsure &= {job.id for job, _ in locked} | {job.id for job, _ in rest}
        self._in_flight = rest
        if locked:  # added to those that an earlier part of the same flush has left
            self._careful_until = monotonic() + CAREFUL_SECONDS
            self._locked += locked

    def _report_ends(self, batch: list[Ended], left: list[Job], locked: set[int]) -> None:
        """Say what became of jobs that were handed over, and which keys are still taken, or may be."""
        for job, outcome in batch:
            if outcome.__class__ is Handed and job not in left:  # its handler's transaction did not commit
                report(job, outcome.otherwise)
        # If a job was handed over and not ended here, its handler has ended it, or it was looked up.
        ours = (each for each in batch if each[1].__class__ is not Handed or each[0] not in left)
        kept = [job for job, outcome in ours if outcome is not COMPLETED and self._outcome_sql.keeps(job, outcome)]
        if kept:
            self._kept([job for job in kept if job.id not in locked])

    def _let_go(self, jobs: list[Job]) -> None:
        self.ended += len(jobs)
        self._written(jobs)

    async def _find_refused(self, batch: list[Ended], rest: list[Ended], error: BaseException) -> None:
        """The server refuses to end these jobs, and ended none: send half as many next time.

        If it is a single job, its outcome is replaced, or kept for later if the error is not about it.
        """
        self._most = max(1, len(batch) // 2)
        if len(batch) > 1:
            return
        [(job, outcome)] = batch
        instead = await self._instead(job, outcome, error)
        if instead is not None:
            self._in_flight = [(job, instead), *rest]
        else:
            self._cannot_end(job, error)
            self._in_flight = rest
            self._try_later(batch)
            if transient(error):  # as when transaction ids run out: the others will hardly get through now
                raise error

    async def _instead(self, job: Job, outcome: Outcome, error: BaseException) -> Outcome | None:
        """The outcome to store instead of one that the server refuses; None if the error is not about this outcome."""
        about = is_about_row(error, self._outcome_sql.schema)
        if about is None:
            about = await self._unreadable(outcome)
        instead = unstorable(outcome, str(error).strip().splitlines()[0]) if about else None
        if instead is not None:
            said = "job %d (%s) has run, but the server refuses to store its outcome, so it %s: %s"
            ends = "is failed" if not isinstance(outcome, Retried) else "is tried again without it"
            log.error(said, job.id, job.task, ends, described(error), extra=fields(job))
        return instead

    async def _unreadable(self, outcome: Outcome) -> bool:
        """Whether the server cannot even read what this outcome says."""
        try:
            await self._session.run(question(outcome, self._outcome_sql.schema))
        except Exception as error:
            if not may_be_about_row(error):
                raise
            return True
        return False

    def _cannot_end(self, job: Job, error: BaseException) -> None:
        """Say that this outcome is kept: once a minute, whichever job it is."""
        if monotonic() < self._cannot_end_at:
            return
        self._cannot_end_at = monotonic() + KEPT_SECONDS
        log.error(
            "job %d (%s) has run, but cannot end: %s. That is not about its outcome, which is kept and tried again "
            "each second. If a right is missing, run `pgqueue grants` for this role",
            job.id,
            job.task,
            described(error),
            extra=fields(job),
        )

    def _trap(self, batch: list[Ended], rest: list[Ended], error: BaseException) -> None:
        """A trigger of the application has raised, or an open transaction has the id of a job, and no job was ended:
        send half as many next time.

        A single job is put aside for a moment, with its outcome.
        """
        self._most = max(1, len(batch) // 2)
        if len(batch) > 1:
            return
        [(job, outcome)] = batch
        again_at = monotonic() + (TRAPPED_PAUSE if job in self._trapped else BUSY_PAUSE)
        self._busy_at = min(self._busy_at, again_at) if self._busy else again_at
        self._busy.append((job, outcome))
        self._trapped.add(job)
        self._in_flight = rest
        self._warn_of_trigger(job, error)

    def _warn_of_trigger(self, job: Job, error: BaseException) -> None:
        self._trap_notice.say(f"job {job.id} ({job.task})", error, fields(job))

    async def _look_up(self, left: list[Job], released: set[int]) -> tuple[set[int], set[int]]:
        """Look up jobs that were not ended; return the ids of those that are ours still, and of those we have ended.

        The others are fenced, or were ended by an earlier try. A job that was to be released has no outcome to drop.
        """
        [answer] = await self._session.run(self._about("complete_missing", left))
        locked = {row[0] for row in answer}
        gone = [job for job in left if job.id not in locked]
        unsure = [job for job in gone if job.id in self._unsure or job.written]
        ended: set[int] = set()
        if unsure:
            settled = self._about("complete_settled", unsure, worker_ids=integers(self._ids))
            [answer] = await self._session.run(settled)
            ended = {row[0] for row in answer}
        dropped = [job for job in gone if job.id not in ended | released]
        self._kept(dropped)
        for job in dropped:
            self.fenced += 1
            log.warning(
                "job %d (%s): had been given to another worker; the outcome of this run is dropped",
                job.id,
                job.task,
                extra=fields(job),
            )
        return locked, ended

    def _about(self, name: str, jobs: list[Job], **params: object) -> Statement[list[Row]]:
        return self._outcome_sql.about(name, jobs, self._state.id, **params)


def _can_wait(job: Job, outcome: Outcome) -> bool:
    """Whether nothing waits for this job's end: its outcome is written, it has no key, and it is no poison job."""
    if outcome is not WRITTEN or job.crashes:
        return False
    keys = job.lock_key, job.limit_key, job.rate_key, job.unique_key, job.idempotency_key
    return all(key is None for key in keys)


def _wants_keys(outcome: Outcome) -> bool:
    return isinstance(outcome, Completed) and any([new.keys is not None for new in outcome.successors])


def _counting(batch: list[Ended], left: list[Job], ended: set[int]) -> list[Ended]:
    """The jobs of a flush that this worker has ended, with the outcomes that count.

    `left` were not ended by the flush. Of these, `ended` were ended by an earlier try of ours, or by their handlers.
    """
    if not left and not any([outcome.__class__ is Handed for _, outcome in batch]):
        return batch
    made: list[Ended] = []
    for job, outcome in batch:
        ours = job not in left
        if isinstance(outcome, Handed):
            outcome = outcome.otherwise if ours else COMPLETED
        if ours or job.id in ended:
            made.append((job, outcome))
    return made


def _not_in(jobs: list[Job], ended: list[int]) -> list[Job]:
    """The jobs that were not ended. If we were taken for dead and given a job again, it is in `jobs` twice: each id in
    `ended` counts for one of them."""
    gone = Counter(ended)
    left: list[Job] = []
    for job in jobs:
        if gone[job.id]:
            gone[job.id] -= 1
        else:
            left.append(job)
    return left
