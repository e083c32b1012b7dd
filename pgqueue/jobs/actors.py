"""By which name a change by hand is recorded: the one given with the call, that of the block, or the database role.

Used by every function that changes something by hand. The command line says its `--actor` once, as a block does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pgqueue.errors import InvalidOption
from pgqueue.options import checks_options

ACTOR_MOST = 200  # characters
_acting: ContextVar[str | None] = ContextVar("pgqueue_actor", default=None)


@checks_options
@contextmanager
def acting(actor: str) -> Iterator[None]:
    """In this block, changes by hand are recorded as this actor's, unless a call names another.

    For code that acts for a person, such as a page of your own. Raises InvalidOption for a name that is no line of 1
    to 200 printable characters.

        with pgqueue.acting("ann"):
            pgqueue.pause(conn, "mail")
    """
    before = _acting.set(_checked(actor))
    try:
        yield
    finally:
        _acting.reset(before)


def act_as(actor: str) -> None:
    """As `acting`, for the rest of this process: for commands."""
    _acting.set(_checked(actor))


def actor_of(given: str | None) -> str | None:
    """The checked actor of a call; None: the role of the connection."""
    return _acting.get() if given is None else _checked(given)


def _checked(actor: str) -> str:
    if isinstance(actor, str) and 0 < len(actor) <= ACTOR_MOST and actor.isprintable():
        return actor
    raise InvalidOption(f"actor {actor!r:.80}: give 1 to {ACTOR_MOST} printable characters, on one line")
