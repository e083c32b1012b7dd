"""Whether a run may go on: what the run of a job asks before its next step, from inside its handler.

The executor lists the runs, and stops them from outside. Here is the inside. A handler asks at checkpoints. The
transactions of handlers make their run `uninterruptible` before they commit. They `shield` it in steps that must not be
left half-way. When the run is over, its job has only `EndedContext` left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from pgqueue.errors import Error
from pgqueue.jobs.context import JobContext
from pgqueue.jobs.job import Job, running_job
from pgqueue.worker.run.run import Interrupted, Run
from pgqueue.worker.run.slots import SlotGroup


class RunningJobs:
    """What runs in one worker, in which groups of slots. The methods are called in the run itself, in its thread or in
    its task on the loop, if they do not say otherwise."""

    def __init__(self, groups: Sequence[SlotGroup]) -> None:
        self.groups = groups
        self.runs: dict[int, Run] = {}
        """The run of each job, by its id."""
        self.others: dict[Job, tuple[Job, ...]] = {}
        """Of each batch that runs, the job that it is a run of, and its other jobs."""
        self.given_away: set[Job] = set()
        """Jobs of batches that run, found to be other workers' when their transaction was to commit."""
        self.about_to_run: Callable[[], list[int]] = list
        """The ids of the jobs that gather in batches, or wait in one for a slot. From any thread."""
        self.cancelled = False
        """Everything is being stopped, for good."""
        self.lost = 0
        """Slots with a handler that was to stop and runs on without its job."""
        self.worn_out = False
        """Half of the slots were lost, or no thread could be had for long: this worker takes no more jobs."""
        self.lost_ever = 0
        """How often a slot was lost."""

    @property
    def slots(self) -> int:
        """The number of slots in all groups."""
        return sum(group.slots for group in self.groups)

    @property
    def half_lost(self) -> bool:
        """Whether half of the slots are lost."""
        return self.lost > 0 and 2 * self.lost >= self.slots

    def free(self, queue: str) -> int:
        """How many slots are free for jobs of this queue, behind those that wait for one here. From any thread."""
        return sum(group.unclaimed() for group in self.groups if queue in group.queues)

    def jobs(self) -> list[Job]:
        """The jobs that run now. From any thread."""
        found = [job for run in list(self.runs.values()) if (job := run.job) is not None]
        return found + [job for jobs in list(self.others.values()) for job in jobs] if self.others else found

    def ids(self) -> list[int]:
        """The ids of the jobs that run now. From any thread."""
        return [*self.runs, *(job.id for jobs in list(self.others.values()) for job in jobs)]

    def on_loop(self, task: asyncio.Task[Any] | None) -> Job | None:
        """The job with a handler that runs in this task of the loop, or has made it. From any thread.

        A task that a handler has made is known from Python 3.12 on, by its context.
        """
        if task is None:
            return None
        for run in list(self.runs.values()):
            if task is run.task or task is run.again:
                return run.job
        context = getattr(task, "get_context", None)
        return None if context is None else context().get(running_job)

    def is_running(self, job: Job) -> bool:
        """Whether it is this run of the job that runs here."""
        return self.run_of(job) is not None

    def stopping(self, job: Job) -> bool:
        """Whether this job is to stop, or was taken away. From any thread."""
        run = self.run_of(job)
        return run is None or self.cancelled or run.stop_asked(job)

    def checkpoint(self, job: Job) -> None:
        """Raise what stops a handler if this job is `stopping`. Flat, for tight loops: 0.12 µs per step, measured."""
        run = self.runs.get(job.id)
        if run is not None and run.job is job and run.stop_outcome is None and not self.cancelled:
            if run.task is None or not run.task.cancelling():
                return
            raise asyncio.CancelledError
        raise Interrupted if run is None or run.task is None else asyncio.CancelledError

    def uninterruptible(self, job: Job, *, reopens: bool = False) -> None:
        """From here on this job is not stopped any more: it is about to commit. In the thread of its sync handler.

        Raises Interrupted if the job was to stop before: then it must not commit. Nothing else is raised into it later.
        If it `reopens`, `interruptible` follows.
        """
        run = self.run_of(job)
        if run is None or not run.uninterruptible(job, reopens=reopens):
            raise Interrupted

    async def auninterruptible(self, job: Job, *, reopens: bool = False) -> None:
        """`uninterruptible` for an async handler, in its task. Raises CancelledError if the job was to stop before."""
        run = self.run_of(job)
        if run is None or not run.uninterruptible(job, reopens=reopens):
            await asyncio.sleep(0)  # a cancellation that is on its way is raised here
            raise asyncio.CancelledError  # the cancellation had been swallowed

    def interruptible(self, job: Job) -> None:
        """The job can be stopped again. If it was to stop meanwhile, raises as `checkpoint` does. In the run itself."""
        run = self.run_of(job)
        if run is not None:
            run.interruptible(job)
        self.checkpoint(job)

    def shield(self, job: Job, *, leaving: bool = False) -> Shield:
        """Nothing is raised into the thread of this sync job meanwhile; a stop in that time takes effect afterwards.

        For steps that must not be left half-way: taking a connection from its pool, giving it back. With `leaving` the
        stop is not raised here: the handler is on its way out, and the executor asks how the job ends.
        """
        return Shield(self.run_of(job), job, leaving)

    def run_of(self, job: Job) -> Run | None:
        run = self.runs.get(job.id)
        return run if run is not None and run.job is job else None

    def reopen(self, job: Job) -> None:
        """The commit of this job has failed, and it runs again: it can be stopped again, too."""
        run = self.run_of(job)
        if run is not None:
            run.interruptible(job)
            if run.task is not None and run.stop_outcome is None and not self.cancelled:
                # Python 3.11: a TaskGroup that failed has asked its task to end, and does not always take that back.
                while run.task.uncancel():
                    pass


class Shield:
    """What `shield` gives. A class, because each transactional job makes two: a generator costs twice as much."""

    __slots__ = ("_job", "_leaving", "_run")

    def __init__(self, run: Run | None, job: Job, leaving: bool) -> None:
        self._run, self._job, self._leaving = run, job, leaving

    def __enter__(self) -> None:
        run = self._run
        # Our exception is never raised into a thread that the handler has started. The handler itself can be stopped
        # while that thread waits.
        if run is not None and (run.lock is None or run.ident != get_ident() or not run.shield(self._job)):
            self._run = None

    def __exit__(self, kind: object, *_: object) -> None:
        if self._run is not None and not self._run.interruptible(self._job) and kind is None and not self._leaving:
            raise Interrupted


class EndedContext(JobContext):
    """The context of a job when its run is over: calls that would have no effect say so.

    A thread or a task of the handler may have kept the job, or a handler that the job was taken away from.
    """

    over = True

    def __init__(self, before: JobContext) -> None:
        self._before = before

    @property
    def resources(self) -> Any:
        """As before."""
        return self._before.resources

    def checkpoint(self, job: Job) -> None:
        self._before.checkpoint(job)

    def progress(self, job: Job, done: float, total: float | None) -> None:
        raise self._refusal(job, "progress()")

    def step(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        raise self._refusal(job, "step()")

    async def astep(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        raise self._refusal(job, "astep()")

    def _refusal(self, job: Job, what: str) -> Error:
        return Error(
            f"job {job.id} ({job.task}): job.{what} after its run is over has no effect: wait for your threads and "
            "tasks before the handler returns",
            job_id=job.id,
        )
