"""What the key of a lock may be: a text of 1 to 500 bytes, without NUL. Longer ones would fit into no index."""

from __future__ import annotations

from pgqueue.errors import InvalidArguments

KEY_MOST = 500  # bytes


def check_key(key: object, what: str = "lock key") -> str:
    """Return `key` if it can be one, else raise InvalidArguments; `what` names it there."""
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
