"""Numbers of claims: which are still to be answered. Shared by all that give jobs to this worker, fetcher and admit.

If this worker does not know a row in job_running with a number up to `settled`, the answer with that row was lost.
"""

from __future__ import annotations


class Claims:
    """Counts up from 1; each number is open until its answer has been processed, or is given up."""

    def __init__(self) -> None:
        self._last = self._void = 0
        self._open: set[int] = set()

    def begin(self) -> int:
        """The next number."""
        self._open.add(self._last + 1)  # first: a thread that looks meanwhile takes none for answered
        self._last += 1
        return self._last

    def end(self, claim: int) -> None:
        """Its answer has been processed or given up."""
        self._open.discard(claim)

    def void_all(self) -> None:
        """All numbers so far are void: claims of a worker that was taken for dead; what they bring is others'."""
        self._void = self._last

    def void(self, claim: int) -> bool:
        """Whether what this claim brings is not ours any more."""
        return claim <= self._void

    @property
    def settled(self) -> int:
        """All numbers up to this one have been answered or given up. From any thread."""
        last = self._last  # before: a number that is begun meanwhile is none of these
        return min(self._open, default=last + 1) - 1
