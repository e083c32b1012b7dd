"""Names of options: an unknown one gets an answer that names the one that may be meant. No I/O."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from pgqueue.errors import InvalidOption

C = TypeVar("C", bound=type)

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
    options = list(inspect.signature(known).parameters) if callable(known) else list(known)
    names = [name for name in options if name not in ("self", "unknown")]
    said: list[str] = []
    for name in sorted(unknown):
        meant = OPTION_WORDS.get(name)
        if meant not in names:
            meant = next(iter(get_close_matches(name, names, 1)), "attempts" if meant == "retry" else None)
        said.append(f"{name}{f' (did you mean {meant}?)' if meant in names else ''}")
    return InvalidOption(f"{what}: no option {', '.join(said)}; there are {', '.join(names)}")


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
