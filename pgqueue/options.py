"""Names of options: an unknown one gets an answer that names the one that may be meant. No I/O."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from pgqueue.errors import InvalidArguments, InvalidOption

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

OPTION_WORDS = {
    **dict.fromkeys(["countdown", "wait"], "delay"),
    **dict.fromkeys(["eta", "at", "when"], "run_at"),
    **dict.fromkeys(["expires", "ttl"], "deadline"),
    **dict.fromkeys(["time_limit", "soft_time_limit", "job_timeout"], "timeout"),
    **dict.fromkeys(["max_retries", "retries", "max_attempts", "attempts"], "retry"),
    **dict.fromkeys(["task_id", "job_id"], "idempotency_key"),
    **dict.fromkeys(["base_delay", "default_retry_delay"], "first"),
    "max_delay": "most",
    "backoff": "factor",
    "autoretry_for": "retry_on",
    "dont_autoretry_for": "fail_on",
    "unique_key": "unique",
    "lock_key": "lock",
    "meta": "headers",
    "rate_limit": "rate",
    "concurrency": "limit",
    "timezone": "tz",
    "misfire": "catch_up",
}
"""What options are called in other queues, and here."""


def no_option(what: str, unknown: Iterable[str], known: Callable[..., Any] | Iterable[str]) -> InvalidOption:
    """The error for options that `what` does not have. It names the one that may be meant."""
    from difflib import get_close_matches  # imported here: a program without mistakes needs none of it

    options = list(inspect.signature(known).parameters) if callable(known) else list(known)
    names = [name for name in options if name not in ("self", "unknown")]
    said: list[str] = []
    for name in sorted(unknown):
        meant = OPTION_WORDS.get(name)
        if meant not in names:
            meant = next(iter(get_close_matches(name, names, 1)), "attempts" if meant == "retry" else None)
        said.append(f"{name}{f' (did you mean {meant}?)' if meant in names else ''}")
    return InvalidOption(f"{what}: no option {', '.join(said)}; there are {', '.join(names) or 'none'}")


def names_options(cls: C) -> C:
    """A class whose unknown options are answered by `no_option`, and not by a bare TypeError."""
    made = cls.__init__  # type: ignore[misc]
    known = [name for name in inspect.signature(made).parameters if name != "self"]

    @wraps(made)
    def init(self: Any, *args: Any, **options: Any) -> None:
        if unknown := options.keys() - set(known):
            raise no_option(cls.__name__, unknown, known)
        made(self, *args, **options)

    cls.__init__ = init  # type: ignore[misc]
    return cls


def checks_options(function: F) -> F:
    """A function whose unknown keywords are answered by `no_option`, and not by a bare TypeError.

    One that takes any keyword is left as it is.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return function
    named = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    known = frozenset(named)
    shown = [name for name in named if name != "conn"]

    def check(options: dict[str, Any]) -> None:
        if not known.issuperset(options):
            raise no_option(function.__name__, options.keys() - known, shown)

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        check(options)
        return function(*args, **options)

    @wraps(function)
    async def achecked(*args: Any, **options: Any) -> Any:
        check(options)
        return await function(*args, **options)

    return cast("F", achecked if inspect.iscoroutinefunction(function) else checked)


def needs_arguments(least: int, said: str) -> Callable[[F], F]:
    """Functions that are given fewer than `least` arguments by position raise InvalidArguments, which says `said`."""

    def wrap(function: F) -> F:
        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if len(args) < least:
                raise InvalidArguments(f"{function.__name__}: {said}")
            return function(*args, **kwargs)

        @wraps(function)
        async def achecked(*args: Any, **kwargs: Any) -> Any:
            if len(args) < least:
                raise InvalidArguments(f"{function.__name__}: {said}")
            return await function(*args, **kwargs)

        return cast("F", achecked if inspect.iscoroutinefunction(function) else checked)

    return wrap
