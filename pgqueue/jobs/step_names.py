"""The names of durable steps (`job.step`)."""

from __future__ import annotations

from pgqueue.errors import InvalidOption

NAME_MOST = 200


def check_name(name: object) -> str:
    """Return the name of a step. Raises InvalidOption unless it is printable text of 1 to 200 bytes."""
    if isinstance(name, str) and name.isprintable() and 1 <= len(name.encode()) <= NAME_MOST:
        return name
    raise InvalidOption(f"step {name!r:.80}: its name is printable text of 1 to {NAME_MOST} bytes")
