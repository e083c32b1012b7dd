"""The options that restrict how many jobs run or start at once: `Lock`, `Limit`, `Rate`.

Used by tasks, which check an option at declaration and render its key at enqueue. Here is decided what a key is. The
worker decides whether it is free (`pgqueue.worker.concurrency`).
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from pgqueue.errors import InvalidArguments, InvalidOption
from pgqueue.jobs.codec import Codec, to_json
from pgqueue.jobs.functions import check_answers
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.keys import check_key
from pgqueue.jobs.nodes import UnknownResult
from pgqueue.jobs.values import COUNT_MOST, parse_rate, whole
from pgqueue.options import names_options

R = TypeVar("R")

LIMIT_MOST = 1 << 31  # the column's type
ON_LOCKED = ("wait", "skip", "once")
NAME_MOST = 200  # bytes


@names_options
@dataclass(frozen=True, slots=True)
class Lock:
    """At most `limit` jobs of one key run at the same time, over all workers and all tasks of the schema.

    `key` is a template of the task's parameters, such as "account:{account_id}", or a function of the parameters that
    it names. If a parameter is None, or the function returns None, the job has no lock.

    If the key has no room, `on_locked` decides what becomes of the job:
    - "wait" (default): it waits, first come first served.
    - "skip": it ends as skipped.
    - "once": it ends as skipped if a job of the same task waits for the key already. That one will run later.

    A job that waits for its next attempt has given up its key, unless `hold_on_retry` is set. Raises InvalidOption for
    values that cannot work.

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
        if not whole(self.limit, 1, LIMIT_MOST - 1):
            raise InvalidOption(f"lock {self.key!r}: limit {self.limit!r}: use a whole number from 1")
        if self.on_locked not in ON_LOCKED:
            raise InvalidOption(f'lock {self.key!r}: on_locked {self.on_locked!r}: use "wait", "skip" or "once"')
        if not isinstance(self.hold_on_retry, bool):
            raise InvalidOption(f"lock {self.key!r}: hold_on_retry {self.hold_on_retry!r} is neither True nor False")

    @classmethod
    def of(cls, given: Lock | str | Callable[..., str | None]) -> Lock:
        """The lock from a declaration, which gives a Lock, a template or a function."""
        return given if isinstance(given, Lock) else cls(given)


@names_options
@dataclass(frozen=True, slots=True)
class Limit:
    """At most `n` jobs of the tasks with this limit run at the same time, over all workers.

    Tasks with the same `name` share the limit. Without a name it is the task's own, under the task's name. `n` is valid
    until an operator sets another number: `pgqueue limits set NAME N`. Raises InvalidOption for values that cannot
    work.

    >>> Limit(5, name="warehouse").n
    5
    >>> Limit(0)
    Traceback (most recent call last):
    ...
    pgqueue.errors.InvalidOption: limit 0: use a whole number from 1
    """

    n: int
    name: str | None = None

    def __post_init__(self) -> None:
        if not whole(self.n, 1, LIMIT_MOST - 1):
            raise InvalidOption(f"limit {self.n!r}: use a whole number from 1")
        if self.name is not None:
            check_name(self.name, f"limit {self.n}: name")

    @classmethod
    def of(cls, given: Limit | int) -> Limit:
        """The limit from a declaration, which gives a Limit or its number."""
        return given if isinstance(given, Limit) else cls(given)


@names_options
@dataclass(frozen=True, slots=True)
class Rate:
    """At most this many jobs of the tasks with this rate start in a period, over all workers; the others wait.

    `rate` is a count and a period: "100/minute", "5/10s", with the units second, minute, hour, day. Starts are spread
    evenly. `burst` jobs may start at once after a rest. In any window of one period at most count + burst - 1 jobs
    start.

    With a `key` (a template or a function, as in `Lock`) each key has its own rate. If the key is None, no rate applies
    to that job. Tasks with the same `name` share the rate; without a name it is the task's own. The rate is valid until
    an operator sets another one: `pgqueue limits set NAME 50/minute`. Raises InvalidOption for values that cannot work.

    >>> Rate("100/minute", key="customer:{customer_id}", name="mail.api").period
    60.0
    >>> Rate("often")
    Traceback (most recent call last):
    ...
    pgqueue.errors.InvalidOption: rate 'often': write COUNT/PERIOD, such as 100/minute or 5/10s (units: s, m, h, d)
    """

    rate: str
    key: str | Callable[..., str | None] | None = None
    name: str | None = None
    burst: int = 1

    def __post_init__(self) -> None:
        parse_rate(self.rate)
        if self.key is not None and not isinstance(self.key, str) and not callable(self.key):
            raise InvalidOption(f"rate {self.rate!r}: the key is a template or a function, not {self.key!r}")
        if self.name is not None:
            check_limiter(self.name, f"rate {self.rate!r}: name")
        if not whole(self.burst, 1, COUNT_MOST):
            raise InvalidOption(f"rate {self.rate!r}: burst {self.burst!r}: use a whole number from 1 to {COUNT_MOST}")

    @property
    def count(self) -> int:
        """Number of jobs that may start in a period."""
        return parse_rate(self.rate)[0]

    @property
    def period(self) -> float:
        """The period, in seconds."""
        return parse_rate(self.rate)[1]

    @classmethod
    def of(cls, given: Rate | str) -> Rate:
        """The rate from a declaration, which gives a Rate or its text."""
        return given if isinstance(given, Rate) else cls(given)


def check_name(name: object, what: str) -> str:
    """Return `name` if it can name a limit: 1 to 200 bytes, printable, without spaces; else raise InvalidOption."""
    if isinstance(name, str) and name.isprintable() and " " not in name and 1 <= len(name.encode()) <= NAME_MOST:
        return name
    raise InvalidOption(f"{what} {name!r:.80}: use 1 to {NAME_MOST} bytes of printable text without spaces")


def check_limiter(name: object, what: str) -> str:
    """Return `name` if it can name a rate: as for a limit, but without a colon, because the key begins after it."""
    if ":" in check_name(name, what):
        raise InvalidOption(f"{what} {name!r}: a colon ends the name of a rate, after it comes the key: use another")
    return str(name)


@dataclass(frozen=True, slots=True)
class Limiting:
    """The limit and the rate of one task, with their names: makes the keys of a call."""

    task: str
    limit: Limit | None = None
    rate: Rate | None = None
    limit_name: str | None = None
    rate_name: str | None = None
    key_of: Callable[[Mapping[str, Any]], str | None] | None = None
    """None: all calls share one rate."""

    def limited(self, new: NewJob[R], arguments: Mapping[str, Any]) -> NewJob[R]:
        """The job of a call with these arguments, with its keys. Raises InvalidArguments if a key cannot be stored."""
        rate_key = self.rate_name
        if rate_key is not None and self.key_of is not None:
            key = self.key_of(arguments)
            if key is not None:
                what = f"task {self.task!r}: rate key"
                key = check_key(f"{rate_key}:{check_key(key, what)}", f"{what} with the rate's name")
            rate_key = key
        return msgspec.structs.replace(new, limit_key=self.limit_name, rate_key=rate_key)


def limiting(limit: Limit | int | None, rate: Rate | str | None, codec: Codec) -> Limiting | None:
    """Check a limit and a rate against a task's signature. None: the task has neither. Raises InvalidOption."""
    if limit is None and rate is None:
        return None
    limit = None if limit is None else Limit.of(limit)
    rate = None if rate is None else Rate.of(rate)
    what = f"task {codec.task!r}:"
    return Limiting(
        codec.task,
        limit,
        rate,
        None if limit is None else limit.name or check_name(codec.task, f"{what} name= for its limit, instead of"),
        None if rate is None else rate.name or check_limiter(codec.task, f"{what} name= for its rate, instead of"),
        None if rate is None or rate.key is None else rendering(rate.key, codec, f"{what} rate key {rate.key!r}"),
    )


def limits_of(said: Iterable[Limiting]) -> dict[str, int]:
    """How many jobs at once these allow, by the names of the limits. Raises InvalidOption if two disagree."""
    limits: dict[str, int] = {}
    for each in said:
        if each.limit is not None and each.limit_name is not None:
            name, n = each.limit_name, each.limit.n
            if limits.setdefault(name, n) != n:
                raise InvalidOption(
                    f"task {each.task!r}: limit {name!r} is {n} here and {limits[name]} elsewhere; "
                    "tasks that share a limit give the same number"
                )
    return limits


def rates_of(said: Iterable[Limiting]) -> dict[str, Rate]:
    """The rates among these by name. Raises InvalidOption if two disagree."""
    rates: dict[str, Rate] = {}
    for each in said:
        if each.rate is not None and each.rate_name is not None:
            name, rate = each.rate_name, each.rate
            other = rates.setdefault(name, rate)
            if (other.count, other.period, other.burst) != (rate.count, rate.period, rate.burst):
                raise InvalidOption(
                    f"task {each.task!r}: rate {name!r} is {rate.rate} here (burst {rate.burst}) and {other.rate} "
                    f"(burst {other.burst}) elsewhere; tasks that share a rate give the same"
                )
    return rates


@dataclass(frozen=True, slots=True)
class Locking:
    """The lock of one task: makes the key of a call."""

    lock: Lock
    task: str
    key_of: Callable[[Mapping[str, Any]], str | None]

    def key(self, arguments: Mapping[str, Any]) -> str | None:
        """The key of a call with these arguments; None: no lock. Raises InvalidArguments if it cannot be stored."""
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
    """The function that makes a call's key from its arguments. It is checked against the task's signature; `what` names
    the option in errors."""
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
    check_answers(function, what)
    names = [p.name for p in named]

    def key_of(arguments: Mapping[str, Any]) -> str | None:
        return function(**(arguments if takes_all else {name: arguments[name] for name in names if name in arguments}))

    return key_of


def _check_names(names: list[str], codec: Codec, what: str) -> None:
    unknown = [name for name in names if not codec.knows(name)]
    if unknown:
        raise InvalidOption(f"{what}: the task has no parameter {', '.join(map(repr, unknown))}; {codec.takes()}")


def _shown(value: object) -> str:
    """The value as in the stored JSON, a text without its quotes. A key made in SQL looks the same."""
    if type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    if type(value) is UnknownResult:
        return str(value)  # which raises
    try:
        plain = msgspec.to_builtins(value, enc_hook=to_json)
        return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
    except (TypeError, ValueError) as error:
        raise InvalidArguments(f"key: {value!r:.80} has no JSON form ({error}); use a function") from error
