"""What `job.resources` is in a test: the value that the test gives, else what the declared lifespan yields.

1. The lifespan is entered when the first handler is called, and left with the drain. A drain without jobs sets nothing
   up.
2. What it yields may belong to its event loop. So while it lasts, async handlers run on that loop.
3. One task enters and leaves it (`LoopThread`).
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from pgqueue.client import lifespan
from pgqueue.testing.loop_thread import LoopThread
from pgqueue.testing.threads import WaitingThread, django_waits, run_async

AS_DECLARED: Any = object()
"""As `resources`: what the lifespan yields; None if none is declared."""


class Resources:
    """The resources of one drain, or of one call of a handler. A context manager, sync or async."""

    def __init__(self, given: Any) -> None:
        self._value = None if given is AS_DECLARED else given
        self._awaits_first = given is AS_DECLARED and lifespan.is_declared()
        self._loop: LoopThread | None = None
        self._entered = AsyncExitStack()

    def value(self) -> Any:
        """The value, from sync code: the first call enters the lifespan, on a loop in another thread."""
        if self._awaits_first:
            self._awaits_first = False
            self._loop = LoopThread(lifespan.declared, WaitingThread() if django_waits() else None)
            self._value = self._loop.value()
        return self._value

    async def avalue(self) -> Any:
        """The value: the first call enters the lifespan on this loop."""
        if self._awaits_first:
            self._awaits_first = False
            self._value = await self._entered.enter_async_context(lifespan.declared())
        return self._value

    def run(self, handler: Coroutine[Any, Any, Any]) -> Any:
        """Run an async handler on the loop of the lifespan, else on a fresh one in another thread."""
        if self._loop is not None:
            return self._loop.run(handler)
        return run_async(handler)

    def __enter__(self) -> Resources:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._loop is not None:
            self._loop.close()

    async def __aenter__(self) -> Resources:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._entered.__aexit__(kind, error, at)
