"""What a key may be (`check_key`), and which unique keys a new job has (`Keys`).

The key of a lock and a unique key are texts of 1 to 500 bytes without NUL. Longer keys would not fit an index.
"""

from __future__ import annotations

import msgspec

from pgqueue.errors import InvalidArguments
from pgqueue.jobs.sizes import KEY_MOST

LOCK, LIMIT, RATE, NODE = "lock:", "limit:", "rate:", "node:"
"""The beginning of the key that a blocked job waits for: the kind of the key. Of a node it waits for other jobs."""


class Keys(msgspec.Struct, frozen=True):
    """The unique keys of a new job, at least one of the two, and what becomes of the job if one of them is held."""

    unique: str | None
    idempotency: str | None = None
    hold: str = "live"  # pending, live, after
    seconds: float = 0.0  # after its end
    on_duplicate: str = "return"
    debounce_max: float | None = None  # seconds from the first enqueue

    def names(self) -> list[str]:
        """The keys as stored in `pgqueue.unique_key`, in the order in which every enqueue takes them."""
        given = (("idempotency", self.idempotency), ("unique", self.unique))
        return [f"{kind}:{key}" for kind, key in given if key is not None]


def check_key(key: object, what: str = "lock key") -> str:
    """Return `key` if it is valid, else raise InvalidArguments; `what` names the key in the error."""
    if not isinstance(key, str):
        raise InvalidArguments(f"{what} {key!r:.80}: a key is a text, not {type(key).__qualname__}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidArguments(f"{what} {key!a:.80}: lone surrogates cannot be stored") from None
    if not 1 <= size <= KEY_MOST:
        raise InvalidArguments(f"{what} {key!r:.80}: {size} bytes, use 1 to {KEY_MOST}")
    if "\0" in key:
        raise InvalidArguments(f"{what} {key!r:.80}: has a NUL, which PostgreSQL cannot store")
    return str.__str__(key)
