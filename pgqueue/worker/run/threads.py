"""The threads in which sync handlers run: made when they are needed, kept for the next job, all of them daemons.

Used by the executor only, which says what they do. If its handler hangs, a thread is left behind; it dies with the
process. Knows nothing of jobs and of stopping them.

A thread may not be had: memory or the number of threads is at its limit. `Thread.start` then raises, or it waits for
ever, because the new thread died before it could say that it lives. So the loop never calls it:

1. The loop starts a bare thread, which is not waited for. That one calls `Thread.start`, and may wait.
2. The new thread says that it is there. If it has not within `START_SECONDS`, it counts as missing.
3. What a missing thread should have done stays in the inbox. The next thread that is free takes it.
4. While threads are missing, another one is tried, after pauses that grow from one second to half a minute.
5. If for a minute none has come, and none has become free, `starved` is called: another process may have more luck.

Why the count of idle threads stays right. Each entry of the inbox has a thread: one that was idle, one that is coming,
or one that is missing. A thread that becomes free pays for a missing one first: it has just taken, or will take, that
one's entry. Only if none is missing it is idle. All counts change on the loop.

Why there is at most one thread for each slot, so that a handler's connection in its thread is opened once a slot:

1. A run in a thread takes its slot on the loop, in the step that calls `start`. It gives the slot back in `done`.
2. `done` is called on the loop, in the step that counts the thread as idle, or as gone. So whenever a step begins, each
   thread that is neither idle nor gone, and each one that is coming or missing, belongs to a slot that is taken.
3. `start` makes a thread only if none is idle. Then all threads belong to slots that are taken, and the new one to
   another: they are no more than the slots.
4. A handler that hangs keeps its thread and its slot. A thread that is gone has given its slot back, and a later
   `start` makes another. So no job waits for a thread of another slot.

In the naive version the slot is given back in the thread. Until the loop has heard of the idle thread, the next job
finds a free slot and no thread, so another thread is made. Only one that was given up, and comes late, may be one more.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

START_SECONDS = 5.0
# Each try may leave a bare thread behind that waits for ever, so the pauses grow.
AGAIN_SECONDS, AGAIN_MOST = 1.0, 30.0
SAY_SECONDS = 60.0
STARVED_SECONDS = 60.0


class Threads:
    """Calls `work` in a thread for everything given; `work` answers whether its thread may be used again."""

    def __init__(self, work: Callable[..., bool], *, starved: Callable[[], object] = lambda: None) -> None:
        self._work = work
        self._starved = starved
        self._starves_since: float | None = None
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[tuple[tuple[Any, ...], Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: set[int] = set()
        """Numbers of the threads that are there, or were and have not said that they go."""
        self._coming: set[int] = set()
        self._made = 0
        self._idle = 0
        self._missing = 0
        self._pause = AGAIN_SECONDS
        self._said = -SAY_SECONDS
        self._closed = self._trying = False

    def start(self, *args: Any, done: Callable[[], None]) -> None:
        """Call `work(*args)` in a thread, and then `done()` on the loop. Called on the loop, which never waits."""
        self._inbox.put((args, done))
        if self._idle:
            self._idle -= 1
        else:
            self._make()

    def take_back(self) -> list[tuple[Any, ...]]:
        """What no thread has begun with, as it was given to `start`. It is not done any more. Called on the loop."""
        taken: list[tuple[Any, ...]] = []
        while True:
            try:
                entry = self._inbox.get_nowait()
            except queue.Empty:
                return taken
            if entry is not None:
                taken.append(entry[0])
                self._free()

    def call_loop(self, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback` on the loop; not if the thread has outlived its worker, and the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def close(self) -> None:
        """Let idle threads end, and the others when their work is done."""
        self._closed = True
        for _ in range(len(self._threads) + len(self._coming)):
            self._inbox.put(None)

    # Making threads, on the loop -------------------------------------------------------------------------------------

    def _make(self) -> None:
        self._made += 1
        self._coming.add(self._made)
        try:
            _thread.start_new_thread(self._start, (self._made,))
        except (RuntimeError, MemoryError) as error:
            self._not_come(self._made, str(error))
            return
        self._loop.call_later(START_SECONDS, self._not_come, self._made, f"it did not begin within {START_SECONDS:g} s")

    def _come(self, number: int) -> None:
        self._threads.add(number)
        self._pause, self._starves_since = AGAIN_SECONDS, None
        if number in self._coming:
            self._coming.discard(number)
        else:  # it was given up, and comes all the same
            self._free()

    def _not_come(self, number: int, why: str) -> None:
        if number not in self._coming:
            return
        self._coming.discard(number)
        self._missing += 1
        if self._starves_since is None:
            self._starves_since = monotonic()
        elif monotonic() - self._starves_since >= STARVED_SECONDS and not self._closed:
            log.critical("no thread could be started for %g s: this worker takes no more jobs", STARVED_SECONDS)
            self._starves_since = None
            self._starved()
        if self._missing and monotonic() - self._said >= SAY_SECONDS:
            self._said = monotonic()
            jobs = plural(self._missing, "job waits", "jobs wait")
            threads = plural(len(self._threads), "thread is", "threads are")
            log.error("no thread can be started for a sync handler: %s; %s, %s there", why, jobs, threads)
        self._try_soon()

    def _try_soon(self) -> None:
        if not self._trying:
            self._trying = True
            self._loop.call_later(self._pause, self._try_again)
            self._pause = min(AGAIN_MOST, 2 * self._pause)

    def _try_again(self) -> None:
        self._trying = False
        if self._missing and not self._closed:
            self._missing -= 1
            self._make()
            if self._missing:
                self._try_soon()

    def _free(self) -> None:
        self._starves_since = None
        if self._missing:
            self._missing -= 1
        else:
            self._idle += 1

    # In threads ------------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        """In a bare thread: start the one that works. This may wait for ever."""
        try:
            threading.Thread(target=self._serve, args=[number], name=f"pgqueue-{number}", daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            self.call_loop(self._not_come, number, str(error) or type(error).__name__)

    def _serve(self, number: int) -> None:
        self.call_loop(self._come, number)
        while (message := self._inbox.get()) is not None:
            args, done = message
            again = False
            try:
                again = self._work(*args)
            finally:  # whatever ends it: its slot is given back
                self.call_loop(*((self._freed, done) if again else (self._gone, number, done)))
            if not again:
                return

    def _freed(self, done: Callable[[], None]) -> None:
        self._free()
        done()

    def _gone(self, number: int, done: Callable[[], None]) -> None:
        self._threads.discard(number)
        done()
