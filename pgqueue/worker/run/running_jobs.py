"""Whether a run may go on: what the run of a job asks before its next step, from inside its handler.

The executor is one: it lists what runs, and stops it from outside; here is the inside. A handler asks at checkpoints;
the transactions of handlers `seal` their run before they commit, and `hold` it where they must not be left half-way.
When the run is over, `EndedContext` is all that its job has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import get_ident
from typing import Any

from pgqueue.errors import Error
from pgqueue.jobs.context import JobContext
from pgqueue.jobs.job import Job, running_job
from pgqueue.worker.run.run import Interrupted, Run
from pgqueue.worker.run.slots import SlotGroup


class RunningJobs:
    """What runs in one worker, in which groups of slots. The methods are called in the run itself: in its thread, or in
    its task on the loop, if they do not say otherwise."""

    def __init__(self, groups: Sequence[SlotGroup]) -> None:
        self.groups = groups
        self.runs: dict[int, Run] = {}
        """What runs each job, by its id."""
        self.cancelled = False
        """Everything is being stopped, for good."""
        self.lost = 0
        """Slots whose handler was to stop and runs on without its job."""

    @property
    def slots(self) -> int:
        """How many there are in all groups."""
        return sum(group.slots for group in self.groups)

    @property
    def half_lost(self) -> bool:
        """Whether half of the slots are lost."""
        return self.lost > 0 and 2 * self.lost >= self.slots

    def jobs(self) -> list[Job]:
        """The jobs that run now. From any thread."""
        return [job for run in list(self.runs.values()) if (job := run.job) is not None]

    def on_loop(self, task: asyncio.Task[Any] | None) -> Job | None:
        """The job whose handler runs in this task of the loop, or has made it. From any thread.

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
        """Whether this job was told to stop, or taken away. From any thread."""
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

        Raises Interrupted if it was told to stop before: then it must not commit. Nothing else is raised into it later.
        A seal that `reopens` is followed by `unseal`.
        """
        run = self.run_of(job)
        if run is None or not run.uninterruptible(job, reopens=reopens):
            raise Interrupted

    async def auninterruptible(self, job: Job, *, reopens: bool = False) -> None:
        """`seal` for an async handler, in its task. Raises CancelledError if it was told to stop before."""
        run = self.run_of(job)
        if run is None or not run.uninterruptible(job, reopens=reopens):
            await asyncio.sleep(0)  # the cancellation that is on its way comes through here
            raise asyncio.CancelledError  # it had come, and been swallowed

    def interruptible(self, job: Job) -> None:
        """The job can be stopped again; raises, as `checkpoint` does, if it was told to stop. In the run itself."""
        run = self.run_of(job)
        if run is not None:
            run.interruptible(job)
        self.checkpoint(job)

    def shield(self, job: Job, *, leaving: bool = False) -> Shield:
        """Nothing is raised into the thread of this sync job meanwhile; a stop in that time is heard afterwards.

        For steps that must not be left half-way: taking a connection from its pool, giving it back. With `leaving` it
        is not heard here: the handler is on its way out, and the executor asks how the job ends.
        """
        return Shield(self.run_of(job), job, leaving)

    def run_of(self, job: Job) -> Run | None:
        run = self.runs.get(job.id)
        return run if run is not None and run.job is job else None

    def reopen(self, job: Job) -> None:
        """Its commit has failed, and it runs again: it can be stopped again, too."""
        run = self.run_of(job)
        if run is not None:
            run.interruptible(job)


class Shield:
    """What `hold` gives. A class, for it is there twice in each transactional job: a generator costs twice as much."""

    __slots__ = ("_job", "_leaving", "_run")

    def __init__(self, run: Run | None, job: Job, leaving: bool) -> None:
        self._run, self._job, self._leaving = run, job, leaving

    def __enter__(self) -> None:
        run = self._run
        # Nothing is raised into a thread that the handler has started; and the handler itself can be stopped while that
        # one waits.
        if run is not None and (run.lock is None or run.ident != get_ident() or not run.shield(self._job)):
            self._run = None

    def __exit__(self, kind: object, *_: object) -> None:
        if self._run is not None and not self._run.interruptible(self._job) and kind is None and not self._leaving:
            raise Interrupted


class EndedContext(JobContext):
    """What is left when the run is over, to what has kept the job (a thread or a task of the handler's, a handler it
    was taken away from): what would be dropped without a word says so."""

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

    def _refusal(self, job: Job, what: str) -> Error:
        return Error(
            f"job {job.id} ({job.task}): job.{what} after its run is over has no effect: wait for your threads and "
            "tasks before the handler returns",
            job_id=job.id,
        )
