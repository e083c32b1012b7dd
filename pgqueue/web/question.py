"""A question to a database that many visitors ask at once: it is asked once, and they share the answer for a second.

Used for the page of all databases and for metrics.

Why a database that is away delays no other one:

1. The question is asked in a task of its own. A visitor who waits for it waits for a given time and not longer, and
   nothing of the task is waited for then. The end of a visitor does not end the task.
2. There is one task for a question at most, however many visitors ask and however often. So a database that hangs costs
   one task and one connection.
3. An answer is good for `SAME_SECONDS`, and so is a failure. A task belongs to its loop: another loop asks anew.
4. No task hangs for ever: what `ask` does ends in time, as a transaction of `Connections` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from pgqueue.steady_clock import monotonic
from pgqueue.web.problems import Problem
from pgqueue.web.task_end import end

T = TypeVar("T")

SAME_SECONDS = 1.0
KEPT_SECONDS = 60.0
"""So long an answer is kept for those who cannot wait for the next one."""
AGAIN_SECONDS = 5.0
"""For Retry-After, if the dashboard ends."""
TASK = "pgqueue web question"


class Question(Generic[T]):
    """The question `ask`, and its last answer."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._task: asyncio.Task[T] | None = None
        self._ended = 0.0
        self._kept: T | None = None

    async def answer(self, seconds: float | None) -> T:
        """The answer, at most `SAME_SECONDS` old. Raises TimeoutError after so long, and what `ask` raises.

        Raises Problem if the question is closed meanwhile. Naive: the cancellation of the task ends the visitor, too.
        """
        task = self._task
        if task is None or task.get_loop() is not asyncio.get_running_loop() or self._is_old(task):
            task = self._task = asyncio.create_task(self._asked(), name=TASK)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # there may be no one to hear it
        if not (await asyncio.wait({task}, timeout=seconds))[0]:
            raise TimeoutError
        if task.cancelled():
            raise Problem(503, "The dashboard ends", "It has closed its connections. Try again.", AGAIN_SECONDS)
        return task.result()

    def kept(self) -> tuple[T, float] | None:
        """The last answer while the next one is under way, and how many seconds old it is; None if it is too old.

        A failure forgets it: what is away is not shown as if it were there.
        """
        age = monotonic() - self._ended
        return None if self._kept is None or age > KEPT_SECONDS else (self._kept, age)

    async def close(self) -> None:
        """Ask no more."""
        task, self._task = self._task, None
        await end(task)

    async def _asked(self) -> T:
        kept = None
        try:
            kept = await self._ask()
            return kept
        finally:
            self._ended, self._kept = monotonic(), kept

    def _is_old(self, task: asyncio.Task[T]) -> bool:
        return task.done() and monotonic() >= self._ended + SAME_SECONDS
