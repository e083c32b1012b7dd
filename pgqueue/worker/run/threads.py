"""The threads in which sync handlers run: made when they are needed, kept for the next job, all of them daemons.

Used by the executor only, which says what they do. If its handler hangs, a thread is left behind; it dies with the
process. Knows nothing of jobs and of stopping them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any


class Threads:
    """Calls `work` in a thread for everything given; `work` answers whether its thread may be used again."""

    def __init__(self, work: Callable[..., bool]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[tuple[tuple[Any, ...], Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._made = 0
        self._idle = 0

    def start(self, *args: Any, done: Callable[[], None]) -> None:
        """Call `work(*args)` in a thread, and then `done()` on the loop. Called on the loop."""
        if self._idle == 0:
            self._made += 1
            thread = threading.Thread(target=self._serve, name=f"pgqueue-{self._made}", daemon=True)
            self._threads.add(thread)
            thread.start()
        else:
            self._idle -= 1
        self._inbox.put((args, done))

    def call_loop(self, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback` on the loop; not if the thread has outlived its worker, and the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def close(self) -> None:
        """Let idle threads end, and the others when their work is done."""
        for _ in self._threads:
            self._inbox.put(None)

    def _serve(self) -> None:
        while (message := self._inbox.get()) is not None:
            args, done = message
            if not self._work(*args):
                return self.call_loop(self._gone, threading.current_thread(), done)
            self.call_loop(self._freed, done)

    def _freed(self, done: Callable[[], None]) -> None:
        self._idle += 1
        done()

    def _gone(self, thread: threading.Thread, done: Callable[[], None]) -> None:
        self._threads.discard(thread)
        done()
