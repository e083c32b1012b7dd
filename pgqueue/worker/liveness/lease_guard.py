"""Stops running jobs of tasks with `on_lost_lease="cancel"` before another worker can be given them.

This happens when the worker cannot reach the database any more: after a whole lease others may give its jobs away.
Other tasks pay nothing: only the handlers of these tasks get this layer when the worker starts. A job is listed while
its handler runs. One thread for the whole worker watches the lease. It is a thread of its own, because the event loop
may be blocked and the heartbeat's thread may hang on a dead connection.

Why a handler is stopped before its job can start elsewhere. Let L be the lease. Let s be the moment when the last
answered heartbeat was sent.
1. Another worker is given the job only after a judge has seen our counter unchanged for L by its own clock
   (`heartbeat`).
2. The answered heartbeat raised our counter after s. A later heartbeat without an answer raised it later, if at all.
   No other run starts before s + L.
3. At s + 0.8 L this thread wakes, by a clock and nothing else, and stops every listed job.
4. A job that starts is listed first, and checks the clock after that. At s + 0.8 L it is listed already, or it checks
   the clock later than that and does not start.
5. A handler has 0.2 L left (3 s of 15). Python interrupts it at its next step.

What this cannot guarantee (a job still running when the lease is over is logged):
- A call into C (a query, a socket without a timeout) may not return in that time.
- An async handler cannot end while another handler blocks its loop.
- A handler may ignore the exception it gets.
- A process that was suspended for a whole lease learns of it only when it goes on. It is stopped at its first step,
  but the other run may have begun before.

What must be safe even then belongs in the database, in a transactional task: its commit is refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from pgqueue.client.middleware import Handler
from pgqueue.client.tasks import Task
from pgqueue.jobs.job import Job, current_job, fields
from pgqueue.jobs.outcomes import RELEASED, Outcome, interrupted
from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

EDGE = 0.8
"""After this part of the lease guarded jobs are stopped. From then on the worker takes no jobs, either."""


class LeaseGuard:
    """Guards the jobs of one worker.

    `last_beat` returns when the last heartbeat that went through was sent, by this process's monotonic clock. `stop`
    stops a job, from any thread.
    """

    def __init__(self, lease: float, *, last_beat: Callable[[], float], stop: Callable[[Job, Outcome], object]) -> None:
        self._lease = lease
        self._last_beat = last_beat
        self._stop = stop
        self._running: dict[Job, None] = {}
        self._guards = False
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=[self._watch], name="pgqueue-lease", daemon=True
        )

    def wraps(self, task: Task[..., Any]) -> bool:
        """Whether the jobs of this task are to be stopped."""
        return task.on_lost_lease == "cancel"

    def start(self) -> None:
        """Start the thread, if any task is guarded."""
        if self._guards:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def lost(self) -> None:
        """Other workers have taken our jobs already: stop the guarded ones. From any thread."""
        self._stop_all("its worker was taken for dead")

    def in_thread(self, task: Task[..., Any], call: Handler) -> Handler:
        """A sync handler that is listed while it runs."""
        self._guards = True

        def in_thread(*args: Any, **kwargs: Any) -> Any:
            job = current_job()
            self._running[job] = None  # before the clock is checked: step 4 above
            try:
                return RELEASED if self._over(EDGE) else call(*args, **kwargs)
            finally:
                self._running.pop(job, None)

        return in_thread

    def on_loop(self, task: Task[..., Any], call: Handler) -> Handler:
        """The same of an async handler."""
        self._guards = True

        async def on_loop(*args: Any, **kwargs: Any) -> Any:
            job = current_job()
            self._running[job] = None
            try:
                return RELEASED if self._over(EDGE) else await call(*args, **kwargs)
            finally:
                self._running.pop(job, None)

        return on_loop

    def _over(self, part: float) -> bool:
        return monotonic() >= self._last_beat() + part * self._lease

    def _watch(self) -> None:
        while not self._closed.is_set():
            beat = self._last_beat()
            if self._sleep_until(beat, EDGE):
                self._stop_all(f"its worker has had no sign of life through for {EDGE * self._lease:g} s")
                if self._sleep_until(beat, 1.0):
                    self._name_stuck()
                self._sleep_past(beat)

    def _sleep_until(self, beat: float, part: float) -> bool:
        """Sleep until this part of the lease after `beat` is over. False if a newer heartbeat has gone through, or the
        guard was closed."""
        left = beat + part * self._lease - monotonic()
        return not self._closed.wait(max(0.0, left)) and self._last_beat() == beat

    def _sleep_past(self, beat: float) -> None:
        while self._last_beat() == beat and not self._closed.wait(self._lease / 10):
            """Until heartbeats go through again. A job that starts meanwhile checks the clock itself."""

    def _stop_all(self, why: str) -> None:
        running = list(self._running)
        if running:
            jobs = plural(len(running), "job that must not overlap is", "jobs that must not overlap are")
            log.error("%s stopped and given back: %s", jobs, why)
        for job in running:
            self._stop(job, interrupted(why))

    def _name_stuck(self) -> None:
        for job in list(self._running):
            log.critical(
                "job %d (%s) could not be stopped before this worker's lease was over: "
                "from now on another worker may run it at the same time",
                job.id,
                job.task,
                extra=fields(job),
            )
