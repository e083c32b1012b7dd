"""`@pgqueue.lifespan`: what a worker process sets up before its first job and takes down after its last one.

Declared at import beside the tasks. The worker enters it on its event loop. Nothing here does I/O.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar, cast

from pgqueue.client.place import Place, declare, declared_at, name_of
from pgqueue.errors import InvalidOption
from pgqueue.options import checks_options

F = TypeVar("F", bound=Callable[[], AsyncIterator[Any]])

_declared: list[Callable[[], AsyncIterator[Any]]] = []


@checks_options
def lifespan(function: F) -> F:
    """Declare what surrounds the jobs of a worker process. The value it yields is `job.resources` in every handler.

    It is an async generator function that yields once. Before the yield it sets up. After the yield, when the last job
    has ended, it takes down. Any other kind of function raises InvalidOption. A process has one lifespan: a second one
    under another name raises InvalidOption.

    >>> @pgqueue.lifespan
    ... async def resources():
    ...     async with httpx.AsyncClient() as client:
    ...         yield client
    """
    if not inspect.isasyncgenfunction(cast(object, function)):
        raise InvalidOption(f"@pgqueue.lifespan: {function!r} must be an async function that yields once")
    here = Place.here()
    for other in _declared:
        before = declared_at(other)
        if not here.replaces(before, one_name=name_of(other) == name_of(function)):
            raise InvalidOption(
                f"@pgqueue.lifespan: {name_of(other)} is declared already ({before.at}); compose the two into one"
            )
    _declared[:] = [function]
    declare(function, here)
    return function


def is_declared() -> bool:
    """Whether this process has a lifespan."""
    return bool(_declared)


def declared() -> AbstractAsyncContextManager[Any]:
    """The lifespan to enter. If none was declared, it does nothing."""
    return asynccontextmanager(_declared[0])() if _declared else nullcontext()
