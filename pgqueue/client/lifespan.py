"""What a worker process sets up before its first job and takes down after its last: `@pgqueue.lifespan`.

Declared at import beside the tasks; entered by the worker on its loop. Nothing here does I/O.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar, cast

from pgqueue.errors import InvalidOption

F = TypeVar("F", bound=Callable[[], AsyncIterator[Any]])

_declared: list[Callable[[], AsyncIterator[Any]]] = []


def lifespan(function: F) -> F:
    """Declare what surrounds the jobs of a worker process; what it yields is `job.resources` in every handler.

    An async generator function that yields once: before the yield it sets up, after it, it takes down, when the last
    job has ended. One per process: a second one under another name, or anything else, raises InvalidOption.

    >>> @pgqueue.lifespan
    ... async def resources():
    ...     async with httpx.AsyncClient() as client:
    ...         yield client
    """
    if not inspect.isasyncgenfunction(cast(object, function)):
        raise InvalidOption(f"@pgqueue.lifespan: {function!r} must be an async function that yields once")
    if _declared and _name(_declared[0]) != _name(function):
        raise InvalidOption(f"@pgqueue.lifespan: {_name(_declared[0])} is declared already; compose the two into one")
    _declared[:] = [function]
    return function


def declared() -> AbstractAsyncContextManager[Any]:
    """The lifespan to enter; one that does nothing if none was declared."""
    return asynccontextmanager(_declared[0])() if _declared else nullcontext()


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"
