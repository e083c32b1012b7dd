"""A run: one task on the loop, or one thread, that works off jobs one after another; and how a job in it is stopped.

Used by the executor only. A run costs a job that is not stopped two attributes. Stopping is the rare case, so the call
that stops a thread does the waiting: it holds the run's lock. A thread that has left its handler looks whether it was
to stop. Only if it was, it takes the lock, too.

A run that is about to commit is *sealed* (`uninterruptible`), under the same lock; on the loop, in one step. If it
finds that its job is to stop, it stops. Else the job cannot be stopped any more. So no job is both committed and
stopped. Where the run goes on after the commit (a batch of an iteration), the seal *reopens*. A stop that comes
meanwhile is kept, and found when the seal is taken away (`interruptible`).

An exception raised into a thread can land in a destructor or the callback of a weak reference. There the interpreter
reports it as unraisable and goes on. So we listen to these reports, and raise it again (`insist`) until the handler has
left. Never on suspicion: a handler that is leaving must not be disturbed while it cleans up. So at any moment at most
one Interrupted is on its way into a thread, and `settle` has no more than one to take back.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from contextlib import suppress
from typing import Any

from pgqueue.jobs.job import STARTED, TOO_LATE, Job
from pgqueue.jobs.outcomes import WRITTEN, Outcome
from pgqueue.steady_clock import monotonic

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_raise_in.restype = ctypes.c_int


class Interrupted(BaseException):
    """Raised inside a sync handler that is to stop. No Exception: `except Exception` in a handler lets it pass."""


class Run:
    """What runs `job` now, on the loop (`task`) or in the thread `ident`. `stop_outcome` is how a stopped job shall
    end.

    - `stopped`: the thread has left the handler and seen the stop outcome.
    - `lost`: the job did not stop and was taken away. What the handler says later counts for nothing.
    - `sealed_job`: the job that cannot be stopped any more, or not now if the seal `reopens`.
    - `missed`: the exception raised in the thread was lost in a destructor.
    - `again`: the task in which the handler is called once more within this run.
    """

    __slots__ = (
        "again", "ident", "job", "lock", "lost", "missed", "reopens", "sealed_job", "stop_outcome", "stopped", "task",
    )  # fmt: skip

    def __init__(self, job: Job) -> None:
        self.job: Job | None = job
        self.task: asyncio.Task[None] | None = None
        self.again: asyncio.Task[Outcome] | None = None
        self.ident = 0
        self.lock: threading.Lock | None = None
        self.stop_outcome: tuple[Job, Outcome] | None = None
        self.sealed_job: Job | None = None
        self.reopens = False
        self.lost = False
        self.missed = False
        self.stopped = False

    def interrupt(self, job: Job, outcome: Outcome) -> bool:
        """Stop `job` if it still runs here; it ends with `outcome`. A second call changes nothing."""
        if self.lock is not None:
            return self._interrupt_thread(self.lock, job, outcome)
        if self.sealed_job is job and not self.reopens:
            return False
        if self.job is job and self.stop_outcome is None and self.task is not None:
            self.stop_outcome = (job, outcome)
            if self.sealed_job is not job:
                self.task.cancel()
        return self.job is job

    def _interrupt_thread(self, lock: threading.Lock, job: Job, outcome: Outcome) -> bool:
        with lock:
            if self.stop_outcome is not None:
                return self.stop_outcome[0] is job
            # We set the stop outcome, then look at the job. The thread clears the job, then looks for a stop outcome.
            # So either we see that it has gone on, or it sees that we want it and waits for the lock.
            self.stop_outcome = (job, outcome)
            if self.job is not job or (self.sealed_job is job and not self.reopens):
                self.stop_outcome = None
                return False
            # A thread that has not begun looks before it calls the handler; a sealed one when its seal is taken away.
            if self.ident and self.sealed_job is not job:
                _listen()
                _raised[self.ident] = self
                _raise_in(self.ident, Interrupted)
            return True

    def insist(self, job: Job) -> bool | None:
        """Whether the exception raised in the thread of `job` was lost in a destructor; then it is raised again.

        None: the handler has left.
        """
        if self.lock is None:
            return None
        with self.lock:
            if self.job is not job or not self.ident:
                return None
            if not self.missed or self.sealed_job is job:
                return False
            self.missed = False
            _raise_in(self.ident, Interrupted)
            return True

    def abandon(self, job: Job) -> Outcome | None:
        """Take `job` away from a run that was interrupted and goes on; its outcome, or None if it has just ended."""
        if self.lock is None:
            return self._lose(job)
        with self.lock:
            return self._lose(job)

    def _lose(self, job: Job) -> Outcome | None:
        if self.job is not job or self.stop_outcome is None or self.lost:
            return None
        self.lost = True
        return self.stop_outcome[1]

    def uninterruptible(self, job: Job, *, reopens: bool = False) -> bool:
        """In the run itself: from here on `job` cannot be stopped. False if it was stopped before; then it must not
        commit."""
        if self.lock is None:
            self.sealed_job, self.reopens = None if self.stop_asked(job) else job, reopens
            return self.sealed_job is job
        with self.lock:  # a call that was about to raise into us has done so
            if self.stop_outcome is None:
                self.sealed_job, self.reopens = job, reopens
                return True
            self.ident = 0  # nothing more is raised
        _take_back()  # so that no exception comes in the middle of the rollback
        return False

    def interruptible(self, job: Job) -> bool:
        """In the run itself: `job` can be stopped again. False if it was to stop meanwhile; then it must stop."""
        if self.lock is None:
            self.sealed_job = None
            return not self.stop_asked(job)
        with self.lock:
            self.sealed_job = None
            return self.stop_outcome is None

    def shield(self, job: Job) -> bool:
        """In the thread of the run: from now on nothing is raised into it. A stop of `job` is kept until
        `interruptible`.

        Unlike `uninterruptible` it also holds for a job that was stopped before. False: the job is sealed already, and
        stays so.
        """
        assert self.lock is not None
        with self.lock:  # a call that was about to raise into us has done so
            if self.sealed_job is job:
                return False
            self.sealed_job, self.reopens = job, True
            stopped = self.stop_outcome is not None
        if stopped:
            with suppress(Interrupted):  # `stop_outcome` says the same
                _take_back()
        return True

    def stop_asked(self, job: Job) -> bool:
        """Whether `job` is to stop."""
        return self.stopped_before(job) or (self.task is not None and self.task.cancelling() > 0)

    def stopped_before(self, job: Job) -> bool:
        """Whether `job` was stopped before its handler was called."""
        return self.stop_outcome is not None and self.stop_outcome[0] is job

    def settle(self, outcome: Outcome) -> Outcome:
        """In the thread, out of the handler, with a stop outcome in sight: how the job ends; `stopped` if by that
        outcome.

        Afterwards nothing can be raised here any more: at most one Interrupted is on its way, and it is taken back
        here.
        """
        assert self.lock is not None
        try:
            with self.lock:  # a call that was about to raise into us has done so
                if self.stop_outcome is None:
                    return outcome
            _take_back()
        except Interrupted:
            pass  # it came after the handler had returned
        with self.lock:  # a call that takes the job away has done so, or sees that we have left
            self.stopped = self.stop_outcome is not None
            _raised.pop(threading.get_ident(), None)
        return self.instead_of(outcome)

    def instead_of(self, outcome: Outcome) -> Outcome:
        """How the job ends: by the stop outcome if there is one. But not if its handler has committed: neither with
        the job's end, nor by a COMMIT of its own, which a second run could do twice."""
        if self.stop_outcome is None or outcome is WRITTEN or self.stop_outcome[0].own_end is not None:
            return outcome
        return self.stop_outcome[1]


def _take_back() -> None:
    """Take back the exception that may still be on its way into this thread.

    We raise one of our own, which replaces it and is caught. To call it off (NULL) would make interpreters up to
    3.12 look for it at every call and jump, in all threads. Under a tracer, so with coverage, they never get on.
    """
    with suppress(Interrupted):
        _raise_in(threading.get_ident(), Interrupted)
        for _ in range(100):  # it comes at the first jump; or in a destructor, then it is gone, too
            pass


_raised: dict[int, Run] = {}
"""The runs of the threads into which an exception was raised, until the thread has left the handler."""
_report: Any = None
"""The hook for unraisable exceptions that was there before ours."""


def _listen() -> None:
    global _report
    if _report is None:
        _report, sys.unraisablehook = sys.unraisablehook, _unraisable


def _unraisable(lost: Any) -> None:
    """In the thread in which an exception could not go on: take note of ours, pass on all others."""
    run = _raised.get(threading.get_ident())
    if lost.exc_type is Interrupted and run is not None:
        run.missed = True
    else:
        _report(lost)


def in_time(job: Job) -> bool:
    """Whether a job that was unblocked under a rate may start now: not too late, and not a second time."""
    assert job.start_by is not None
    punctual = monotonic() <= job.start_by
    if job.start_by > STARTED:
        job.start_by = STARTED if punctual else TOO_LATE
    return punctual
