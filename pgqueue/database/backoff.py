"""How a service repeats itself, and waits: helpers for pauses with jitter, patience with the database, loops, and steps
that a cancellation must not break into.

Used by every service of a worker, so that none has start, stop and back-off code of its own. Never decides what is
done.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import psycopg

log = logging.getLogger("pgqueue")

_TRANSIENT = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    TimeoutError,
    OSError,
    # What a standby answers that has not been promoted yet.
    psycopg.InternalError,
    # What a new connection cures: the plan of a prepared statement outlived a migration, or a pooler lost it.
    psycopg.errors.FeatureNotSupported,
    psycopg.errors.InvalidSqlStatementName,
)


def transient(error: BaseException) -> bool:
    """Whether trying again can help: the database is away, restarting, failing over, overloaded, or refused in passing.

    A missing table or a missing right is not transient: the worker says so and ends.
    """
    return isinstance(error, _TRANSIENT)


def jittered(seconds: float) -> float:
    """`seconds`, up to twice as long, so that a fleet started together does not stay in step."""
    return seconds * random.uniform(1.0, 2.0)


class Backoff:
    """Growing pauses with full jitter, 50 ms at first and 5 s at most; a success starts them anew."""

    def __init__(self, first: float = 0.05, most: float = 5.0) -> None:
        self._first, self._most, self._next = first, most, first

    def succeeded(self) -> None:
        self._next = self._first

    def pause(self) -> float:
        seconds = random.uniform(self._next / 2, self._next)
        self._next = min(self._most, self._next * 2)
        return seconds


async def persist(step: Callable[[], Awaitable[None]], *, name: str, until: Callable[[], bool] = lambda: False) -> None:
    """Repeat `step` until told or cancelled. After a transient error, log it and pause; any other error is raised."""
    backoff = Backoff()
    while not until():
        try:
            await step()
            backoff.succeeded()
        except Exception as error:
            if not transient(error):
                raise
            pause = backoff.pause()
            log.warning("%s: %s; trying again in %.2f s", name, str(error).strip() or type(error).__name__, pause)
            await asyncio.sleep(pause)


async def wait(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for `event` at most `seconds`; whether it was set. Never clears it."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True


async def within(awaitable: Awaitable[object], seconds: float) -> bool:
    """Whether it ended in time; if not, it was cancelled."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await awaitable
    except TimeoutError:
        return False
    return True


async def to_its_end(step: Coroutine[Any, Any, None]) -> None:
    """Await `step`; a cancellation meanwhile is raised when it has ended."""
    doing = asyncio.ensure_future(step)
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        while not doing.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([doing])
        if not doing.cancelled():
            doing.exception()  # whatever it is, the cancellation says how this ends
        raise
