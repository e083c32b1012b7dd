"""The end of a worker process at a deadline, whatever still runs in it: a handler, a thread, a hook of `atexit`.

Only `pgqueue work` has one. A thread waits for the deadline; it is started first, because later there may be none to be
had. What it says is written without the logger: a thread that hangs may hold the lock of its handler.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from math import inf
from types import CodeType
from typing import NoReturn

from pgqueue import stderr
from pgqueue.client import observers
from pgqueue.steady_clock import monotonic
from pgqueue.worker.run.child_processes import children, kill_children

log = logging.getLogger("pgqueue")

ORDERLY_SECONDS = 5.0
"""After an orderly stop: for tasks that are cancelled, threads, `atexit`, coverage."""
LAST_SECONDS = 19.5
"""After the grace: to stop handlers, write outcomes and sign off. The supervisor kills after 20."""
STANDS_SECONDS = 10.0
"""After the grace: if the loop stands by then, nothing of that will be done."""
TURN_SECONDS = 3.0
"""The last of these are for one turn of it. A `flush` takes less."""
FLUSH_SECONDS = 1.0
TELEMETRY_SECONDS = 2.0
"""After an orderly stop, within `ORDERLY_SECONDS`."""
WAITING = ("threading.py", "asyncio/runners.py", "asyncio/base_events.py", "selectors.py")


class ProcessEnd:
    """Ends this process. Made on its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadlines: queue.SimpleQueue[tuple[float, int, float]] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="pgqueue-end", daemon=True).start()

    def within(self, seconds: float, code: int, *, standing: float = inf) -> None:
        """From now on the process has so many seconds to end by itself. Then it is ended, with this exit code.

        If the loop stands, it has only `standing` seconds.
        """
        now = monotonic()
        self._deadlines.put((now + seconds, code, now + standing - TURN_SECONDS))

    def at_once(self, code: int) -> NoReturn:
        """End the process now."""
        kill_children()
        os._exit(code)

    def _wait(self) -> None:
        deadline, code, look = self._deadlines.get()
        while (now := monotonic()) < deadline:
            if now >= look:
                if not self._turns() and self._deadlines.empty():
                    break
                look = inf
            left = min(deadline, look) - monotonic()
            with suppress(queue.Empty):
                # more than some days is no timeout
                deadline, code, look = self._deadlines.get(timeout=max(0.0, min(left, 3_600.0)))
        try:
            what = "; ".join(self._left()) or "something outside of Python's threads"
            write(
                f"this process does not end by itself, and is ended (exit code {code}); it is kept by: {what}", "ERROR"
            )
        finally:
            self.at_once(code)

    def _turns(self) -> bool:
        """Whether the loop turns, or has ended. It stands if a handler blocks it, or a log pipe that nothing reads."""
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # it is closed
            return True
        return turned.wait(TURN_SECONDS)

    def _left(self) -> Iterator[str]:
        """What may keep this process: threads with the line where they stand, tasks, and children that it waits for."""
        frames = sys._current_frames()
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if frame is not None and not thread.daemon and not _waits(thread, frame.f_code):
                yield f"thread {thread.name} at {frame.f_code.co_filename}:{frame.f_lineno}"
        if not self._loop.is_closed():
            for task in asyncio.all_tasks(self._loop):
                yield f"task {getattr(task.get_coro(), '__qualname__', task.get_name())}"
        for child in children():
            yield f"process {child.name} of multiprocessing"


def _waits(thread: threading.Thread, code: CodeType) -> bool:
    """Whether it keeps nothing: the main thread waits for the others or for the loop, one of a pool for work."""
    if thread is threading.main_thread():
        return code.co_filename.endswith(WAITING)
    return code.co_name == "_worker" and code.co_filename.endswith("concurrent/futures/thread.py")


def flush(seconds: float, *, logs: bool = True, telemetry: bool = True) -> None:
    """Let the log's handlers and the observers of jobs send what they keep back, such as spans and reports.

    All do so at the same time, and for so many seconds at most: each of them may hang. The threads are bare ones, as
    `Thread.start` may hang, too. If no thread can be had, what is kept back is lost.
    """
    handlers = logging.getLogger().handlers if logs else []
    watching = list(observers.observers) if telemetry else []
    calls: list[Callable[[], object]] = [partial(observers.flush, each, seconds) for each in watching]
    calls += [each.flush for each in handlers]
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def call(number: int) -> None:
        try:
            calls[number]()
        finally:
            ended.put(number)

    begun, left, until = 0, set(range(len(calls))), monotonic() + seconds
    with suppress(RuntimeError, MemoryError):  # no thread can be had
        for number in range(len(calls)):
            _thread.start_new_thread(call, (number,))
            begun += 1
    with suppress(queue.Empty):
        for _ in range(begun):
            left.discard(ended.get(timeout=max(0.0, until - monotonic())))
    if late := [type(each).__name__ for number, each in enumerate(watching) if number in left]:
        write(f"what telemetry has kept back is lost with this process: not sent in {seconds:.1f} s: {', '.join(late)}")


def write(message: str, level: str = "WARNING") -> None:
    """Write a log line without the logger, whose lock may be held: by the write that a signal has interrupted, or by a
    thread that hangs."""
    record = logging.makeLogRecord({"name": log.name, "levelname": level, "msg": message})
    for handler in logging.getLogger().handlers[:1]:
        stderr.write(f"{handler.format(record)}\n")
