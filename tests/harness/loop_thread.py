"""An event loop in a thread of its own, for helpers that serve while a test does something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
ANSWER_SECONDS = 60.0


class LoopThread:
    """The loop runs from the start until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, step: Coroutine[Any, Any, T]) -> T:
        """Run this on the loop, and wait for its answer. Called from any other thread."""
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(ANSWER_SECONDS)

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call this on the loop, and do not wait."""
        self._loop.call_soon_threadsafe(call, *args)

    def close(self, last: Coroutine[Any, Any, object]) -> None:
        """Run this as the last step, then end the loop and its thread, also if the step fails."""
        try:
            self.call(last)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
