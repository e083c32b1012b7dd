"""The cursor that everybody writes first."""

from __future__ import annotations

from typing import Any

from pgqueue.worker.fetch.watermark import Fetch, Watermark


class NaiveCursor(Watermark):
    """The highest position taken, and nothing else: what everybody writes first."""

    __slots__ = ()

    def fetched(self, fetch: Fetch, now: float, cost: float = 0.0) -> bool:
        for lane, (_, highest) in fetch.taken.items():
            self._cursors[lane] = max(self._cursors[lane], highest)
        self._in_flight = False
        return False

    def idle(self, *args: Any) -> bool:
        return False

    def start_at_zero(self) -> None:
        """It has no such thing."""

    def next_look(self, now: float) -> float | None:
        return now + 0.05
