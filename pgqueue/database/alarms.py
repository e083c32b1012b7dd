"""Calls functions when their time is over, in one standing thread for the whole process.

Used by the round trips of threads, which have no event loop to wake them. A thread for each round trip would need
memory just when there may be none: `Thread.start` then raises, or waits for ever for a thread that died at its birth.

The thread is made at the first use, so when a worker registers. Handlers must not use this: an exception that is raised
into a thread from outside could leave the lock taken.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from pgqueue.database import forks
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")


class Alarms:
    """Functions, each with the time when it is called."""

    def __init__(self) -> None:
        self.depth = forks.depth
        self._news = threading.Condition()
        self._due: dict[int, tuple[float, Callable[[], object]]] = {}
        self._numbers = count()
        threading.Thread(target=self._run, name="pgqueue-alarms", daemon=True).start()

    @contextmanager
    def after(self, seconds: float, call: Callable[[], object]) -> Iterator[None]:
        """Call this if the block lasts longer than so many seconds."""
        with self._news:
            number = next(self._numbers)
            self._due[number] = (monotonic() + seconds, call)
            self._news.notify()
        try:
            yield
        finally:
            with self._news:
                self._due.pop(number, None)

    def _run(self) -> None:
        while True:
            for call in self._wait():
                try:
                    call()
                except Exception:  # the others' time comes, too
                    log.exception("what was to be done when a time is over has failed")

    def _wait(self) -> list[Callable[[], object]]:
        """Wait until the time of some is over, and take them out."""
        with self._news:
            now = monotonic()
            over = [number for number, (at, _) in self._due.items() if at <= now]
            if not over:
                self._news.wait(min((at for at, _ in self._due.values()), default=now + threading.TIMEOUT_MAX) - now)
            return [self._due.pop(number)[1] for number in over]


_made: list[Alarms] = []
_making = threading.Lock()


@contextmanager
def after(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Call this if the block lasts longer than so many seconds. Not for handlers."""
    with _alarms().after(seconds, call):
        yield


def _alarms() -> Alarms:
    """Those of this process: a forked child has not inherited the thread."""
    if _made and _made[-1].depth == forks.depth:
        return _made[-1]
    with _making:
        if not _made or _made[-1].depth != forks.depth:
            _made[:] = [Alarms()]
        return _made[-1]
