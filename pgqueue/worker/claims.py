"""Numbers of claims: which are still to be answered. Shared by the services that bring jobs to this worker.

These are fetcher, unblocker and rate limiter. If this worker does not know a row in job_running with a number up to
`settled`, the answer with that row was lost.
"""

from __future__ import annotations


class Claims:
    """Counts up from 1; each number is open until its answer has been processed, or is given up."""

    def __init__(self) -> None:
        self._last = self._void = 0
        self._open: set[int] = set()

    def begin(self) -> int:
        """The next number."""
        self._open.add(self._last + 1)  # first: so a thread that looks meanwhile does not take it for answered
        self._last += 1
        return self._last

    def end(self, claim: int) -> None:
        """The answer to this claim has been processed or given up."""
        self._open.discard(claim)

    def void_all(self) -> None:
        """All numbers so far are void: claims of a worker that had seemed dead. Their jobs belong to other workers."""
        self._void = self._last

    def void(self, claim: int) -> bool:
        """Whether the jobs of this claim are not ours any more."""
        return claim <= self._void

    @property
    def settled(self) -> int:
        """All numbers up to this one have been answered or given up. From any thread."""
        last = self._last  # before: a number that is begun meanwhile is above it
        return min(self._open, default=last + 1) - 1
