"""Whose turn it is where one slot is free: that of the fetcher, or of a line under a key. One after the other.

Kept by the worker. A worker that is full has its slots free one by one; without this whoever is quicker would have them
all, and starve the other. Decides only.
"""

from __future__ import annotations

from collections.abc import Callable


class Turns:
    """`fetches` says how many fetches have been answered, `hungry` whether the fetcher would take more."""

    def __init__(self, fetches: Callable[[], int], hungry: Callable[[], bool]) -> None:
        self._fetches = fetches
        self._hungry = hungry
        self._at = -1

    def taken(self) -> None:
        """A line has had a slot."""
        self._at = self._fetches()

    @property
    def fetchers(self) -> bool:
        """Whether the next slot is the fetcher's: it wants one, and has had none since."""
        return self._at == self._fetches() and self._hungry()
