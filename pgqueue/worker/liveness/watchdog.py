"""Ends a process that is stuck, so that its supervisor starts another one. Its jobs go to other workers.

The watchdog is a thread beside the worker of `pgqueue work`. An application that embeds a `Worker` may start its own.
Two things must move: the event loop always, and the completer while it has outcomes to write. A failed try of the
completer counts as a move: an outage of the database ends no process. A long job counts only if it blocks the loop.
Before the end all stacks are written to stderr, because nothing else shows the reason.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
from collections.abc import Callable

from pgqueue import stderr
from pgqueue.options import names_options
from pgqueue.worker.run.child_processes import kill_children

STUCK = 6
"""The exit code."""
STUCK_SECONDS = 600.0
LOOKS = 10


@names_options
class Watchdog:
    """Looks ten times in `most` seconds. Created and started on the loop it watches.

    If something has not changed in ten looks, it is stuck. Looks are counted, not seconds: while the process is
    suspended, the watchdog does not look either. Where a process has several workers, one watchdog looks at all.
    """

    def __init__(self, completing: Callable[[], int | None], most: float = STUCK_SECONDS) -> None:
        self._completing = {"completer": completing}
        self._every = most / LOOKS
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._asked = self._turned = 0
        self._same: dict[str, tuple[int, int]] = {}
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="pgqueue-watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def watch(self, name: str, completing: Callable[[], int | None]) -> None:
        """Look at one more worker, by this name."""
        self._completing[name] = completing

    def forget(self, name: str) -> None:
        """Look at the worker of this name no more: it has stopped, and what it could not write is no sign of a stuck
        process."""
        self._completing.pop(name, None)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            if stuck := self.look():
                _end(stuck, self._most)

    def look(self) -> str | None:
        """Return the name of what has not moved in the last ten looks, or None."""
        waits = self._asked != self._turned
        moving: dict[str, int | None] = {"event loop": self._turned if waits else None}
        moving |= {name: completing() for name, completing in self._completing.copy().items()}
        if not waits and not self._loop.is_closed():
            self._asked += 1
            self._loop.call_soon_threadsafe(self._turn)
        for name in self._same.keys() - moving.keys():
            del self._same[name]
        for name, value in moving.items():
            before, looks = self._same.get(name, (value, 0))
            if value is None or value != before:
                self._same.pop(name, None)
            if value is not None:
                self._same[name] = (value, looks + 1 if value == before else 1)
                if self._same[name][1] > LOOKS:
                    return name
        return None

    def _turn(self) -> None:
        self._turned = self._asked


def _end(stuck: str, most: float) -> None:
    # Not written to a log: a stuck thread may hold the lock of its handler.
    text = (
        f"pgqueue: the {stuck} has not moved for {most:g} s; this process ends (exit code {STUCK}); all stacks follow\n"
    )
    try:
        stderr.write(text + _stacks())
    finally:
        kill_children()
        os._exit(STUCK)


def _stacks() -> str:
    """The stacks of all threads. The interpreter stands while they are written: not to stderr, which may be unread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # what does not fit is left out
    faulthandler.dump_traceback(writing, all_threads=True)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as stacks:
        return stacks.read()
