"""Rows that the server refuses to move or to end: each is left alone for a while, and one is named now and then.

Used where many rows go at once, and one of them must not keep the others (see mover). Asks nothing, moves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from math import inf
from typing import Any, Generic, TypeVar

from pgqueue.database.backoff import described
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

Row = TypeVar("Row")

SOON_SECONDS = 5.0
"""How long a row is left alone if what refuses it may be over soon."""


class Notice:
    """Says why a row is left alone. One line in so many seconds stands for all rows."""

    def __init__(self, said: str, *, seconds: float = 60.0) -> None:
        self._said, self._seconds, self._at = said, seconds, -inf

    def say(self, name: str, error: BaseException, extra: Mapping[str, Any] | None = None) -> None:
        now = monotonic()
        if now >= self._at:
            self._at = now + self._seconds
            said = "%s %s: %s. It is tried again; so are others like it"
            log.error(said, name, self._said, described(error), extra=extra)


class LeftAlone(Generic[Row]):
    """Until when each row is left alone: `seconds`, and longer by `each` for every other one that is."""

    def __init__(self, notice: Notice, *, seconds: float, each: float = 0.0) -> None:
        self._notice = notice
        self._seconds, self._each = seconds, each
        self._until: dict[Row, float] = {}
        self._over = False

    def leave(
        self,
        row: Row,
        name: str,
        error: BaseException,
        *,
        seconds: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """The server refuses this row by itself: it is left alone for so long, and named."""
        self._forget()
        usual = self._seconds + self._each * len(self._until)
        self._until[row] = monotonic() + (usual if seconds is None else seconds)
        self._notice.say(name, error, extra)

    def rows(self) -> Collection[Row]:
        """Those that are left alone now."""
        if self._until:
            self._forget()
        return self._until.keys()

    def over(self) -> bool:
        """Whether the time of some is over, since this was asked last: these may be tried again."""
        self._forget()
        over, self._over = self._over, False
        return over

    def until(self, row: Row) -> float:
        """Until when this row is left alone, by `monotonic`; in the past if it is not."""
        return self._until.get(row, -inf)

    def next(self) -> float:
        """When the time of the first is over, by `monotonic`."""
        return min(self._until.values(), default=inf)

    def _forget(self) -> None:
        now, before = monotonic(), len(self._until)
        self._until = {row: until for row, until in self._until.items() if until > now}
        self._over |= len(self._until) < before
