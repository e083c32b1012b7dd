"""Names of options: an unknown one gets an answer that names the one that may be meant. No I/O."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar, cast

from pgqueue.errors import InvalidArguments, InvalidOption

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

HIGHEST_ID = 2**63 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")

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


def check_id(id: object, what: str) -> int:
    """Return the id of a job. A text, a truth value or a handle is no id: InvalidOption, which says what to give."""
    if not isinstance(id, int) or isinstance(id, bool) or not 0 < id <= HIGHEST_ID:
        shown = f"{type(id).__name__} {id!r}"[:200]
        hint = " (did you mean its .id?)" if isinstance(getattr(id, "id", None), int) else ""
        if isinstance(id, list | tuple | set):
            hint = " (did you mean *ids?)"
        raise InvalidOption(f"{what}: {shown} is no id of a job{hint}; an id is a whole number, such as handle.id")
    return id


def check_limit(limit: int, most: int) -> int:
    """Return how many are asked for. Raises InvalidOption if this is no whole number from 1 to `most`."""
    if isinstance(limit, int) and not isinstance(limit, bool) and 1 <= limit <= most:
        return limit
    raise InvalidOption(f"limit {limit!r}: give a whole number from 1 to {most}")


def check_moment(value: datetime | None, what: str) -> str | None:
    """A time as a parameter; None if none is given. Raises InvalidOption if this is no datetime with a time zone."""
    if value is None:
        return None
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidOption(f"{what} {value!r}: give a datetime with a time zone")
    return value.isoformat()


def check_states(state: str | Iterable[str] | None, may: Collection[str]) -> tuple[str, ...]:
    """Return the states that are asked for, one or several; () for None. InvalidOption if one is not in `may`."""
    if state is None:
        return ()
    if not isinstance(state, Iterable):
        raise InvalidOption(f"state {state!r:.80}: use one or more of {', '.join(may)}")
    states = (state,) if isinstance(state, str) else tuple(state)
    for each in states:
        if each not in may:
            raise InvalidOption(f"state {each!r:.80}: use one of {', '.join(may)}")
    if not states:
        raise InvalidOption("state: give at least one, or leave it out")
    return states


def check_text(value: str | None, what: str) -> None:
    """Raise InvalidOption if this is given and no text that PostgreSQL can read.

    Not every driver refuses such a text itself. One that sends it has the server end the caller's transaction.
    """
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidOption(f"{what} {value!r}: give a text")
    if "\0" in value or _SURROGATE.search(value):
        raise InvalidOption(f"{what} {value!a:.80}: a text for PostgreSQL has no NUL and no lone surrogate")
