"""Stops in time what must never overlap: the running jobs of tasks declared with `on_lost_lease="cancel"`, when this
worker cannot reach the database any more and others may soon give its jobs away.

Only such tasks pay: `wraps` puts the guard into their call path when the worker starts. It lists a job while its
handler runs, and one thread for the whole worker watches the lease: a thread, because the event loop may be blocked and
the beat's own thread may hang on a dead link.

Why a handler has left before its job can be started elsewhere. Let L be the lease, and s the moment when the last beat
that was answered was sent.
1. Others are given the job only after a judge has seen our counter stand still for L by its own clock (`heartbeat`).
   That beat raised it after s, one without an answer raised it later still: no other run starts before s + L.
2. At s + 0.8 L this thread wakes, by a clock and nothing else, and stops every listed job.
3. A job that starts is listed first, and looks at the clock then. So at s + 0.8 L it is listed, or it looks later than
   that, and does not start.
So a handler has 0.2 L (3 s of 15) to leave, and Python lets it begin at its next step.

What cannot be proven, and is logged when the lease is over: that a call into C returns in that time (a query, a socket
without a timeout), that an async handler leaves while another one blocks its loop, that a handler heeds what it gets.
And a process that was stopped or suspended for a whole lease, and its machine, learns of it only when it goes on: it is
stopped then at its first step, after another worker's first. What must be safe even so belongs into the database, in a
transactional task: its commit is refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from pgqueue.client.middleware import Handler
from pgqueue.client.tasks import Task
from pgqueue.jobs.job import Job, current_job, fields
from pgqueue.jobs.outcomes import RELEASED, Outcome, interrupted

log = logging.getLogger("pgqueue")

EDGE = 0.8
"""The part of the lease after which guarded jobs are stopped; from there on a worker takes no jobs, either."""


class LeaseGuard:
    """Guards jobs over one lease. `last_beat` is when the last beat that went through was sent, by this process's
    clock; `stop` stops a job, from any thread."""

    def __init__(self, lease: float, *, last_beat: Callable[[], float], stop: Callable[[Job, Outcome], object]) -> None:
        self._lease = lease
        self._last_beat = last_beat
        self._stop = stop
        self._running: dict[Job, None] = {}
        self._guards = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pgqueue-lease", daemon=True)

    def wraps(self, task: Task[..., Any]) -> bool:
        """Whether the jobs of this task are to be stopped."""
        return task.on_lost_lease == "cancel"

    def start(self) -> None:
        """Begin to watch, if there is anything to guard."""
        if self._guards:
            self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def lost(self) -> None:
        """Others have taken our jobs already: stop what is guarded. From any thread."""
        self._stop_all("its worker was taken for dead")

    def in_thread(self, task: Task[..., Any], call: Handler) -> Handler:
        """A sync handler that is listed while it runs."""
        self._guards = True

        def in_thread(*args: Any, **kwargs: Any) -> Any:
            job = current_job()
            self._running[job] = None  # first, see above
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
        """Sleep until this part of the lease after `beat` is over; False if another beat has gone through meanwhile."""
        left = beat + part * self._lease - monotonic()
        return not self._closed.wait(max(0.0, left)) and self._last_beat() == beat

    def _sleep_past(self, beat: float) -> None:
        while self._last_beat() == beat and not self._closed.wait(self._lease / 10):
            """Until beats go through again: a job that starts meanwhile looks at the clock itself."""

    def _stop_all(self, why: str) -> None:
        running = list(self._running)
        if running:
            log.error("%d jobs that must not overlap are stopped and given back: %s", len(running), why)
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
