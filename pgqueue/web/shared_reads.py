"""One read for all visitors who ask for the same at the same time. No visitor gets what is older than the request.

Called by pages, for what is the same for every visitor: the numbers of jobs, the findings, the history, a job as it is
in the database. It keeps no answer: when the last of its visitors has the answer, it is gone.

Why an answer is never older than the request, nor shared where it must not be:

1. A read that has begun takes no further visitor. A request that comes after that waits for the next read of this
   name.
2. The next read begins when the one before it has ended. Until then all requests of this name join it.
3. So each transaction of a read begins after every request that it answers has come. What was committed before the
   request, such as a change by the same visitor, is in the answer.
4. At most one read of a name runs, and at most one waits. So ten visitors at once cost two reads, and not ten.
5. A read is given no request: it knows neither rights nor redaction. What it has found is as the database has it. Each
   page hides what its own visitor may not see.
6. A visitor who goes away ends no read: others may wait for it. A read that fails has failed for all of its visitors,
   and the next one begins anew.
7. The name of a read says all that it depends on: its filter, too (`Asked.read_shared`). So no visitor gets the
   answer to another filter.
8. A read belongs to its event loop. If that has ended, its reads are forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Reads:
    """The reads of one event loop by name: those that run, and those that wait for these."""

    loop: asyncio.AbstractEventLoop | None = None
    running: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    next: dict[str, asyncio.Task[Any]] = field(default_factory=dict)


class SharedReads:
    """Reads for all visitors of this process."""

    def __init__(self) -> None:
        self._reads = _Reads()

    async def read(self, name: str, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` finds out from now on, or what another visitor's of this name does."""
        loop = asyncio.get_running_loop()
        reads = self._reads  # once: another thread, with a loop of its own, may replace them meanwhile
        if reads.loop is not loop:
            reads = self._reads = _Reads(loop)
        task = reads.next.get(name)
        if task is None or task.done():  # one that was cancelled before it began is done, too
            task = reads.next[name] = loop.create_task(_in_turn(reads, name, ask))
        found: T = await asyncio.shield(task)
        return found


async def _in_turn(reads: _Reads, name: str, ask: Callable[[], Awaitable[T]]) -> T:
    """Wait for the read before, then take no further visitor, and read."""
    before = reads.running.get(name)
    if before is not None:
        await asyncio.wait({before})
    task = reads.running[name] = reads.next.pop(name)
    try:
        return await ask()
    finally:
        if reads.running.get(name) is task:
            del reads.running[name]
