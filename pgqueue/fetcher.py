"""Claims jobs: one fetch in flight, sized by the room the executor has, behind the watermark.

Part of the flow between notifier and executor: woken by the notifier, by room, or by its own slow poll. A fetch is one
round trip, one READ COMMITTED transaction: a reading (snapshot, head, own id, in this order), then the claim. It never
waits for jobs inside the database, and never decides what a job means.

Wake-ups are not lost: the event is cleared *before* a fetch, so news that comes while a fetch is under way leads to
another one. What is *known* is kept per queue: one whose slots are taken is not asked, and may have more. Whatever
is missed all the same (NOTIFY off, a pooler, a broken listener) is found by the poll.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

import msgspec

from pgqueue.job import Job
from pgqueue.loops import jittered, persist, wait
from pgqueue.sessions import Session
from pgqueue.watermark import Lane, Reading, Watermark

log = logging.getLogger("pgqueue")

SUSPECTS = (-2, -1)
RANKS = tuple(range(20))
# A fetch wanted now is due at once where there is room; without room the loop must not spin.
SOON = 0.01
# Outcomes not yet written down: past this, taking more would only grow what a crash repeats.
UNWRITTEN_MOST = 5_000


@dataclass(frozen=True, slots=True)
class Share:
    """Some queues and how many jobs they may be given now. The executor's pools, as the fetcher sees them."""

    queues: Sequence[str]
    room: int


@dataclass(slots=True)
class Asked:
    """The lanes of one claim, in order, each with its limit."""

    lanes: list[Lane]
    mosts: list[int]


class Fetcher:
    """Keeps the executor supplied. `news` and `roomier` wake it; `deliver` receives what it claimed."""

    def __init__(
        self,
        session: Session,
        worker_id: Callable[[], int],
        *,
        shares: Callable[[], list[Share]],
        deliver: Callable[[list[Job]], None],
        suspect_free: Callable[[], bool],
        live_workers: Callable[[], int],
        in_doubt: Callable[[], None],
        poll: float,
    ) -> None:
        self.watermark = Watermark()
        self.settled = 0
        """The last claim number whose answer has been processed or given up."""
        self.fetches = 0
        self._session = session
        self._worker_id = worker_id
        self._shares = shares
        self._deliver = deliver
        self._suspect_free = suspect_free
        self._live_workers = live_workers
        self._in_doubt = in_doubt
        self._poll = poll
        self._wake = asyncio.Event()
        self._known: set[str] = set()
        self._claims = itertools.count(1)
        self._turns = itertools.count()
        self._generation = 0
        self._quiet = False

    def news(self, zero: bool = False) -> None:
        """Something may have become available; `zero`: even behind the watermark (a rescue freed rows)."""
        if zero:
            self.watermark.start_at_zero()
        self._known.clear()
        self._wake.set()

    def roomier(self) -> None:
        """The executor has room for more."""
        self._wake.set()

    def quiet(self) -> None:
        """Take no more; `run` returns when the fetch under way has been answered."""
        self._quiet = True
        self._wake.set()

    async def run(self) -> None:
        """Fetch until `quiet`; the database being away is waited out."""
        await persist(self._step, name="fetch", until=lambda: self._quiet)

    async def _step(self) -> None:
        shares = self._shares()
        if any(share.room and not self._known.issuperset(share.queues) for share in shares):
            self._wake.clear()
            await self._fetch(shares)
        elif await wait(self._wake, self._patience()):
            self._wake.clear()
        elif self._wanted() <= 0:
            self._known.clear()
        elif any(share.room for share in self._shares()):
            await self._look()

    def _patience(self) -> float:
        """Seconds until the next look without a wake: the poll, or when the watermark wants a fetch, if near."""
        wanted = max(self._wanted(), SOON)
        return wanted if wanted <= 2 * self._poll else jittered(self._poll)

    def _wanted(self) -> float:
        """Seconds until the watermark wants a fetch: a start at zero, or a cursor it has lowered."""
        look = self.watermark.next_look(now := monotonic())
        return inf if look is None else look - now

    async def _look(self) -> None:
        """A poll: fetch, unless one cheap read-only statement proves that there is nothing."""
        link = self._session.link
        [[(head, snapshot, paused)]] = await self._session.run(link.statement("fetch_probe"))
        lanes = self._asked(self._shares()).lanes
        if not self.watermark.idle(Reading(head, None, snapshot), frozenset(paused), lanes, monotonic()):
            self._known.clear()

    async def _fetch(self, shares: list[Share]) -> None:
        asked = self._asked(shares)
        if not asked.lanes:
            return
        self._known.update(queue for queue, _ in asked.lanes)
        n = sum(share.room for share in shares)
        if await self._session.ready() != self._generation:
            self.watermark.forget()
            self._generation = self._session.generation
        claim = next(self._claims)
        started = monotonic()
        starts = self.watermark.starts(asked.lanes, started)
        try:
            reading, (opened, jobs) = await self._claim(asked, starts, n, claim)
        except BaseException:
            # Whether rows were taken is unknown; reconciliation hands them back once this claim counts as given up.
            self.watermark.forget()
            self._known.clear()
            self._in_doubt()
            raise
        finally:
            self.settled = claim
        self.fetches += 1
        now = monotonic()
        taken = _taken(jobs)
        open_lanes = {asked.lanes[place - 1] for place in opened}
        repeat = self.watermark.fetched(
            reading, asked.lanes, asked.mosts, open_lanes, taken, n, now, now - started, self._live_workers()
        )
        if repeat or len(jobs) >= n:
            self._known.clear()
        self._known -= self._short_of_limit(asked, taken, n)
        if jobs:
            places = {lane: place for place, lane in enumerate(asked.lanes)}
            jobs.sort(key=lambda job: (places[job.lane], job.pos))
            self._deliver(jobs)

    def _asked(self, shares: Sequence[Share]) -> Asked:
        """The lanes to ask, most urgent first; queues of one rank take turns; the limit is the room of the pool."""
        turn = next(self._turns)
        queues = [(queue, share.room) for share in shares if share.room for queue in share.queues]
        turn %= max(1, len(queues))
        queues = queues[turn:] + queues[:turn]
        asked = Asked([], [])
        if self._suspect_free():
            self._ask(asked, queues, SUSPECTS, 1)
        self._ask(asked, queues, RANKS, None)
        return asked

    @staticmethod
    def _ask(asked: Asked, queues: list[tuple[str, int]], ranks: Sequence[int], most: int | None) -> None:
        for rank in ranks:
            for queue, room in queues:
                asked.lanes.append((queue, rank))
                asked.mosts.append(room if most is None else most)

    async def _claim(
        self, asked: Asked, starts: list[int], n: int, claim: int
    ) -> tuple[Reading, tuple[list[int], list[Job]]]:
        link = self._session.link
        [(head, xid, snapshot, *_)], rows = await self._session.run(
            link.statement("fetch_reading"),
            link.statement(
                "fetch_claim",
                queues=[queue for queue, _ in asked.lanes],
                ranks=[rank for _, rank in asked.lanes],
                afters=starts,
                mosts=asked.mosts,
                worker_id=self._worker_id(),
                claim=claim,
                n=n,
            ),
            settings=False,
        )
        opened = msgspec.json.decode(rows[0][5], type=list[int])
        return Reading(head, xid, snapshot), (opened, [Job(row, claim) for row in rows[1:]])

    @staticmethod
    def _short_of_limit(asked: Asked, taken: Mapping[Lane, tuple[int, int]], n: int) -> set[str]:
        """The queues with a lane that gave all it was allowed to: there may be more of it."""
        return {
            lane[0]
            for lane, most in zip(asked.lanes, asked.mosts, strict=True)
            if most < n and taken.get(lane, (0, 0))[0] >= most
        }


def _taken(jobs: Collection[Job]) -> dict[Lane, tuple[int, int]]:
    """How many rows each lane gave, and the highest position of them."""
    taken: dict[Lane, tuple[int, int]] = {}
    for job in jobs:
        count, highest = taken.get(job.lane, (0, 0))
        taken[job.lane] = (count + 1, job.pos if job.pos > highest else highest)
    return taken
