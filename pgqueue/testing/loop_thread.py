"""An event loop in a thread, inside an async context manager: for sync tests of what belongs to a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import copy_context
from typing import Any

from pgqueue.testing.threads import WaitingThread


class LoopThread:
    """The loop. One task enters the context manager and leaves it: a task group or a timeout inside demands that.

    `waiting` runs in the thread of the test, while that waits here, what the loop sends through Django.
    """

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[Any]], waiting: WaitingThread | None = None
    ) -> None:
        self._make = make
        self._wait: Callable[[Future[Any]], Any] = waiting.wait if waiting else Future.result
        self._around = waiting.for_django if waiting else nullcontext
        self._entered: Future[Any] = Future()
        self._thread = ThreadPoolExecutor(1, "pgqueue-testing")
        self._done = self._thread.submit(copy_context().run, asyncio.run, self._hold())

    def value(self) -> Any:
        """What entering gave, when it has; raises what it raised."""
        return self._wait(self._entered)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run this on the loop, and wait for its end."""
        return self._wait(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """Leave the context manager; raise what that raises."""
        with self._thread:
            if self._entered.exception() is None:
                if not self._done.done():
                    self._loop.call_soon_threadsafe(self._left.set)
                self._wait(self._done)

    async def _hold(self) -> None:
        self._loop, self._left = asyncio.get_running_loop(), asyncio.Event()
        try:
            with self._around():
                async with self._make() as value:
                    self._entered.set_result(value)
                    await self._left.wait()
        except BaseException as error:
            if self._entered.done():
                raise
            self._entered.set_exception(error)
