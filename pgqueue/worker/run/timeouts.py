"""Stops jobs that run longer than their timeout, their task's or their own; takes those away that do not stop.

Only a job with a timeout pays. When the worker starts, the watch is put into the call path of the tasks with a timeout.
For any other task that is done when a job is offered that has a timeout in its headers. A job without one pays for the
look for headers.

There is one heap of moments for the whole worker, and one timer on the loop for the earliest. A job that has ended
leaves its moment in the heap; when that comes, nothing is done. Handlers start in threads, too: they append to `_new`,
and wake the loop only for a moment earlier than the one it sleeps for.

Two moments per job. At the timeout it is interrupted. If it still runs `GRACE` seconds after that, it is abandoned. If
the loop stands still while the timeout passes, the handler has its grace all the same.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

from pgqueue.client.middleware import Handler, wrapped
from pgqueue.client.tasks import Task
from pgqueue.jobs.headers import TIMEOUT
from pgqueue.jobs.job import Job, current_job, fields, own_timeout, timed_of
from pgqueue.jobs.outcomes import Outcome, timed_out
from pgqueue.steady_clock import monotonic
from pgqueue.worker.run.slots import Entry

log = logging.getLogger("pgqueue")

GRACE = 5.0
# How many moments may belong to jobs that have ended before the heap is searched for them.
STALE_MOST = 1_000

Moment = tuple[float, int, Job, Task[..., Any], float, bool, float]
"""When; a number that keeps the order of equals; the job, its task and timeout; whether it was interrupted before; and
when its run began: a job of a batch that has failed runs a second time.
"""


class Timeouts:
    """Watches jobs with a timeout. `runs` says whether a job still runs, `interrupt` and `abandon` stop it."""

    def __init__(
        self,
        tasks: Mapping[str, Task[..., Any]],
        *,
        runs: Callable[[Job], bool],
        interrupt: Callable[[int, Outcome], bool],
        abandon: Callable[[Job], object],
    ) -> None:
        self.tasks = {name: wrapped(task, self) for name, task in tasks.items()}
        """By name, with the watch in the call path of those that have a timeout."""
        self._own: dict[str, Task[..., Any]] = {}
        """The other tasks that have had a job with a timeout of its own, with the watch."""
        self._runs = runs
        self._interrupt = interrupt
        self._abandon = abandon
        self._loop = asyncio.get_running_loop()
        self._heap: list[Moment] = []
        self._new: deque[Moment] = deque()
        self._numbers = count()
        self._next = inf
        self._timer: asyncio.TimerHandle | None = None

    def with_tasks(self, jobs: Sequence[Job]) -> list[Entry]:
        """These jobs with their tasks, watched if they have a timeout."""
        tasks = self.tasks
        entries: list[Entry] = [(job, tasks[job.task]) for job in jobs]
        if timed := timed_of(jobs):
            theirs = set(timed)
            return [(job, self._watching(task) if job in theirs else task) for job, task in entries]
        return entries

    def close(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _watching(self, task: Task[..., Any]) -> Task[..., Any]:
        """This task for a job with a timeout of its own."""
        if task.timeout is not None:
            return task
        if task.name not in self._own:
            watch = self.on_loop if task.is_async else self.in_thread
            self._own[task.name] = replace(task, fn=watch(task, task.fn))
        return self._own[task.name]

    def wraps(self, task: Task[..., Any]) -> bool:
        """Whether this task has a timeout."""
        return task.timeout is not None

    def in_thread(self, task: Task[..., Any], call: Handler) -> Handler:
        """A sync handler that is watched from its first line."""

        def in_thread(*args: Any, **kwargs: Any) -> Any:
            self._watch(current_job(), task)
            return call(*args, **kwargs)

        return in_thread

    def on_loop(self, task: Task[..., Any], call: Handler) -> Handler:
        """An async handler that is watched from its first line."""

        async def on_loop(*args: Any, **kwargs: Any) -> Any:
            self._watch(current_job(), task)
            return await call(*args, **kwargs)

        return on_loop

    def _watch(self, job: Job, task: Task[..., Any]) -> None:
        timeout = _timeout(job, task)
        if timeout is None:
            return
        at = monotonic() + timeout
        self._new.append((at, next(self._numbers), job, task, timeout, False, job.began))
        # We append, then look when the loop wakes. The loop says when it wakes, then looks for what is new.
        if (at < self._next or len(self._new) > STALE_MOST) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        """Handle every moment that has come, and sleep until the next."""
        while True:
            self._take_in()
            while self._heap and self._heap[0][0] <= monotonic():
                self._come(heapq.heappop(self._heap))
            self._next = self._heap[0][0] if self._heap else inf
            if not self._new:
                break
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if self._next == inf else self._loop.call_later(self._next - monotonic(), self._tick)

    def _take_in(self) -> None:
        while self._new:
            heapq.heappush(self._heap, self._new.popleft())
        if len(self._heap) > STALE_MOST:
            alive = [moment for moment in self._heap if self._runs(moment[2]) and moment[2].began == moment[6]]
            if len(alive) < len(self._heap):
                heapq.heapify(alive)
                self._heap = alive

    def _come(self, moment: Moment) -> None:
        _, number, job, task, timeout, interrupted, began = moment
        if not self._runs(job) or job.began != began:
            return
        if interrupted:
            self._abandon(job)
            return
        heapq.heappush(self._heap, (monotonic() + GRACE, number, job, task, timeout, True, began))
        if self._interrupt(job.id, timed_out(job, task.retry, timeout)):
            message = "job %d (%s) runs longer than %g s and is being stopped"
            log.info(message, job.id, job.task, timeout, extra=fields(job))


def _timeout(job: Job, task: Task[..., Any]) -> float | None:
    """How long this attempt may run. A header that is no valid timeout harms no job."""
    try:
        own = own_timeout(job)
    except ValueError as error:
        message = "job %d (%s): its header %s cannot be a timeout (%s); the timeout of its task holds"
        log.warning(message, job.id, job.task, TIMEOUT, error, extra=fields(job))
        return task.timeout
    return task.timeout if own is None else own
