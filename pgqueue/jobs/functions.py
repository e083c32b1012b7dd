"""What can be a task: a plain `def` or `async def` with a name that a worker finds again. Used at declaration only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from pgqueue.errors import InvalidOption

_NO_ANSWER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def default_name(fn: Callable[..., Any]) -> str:
    if fn.__module__ == "__main__":
        raise InvalidOption(
            f"task {fn.__qualname__}: it is declared in __main__, a name no worker can find again: "
            f"pass name=…, such as @task(name={fn.__qualname__!r}), or move it to a module"
        )
    if fn.__name__ == "<lambda>":
        raise InvalidOption("task: a lambda has no name of its own: pass name=…, or use def")
    return f"{fn.__module__}.{fn.__qualname__}"


def check_function(fn: Callable[..., Any]) -> None:
    if not inspect.isfunction(fn):
        raise InvalidOption(f"task {fn!r}: {_no_function(fn)}; declare a plain def or async def")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise InvalidOption(f"task {fn.__qualname__}: a generator does nothing until iterated; return instead of yield")
    first = next(iter(inspect.signature(fn).parameters), "")
    if first in ("self", "cls") and "." in fn.__qualname__.rpartition("<locals>.")[2]:
        raise InvalidOption(
            f"task {fn.__qualname__}: a method needs its object, which is no argument: "
            "use a function that is given an id and loads the object"
        )


def check_wrapper(fn: Callable[..., Any], task: str) -> None:
    """A decorator around the function may give it an argument. Then the wrapper does not take what the function takes,
    which is what a job would have. A wrapper with `*args, **kwargs` takes all: nothing is seen of it here."""
    if not hasattr(fn, "__wrapped__") or hasattr(fn, "__signature__"):
        return
    taken, wanted = inspect.signature(fn, follow_wrapped=False), inspect.signature(fn)
    given = wanted.parameters.values()
    by_place = [each for each in given if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    by_name = [each.name for each in given if each.kind is each.KEYWORD_ONLY]
    try:
        taken.bind(*by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        raise InvalidOption(
            f"task {task!r}: the decorator around it takes {taken}, and the function {wanted}: {error}. If the "
            "decorator gives an argument, let its wrapper have a `__signature__` without that"
        ) from None


def check_answers(function: Callable[..., Any], what: str) -> None:
    """A function of an option is called for its answer: it is no async function, and no generator."""
    inner: Any = function.func if isinstance(function, partial) else function
    inner = inner if inspect.isroutine(inner) else type(inner).__call__
    if any(is_other(inner) for is_other in _NO_ANSWER):
        raise InvalidOption(f"{what}: it is called for its answer: use a plain def with a return")


def check_takes(function: Callable[..., Any], what: str, *given: str) -> None:
    """It can be called with what is `given`. What has no signature that can be read, as a built-in, is not asked."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise InvalidOption(f"{what}: it is called with ({', '.join(given)}): {error}") from None


def hidden_body(fn: Callable[..., Any]) -> str | None:
    """What a decorator hides of a plain function: that the function below it is async, or a generator. None: nothing.

    Such a wrapper is right if it runs the body itself, as with `asyncio.run` or `list`; that cannot be seen here. Else
    it returns something that has not run, and every attempt of the job fails.
    """
    if inspect.iscoroutinefunction(fn):
        return None
    inner = inspect.unwrap(fn)
    if inspect.iscoroutinefunction(inner):
        return f"{inner.__qualname__} is async"
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        return f"{inner.__qualname__} is a generator"
    return None


def _no_function(fn: object) -> str:
    if isinstance(fn, type):
        return "a class is no task"
    if inspect.ismethod(fn):
        return "a bound method carries an object that cannot be stored"
    if isinstance(fn, staticmethod | classmethod):
        return f"put @{type(fn).__name__} above @task"
    if callable(fn):
        return "a partial or other callable object has no name of its own"
    return "the options of a task are keywords, such as @task(name=…)"
