"""The last messages of several workers whose process ends with them: in which order they are sent.

Why no job runs here beside its next run, however slow one of the databases is:

1. A worker with jobs that could not be stopped gives back none of them before its last message. It stays alive until
   then, so it can wait for the others (`LastMessage`, 1).
2. From the first of these messages on, the other workers have `OTHERS_SECONDS` to stop. One that has not stopped by
   then is left out.
3. All that may take long comes before the first COMMIT: lifespans, history, the end of handlers' sessions, what the log
   and the telemetry keep back. All databases do each step together, and each step has a bound.
4. A database that is too slow for a step, or fails in it, is left out from there on. It gets no COMMIT: its rows stay
   its worker's own until the process has ended, and rescue gives them back when the lease is over.
5. Then the children of multiprocessing are killed.
6. Then the COMMITs are sent together, each on a connection that is open. When one of them has ended, with whatever
   answer, the others have `BESIDE_SECONDS`. Then the process ends. So a job that was given back runs here no longer
   than that, and as long as it takes to say in one line which databases have not answered.
7. A COMMIT that is cut off then may have come about or not. If not, its rows stay, as in 4.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from math import inf
from typing import Any, TypeVar

from pgqueue.cli.process_end import FLUSH_SECONDS, flush, write
from pgqueue.database.backoff import one_line
from pgqueue.steady_clock import monotonic
from pgqueue.worker.last_message import SEND_SECONDS, LastMessage
from pgqueue.worker.run.child_processes import kill_children

T = TypeVar("T")

log = logging.getLogger("pgqueue")

OTHERS_SECONDS = 3.0
"""So long the other workers may still stop when the first one has its last message."""
PREPARE_SECONDS = 4.0
SETTLE_SECONDS = 3.0
BESIDE_SECONDS = 0.25
"""So long the process waits for the other COMMITs when the first one has ended."""
LATER = "rescue gives back what ran when the lease is over"


class LastMessages:
    """The messages by the name of the database. `contexts` are those of the workers: what is logged there names it."""

    def __init__(self, messages: Mapping[str, LastMessage], contexts: Mapping[str, Context]) -> None:
        self._messages = dict(messages)
        self._contexts = contexts

    async def send(self) -> None:
        """Send them. The caller ends the process as soon as this returns."""
        seconds = await self._together(LastMessage.prepare, PREPARE_SECONDS)
        await self._together(LastMessage.settle, SETTLE_SECONDS)
        flush(min(seconds, default=FLUSH_SECONDS))
        kill_children()
        await self._commit()

    async def _together(self, step: Callable[[LastMessage], Coroutine[Any, Any, T]], seconds: float) -> list[T]:
        """Take this step for all; what those answer that have done it in time. The others are left out."""
        steps, answers = self._begin(step), []
        if steps:
            await asyncio.wait(steps, timeout=seconds)
        for doing, name in steps.items():
            if doing.done() and not doing.cancelled() and (error := doing.exception()) is None:
                answers.append(doing.result())
                continue
            why = one_line(error) if doing.done() and not doing.cancelled() and error else f"not within {seconds:g} s"
            del self._messages[name]
            self._contexts[name].copy().run(log.warning, "could not sign off: %s; %s", why, LATER)
        return answers

    def _begin(self, step: Callable[[LastMessage], Coroutine[Any, Any, T]]) -> dict[asyncio.Task[T], str]:
        """The tasks that take this step, each in the context of its worker."""
        loop = asyncio.get_running_loop()
        return {
            asyncio.Task(step(last), loop=loop, context=self._contexts[name].copy()): name
            for name, last in self._messages.items()
        }

    async def _commit(self) -> None:
        commits = self._begin(LastMessage.commit)
        if not commits:
            return
        _, late = await asyncio.wait(commits, timeout=SEND_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if late:
            await asyncio.wait(late, timeout=BESIDE_SECONDS)
        if missing := [name for commit, name in commits.items() if not commit.done() or _failed(commit)]:
            write(f"could not sign off in {', '.join(missing)}; {LATER}")  # not by the log, which may hang


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


async def those_that_come(stops: Mapping[str, asyncio.Task[LastMessage | None]]) -> dict[str, LastMessage]:
    """Wait for these stops; the last messages of those that have one. From the first one on the others have
    `OTHERS_SECONDS`."""
    found: dict[str, LastMessage] = {}
    pending, until = set(stops.values()), inf
    while pending and monotonic() < until:
        patience = until - monotonic() if found else None
        _, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        for name, stop in stops.items():
            if name not in found and stop.done() and (last := stop.result()) is not None:
                found[name] = last
        if found and until == inf:
            until = monotonic() + OTHERS_SECONDS
    return found
