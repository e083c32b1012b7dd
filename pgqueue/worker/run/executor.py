"""Runs claimed jobs: async handlers on the loop, sync handlers in threads, both at once, at most `slots` together.

For each job: find the task, decode the arguments, call the handler, turn the result or exception into an Outcome, hand
that to the completer. Nothing here does I/O. The fetcher fills `offer`, the completer empties `finish`.

Why each slot comes back, and each job that has started gets an outcome:

1. A run has its slot until `group.end`, which is called on the loop only. A run on the loop then names no job any more.
2. Whatever else ends a task on the loop, `_run_ended` is called, as the loop promises. If the run still names a job,
   its slot is given back. If the job has no outcome yet, so that it is still listed, it has failed.
3. `_run_in_thread` catches whatever else ends its work in a thread. If the job has no outcome yet, it has failed.
   However a thread ends its work, `_thread_done` is called, which gives the slot back.
4. So no exception of a handler, of what wraps it, of a hook or of an exception's own code is caught by its kind. Only
   CancelledError and GeneratorExit that the loop or this worker has sent pass: `_sent` tells them.

Speed is the absence of work per job. A *run* is one task on the loop, or one thread. As soon as it has finished a job,
it takes the next one, as long as its turn lasts. So a handler that never waits costs no task object and no turn of the
loop. A handler gets a clean task and context: a run is not used again after a handler has left something there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from pgqueue import logs
from pgqueue.client.tasks import Task
from pgqueue.database import forks
from pgqueue.jobs.context import JobContext
from pgqueue.jobs.job import Job, fields, running_job, unfit_of
from pgqueue.jobs.outcomes import COMPLETED, RELEASED, Outcome, given, interrupted, undescribed, unfit
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.run.forked_child import end_child
from pgqueue.worker.run.isolation import Isolation
from pgqueue.worker.run.run import Interrupted, Run, in_time
from pgqueue.worker.run.running_jobs import EndedContext, RunningJobs
from pgqueue.worker.run.serialization_retries import SerializationRetries, aborted, unable
from pgqueue.worker.run.slots import SlotGroup
from pgqueue.worker.run.threads import Threads
from pgqueue.worker.run.timeouts import Timeouts

T = TypeVar("T")

log = logging.getLogger("pgqueue")

# How long runs may go on without giving the loop a turn; the fetcher and the completer need it.
TURN_SECONDS = 0.001
# How soon to look whether a thread has left, first and at most: it may be in C for long.
INSIST_FIRST, INSIST_MOST = 0.01, 1.0

STOPPED = interrupted("its worker was shut down")


class Executor:
    """Runs jobs for one worker. `offer` takes jobs. `finish` is called for each job with its outcome, from any thread.
    `slots_freed` is called on the loop when there is room for more. `context` is behind every handler's `Job`."""

    def __init__(
        self,
        running: RunningJobs,
        tasks: Mapping[str, Task[..., Any]],
        context: JobContext,
        retries: SerializationRetries,
        *,
        finish: Callable[[Job, Outcome], None],
        slots_freed: Callable[[], None],
    ) -> None:
        logs.harmless("pgqueue", "pgqueue.job")
        self._running = running
        self._timeouts = Timeouts(tasks, runs=running.is_running, interrupt=self.interrupt, abandon=self.abandon)
        self._finish, self._low = finish, slots_freed
        self._retries = retries
        self._job_context = context
        self._ended_context = EndedContext(context)
        self._loop = asyncio.get_running_loop()
        self._forks = forks.depth
        self._isolation = Isolation()
        self._runs: set[Run] = set()
        self._threads = Threads(self._run_in_thread, starved=self._wear_out)
        self._turn_ends = 0.0
        self._dispatching = False
        self._ended = asyncio.Event()

    def offer(self, group: SlotGroup, jobs: Sequence[Job], *, first: bool = False) -> None:
        """Take claimed jobs. They start as slots are free; `first`: before others that wait. Jobs past their deadline,
        and those that are too large, never start. Called on the loop."""
        if unfit_of(jobs):
            outcomes = [(job, unfit(job)) for job in jobs]
            for job, outcome in outcomes:
                if outcome is not None:
                    self._finish(job, outcome)
            jobs = [job for job, outcome in outcomes if outcome is None]
        group.put(self._timeouts.with_tasks(jobs), first=first)
        self._dispatch()

    def reserve(self, numbers: Iterable[int]) -> None:
        """Keep one slot free in these groups, counted from 1, for jobs offered as `first`; in no other group."""
        wanted = set(numbers)
        for number, group in enumerate(self._running.groups, 1):
            group.reserved = int(number in wanted)
            if group.waiting and not group.reserved:
                self._dispatch_soon()

    def hand_back(self) -> list[Job]:
        """Give up all jobs that have not started; the caller releases them. Jobs that wait to run again are released,
        too."""
        self._retries.leave_all()
        return self._take_from_threads() + [job for group in self._running.groups for job, _ in group.empty()]

    def _take_from_threads(self) -> list[Job]:
        """Take back the jobs that no thread has begun with: usually none, all of them where no thread can be had."""
        back = []
        for group, run, _ in self._threads.take_back():
            job, run.job = run.job, None
            assert job is not None
            self._forget(job, run)
            self._run_gone(run)
            group.end()
            if run.lost:  # it was taken away, and has ended by that
                continue
            if run.stop_outcome is None:
                back.append(job)
            else:
                self._finish(job, run.stop_outcome[1])
            self._slot_freed(group)
        return back

    def interrupt(self, job_id: int, outcome: Outcome) -> bool:
        """Stop this job, which then ends with `outcome`, whatever its handler says; False if it is not here.

        An async handler is cancelled. In a sync one an exception is raised at its next step in Python. A call into C (a
        query, a sleep) is not left before it returns. A job that waits for a slot ends at once. Only the first call
        counts: if a handler swallows the exception it runs on, and its job ends with `outcome` when it returns. Called
        on the loop.
        """
        for group in self._running.groups:
            waiting = group.remove(job_id)
            if waiting is not None:
                self._finish(waiting, outcome)
                return True
        run = self._running.runs.get(job_id)
        job = None if run is None else run.job
        if run is None or job is None or not run.interrupt(job, outcome):
            return False
        self._interrupted(run, job)
        return True

    def interrupt_run(self, job: Job, outcome: Outcome) -> None:
        """`interrupt` for this run of the job, from any thread: in a thread at once, even if the loop is blocked."""
        run = self._running.run_of(job)
        if run is not None and run.lock is not None:
            run.interrupt(job, outcome)
            self._threads.call_loop(self._interrupted, run, job)
        elif run is not None:
            self._threads.call_loop(run.interrupt, job, outcome)

    def _interrupted(self, run: Run, job: Job, pause: float = INSIST_FIRST) -> None:
        """End the pause before the job runs again. Raise the exception again if a destructor has swallowed it."""
        self._retries.leave(job)
        if (again := run.insist(job)) is not None:
            more = INSIST_FIRST if again else min(INSIST_MOST, 2 * pause)
            self._loop.call_later(pause, self._interrupted, run, job, more)

    def abandon(self, job: Job) -> None:
        """Take away a job that was interrupted and does not stop: it ends now, and its slot is lost until its handler
        ends.

        Nothing that the handler says later counts. Called on the loop. A job that has just ended is left alone.
        """
        run = self._running.run_of(job)
        if run is not None and (outcome := run.abandon(job)) is not None:
            self._finish(job, outcome)
            self._forget(job, run)
            self._slot_lost(job)
            job.context = self._ended_context
            self._job_context.abandoned(job)

    def cancel(self) -> None:
        """Stop all runs, for good: their jobs are given back and noted as interrupted. A sealed run ends as it will.

        An async handler that returns all the same has completed. A sync one may have swallowed the exception half-way.
        """
        self._running.cancelled = True
        self._retries.close()
        for run in self._runs:
            if run.task is not None and run.sealed_job is not run.job:
                run.task.cancel()
            elif (job := run.job) is not None:
                run.interrupt(job, STOPPED if run.task or run.ident else RELEASED)
                self._interrupted(run, job)

    async def idle(self) -> None:
        """Wait until nothing runs."""
        while self._running.runs:
            self._ended.clear()
            await self._ended.wait()

    def close(self) -> None:
        """Let idle threads end. A thread with a handler that hangs is left behind, without its transaction; it dies
        with the process."""
        for run in list(self._running.runs.values()):
            if run.job is not None:
                self._job_context.abandoned(run.job)
        self._timeouts.close()
        self._threads.close()

    # Starting runs ---------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Start one run on the loop, and as many in threads as slots allow; come back next turn while there is more."""
        self._dispatching = False
        self._turn_ends = perf_counter() + TURN_SECONDS
        for group in self._running.groups:
            while (entry := group.start()) is not None:
                job, task = entry
                self._running.runs[job.id] = run = Run(job)
                self._runs.add(run)
                if task.is_async:
                    run.task = self._task(self._run(group, run, job, task))
                    run.task.add_done_callback(partial(self._run_ended, group, run, task.retry))
                    # This run may work off all waiting jobs in its turn; more runs are started only if it waits.
                    self._dispatch_soon()
                    break
                run.lock = threading.Lock()
                self._threads.start(group, run, task, done=partial(self._thread_done, group, run))

    def _task(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task in a clean context. Not by the loop's task factory, which the application may have set: an eager one
        would run handlers in the middle of a dispatch, and one of the old form takes no context."""
        return asyncio.Task(call, loop=self._loop, context=self._isolation.context())

    def _run_ended(self, group: SlotGroup, run: Run, retry: RetryPolicy, task: asyncio.Task[None]) -> None:
        self._run_gone(run)
        if (job := run.job) is None:  # it has ended as a run ends
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        # If it was cancelled from outside, that was before its first step: its handler has not seen the job.
        released = task.cancelled() and task.cancelling() > 0
        outcome = RELEASED if error is None or released else undescribed(job, retry, error)
        try:
            self._end_without_outcome(run, job, outcome)
        finally:
            group.end()
        self._slot_freed(group)

    def _end_without_outcome(self, run: Run, job: Job, outcome: Outcome) -> None:
        """A run did not end as it should. Its job ends with this outcome if it has none."""
        try:
            if not run.lost and self._running.runs.get(job.id) is run:
                self._finish(job, run.instead_of(outcome))
        finally:
            self._forget(job, run)
            run.job = None

    def _slot_lost(self, job: Job) -> None:
        self._running.lost += 1
        self._running.lost_ever += 1
        slots = self._running.slots
        message = (
            "job %d (%s) does not stop and is taken away; its handler goes on in a slot that is lost (%d of %d are)"
        )
        log.error(message, job.id, job.task, self._running.lost, slots, extra=fields(job))
        if self._running.half_lost:
            log.critical("half of this worker's slots are lost to handlers that do not stop: it takes no more jobs")
            self._wear_out()
        if not self._running.runs:
            self._ended.set()

    def _wear_out(self) -> None:
        self._running.worn_out = True
        self._low()

    def _run_gone(self, run: Run) -> None:
        self._runs.discard(run)
        if run.lost:
            self._running.lost -= 1
            log.warning("a handler that had not stopped has returned; its slot is free again")

    def _forget(self, job: Job, run: Run) -> None:
        """The job runs here no more. If we were given it anew (we had seemed dead), its other run stays."""
        if self._running.runs.get(job.id) is run:
            del self._running.runs[job.id]

    def _dispatch_soon(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def _slot_freed(self, group: SlotGroup) -> None:
        if not self._running.runs:
            self._ended.set()
        if group.waiting:
            self._dispatch_soon()
        if group.low():
            self._low()

    # On the loop -----------------------------------------------------------------------------------------------------

    async def _run(self, group: SlotGroup, run: Run, job: Job, task: Task[..., Any]) -> None:
        """Run this job, then waiting ones, until the turn ends or no job is left.

        It also ends if a handler has left something at this task or in its context: the next job must not feel it.
        """
        me, running, finish, isolation = run.task, self._running.runs, self._finish, self._isolation
        forked = self._forks
        assert me is not None
        mark = isolation.mark(me)
        while True:
            job.began = started = perf_counter()
            try:
                outcome = await self._call(job, task)
            except BaseException as error:
                if self._sent(me, error):
                    raise
                outcome = undescribed(job, task.retry, error)
            now = perf_counter()
            job.ran = ran = now - started
            if run.stop_outcome is not None:
                if not run.lost:
                    self._finish(job, run.instead_of(outcome))
                    self._forget(job, run)
                break
            finish(job, outcome)
            if forks.depth != forked:  # by a hook, or a filter of the log
                end_child(forked, job)
            if running.get(job.id) is run:  # as `_forget` does; a call less for most jobs
                del running[job.id]
            if now > self._turn_ends or not group.waiting or isolation.changed(me, mark):
                break
            entry = group.take(True, ran)
            if entry is None:
                break
            job, task = entry
            run.job = job
            running[job.id] = run
            if len(group.waiting) == group.prefetch // 2:
                self._low()
        run.job = None
        group.note(ran)
        group.end()
        self._slot_freed(group)

    def _sent(self, me: asyncio.Task[None], error: BaseException) -> bool:
        """Whether the loop or this worker has sent this to the task of a run: it cancels the task, or closes its
        coroutine, which is then in no step of the task."""
        if isinstance(error, asyncio.CancelledError):
            return me.cancelling() > 0
        return isinstance(error, GeneratorExit) and asyncio.current_task(self._loop) is not me

    async def _call(self, job: Job, task: Task[..., Any]) -> Outcome:
        if job.start_by is not None and not in_time(job):
            return RELEASED
        token = running_job.set(job)
        job.context = self._job_context
        try:
            args, kwargs = task.codec.decode(job.args)
            if forks.depth != self._forks:
                end_child(self._forks, job)
            value = await (task.fn(job, *args, **kwargs) if task.wants_job else task.fn(*args, **kwargs))
            if forks.depth != self._forks:
                end_child(self._forks, job)
            return COMPLETED if value is None and job.successors is None else given(job, task.retry, value)
        except BaseException as error:
            if type(error) is GeneratorExit and self._running.on_loop(asyncio.current_task(self._loop)) is not job:
                raise  # not of the handler: the loop closes this coroutine
            outcome = self._raised(job, task, error)
            if outcome is not None:
                return outcome
            abort = error
        finally:
            running_job.reset(token)
            job.context = self._ended_context
        return await self._again(job, task, abort)

    def _raised(self, job: Job, task: Task[..., Any], error: BaseException) -> Outcome | None:
        """The outcome of a handler that raised this; None: the database has aborted it, so it may run again.

        The exception may raise another one at each look. Then the attempt has failed."""
        end_child(self._forks, job, error)
        try:
            self._job_context.raised(job)
            if job.own_end is None and task.is_async and issubclass(type(error), asyncio.CancelledError):
                # Only a shutdown gives a job back: a job that cancels itself would come back at once, for ever.
                return STOPPED if self._running.cancelled else given(job, task.retry, error, raised=True)
            ends = job.own_end is not None or self._loop.is_closed()
            if not ends and aborted(task.retry, error, job.session_lost):
                return None
            return given(job, task.retry, unable(error) or error, raised=True)
        except Interrupted:  # `stop_outcome` says how the job ends
            raise
        except BaseException as broken:
            return undescribed(job, task.retry, broken)

    async def _again(self, job: Job, task: Task[..., Any], abort: BaseException) -> Outcome:
        """Run the job once more, after a pause, as if it had not run; or answer how it ends."""
        self._running.reopen(job)
        try:
            ended = await self._retries.again(job, task.retry, abort)
        except asyncio.CancelledError as error:
            return STOPPED if self._running.cancelled else given(job, task.retry, error, raised=True)
        if ended is not None:
            return ended
        self._job_context.anew(job)
        job.session_lost = False
        called = self._task(self._call(job, task))
        if (run := self._running.run_of(job)) is not None:
            run.again = called
        return await called

    # In threads ------------------------------------------------------------------------------------------------------

    def _run_in_thread(self, group: SlotGroup, run: Run, task: Task[..., Any]) -> bool:
        """Run this job, then waiting ones, until none is left; False if an exception was raised in this thread from
        outside. The slot is given back by `_thread_done`."""
        me, job = threading.get_ident(), run.job
        assert job is not None
        try:
            while True:
                job.began = started = perf_counter()
                outcome = self._call_thread(run, me, job, task)
                job.ran = ran = perf_counter() - started
                if run.stopped:
                    if not run.lost:
                        self._finish_in_thread(job, outcome)
                        self._forget(job, run)
                    break
                self._finish_in_thread(job, outcome)  # first: a shutdown that sees nothing run must see the outcome
                self._forget(job, run)
                entry = group.take(False, ran)
                if entry is None:
                    break
                job, task = entry
                run.job = job
                self._running.runs[job.id] = run
                if len(group.waiting) == group.prefetch // 2:
                    self._threads.call_loop(self._low)
        except BaseException as error:
            self._end_without_outcome(run, job, undescribed(job, task.retry, error))
            return False
        group.note(ran)
        return not run.stopped

    def _finish_in_thread(self, job: Job, outcome: Outcome) -> None:
        """Hand on the outcome. A child that is forked there, by a hook or a filter of the log, would stay: it has no
        loop that ends it."""
        self._finish(job, outcome)
        if forks.depth != self._forks:
            end_child(self._forks, job)

    def _thread_done(self, group: SlotGroup, run: Run) -> None:
        self._run_gone(run)
        group.end()
        self._slot_freed(group)

    def _call_thread(self, run: Run, me: int, job: Job, task: Task[..., Any]) -> Outcome:
        """Call the handler where it can be stopped: from the moment the run names its thread until it names no job."""
        outcome: Outcome = RELEASED
        try:
            run.ident = me
            if run.stop_outcome is None or not run.stopped_before(job):
                outcome = self._isolation.context().run(self._call_sync, job, task)
        except Interrupted as error:
            end_child(self._forks, job, error)  # else `stop_outcome` says how the job ends
            self._job_context.raised(job)
            if job.own_end is not None:
                outcome = given(job, task.retry, error, raised=True)
        except BaseException as error:
            outcome = undescribed(job, task.retry, error)
        run.job, run.ident = None, 0
        if run.stop_outcome is None:
            return outcome
        try:
            return run.settle(outcome)
        except Interrupted:  # Python 3.13 may raise it a step later than 3.11, so here; there is no second one
            return run.settle(outcome)

    def _call_sync(self, job: Job, task: Task[..., Any]) -> Outcome:
        if job.start_by is not None and not in_time(job):
            return RELEASED
        running_job.set(job)
        job.context = self._job_context
        try:
            args, kwargs = task.codec.decode(job.args)
            if forks.depth != self._forks:
                end_child(self._forks, job)
            value = task.fn(job, *args, **kwargs) if task.wants_job else task.fn(*args, **kwargs)
            if forks.depth != self._forks:
                end_child(self._forks, job)
            return COMPLETED if value is None and job.successors is None else given(job, task.retry, value)
        except Interrupted:
            raise
        except BaseException as error:
            outcome = self._raised(job, task, error)
            if outcome is not None:
                return outcome
            abort = error
        finally:
            job.context = self._ended_context
        self._running.reopen(job)
        ended = self._wait_for_loop(self._retries.again(job, task.retry, abort))
        if ended is not None:
            return ended
        self._job_context.anew(job)
        job.session_lost = False
        return self._isolation.context().run(self._call_sync, job, task)

    def _wait_for_loop(self, deciding: Coroutine[Any, Any, Outcome | None]) -> Outcome | None:
        """In a thread: wait for the loop to decide. If the loop ends first, the worker has ended, and the job is given
        back."""
        try:
            return asyncio.run_coroutine_threadsafe(deciding, self._loop).result()
        except CancelledError:
            return RELEASED
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            deciding.close()
            return RELEASED
