"""Notices when the event loop is blocked, and logs which job blocks it.

The heartbeat's thread asks twice per threshold; the loop answers with its next turn. A worker whose loop is blocked is
not dead and keeps its jobs, but all other async work in it stands still. The job is named while it still blocks the
loop. Running jobs are not slowed down, and none is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

from pgqueue.jobs.job import fields
from pgqueue.steady_clock import monotonic
from pgqueue.worker.run.running_jobs import RunningJobs

log = logging.getLogger("pgqueue")

BLOCKED_SECONDS = 1.0


class LoopMonitor:
    """Watches one loop. Created on the loop's thread; `look` is called from one other thread, always the same."""

    def __init__(self, loop: asyncio.AbstractEventLoop, running: RunningJobs, most: float = BLOCKED_SECONDS) -> None:
        self.turns = 0
        """Number of the last requested turn that the loop has taken."""
        self.every = most / 2
        """Seconds between looks."""
        self._most = most
        self._loop = loop
        self._running = running
        self._thread = threading.get_ident()
        self._asked = 0
        self._asked_at = monotonic()
        self._named: int | None = None

    def owed(self) -> int | None:
        """The number of the turn that was asked for and is not taken yet; None if there is none."""
        return None if self.turns == self._asked else self._asked

    def blocked(self) -> float:
        """Seconds since the turn was asked for that the loop owes; 0 if it owes none."""
        return 0.0 if self.owed() is None else monotonic() - self._asked_at

    def look(self, late: float = 0.0) -> None:
        """Ask the loop for a turn. If the turn asked for before is overdue, log the job that blocks the loop.

        `late`: how many seconds too late this thread has come. If it did not run either, the process was suspended, or
        a handler held the interpreter's lock. Then the time counts anew.
        """
        now = monotonic()
        if self.owed() is None:
            self._ask(now)
        elif late > self._most:
            self._asked_at = now
        elif now - self._asked_at >= self._most:
            self._name(now - self._asked_at)

    def _ask(self, now: float) -> None:
        self._asked_at = now
        try:
            self._loop.call_soon_threadsafe(self._turned, self._asked + 1)
        except RuntimeError:  # the loop is closed: this worker was not stopped in order
            return
        self._asked += 1

    def _turned(self, asked: int) -> None:
        self.turns = asked

    def _name(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._thread)
        job = self._running.on_loop(asyncio.current_task(self._loop))
        if frame is None or job is None or job.id == self._named:
            return
        self._named = job.id
        code = frame.f_code
        log.warning(
            "job %d (%s) has blocked the event loop for %.1f s, now in %s (%s:%d): the async jobs beside it "
            "stand still. Await there, or make the handler a plain def",
            job.id,
            job.task,
            seconds,
            code.co_name,
            code.co_filename,
            frame.f_lineno,
            extra=fields(job, seconds=seconds),
        )
