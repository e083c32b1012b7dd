"""Gathers the jobs of tasks with a `Batch`, calls the handler once for many of them, and takes its answer apart.

`held_jobs` brings jobs here before they go to the executor. What goes on from here is one job, the *lead*, for all jobs
of its batch. The executor runs the lead in one slot. This is the innermost layer around its handler. What the executor
says of the lead comes back to `finish`, and becomes the outcome of each job.

A batch has three states, all changed under one lock:

- *gathering*: jobs wait here for neighbours, none longer than `Batch.seconds` after the first;
- *waiting*: the lead stands among the jobs that wait for a slot;
- *begun*: the handler has been called, or is about to.

Why each job ends once:

1. A job is in one batch: it is added when it comes, and is in no other place of this worker.
2. Before a batch has begun, whatever takes jobs out (a cancel, a shutdown, a look at what waits too long) takes them
   under the lock. So a job that is taken out is not among those that the handler is called with.
3. After that no job is taken out. Only `finish` ends jobs, and it removes the batch first. It is called once for a run.
4. If the lead ends before the handler is called, as it was cancelled or its arguments do not fit, only the lead ends.
   The others become a batch again, with another lead.
5. A cancel of the lead may come as its run begins, so that it stops the run. Then only the lead is cancelled, too. If
   the handler has been called, each of the others runs again by itself.

Why the effects and the ends of a transactional batch are one commit:

1. `BatchEnds` goes through the transaction, which writes every end in it, by the fence of each job (`commit`).
2. The rows of all jobs are locked first, in the order of their ids. If one is not this run's any more, the statement
   raises, and nothing of the batch is committed.
3. The ends are known as WRITTEN only after that commit.

What an attempt is. A job has spent an attempt when it has an outcome of its own.

1. If the handler raises, none of the jobs has one. Their attempt goes on: each runs again, in a batch of its own.
2. Of a job that has failed alone, the next attempts are batches of their own, too. So are those of a job under which a
   worker died, of one with a lock, and of one with a timeout of its own. All that stands in the job's row.
3. So a job that cannot succeed makes a batch of others fail once, unless it was given back before it had run alone.
   It goes back only if the worker stops, or if its loop is blocked, as what waits here too long does (`held_jobs`).
4. If it is given back each time, the jobs before it have run alone. So each such round ends a job, or spends its
   attempt.
5. A job that is another worker's by then does not run again here. Its claim is void, as this worker had seemed dead; or
   the transaction of the batch was refused for it.

Why a neighbour of a killer is never failed for it:

1. A job with a crash runs in a batch of its own, and poison jobs run one at a time. So its next crash is its own.
2. From its claim on, the next heartbeat lists each job of a batch among those that run. So each counts a crash.
3. If no heartbeat came since the claim, as many of the jobs claimed since count a crash as the worker has slots. If the
   killer is none of them, at least these run apart the next time. After size / slots such deaths it is one of them.
4. The naive way lists jobs when the batch begins. Those that have gathered for longer than a heartbeat then count as
   not started, no job counts a crash, and the killer ends one worker after the other.

The naive ways: to end the jobs one after the other when the handler has returned (a crash in between repeats effects);
to try the whole batch again (one bad job fails its neighbours for ever); to leave out the lock of 2 (a job that was
cancelled while its batch began is cancelled and run).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from threading import Lock
from time import perf_counter
from typing import Any

from pgqueue.client.middleware import Finish, Handler
from pgqueue.client.tasks import Task
from pgqueue.jobs.batch import WrongAnswer, ended, values
from pgqueue.jobs.context import JobContext
from pgqueue.jobs.job import Job, again, current_job, fields, timed_of, unfit_of
from pgqueue.jobs.outcomes import (
    ASKS,
    RELEASED,
    WRITTEN,
    BatchEnds,
    Cancelled,
    Completed,
    Failed,
    Outcome,
    Retried,
    failed,
    given,
    interrupted,
    one_kind,
    timed_out,
)
from pgqueue.plain_text import foreign, plain
from pgqueue.worker.run.batch_context import BatchContext
from pgqueue.worker.run.running_jobs import EndedContext, RunningJobs
from pgqueue.worker.run.slots import SlotGroup
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

UNSTOPPED = interrupted("its batch did not stop, and was taken away")
"""What hooks are told of a run whose job runs again."""

GROWTH = 4
"""How many jobs to fetch for a batch beyond what fits, for each that the last claim has brought for it."""


@dataclass(slots=True, eq=False)
class JobBatch:
    """Jobs of one task that are one call of its handler. The first is the lead."""

    task: Task[..., Any]
    group: SlotGroup | None
    """The slots that it waits for. None: it has begun."""
    jobs: list[Job]
    brought: int = 0
    """While it gathers: how many of its jobs came last, together."""
    timer: asyncio.TimerHandle | None = None
    """While it gathers: when it starts at the latest."""
    called: bool = False
    """Its handler has been called, or is about to be."""
    asked: BaseException | None = None
    """The Snooze, Retry, Cancel or Fail that its handler has raised, for all jobs."""
    wrong: WrongAnswer | None = None
    """Its handler has answered something else than a value for each job."""
    cancelled: dict[Job, Outcome] = field(default_factory=dict)
    """The jobs that were cancelled while they run, and how each ends if the handler does not say."""


class JobBatches:
    """The batches of one worker. `offer(group, jobs)` lets jobs start as slots are free, on the loop. `wake` says that
    jobs fit again. `replaced(before, after)` says that a job goes on as another object, as the run of the first one is
    `UNSTOPPED`, on the loop. `began(job)` tells the hooks that a job begins."""

    def __init__(
        self,
        state: WorkerState,
        running: RunningJobs,
        *,
        offer: Callable[[SlotGroup, list[Job]], None],
        wake: Callable[[], None],
        replaced: Callable[[Job, Job], None],
        began: Callable[[Job], None],
    ) -> None:
        self.context = JobContext()
        """What is behind the jobs of a worker. Set by `services`."""
        self._state = state
        self._running = running
        self._offer, self._wake, self._replaced, self._began = offer, wake, replaced, began
        self._tasks = {name: task for name, task in state.tasks.items() if task.batch is not None}
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._gathering: dict[tuple[str, ...], dict[str, JobBatch]] = {}
        """By the queues of a group of slots, and by the name of the task."""
        self._batches: dict[Job, JobBatch] = {}
        """By their leads, those that wait for a slot, and those that have begun."""
        self._places: dict[int, tuple[JobBatch, Job]] = {}
        """By id, the jobs of these batches: each cancel asks for one."""
        self._ahead: list[tuple[SlotGroup, list[Job]]] = []
        """Jobs that a batch has left, until the loop offers them: each of the inner lists is a batch."""
        self._finish: Finish = lambda job, outcome: None
        if self._tasks:
            running.about_to_run = self.waiting_ids

    def finishing(self, finish: Finish) -> Finish:
        """Return a function that calls `finish` for each job of a batch; `finish` itself if no task has batches."""
        self._finish = finish
        return self.finish if self._tasks else finish

    # Gathering, on the loop ------------------------------------------------------------------------------------------

    def gather(self, group: SlotGroup, jobs: list[Job]) -> list[Job]:
        """Keep those of these jobs that are to be a batch with others. The rest, and the leads of full batches, are to
        start as slots are free."""
        if not self._tasks or not jobs:
            return jobs
        alone = {*unfit_of(jobs), *timed_of(jobs)}
        ready = []
        with self._lock:
            for batch in self._gathering.get(group.queues, {}).values():
                batch.brought = 0
            for job in jobs:
                task = self._tasks.get(job.task)
                if task is None or job in alone or not _joins(job):
                    ready.append(job)
                elif (lead := self._join(group, task, job)) is not None:
                    ready.append(lead)
            self._want(group)
        return ready

    def _join(self, group: SlotGroup, task: Task[..., Any], job: Job) -> Job | None:
        assert task.batch is not None
        gathering = self._gathering.setdefault(group.queues, {})
        batch = gathering.get(task.name)
        if batch is None:
            batch = gathering[task.name] = JobBatch(task, group, [])
            batch.timer = self._loop.call_later(task.batch.seconds, self._start, batch)
            group.beyond += 1  # the slot that it will take, however many jobs come
        batch.jobs.append(job)
        self._places[job.id] = batch, job
        batch.brought += 1
        return self._ready(batch) if len(batch.jobs) == task.batch.size else None

    def _ready(self, batch: JobBatch) -> Job:
        """It gathers no more: its lead may start. Under the lock."""
        group, lead = batch.group, batch.jobs[0]
        assert group is not None
        gathering = self._gathering.get(group.queues, {})
        if gathering.get(batch.task.name) is batch:
            del gathering[batch.task.name]
        if batch.timer is not None:
            batch.timer.cancel()
            batch.timer = None
        self._batches[lead] = batch
        group.beyond += len(batch.jobs) - 2  # the lead is among those that wait there, and had counted for all
        return lead

    def _start(self, batch: JobBatch) -> None:
        """Start what has gathered, if it gathers still."""
        with self._lock:
            group = batch.group
            if batch.timer is None or not batch.jobs or group is None:
                return
            lead = self._ready(batch)
            self._want(group)
        self._offer(group, [lead])

    def start_all(self) -> None:
        """Let all that has gathered start now: no more jobs come."""
        with self._lock:
            found = [batch for each in self._gathering.values() for batch in each.values()]
        for batch in found:
            self._start(batch)

    def _want(self, group: SlotGroup) -> None:
        """How many jobs to fetch for its gatherings: no more than they take, and `GROWTH` for each that has just come.

        A claim brings jobs of any task. If the last one has brought none for them, the next would keep others from
        workers that have slots for them.
        """
        gathering = self._gathering.get(group.queues, {}).values()
        group.gathering = sum(
            min(each.task.batch.size - len(each.jobs), GROWTH * each.brought) for each in gathering if each.task.batch
        )

    # Jobs that go before they run ------------------------------------------------------------------------------------

    def remove(self, job_id: int) -> Job | None:
        """Take out this job if it is here and has not begun. The others of its batch stay one. On the loop."""
        if not self._tasks:
            return None
        with self._lock:
            for _, jobs in self._ahead:
                if (ahead := next((each for each in jobs if each.id == job_id), None)) is not None:
                    jobs.remove(ahead)
                    self._ahead = [each for each in self._ahead if each[1]]
                    return ahead
            batch, job = self._places.get(job_id, (None, None))
            if batch is None or job is None or (group := batch.group) is None:
                return None
            lead = batch.jobs[0]
            if lead not in self._batches:  # it gathers
                self._leave_out(batch, job)
                if not batch.jobs:
                    self._forget_gathering(batch, group)
                self._want(group)
                return job
            if job is not lead:
                self._leave_out(batch, job)
                group.beyond -= 1
                return job
            if group.remove(job_id) is None:  # a run has just taken it
                return None
            self._go_on(group, self._dissolve(batch)[1:])
            return job

    def _leave_out(self, batch: JobBatch, job: Job) -> None:
        batch.jobs.remove(job)
        self._left(batch, [job])

    def _left(self, batch: JobBatch, jobs: Iterable[Job]) -> None:
        """These jobs are of this batch no more. Under the lock."""
        for job in jobs:
            if self._places.get(job.id) == (batch, job):
                del self._places[job.id]

    def _forget_gathering(self, batch: JobBatch, group: SlotGroup) -> None:
        self._gathering[group.queues].pop(batch.task.name, None)
        group.beyond -= 1
        if batch.timer is not None:
            batch.timer.cancel()
            batch.timer = None

    def _dissolve(self, batch: JobBatch) -> list[Job]:
        """Take apart a batch that waits for a slot; its jobs. Under the lock."""
        assert batch.group is not None
        del self._batches[batch.jobs[0]]
        self._left(batch, batch.jobs)
        batch.group.beyond -= len(batch.jobs) - 1
        batch.group = None
        return batch.jobs

    def with_others(self, jobs: Iterable[Job]) -> list[Job]:
        """These jobs, which have been taken out before they had begun. Behind the lead of a batch come its others."""
        if not self._batches:
            return list(jobs)
        found: list[Job] = []
        with self._lock:
            for job in jobs:
                batch = self._batches.get(job)
                waits = batch is not None and batch.group is not None
                found += self._dissolve(batch) if batch is not None and waits else [job]
        return found

    def take_out(self) -> list[Job]:
        """Take out all jobs that gather, or have left a batch. From any thread: the loop may be blocked."""
        if not self._tasks:
            return []
        with self._lock:
            found = [job for _, jobs in self._ahead for job in jobs]
            self._ahead.clear()
            for gathering in self._gathering.values():
                for batch in gathering.values():
                    assert batch.group is not None
                    batch.group.beyond -= 1
                    batch.group.gathering = 0
                    found += batch.jobs
                    self._left(batch, batch.jobs)
                    batch.jobs, batch.timer = [], None  # a timer that comes finds that it gathers no more
                gathering.clear()
        return found

    def note(self, job_id: int, outcome: Outcome, interrupt: Callable[[int, Outcome], bool]) -> bool | None:
        """Stop this job of a batch of several that has begun; None if it is not in one.

        A cancel stops no batch, as it is meant for one job: `Job.cancelled` says so to the handler. What else stops a
        job stops the batch.
        """
        if not self._batches:
            return None
        with self._lock:
            batch, job = self._places.get(job_id, (None, None))
            if batch is None or job is None or batch.group is not None or len(batch.jobs) < 2:
                return None
            lead = batch.jobs[0]
            if isinstance(outcome, Cancelled):
                batch.cancelled.setdefault(job, outcome)
                return True
        return interrupt(lead.id, outcome)

    def waiting_ids(self) -> list[int]:
        """The ids of the jobs here that have not begun. From any thread."""
        with self._lock:
            found = [job.id for _, jobs in self._ahead for job in jobs]
            gathering = (batch for each in self._gathering.values() for batch in each.values())
            for batch in (*gathering, *self._batches.values()):
                if batch.group is not None:
                    found += [job.id for job in batch.jobs]
        return found

    # The layer -------------------------------------------------------------------------------------------------------

    def wraps(self, task: Task[..., Any]) -> bool:
        """Whether the handler of this task takes batches."""
        return task.batch is not None

    def in_thread(self, task: Task[..., Any], call: Handler) -> Handler:
        """A sync handler that is called with the jobs of a batch."""

        def in_thread(*args: Any, **kwargs: Any) -> BatchEnds:
            job = current_job()
            with self._running.shield(job):  # a job that leaves the batch ends here
                batch, elements = self._begin(job, task, args[-1])
            batch.called = True
            try:
                return self._ends(batch, call(*_arguments(batch, elements)))
            except BaseException as error:
                _note(batch, error)
                raise
            finally:
                self._leave(batch)

        return in_thread

    def on_loop(self, task: Task[..., Any], call: Handler) -> Handler:
        """The same of an async handler."""

        async def on_loop(*args: Any, **kwargs: Any) -> BatchEnds:
            batch, elements = self._begin(current_job(), task, args[-1])
            batch.called = True
            try:
                return self._ends(batch, await call(*_arguments(batch, elements)))
            except BaseException as error:
                _note(batch, error)
                raise
            finally:
                self._leave(batch)

        return on_loop

    def _begin(self, lead: Job, task: Task[..., Any], first: Any) -> tuple[JobBatch, list[Any]]:
        """The batch that this job leads, from now on one that has begun, and the argument of each of its jobs.

        A job with arguments that do not fit ends here, and is no part of it.
        """
        with self._lock:
            batch = self._batches.get(lead)
            if batch is None:
                batch = self._batches[lead] = JobBatch(task, None, [lead])
            elif batch.group is not None:
                batch.group.beyond -= len(batch.jobs) - 1
                batch.group = None
        batch.asked, batch.wrong, batch.called = None, None, False
        if len(batch.jobs) > 1:
            self._running.others[lead] = tuple(batch.jobs[1:])  # the heartbeat names them before the handler is called
        elements, fit, now = [first], [lead], perf_counter()
        unfit: list[tuple[Job, Exception]] = []
        for job in batch.jobs[1:]:
            job.began = now
            try:
                args, _ = task.codec.decode(job.args)
            except Exception as error:
                unfit.append((job, error))
            else:
                elements.append(args[-1])
                fit.append(job)
        if unfit:
            batch.jobs = fit
            with self._lock:
                self._left(batch, [job for job, _ in unfit])
            self._running.others[lead] = tuple(fit[1:])
            for job, misfit in unfit:
                self._finish(job, given(job, task.retry, misfit, raised=True))
        context = BatchContext(self.context, lead, batch.cancelled)
        lead.context = context  # its hooks and its middleware have begun: what they have enqueued stands
        for job in fit[1:]:
            job.successors, job.context = None, context
            self._began(job)
        return batch, elements

    def _ends(self, batch: JobBatch, answer: object) -> BatchEnds:
        retry, stored, jobs = batch.task.retry, batch.task.store_result, batch.jobs
        try:
            said = values(answer, len(jobs))
        except WrongAnswer as wrong:
            batch.wrong = wrong
            raise
        pairs = zip(jobs, said, strict=True)
        return BatchEnds(tuple((job, ended(job, retry, value, stored=stored)) for job, value in pairs))

    def _leave(self, batch: JobBatch) -> None:
        """The handler is left, or left behind: what its jobs call now has no effect. The executor sees to the lead."""
        over = EndedContext(self.context)
        for job in batch.jobs[1:]:
            job.context = over

    # Ends, from any thread -------------------------------------------------------------------------------------------

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Take the outcome of a job, from the loop or from a thread: that of a lead is the outcome of its batch."""
        with self._lock:
            batch = self._batches.get(job)
            if batch is not None and (group := batch.group) is not None:  # it has not begun: only the lead ends
                self._go_on(group, self._dissolve(batch)[1:])
                batch = None
            elif batch is not None:
                del self._batches[job]
                self._left(batch, batch.jobs)
        if batch is None:
            self._finish(job, outcome)
            return
        run, now = self._running.run_of(job), perf_counter()
        lost = run is not None and run.lost
        if lost:
            self._leave(batch)
        for each, end in self._outcomes(batch, outcome, lost=lost):
            if each is not job and hasattr(each, "began"):
                each.ran = now - each.began
            self._finish(each, end)
        self._running.others.pop(job, None)
        self._running.given_away.difference_update(batch.jobs)
        self._count(job, len(batch.jobs) - 1)

    def _outcomes(self, batch: JobBatch, outcome: Outcome, *, lost: bool) -> Iterable[tuple[Job, Outcome]]:
        """How each job ends. Those that run again, each by itself, are not among them."""
        jobs, lead, retry, ended_by = batch.jobs, batch.jobs[0], batch.task.retry, batch.jobs[0].own_end
        if isinstance(outcome, BatchEnds):
            return _with_late_successors(outcome)
        if ended_by is not None and outcome is not WRITTEN:  # to run one of them again could do it twice
            for job in jobs:
                job.own_end = ended_by
            return [(job, given(job, retry, ended_by, raised=True)) for job in jobs]
        if not isinstance(outcome, Failed | Retried | Cancelled):
            return [(job, outcome) for job in jobs]
        if isinstance(outcome, Cancelled):  # by what the handler asks for all, or the lead was cancelled
            batch.cancelled[lead] = outcome
        timeout = batch.task.timeout if _is_timeout(outcome) else None
        if timeout is None and batch.asked is not None:
            return [(job, given(job, retry, batch.asked, raised=True)) for job in jobs]
        if timeout is None and batch.wrong is not None:
            return [(job, failed(job, retry, batch.wrong)) for job in jobs]
        if len(jobs) == 1:
            return [(lead, outcome)]
        if lost and timeout is not None and 2 * (self._running.lost + 1) >= self._running.slots:
            # This worker takes no more jobs. If they all went back, they would be one batch on the next worker, too.
            return [(job, timed_out(job, retry, timeout)) for job in jobs]
        return self._apart_from_now(batch, outcome, lost=lost)

    def _apart_from_now(
        self, batch: JobBatch, outcome: Failed | Retried | Cancelled, *, lost: bool
    ) -> Iterable[tuple[Job, Outcome]]:
        """The batch has failed: each job runs again by itself. Those end that were cancelled or given away meanwhile.

        `lost`: its handler has not stopped and goes on, and this is called on the loop.
        """
        problem, lead = outcome.problem, batch.jobs[0]
        given_away = self._running.given_away.intersection(batch.jobs)
        gone = [*((job, RELEASED) for job in given_away.difference(batch.cancelled)), *batch.cancelled.items()]
        group = self._group_of(lead)
        left = [job for job in batch.jobs if job not in batch.cancelled and job not in given_away]
        if lost:
            left = [self._in_place_of(job) for job in left]
        for job in left:
            job.successors = None  # what this run has enqueued is dropped with it
        if isinstance(outcome, Cancelled) and not batch.called:
            with self._lock:
                self._go_on(group, left)
            return gone
        log.warning(
            "a batch of %d jobs (%s) failed, and each of them runs again by itself: %s: %s",
            len(batch.jobs),
            lead.task,
            problem.error_type or problem.outcome,
            plain(problem.message or ""),
            extra=fields(lead, jobs=len(batch.jobs)),
        )
        with self._lock:
            for job in left:
                self._go_on(group, [job])
        return gone

    def _in_place_of(self, job: Job) -> Job:
        """What runs in place of this job, which a handler has that goes on. On the loop."""
        anew = again(job)
        self._replaced(job, anew)
        return anew

    def _go_on(self, group: SlotGroup, jobs: list[Job]) -> None:
        """Let these jobs run as one batch, as soon as the loop comes to it. Under the lock."""
        if jobs:
            self._ahead.append((group, jobs))
            if len(self._ahead) == 1 and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._offer_ahead)

    def _offer_ahead(self) -> None:
        with self._lock:
            void = {job for _, jobs in self._ahead for job in jobs if self._state.claims.void(job.claim)}
            rest = [(group, [job for job in jobs if job not in void]) for group, jobs in self._ahead]
            ahead = [(group, self._anew(group, jobs)) for group, jobs in rest if jobs]
            self._ahead.clear()
        for job in void:  # this worker was taken for dead since
            self._finish(job, RELEASED)
        if self._state.phase != "running":  # what has not begun goes back
            for job in self.with_others(lead for _, lead in ahead):
                self._finish(job, RELEASED)
            return
        for group in self._running.groups:
            leads = [lead for each, lead in ahead if each is group]
            if leads:
                self._offer(group, leads)

    def _anew(self, group: SlotGroup, jobs: list[Job]) -> Job:
        """The lead of these jobs, which are one batch from now on. Under the lock."""
        if len(jobs) > 1:
            batch = self._batches[jobs[0]] = JobBatch(self._tasks[jobs[0].task], group, jobs)
            self._places.update((job.id, (batch, job)) for job in jobs)
            group.beyond += len(jobs) - 1
        return jobs[0]

    def _group_of(self, job: Job) -> SlotGroup:
        return next(group for group in self._running.groups if job.queue in group.queues)

    def _count(self, job: Job, others: int) -> None:
        """So many other jobs have ended with this one: how many to have at hand is measured in jobs."""
        group = self._group_of(job)
        group.add_ended(others)
        if group.low() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)


def _joins(job: Job) -> bool:
    """Whether this job may be in a batch with others (see the head). It is asked of each, therefore in one line."""
    return job.attempt < 2 and not job.crashes and job.lock_key is None and job.start_by is None and not job.chained


def _arguments(batch: JobBatch, elements: list[Any]) -> tuple[Any, ...]:
    return (list(batch.jobs), elements) if batch.task.wants_job else (elements,)


def _with_late_successors(batch: BatchEnds) -> Iterable[tuple[Job, Outcome]]:
    """These ends. Middleware may have enqueued more for the lead since the handler has answered."""
    (lead, end), *others = batch.ends
    if isinstance(end, Completed) and lead.successors and len(lead.successors) > len(end.successors):
        end = replace(end, successors=tuple(lead.successors))
    return [(lead, end), *others]


def _note(batch: JobBatch, error: BaseException) -> None:
    """If the handler has raised what asks for something, each of its jobs asks for it."""
    try:
        said = one_kind(error)
    except foreign():  # an exception may raise another one when it is looked at
        return
    if isinstance(said, ASKS):
        batch.asked = said


def _is_timeout(outcome: Failed | Retried | Cancelled) -> bool:
    return outcome.problem.outcome == "timeout"
