"""The record of what is written by hand: by which actor, what, on what, how many jobs.

Each function that changes something by hand writes its row in the statement that makes the change. So a row is there
exactly when the change is. Called by those functions and by the CLI.
"""

from __future__ import annotations

from pgqueue.errors import InvalidOption

ACTOR_MOST = 200  # characters


def checked_actor(actor: str | None) -> str | None:
    """Return the actor if it can be written, else raise InvalidOption. None: the role of the connection."""
    if actor is None or (isinstance(actor, str) and 0 < len(actor) <= ACTOR_MOST and actor.isprintable()):
        return actor
    raise InvalidOption(f"actor {actor!r}: give 1 to {ACTOR_MOST} printable characters, on one line")
