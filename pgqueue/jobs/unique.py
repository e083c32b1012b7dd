"""What a declaration says about unique keys (`Unique`), and the keys of one call.

Used by tasks, which check it at declaration and render the key at enqueue. Here is decided what the key is and what it
means. Whether a job holds it is asked by `unique_enqueue`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec

from pgqueue.errors import InvalidOption
from pgqueue.jobs.codec import Codec
from pgqueue.jobs.concurrency import rendering
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.keys import Keys, check_key
from pgqueue.jobs.values import Duration, seconds
from pgqueue.options import names_options

R = TypeVar("R")

ON_DUPLICATE = ("return", "raise", "replace")


@names_options
@dataclass(frozen=True, slots=True)
class Unique:
    """At most one job of a key, over all tasks of the schema. A second enqueue gets the job that exists.

    `key` is a template of the task's parameters, such as "invoice:{order_id}", or a function of the parameters that it
    names. If a parameter is None, or the function returns None, the job has no key.

    `hold` is how long the key is held (default: "live"; with "replace" or `debounce`: "pending"):
    - "pending": until the job starts.
    - "live": until it has ended in any way.
    - a duration (seconds, a timedelta, or a text such as "24h"): until that time after its end.

    `on_duplicate` is what a second enqueue does:
    - "return" gives the handle of the job that holds the key.
    - "raise" raises DuplicateJob.
    - "replace" gives that handle. If the job has not started, it gets the values of the second enqueue.

    With `debounce` the job starts that long after the last enqueue, each of which replaces it. It starts at most
    `debounce_max` after the first enqueue. Wrong values raise InvalidOption.

    >>> Unique("invoice:{order_id}").hold, Unique("index:{shop}", debounce=5).hold
    ('live', 'pending')
    >>> Unique("invoice:{order_id}", hold="forever")
    Traceback (most recent call last):
    ...
    pgqueue.errors.InvalidOption: unique 'invoice:{order_id}': hold 'forever': use "pending", "live" or "30s", "2h"
    """

    key: str | Callable[..., str | None]
    hold: Literal["pending", "live"] | Duration | None = None
    on_duplicate: Literal["return", "raise", "replace"] = "return"
    debounce: Duration | None = None
    debounce_max: Duration | None = None

    def __post_init__(self) -> None:
        what = f"unique {self.key!r}"
        if not isinstance(self.key, str) and not callable(self.key):
            raise InvalidOption(f"{what}: the key is a template or a function")
        if self.on_duplicate not in ON_DUPLICATE:
            raise InvalidOption(f'{what}: on_duplicate {self.on_duplicate!r}: use "return", "raise" or "replace"')
        if self.debounce is not None:
            if self.on_duplicate == "raise":
                raise InvalidOption(f'{what}: debounce replaces, so it cannot on_duplicate="raise"')
            object.__setattr__(self, "on_duplicate", "replace")
            object.__setattr__(self, "debounce", seconds(self.debounce, f"{what}: debounce"))
        if self.debounce_max is not None:
            object.__setattr__(self, "debounce_max", seconds(self.debounce_max, f"{what}: debounce_max"))
            if self.debounce is None or self.debounce_max < self.debounce:  # type: ignore[operator]  # both are floats
                raise InvalidOption(f"{what}: debounce_max {self.debounce_max!r}: it is no less than a debounce")
        if self.hold is None:
            object.__setattr__(self, "hold", "pending" if self.on_duplicate == "replace" else "live")
        elif isinstance(self.hold, str) and not self.hold[:1].isdigit():
            if self.hold not in ("pending", "live"):
                raise InvalidOption(f'{what}: hold {self.hold!r}: use "pending", "live" or "30s", "2h"')
        else:
            object.__setattr__(self, "hold", seconds(self.hold, f"{what}: hold"))

    @classmethod
    def of(cls, given: Unique | str | Callable[..., str | None]) -> Unique:
        """The Unique from a declaration, which gives a Unique, a template or a function."""
        return given if isinstance(given, Unique) else cls(given)


@dataclass(frozen=True, slots=True)
class Uniqueness:
    """The unique key of one task, or of one `using` of it: makes the keys of a call."""

    task: str
    unique: Unique | None = None
    key_of: Callable[[Mapping[str, Any]], str | None] | None = None
    idempotency_key: str | None = None

    def keyed(self, new: NewJob[R], arguments: Mapping[str, Any]) -> NewJob[R]:
        """The job of a call with these arguments, with its keys. Raises InvalidArguments if one cannot be stored."""
        key = None if self.key_of is None else self.key_of(arguments)
        if key is None and self.idempotency_key is None:
            return new
        unique = self.unique
        if key is None or unique is None:
            return msgspec.structs.replace(new, keys=Keys(None, self.idempotency_key))
        keys = Keys(
            check_key(key, f"task {self.task!r}: unique key"),
            self.idempotency_key,
            unique.hold if isinstance(unique.hold, str) else "after",
            0.0 if isinstance(unique.hold, str) else float(unique.hold),  # type: ignore[arg-type]  # seconds, since init
            unique.on_duplicate,
            unique.debounce_max,  # type: ignore[arg-type]  # seconds, since init
        )
        if unique.debounce is not None and new.run_at is None and new.delay is None:
            return msgspec.structs.replace(new, keys=keys, delay=unique.debounce)
        return msgspec.structs.replace(new, keys=keys)


def unique_by(
    given: Unique | str | Callable[..., str | None], codec: Codec, before: Uniqueness | None = None
) -> Uniqueness:
    """Check a unique key against a task's signature. An idempotency key in `before` is kept."""
    unique = Unique.of(given)
    key_of = rendering(unique.key, codec, f"task {codec.task!r}: unique {unique.key!r}")
    return replace(before or Uniqueness(codec.task), unique=unique, key_of=key_of)


def idempotent_by(key: str, codec: Codec, before: Uniqueness | None = None) -> Uniqueness:
    """Check an idempotency key. A unique key in `before` is kept."""
    checked = check_key(key, f"task {codec.task!r}: idempotency key")
    return replace(before or Uniqueness(codec.task), idempotency_key=checked)
