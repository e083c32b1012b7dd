"""Permits: how many connections may be out at once if they are fewer than slots, and which jobs wait for one.

Used by each side of `handler_pool`. First come, first served.

1. A job with a permit gets a connection as soon as there is one. So in the pool itself it waits for the database only,
   and here it waits for other handlers only.
2. To wait for other handlers is normal, and no time limit ends it: how long is too long is said by the job's timeout.
3. So a wait ends when its job is to stop. On the loop that is a cancellation. Nothing is raised into a thread while it
   takes a connection: it looks for itself.

A permit is given up once, by what comes first: the connection is released, or the job is taken from its handler, which
may have that connection for as long as it hangs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

LOOK_SECONDS = 0.1  # so late a thread that waits hears that its job is to stop


class Permits:
    """`number` permits, for threads or for the loop."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._taken: set[object] = set()
        self._waiting: deque[tuple[object, Callable[[], object]]] = deque()
        self._lock = threading.Lock()

    @property
    def taken(self) -> int:
        """How many are taken just now."""
        return len(self._taken)

    def acquire(self, look: Callable[[], object]) -> object:
        """A permit, in a thread; `look` is called now and then while it waits, and ends the wait if it raises."""
        given = threading.Lock()
        given.acquire()
        permit = self._ask(given.release)
        try:
            while not given.acquire(timeout=LOOK_SECONDS):
                look()
        except BaseException:
            self.release(permit)
            raise
        return permit

    async def aacquire(self) -> object:
        """A permit, on the loop; a task that is cancelled waits no more."""
        given = asyncio.Event()
        permit = self._ask(given.set)
        try:
            await given.wait()
        except BaseException:
            self.release(permit)
            raise
        return permit

    def release(self, permit: object) -> None:
        """Give this permit up, or the turn in the waiting queue; nothing if that was done before."""
        with self._lock:
            if permit in self._taken:
                self._taken.discard(permit)
            else:
                self._waiting = deque(each for each in self._waiting if each[0] is not permit)
            while self._waiting and len(self._taken) < self.number:
                self._grant(*self._waiting.popleft())

    def _ask(self, tell: Callable[[], object]) -> object:
        permit = object()
        with self._lock:
            if len(self._taken) < self.number:
                self._grant(permit, tell)
            else:
                self._waiting.append((permit, tell))
        return permit

    def _grant(self, permit: object, tell: Callable[[], object]) -> None:
        self._taken.add(permit)
        tell()
