"""What a declaration may ask for beyond the task itself, as small values: `Lock`.

Used by tasks, which check an option at declaration and render its key at enqueue. Decides what a key is; never asks
whether it is free: that is admit's.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from pgqueue.codec import Codec
from pgqueue.errors import InvalidArguments, InvalidOption
from pgqueue.job import NewJob
from pgqueue.keys import check_key

R = TypeVar("R")

LIMIT_MOST = 1 << 31  # the column's type
ON_LOCKED = ("wait", "skip", "once")


@dataclass(frozen=True, slots=True)
class Lock:
    """At most `limit` jobs of one key run at the same time, over all workers and all tasks of the schema.

    `key` is a template of the task's parameters, such as "account:{account_id}", or a function of those parameters it
    names; a parameter that is None, and a function that returns None, mean no lock. What becomes of a job whose key
    has no room: "wait" (default) lets it wait, first come first served; "skip" ends it as skipped; "once" ends it as
    skipped if a job of the same task waits for the key already, which will run after it. A job that waits for its
    next attempt has given its key up, unless `hold_on_retry`. Raises InvalidOption for what cannot work.

    >>> Lock("account:{account_id}").limit
    1
    >>> Lock("api", limit=3, on_locked="later")
    Traceback (most recent call last):
    ...
    pgqueue.errors.InvalidOption: lock 'api': on_locked 'later': use "wait", "skip" or "once"
    """

    key: str | Callable[..., str | None]
    limit: int = 1
    on_locked: Literal["wait", "skip", "once"] = "wait"
    hold_on_retry: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) and not callable(self.key):
            raise InvalidOption(f"lock {self.key!r}: the key is a template or a function")
        whole = isinstance(self.limit, int) and not isinstance(self.limit, bool)
        if not whole or not 1 <= self.limit < LIMIT_MOST:
            raise InvalidOption(f"lock {self.key!r}: limit {self.limit!r}: use a whole number from 1")
        if self.on_locked not in ON_LOCKED:
            raise InvalidOption(f'lock {self.key!r}: on_locked {self.on_locked!r}: use "wait", "skip" or "once"')
        if not isinstance(self.hold_on_retry, bool):
            raise InvalidOption(f"lock {self.key!r}: hold_on_retry {self.hold_on_retry!r} is neither True nor False")

    @classmethod
    def of(cls, given: Lock | str | Callable[..., str | None]) -> Lock:
        """A lock from what a declaration says: one already, a template or a function."""
        return given if isinstance(given, Lock) else cls(given)


@dataclass(frozen=True, slots=True)
class Locking:
    """A lock as one task has it: what makes the key of a call."""

    lock: Lock
    task: str
    key_of: Callable[[Mapping[str, Any]], str | None]

    def key(self, arguments: Mapping[str, Any]) -> str | None:
        """The key of a call with these arguments; None: no lock. Raises InvalidArguments for one that cannot be."""
        key = self.key_of(arguments)
        return None if key is None else check_key(key, f"task {self.task!r}: lock key")


def locking(given: Lock | str | Callable[..., str | None], codec: Codec) -> Locking:
    """Check a lock against a task's signature. Raises InvalidOption."""
    lock = Lock.of(given)
    what = f"task {codec.task!r}: lock {lock.key!r}"
    return Locking(lock, codec.task, rendering(lock.key, codec, what))


def locked(new: NewJob[R], lock: Locking, arguments: Mapping[str, Any]) -> NewJob[R]:
    """The job of a call with these arguments, with its key."""
    key = lock.key(arguments)
    if key is None:
        return new
    return msgspec.structs.replace(new, lock_key=key, lock_limit=lock.lock.limit, on_locked=lock.lock.on_locked)


def rendering(
    key: str | Callable[..., str | None], codec: Codec, what: str
) -> Callable[[Mapping[str, Any]], str | None]:
    """What makes the key of a call of its arguments; checked against the task's signature, `what` names it."""
    return _template(key, codec, what) if isinstance(key, str) else _function(key, codec, what)


def _template(template: str, codec: Codec, what: str) -> Callable[[Mapping[str, Any]], str | None]:
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidOption(f"{what}: {error}") from None
    names = [name for _, name, _, _ in pieces if name is not None]
    if any(form or conversion or not name.isidentifier() for _, name, form, conversion in pieces if name is not None):
        raise InvalidOption(f"{what}: write parameters as {{name}}; a function of them can do more")
    _check_names(names, codec, what)

    def key_of(arguments: Mapping[str, Any]) -> str | None:
        parts: list[str] = []
        for literal, name, _, _ in pieces:
            parts.append(literal)
            if name is not None:
                if name not in arguments:
                    raise InvalidArguments(f"{what}: no argument {name!r} was given")
                if (value := arguments[name]) is None:
                    return None
                parts.append(_shown(value))
        return "".join(parts)

    return key_of


def _function(
    function: Callable[..., str | None], codec: Codec, what: str
) -> Callable[[Mapping[str, Any]], str | None]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"{what}: its signature cannot be read ({error})") from None
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if len(named) + takes_all < len(parameters):
        raise InvalidOption(f"{what}: it is called with keywords: name the parameters it needs, or take **arguments")
    _check_names([p.name for p in named if p.default is p.empty], codec, what)
    names = [p.name for p in named]

    def key_of(arguments: Mapping[str, Any]) -> str | None:
        return function(**(arguments if takes_all else {name: arguments[name] for name in names if name in arguments}))

    return key_of


def _check_names(names: list[str], codec: Codec, what: str) -> None:
    unknown = [name for name in names if not codec.knows(name)]
    if unknown:
        raise InvalidOption(f"{what}: the task has no parameter {', '.join(map(repr, unknown))}; {codec.takes()}")


def _shown(value: object) -> str:
    """A value as it stands in the stored JSON, a text without its quotes: so a key looks the same from SQL."""
    if type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    try:
        plain = msgspec.to_builtins(value)
        return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
    except (TypeError, ValueError) as error:
        raise InvalidArguments(f"key: {value!r:.80} has no JSON form ({error}); use a function") from error
