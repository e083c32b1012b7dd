"""Numbers of claims: which are still to be answered. Shared by the services that bring jobs to this worker.

These are fetcher, unblocker and rate limiter. If this worker does not know a row in job_running with a number up to
`settled`, the answer with that row was lost.

The columns `claim` hold integers, so the numbers end at `LAST`. Near the end they begin anew, under another worker id
(see `liveness/renewal`). Why no fence (job, worker, claim) ever names two runs, and nothing is lost:

1. Numbers begin anew at a moment when none is open and no job is held: so no row in job_running has an old one that
   this worker knows, and no outcome is on its way.
2. From that moment `begin` waits. So no claim is sent under the old id until the new one is there.
3. The worker has signed off under the old id: rows of lost answers are handed back, and its row is deleted. It has
   another id before the first new number is given, and ids are never given again.
4. If jobs run so long that the last number is reached, `begin` waits, too. Jobs need no claim to end, so 1. comes.

Another thread may give up claims whose answers the loop does not read (see `liveness/blocked_loop`). Then any worker
may have their jobs. Why none of them starts here as well:

1. A number is ended when the answer has been read, before a job of it is delivered.
2. To end a number and to give it up take one lock. So it is given up only while it is open, and is `void` before its
   jobs are delivered.
"""

from __future__ import annotations

import asyncio
import threading

LAST = 2**31 - 1
RESERVE = 2**24
"""So many numbers before the last one the worker takes no more jobs. Claims that bring none may still begin."""


class Claims:
    """Counts up from 1, or from behind `last`; each number is open until its answer has been read, or will not be."""

    def __init__(self, last: int = 0) -> None:
        self._last = last
        self._void = 0
        self._open: set[int] = set()
        self._given_up: set[int] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._opened: asyncio.Event | None = None
        """There while a claim waits. Not made before: a worker may be started again on another loop."""

    async def begin(self) -> int:
        """The next number. Waits while numbers are begun anew."""
        while self._closed or self._last >= LAST:
            if self._opened is None:
                self._opened = asyncio.Event()
            await self._opened.wait()
        self._open.add(self._last + 1)  # first: so a thread that looks meanwhile does not take it for answered
        self._last += 1
        return self._last

    def end(self, claim: int) -> None:
        """The answer to this claim has been read, or will not be. Before its jobs are delivered; may be repeated."""
        with self._lock:
            self._open.discard(claim)

    def give_up(self) -> frozenset[int]:
        """Give up the claims whose answers have not been read: their jobs are not ours, when they come. From any
        thread."""
        with self._lock:
            given_up = frozenset(self._open)
            self._given_up |= given_up
        return given_up

    def forget(self, claim: int) -> None:
        """This claim has ended, and no job of it will come."""
        self._given_up.discard(claim)

    def void_all(self) -> None:
        """All numbers so far are void: claims of a worker that had seemed dead. Their jobs belong to other workers."""
        self._void = self._last

    def void(self, claim: int) -> bool:
        """Whether the jobs of this claim are not ours any more."""
        return claim <= self._void or claim in self._given_up

    @property
    def settled(self) -> int:
        """All numbers up to this one have ended: their answers were read, or will not be. From any thread."""
        last = self._last  # before: a number that is begun meanwhile is above it
        return min(self._open, default=last + 1) - 1

    # Near the last number --------------------------------------------------------------------------------------------

    @property
    def spent(self) -> bool:
        """Whether the numbers are to begin anew."""
        return self._last >= LAST - RESERVE

    def close(self) -> bool:
        """Let no number begin. False, and nothing is done, while one is open."""
        self._closed = not self._open
        return self._closed

    def begin_anew(self) -> None:
        """The next number is 1. Only while closed, when the worker has another id, and holds no job."""
        assert self._closed, "a claim under an old number may be under way"
        self._last = self._void = 0
        self._given_up.clear()

    def open(self) -> None:
        """Let numbers begin."""
        self._closed = False
        if self._opened is not None and self._last < LAST:
            self._opened.set()
            self._opened = None
