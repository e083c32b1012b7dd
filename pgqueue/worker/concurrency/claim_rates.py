"""Takes jobs under a rate that is far from its limit with the claim itself: no line, no second move or transaction.

Asked by the fetcher, which sends what this gives it ahead of a claim (sql/passing.sql), in the claim's transaction. Of
fast rates only, 500 a second or more: of others a job must find a slot free at the moment when it is let in, and what
the claim brings waits at hand first. A rate that has nothing left, a line that is not ours to take, a key that somebody
else has locked, suspects: these go the long way, as jobs under slow rates do (`rates`).

Why never more start than the rate allows. The proof at the head of `rates` needs three things of whoever lets in. (1)
`next_at` is read and written with the key's lock held, by snapshots taken after it: `claim_rates_lock` is a statement
of its own, the first, and the lock lasts until the commit. (2) Each job is charged in the transaction that makes it
run, at a time at which the rate had room for it: `claim_rates_room` says for how many, when the lock is had; it moves
and the claim takes no more than that; `claim_rates_charge` charges for exactly those, later, when `next_at` is no
further ahead than it was. (3) A job starts within `late` of the time of its charge. We count from no later than that
was; what has not started goes back.

Why nobody is overtaken. The claim has jobs of a key only if nobody waits in its line whom we or another worker could
take, and it has them in the order of its lanes. Where somebody waits, he is taken first. As for free locks, a row that
another claim has parked and not committed is not seen yet, and may be passed.

Why a line does not last. While there is one, what the claim finds is parked behind it. A fetch takes three quarters of
its jobs from the line if there are so many, and parks a quarter at most: the line becomes shorter and is gone. Without
that, a worker that had once parked a job would park all that come after it.

Why few are late. What passes waits at hand for less than `late`: as many are asked for as this worker has lately worked
off in two fifths of that; more and more if it had nothing at hand when they came, half as many if some came too late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import msgspec

from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement
from pgqueue.jobs.job import Job, Lane
from pgqueue.jobs.keys import RATE

CLAIMS = 16
"""For how many claims that bring no job under a rate the next still looks for them."""
MOST_LEAST, MOST = 64, 1_000
TURN_SECONDS = 0.05
"""So long a claim waits for an ask of this worker before it looks at no rates."""
SHARE = 0.4
"""Of the time that may pass until a job starts, how much is counted on."""


class Passing:
    """What passes with the claims of one fetcher."""

    def __init__(self) -> None:
        self.most = MOST_LEAST
        """So many jobs may be asked for while some of them are under a rate."""
        self.passed = 0
        """How many jobs have passed."""
        self._left = 0
        self.keys: frozenset[str] = frozenset()
        """The keys of fast rates that the last claim has met."""
        self.moved: list[Job] = []
        """Those whom the last claim has taken from lines."""
        self._full: set[str] = set()
        """Of those the ones that let nobody more pass."""
        self._asked = self._skip = False
        self.asking = asyncio.Lock()
        """Held by claims that look at rates, and by whoever else here wants their keys: they would meet there."""
        self._at, self._ended, self._late = 0.0, 0, 0.0

    def room(self, n: int) -> int:
        """How many of n a claim may ask for."""
        return min(n, self.most) if self._left else n

    def around(
        self,
        link: Link,
        lanes: Sequence[Lane],
        afters: Sequence[int],
        n: int,
        worker_id: int,
        claim: int,
        *,
        skip: bool,
    ) -> tuple[list[Statement[Any]], list[Statement[Any]]]:
        """What to send before and after this claim; nothing if there have been no jobs under rates lately."""
        if not self._left or self._skip or skip:
            return [], []
        queues, ranks = [queue for queue, _ in lanes], [rank for _, rank in lanes]
        return [
            link.statement("claim_rates_lock", lanes=queues, ranks=ranks, afters=afters, n=n),
            link.statement(
                "claim_rates_room", queues=list(dict.fromkeys(queues)), n=n, worker_id=worker_id, claim=claim
            ),
        ], [link.statement("claim_rates_charge", worker_id=worker_id)]

    def brought(
        self,
        before: Sequence[Any],
        after: Sequence[Any],
        claimed: Iterable[Job],
        parked: Iterable[str],
        sent: float,
        claim: int,
    ) -> None:
        """What was sent around a claim at `sent` was answered so, and the claim has brought these jobs and parked some
        under these keys."""
        self.moved, starts = [], dict[str, float]()
        self._asked, self.keys = bool(before), frozenset()
        self._full.clear()
        if before:
            [(began, wanted, _)], [_, *rows] = before
            [[(looked, told, _)], *_] = after
            self.keys = frozenset(msgspec.json.decode(wanted, type=list[str]))
            # By our clock no later than when they were charged by the server's; between the two it may have waited.
            at = sent + max(0.0, (looked - began) / 1e6)
            for key, taken, late, more in msgspec.json.decode(told, type=list[tuple[str, int, float, bool]]):
                starts[key] = at + late
                if not more:
                    self._full.add(key)
                if taken:
                    self._late = late
                    self.passed += taken
            self.moved = [Job(row, claim) for row in rows]
        rated = [job for job in [*self.moved, *claimed] if job.rate_key is not None]
        for job in rated:
            job.start_by = starts[job.rate_key or ""]
        if rated or any(key.startswith(RATE) for key in parked):
            self._left = CLAIMS
        elif self._left:
            self._left -= 1

    def lasting(self, keys: Iterable[str]) -> bool:
        """Whether the lines of all these keys, under which jobs have been parked, will last: not of rates that let them
        pass, or that nobody has asked about yet."""
        rates = [key.removeprefix(RATE) for key in keys if key.startswith(RATE)]
        return not rates or (self._asked and all(key in self._full or key not in self.keys for key in rates))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Between asks for these keys; if they take too long, without a look at rates."""
        self._skip = False
        if not self._left:
            yield
            return
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self.asking.acquire()
        except TimeoutError:
            self._skip = True
            yield
            return
        try:
            yield
        finally:
            self.asking.release()

    def adapt(self, ended: int, *, starved: bool) -> None:
        """Some have been brought; this worker has ended so many jobs so far, and had none at hand, or it had."""
        now = monotonic()
        quick = int((ended - self._ended) / max(now - self._at, 1e-3) * self._late * SHARE)
        grown = self.most * 5 // 4
        # Without any at hand it has waited for claims, and may be quicker than it had reason to be.
        self.most = min(MOST, max(MOST_LEAST, grown if starved else min(grown, quick)))
        self._at, self._ended = now, ended

    def came_back(self) -> None:
        """Some have not started in time."""
        self.most = max(MOST_LEAST, self.most // 2)
