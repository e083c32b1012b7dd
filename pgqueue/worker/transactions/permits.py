"""Places: how many connections may be lent at once where they are fewer than slots, and which jobs wait for one.

Used by the lender of handlers' connections, one for its pool of each kind. First come, first served. A job with a place
gets a connection as soon as there is one, so what is waited for in the pool itself is the database only, and what is
waited for here is other handlers only. That is normal, and has no end of its own: it is the job's timeout that says how
long is too long. So a wait ends when its job is to stop: on the loop by cancellation; a thread, into which nothing is
raised while it takes a connection, looks for itself.

A place is given up once, with what comes first: the connection is given back, or a job is taken from its handler, which
may have that connection for as long as it hangs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

LOOK_SECONDS = 0.1  # how late a thread that waits hears that its job is to stop


class Permits:
    """`number` places, for threads or for the loop."""

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
        """A place, in a thread; `look` is called now and then while it waits, and ends the wait if it raises."""
        given = threading.Lock()
        given.acquire()
        place = self._ask(given.release)
        try:
            while not given.acquire(timeout=LOOK_SECONDS):
                look()
        except BaseException:
            self.release(place)
            raise
        return place

    async def aacquire(self) -> object:
        """A place, on the loop; a task that is cancelled waits no more."""
        given = asyncio.Event()
        place = self._ask(given.set)
        try:
            await given.wait()
        except BaseException:
            self.release(place)
            raise
        return place

    def release(self, place: object) -> None:
        """Give this place up, or one's turn in the line for it; nothing if that was done before."""
        with self._lock:
            if place in self._taken:
                self._taken.discard(place)
            else:
                self._waiting = deque(each for each in self._waiting if each[0] is not place)
            while self._waiting and len(self._taken) < self.number:
                self._grant(*self._waiting.popleft())

    def _ask(self, tell: Callable[[], object]) -> object:
        place = object()
        with self._lock:
            if len(self._taken) < self.number:
                self._grant(place, tell)
            else:
                self._waiting.append((place, tell))
        return place

    def _grant(self, place: object, tell: Callable[[], object]) -> None:
        self._taken.add(place)
        tell()
