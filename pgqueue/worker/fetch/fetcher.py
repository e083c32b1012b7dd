"""Claims jobs: one fetch in flight, sized by the room the executor has, behind the watermark.

Part of the flow between notifier and executor: woken by the notifier, by room, or by its own slow poll. A fetch is
one round trip, one READ COMMITTED transaction: a reading (snapshot, head, own id, in this order), then the claim. It
never waits for jobs inside the database, and never decides what a job means.

A job that needs a key and does not hold it is parked by the claim and comes back through admit: it took nobody's
slot, so the fetch is repeated. A job under a rate is parked by the claim always, and comes back through the rate
limiter. What need not be parked, and what is parked many at once, is for `claim_locks`: it sends statements of its own
in the claim's transaction, and is told what came of them.

Wake-ups are not lost: the event is cleared *before* a fetch, so news that comes while a fetch is under way leads to
another one. What is *known* is kept per queue: one whose slots are taken is not asked, and may have more. Whatever
is missed all the same (NOTIFY off, a pooler, a broken listener) is found by the poll.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import uniform
from time import monotonic
from typing import Any

import msgspec
import psycopg

from pgqueue.database.backoff import jittered, persist, wait
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Statement, integers, texts
from pgqueue.jobs.job import Job, Lane
from pgqueue.jobs.keys import LOCK
from pgqueue.worker.claims import Claims
from pgqueue.worker.concurrency.claim_locks import Keyed, Parked
from pgqueue.worker.concurrency.holder_cursors import Starts
from pgqueue.worker.concurrency.waiter_cursors import Fronts, Place
from pgqueue.worker.fetch.watermark import Reading, Watermark

log = logging.getLogger("pgqueue")

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
    alone: bool = False
    """Ask only for suspects that must run alone; the answer is delivered even if it is empty."""


@dataclass(slots=True)
class Asked:
    """The lanes of one claim, in order, each with its limit."""

    lanes: list[Lane]
    mosts: list[int]


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim has brought."""

    reading: Reading
    scanned: set[Lane]
    """The lanes it has looked at, and passed over no row of."""
    taken: dict[Lane, tuple[int, int]]
    """How many rows each of these gave, parked ones too, and the highest position of them."""
    jobs: list[Job]
    parked: int | None
    """How many it has parked; None if it passed over them."""

    def more(self, n: int) -> bool:
        """Whether there may be more: it has given all of n, or has left some behind."""
        return self.parked is None or len(self.jobs) + self.parked >= n


def spaced(wanted: float, poll: float) -> float:
    """Seconds until the next look, where a fetch is wanted in `wanted`: then, if that is near; else in a poll or more.

    At random, but such that no look comes right before the fetch, which would find what it finds.
    """
    if wanted <= 2 * poll:
        return wanted
    return uniform(max(poll, wanted / 2), 2 * poll) if wanted <= 4 * poll else jittered(poll)


class Fetcher:
    """Keeps the executor supplied. `news` and `roomier` wake it; `deliver` receives what it claimed."""

    def __init__(
        self,
        session: Session,
        worker_id: Callable[[], int],
        *,
        shares: Callable[[], list[Share]],
        deliver: Callable[[list[Job]], None],
        suspects: Callable[[], Sequence[int]],
        live_workers: Callable[[], int],
        in_doubt: Callable[[], None],
        poll: float,
        claims: Claims | None = None,
        parked: Callable[
            [Mapping[str, Collection[int]], Collection[str], tuple[int, int] | None], None
        ] = lambda keys, singly, lowest: None,
        holding: Callable[[Sequence[Job]], None] = lambda jobs: None,
        answered: Callable[[], None] = lambda: None,
        beside: Callable[[], Sequence[Statement[Any]]] = lambda: (),
        fronts: Fronts | None = None,
    ) -> None:
        self.watermark = Watermark()
        self.fetches = 0
        self.asking: tuple[Sequence[str], int] = ((), 0)
        """The queues a claim under way asks, and for how many jobs."""
        self._session = session
        self._worker_id = worker_id
        self._shares = shares
        self._deliver = deliver
        self._suspects = suspects
        self._live_workers = live_workers
        self._in_doubt = in_doubt
        self._poll = poll
        self._wake = asyncio.Event()
        self._known: set[str] = set()
        self.claims = Claims() if claims is None else claims
        self._parked = parked
        self._holding = holding
        self._answered = answered
        self._beside = beside
        self.keyed = Keyed()
        self._starts = Starts()
        self._fronts = Fronts() if fronts is None else fronts
        self._pool_turns = itertools.count()
        # One for each pool: a common one would come to the same queue each time where the other pools' number fits.
        self._turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
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

    def hungry(self, queues: Iterable[str]) -> bool:
        """Whether there may be jobs in these queues that it has not taken for want of room."""
        return not self._known.issuperset(queues)

    def quiet(self) -> None:
        """Take no more; `run` returns when the fetch under way has been answered."""
        self._quiet = True
        self._wake.set()

    async def warm(self) -> None:
        """Connect, and have the claim planned, by one that asks for no job.

        A claim's first time takes the server ten times as long, and the jobs it takes wait for it.
        """
        for share in self._shares()[:1]:
            asked = self._asked(share)
            await self._claim(asked, [0] * len(asked.lanes), 0, 0)

    async def run(self) -> None:
        """Fetch until `quiet`; the database being away is waited out."""
        await persist(self._step, name="fetch", until=lambda: self._quiet)

    async def _step(self) -> None:
        roomy = [share for share in self._shares() if share.room]
        unknown = [share for share in roomy if not self._known.issuperset(share.queues)]
        if unknown:
            self._wake.clear()
            # One pool at a time: together, each lane of a pool could give that pool's whole room.
            await self._fetch(unknown[next(self._pool_turns) % len(unknown)])
        elif await wait(self._wake, self._patience() if roomy else None):
            self._wake.clear()
        elif self._wanted() <= 0:
            self._known.clear()
        else:
            await self._look(roomy)

    def _patience(self) -> float:
        """Seconds until the next look without a wake."""
        return spaced(max(self._wanted(), SOON), self._poll)

    def _wanted(self) -> float:
        """Seconds until the watermark wants a fetch: a start at zero, or a cursor it has lowered."""
        look = self.watermark.next_look(now := monotonic())
        return inf if look is None else look - now

    async def _look(self, roomy: Sequence[Share]) -> None:
        """A poll: fetch, unless one cheap read-only statement proves that there is nothing."""
        link = self._session.link
        [(head, snapshot, paused)], *_ = await self._session.run(link.statement("fetch_probe"), *self._beside())
        lanes = [lane for share in roomy for lane in self._asked(share).lanes]
        known = self._session.generation == self._generation
        if not known or not self.watermark.idle(Reading(head, None, snapshot), frozenset(paused), lanes, monotonic()):
            self._known.clear()

    async def _fetch(self, share: Share) -> None:
        asked = self._asked(share, next(self._turns[share.queues[0]]))
        n = self.keyed.room(share.room, self._live_workers())
        self._known.update(share.queues)
        if await self._session.ready() != self._generation:
            self._begin_anew()
        claim = self.claims.begin()
        starts = self.watermark.starts(asked.lanes, monotonic(), zero=not self.keyed.long_rows)
        self.asking = (share.queues, n)
        try:
            claimed = await self._claim(asked, starts, n, claim)
        except psycopg.errors.UniqueViolation:
            self.watermark.forget()
            self._known.clear()
            await self._refuse_doubles()
            return
        except BaseException:
            # Whether rows were taken is unknown; reconciliation hands them back once this claim counts as given up.
            self.watermark.forget()
            self._known.clear()
            self._in_doubt()
            raise
        finally:
            self.claims.end(claim)
            self.asking = ((), 0)
            self._answered()
        self.fetches += 1
        repeat = self.watermark.fetched(
            claimed.reading,
            asked.lanes,
            asked.mosts,
            claimed.scanned,
            claimed.taken,
            n,
            monotonic(),
            self._session.took,
            self._live_workers(),
        )
        if repeat or claimed.more(n) or share.alone:
            self._known.clear()
        self._known -= self._short_of_limit(asked, claimed.taken, n)
        if jobs := claimed.jobs:
            places = {lane: place for place, lane in enumerate(asked.lanes)}
            jobs.sort(key=lambda job: (places[job.lane], job.pos, job.id))
        if jobs or share.alone:
            self._deliver(jobs)

    def _begin_anew(self) -> None:
        """On a new connection, to a server that perhaps has forgotten what this worker completed."""
        self.watermark.forget()
        if self._generation:
            self._in_doubt()
        self._generation = self._session.generation

    async def _refuse_doubles(self) -> None:
        """Rows that were available; what else it was is not ours to judge."""
        [available] = await self._session.run(self._session.link.statement("fetch_refuse_doubles"))
        for (job_id,) in available:
            said = "job %d is running, and a second row with its id was available; that row is failed: refused"
            log.error(said, job_id, extra={"job_id": job_id})

    def _asked(self, share: Share, turn: int = 0) -> Asked:
        """The lanes to ask, most urgent first; queues of one rank take turns; a suspect comes alone."""
        turn %= len(share.queues)
        queues = [*share.queues[turn:], *share.queues[:turn]]
        suspects = self._suspects()
        ranks = suspects if share.alone else (*suspects, *RANKS)
        return Asked(
            [(queue, rank) for rank in ranks for queue in queues],
            [1 if rank in suspects else share.room for rank in ranks for _ in queues],
        )

    async def _claim(self, asked: Asked, starts: list[int], n: int, claim: int) -> Claimed:
        link = self._session.link
        lanes = {
            "queues": texts(queue for queue, _ in asked.lanes),
            "ranks": integers(rank for _, rank in asked.lanes),
            "afters": integers(starts),
        }
        passes_over = self.keyed.long_rows
        on = self._session.lasting
        self._starts.on(on)
        fronts = self._fronts.known(LOCK)
        ahead = self.keyed.statements(link, lanes, n, self._worker_id(), self._live_workers())
        [(head, xid, snapshot, *_)], *answers = await self._session.run(
            link.statement("fetch_reading"),
            *ahead,
            link.statement(
                "fetch_claim",
                **lanes,
                mosts=integers(asked.mosts),
                reach=self.keyed.reach,
                starts=self._starts.often(),
                lines=_lines(fronts),
                worker_id=self._worker_id(),
                claim=claim,
                n=n,
            ),
            *self._beside(),
            on=on,
        )
        rows = answers[len(ahead)]
        first = rows[0]
        jobs = [Job(row, claim) for row in rows[1:]]
        if first[7]:
            self._holding(jobs)
            self._given(first, jobs, fronts)
        parked = Parked([], {}) if first[14] is None else msgspec.json.decode(first[14], type=Parked)
        keys, singly, lowest = self.keyed.brought(answers[: len(ahead)], parked, len(jobs), keyed=bool(first[7]))
        if keys:
            self._parked(keys, singly, lowest)
        reading = Reading(head, xid, snapshot)
        if passes_over:
            return Claimed(reading, set(), {}, jobs, None)
        opened = {asked.lanes[place - 1] for place in msgspec.json.decode(first[5], type=list[int])}
        return Claimed(reading, opened, _taken(jobs, parked), jobs, len(parked))

    def _given(self, first: Sequence[Any], jobs: Sequence[Job], fronts: Mapping[str, Place]) -> None:
        """Remember where the holders of the locks that this claim has given begin; nobody was in line for those."""
        if first[1] is not None:
            came_with = set(msgspec.json.decode(first[3])) if first[3] else ()
            keys = [key for job in jobs if (key := job.lock_key) is not None and key not in came_with]
            self._starts.given(keys, first[1])
            self._fronts.empty((line for key in keys if (line := LOCK + key) not in fronts), self._session.sent)

    @staticmethod
    def _short_of_limit(asked: Asked, taken: Mapping[Lane, tuple[int, int]], n: int) -> set[str]:
        """The queues with a lane that gave all it was allowed to: there may be more of it."""
        return {
            lane[0]
            for lane, most in zip(asked.lanes, asked.mosts, strict=True)
            if most < n and taken.get(lane, (0, 0))[0] >= most
        }


def _lines(fronts: Mapping[str, Place]) -> str:
    """Where lines begin, as a claim wants it: a JSON object by lock."""
    return msgspec.json.encode({key.removeprefix(LOCK): place for key, place in fronts.items()}).decode()


def _taken(jobs: Collection[Job], parked: Parked) -> dict[Lane, tuple[int, int]]:
    """How many rows each lane gave, parked ones too, and the highest position of them."""
    taken: dict[Lane, tuple[int, int]] = {(queue, rank): (count, pos) for queue, rank, count, pos in parked.lanes}
    for job in jobs:
        count, highest = taken.get(job.lane, (0, 0))
        taken[job.lane] = (count + 1, job.pos if job.pos > highest else highest)
    return taken
