"""Claims jobs: one fetch in flight, sized by the room the executor has, behind the watermark.

Part of the flow between notifier and executor. It is woken by the notifier, by room, or by its own slow poll. A fetch
is one round trip and one READ COMMITTED transaction: a reading (snapshot, head, own id, in this order), then the claim.
It never waits for jobs inside the database, and never decides what a job means.

Jobs are of two kinds, plain jobs and jobs with keys. A fetch asks one kind; which one `kinds` says. There is one
watermark: what a reading learns of transactions lowers the cursors of both kinds.

If a job needs a key and does not hold it, the claim blocks it, and the unblocker starts it later. The job took no slot,
so the fetch is repeated.

Why no wake is lost:

1. The event is cleared *before* a fetch. So a wake that comes during a fetch leads to another one.
2. Each kind has a set of queues that are `known` to have no more jobs. A queue that was not asked, because its slots
   are taken, is not in it.
3. The poll finds whatever is missed all the same (NOTIFY off, a pooler, a broken listener).

The server may refuse a claim for a value of one row, or not get through with it in time (statement_timeout). Then
nothing was taken, and the next claims of that kind ask for fewer jobs, down to one. That one is looked up, and claimed
by its position alone. If it is refused again, it is put aside: failed, reason `refused`. So a bad row costs a few
claims, and every other job is claimed as ever. If every job seems bad, it is not the rows: after REFUSED_MOST of them,
the error goes to the loop, which waits before it goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import uniform
from time import monotonic
from typing import Any, Protocol, cast

import msgspec
import psycopg

from pgqueue.database.backoff import jittered, persist, wait, without_values
from pgqueue.database.row_errors import refuses_row
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Row, Statement, integers, texts
from pgqueue.database.triggers import trigger_of
from pgqueue.jobs.job import Job, Lane
from pgqueue.jobs.keys import LOCK
from pgqueue.jobs.outcomes import MESSAGE_MOST
from pgqueue.worker.concurrency.holder_cursors import HolderCursors
from pgqueue.worker.concurrency.waiter_cursors import Position, WaiterCursors
from pgqueue.worker.doubles import resolve
from pgqueue.worker.fetch.keyed_claim import Blocked, KeyedClaim
from pgqueue.worker.fetch.kinds import NO_RANK, Kind, Kinds
from pgqueue.worker.fetch.passed_over import POSITIONS_MOST, Passed, PassedOver
from pgqueue.worker.fetch.watermark import Fetch, Reading, Watermark
from pgqueue.worker.run.slots import Room
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

RANKS = tuple(range(20))
# A fetch wanted now is due at once where there is room; without room the loop must not spin.
SOON = 0.01
NO_END = 2**63 - 1
# After a claim was refused for a row, the next one asks for a part of its jobs. So many jobs may be put aside one after
# the other, without a claim between them that took any.
NARROWER = 8
REFUSED_MOST = 20


@dataclass(slots=True)
class Asked:
    """The lanes of one claim, in order, each with its limit."""

    lanes: list[Lane]
    mosts: list[int]
    starts: list[int] = field(default_factory=list)
    """The position after which each lane is asked."""
    passed_over: list[tuple[Lane, int]] = field(default_factory=list)
    """Positions at or before the start of their lane, which are asked for by themselves."""

    def ranges(self) -> list[tuple[Lane, int, int, int]]:
        """What the claim is asked for, in order: (lane, after which position, up to which position, how many rows)."""
        alone: defaultdict[Lane, list[int]] = defaultdict(list)
        for lane, pos in sorted(self.passed_over):
            alone[lane].append(pos)
        places: list[tuple[Lane, int, int, int]] = []
        for lane, start, most in zip(self.lanes, self.starts, self.mosts, strict=True):
            places += [(lane, pos - 1, pos, 1) for pos in alone[lane]]
            places.append((lane, start, NO_END, most))
        return places


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim has brought."""

    reading: Reading
    scanned: set[Lane]
    """The lanes that the claim has looked at."""
    taken: dict[Lane, tuple[int, int]]
    """How many rows each of these lanes gave, blocked ones too, and the highest position of them."""
    jobs: list[Job]
    blocked: int
    """How many jobs the claim has blocked."""
    other: int | None
    """The rank of the most urgent lane of the other kind that had a job; None if none had."""
    looked: dict[Lane, int]
    """How far the reading has looked at lanes of the other kind, and seen no job."""

    def more(self, n: int) -> bool:
        """Whether there may be more jobs: the claim has given all of n."""
        return len(self.jobs) + self.blocked >= n


class ClaimSummary(msgspec.Struct):
    """What a claim says beside its jobs; only one of jobs with keys says more than which lanes were open."""

    lanes: list[int]
    """The places (from 1) of the lanes that were open."""
    lowest_hold: int | None = None
    """The lowest hold_pos of the jobs that run now; None if none does."""
    held: list[str] = []
    """The locks that came with such a job."""
    blocked: Blocked | None = None


Answer = tuple[list[Row], ClaimSummary, list[Job]]
"""The answer to a fetch: the reading, and the claim's summary and jobs."""


def spaced(wanted: float, poll: float) -> float:
    """Seconds until the next look, if a fetch is wanted in `wanted` seconds.

    If that is near, the look is the fetch. Else it comes after a poll or more, at random, but not right before the
    fetch: it would find what the fetch finds.
    """
    if wanted <= 2 * poll:
        return wanted
    return uniform(max(poll, wanted / 2), 2 * poll) if wanted <= 4 * poll else jittered(poll)


class FetchCapacity(Protocol):
    """What may be fetched now."""

    def to_fetch(self) -> list[Room]:
        """The groups of slots with room for more."""
        ...

    def poison_ranks(self) -> Sequence[int]:
        """The ranks of poison jobs that may be asked for."""
        ...


class Receiver(Protocol):
    """Takes the jobs that were fetched."""

    def deliver(self, jobs: list[Job], /) -> None:
        """These jobs were claimed."""
        ...

    def fetched(self) -> None:
        """A fetch has been answered, or has failed."""
        ...


class Keys(Protocol):
    """Learns what a claim has done with keys."""

    waiter_cursors: WaiterCursors

    def blocked(
        self, keys: Mapping[str, Collection[int]], singly: Collection[str], lowest: tuple[int, int] | None, /
    ) -> None:
        """Jobs now wait for these keys (see `KeyedClaim.handle_answer`)."""
        ...

    def granted(self, jobs: Iterable[Job], /) -> None:
        """These jobs hold keys now."""
        ...


class Fetcher:
    """Keeps the executor supplied with jobs of `tasks`. `wake` and `slots_freed` wake it; `deliver` receives its jobs.

    Jobs of other tasks stay where they are, for other workers. The cursors of this worker may pass them.
    """

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        capacity: FetchCapacity,
        receiver: Receiver,
        keys: Keys,
        beside: Callable[[], Sequence[Statement[Any]]] = lambda: (),
    ) -> None:
        self.watermark = Watermark()
        self.passed_over = PassedOver()
        self.kinds = Kinds()
        self.keyed_claim = KeyedClaim()
        self.fetches = 0
        self.asking: tuple[Sequence[str], int] = ((), 0)
        """The queues that a claim under way asks, and for how many jobs."""
        self._session = session
        self._state = state
        self._tasks = texts(state.tasks)
        self._capacity = capacity
        self._receiver = receiver
        self._keys = keys
        self._beside = beside
        self._holder_cursors = HolderCursors()
        self._wake = asyncio.Event()
        self._group_turns = itertools.count()
        # One count for each group. A common count could come to the same queue each time, by the number of groups.
        self._queue_turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._generation = 0
        self._quiet = False
        self._put_aside = 0
        """How many jobs were put aside one after the other, without a claim that took any."""

    def wake(self, zero: bool = False) -> None:
        """Jobs may have become available; `zero`: even behind the watermark (a rescue freed rows)."""
        if zero:
            self.watermark.start_at_zero()
        self.kinds.unknown()
        self._wake.set()

    def slots_freed(self) -> None:
        """The executor has room for more."""
        self._wake.set()

    def hungry(self, queues: Iterable[str]) -> bool:
        """Whether there may be jobs in these queues that were not taken for want of room."""
        return self.kinds.hungry(list(queues))

    def quiet(self) -> None:
        """Take no more; `run` returns when the fetch under way has been answered."""
        self._quiet = True
        self._wake.set()

    async def warm(self) -> None:
        """Connect, and have the claims planned, by claims that ask for no job.

        A claim's first time takes the server ten times as long, and the jobs it takes would wait for it.
        """
        for room in self._capacity.to_fetch()[:1]:
            for kind in (self.kinds.plain, self.kinds.keyed):
                asked = self._asked(room, kind)
                asked.starts = [0] * len(asked.lanes)
                await self._claim(kind, asked, 0, 0)

    async def run(self) -> None:
        """Fetch until `quiet`; if the database is away, wait for it."""
        answers = self._session.answers
        await persist(self._step, name="fetch", answers=answers, until=lambda: self._quiet, past_data=True)

    async def _step(self) -> None:
        roomy = [room for room in self._capacity.to_fetch() if room.free]
        hungry = [room for room in roomy if self.hungry(room.queues)]
        if hungry:
            self._wake.clear()
            # One group at a time: together, each lane of a group could fill that whole group.
            room = hungry[next(self._group_turns) % len(hungry)]
            await (
                self._fetch_alone(room) if room.alone else self._fetch(room, self.kinds.next(room.queues, monotonic()))
            )
        elif await wait(self._wake, self._patience(roomy) if roomy else None):
            self._wake.clear()
        elif self._wanted(roomy) <= 0:
            self.kinds.unknown()
        else:
            await self._look(roomy)

    async def _fetch_alone(self, room: Room) -> None:
        """Ask both kinds for a poison job that must run alone. If neither kind has one, that is delivered, too."""
        for kind in (self.kinds.plain, self.kinds.keyed):
            if await self._fetch(room, kind) is not False:
                return
        self._receiver.deliver([])

    def _patience(self, roomy: Sequence[Room]) -> float:
        """Seconds until the next look without a wake."""
        reading = max(self.passed_over.next_reading() - monotonic(), SOON)
        return min(spaced(max(self._wanted(roomy), SOON), self._state.settings.poll), reading)

    def _wanted(self, roomy: Sequence[Room]) -> float:
        """Seconds until a fetch is wanted: a start at zero, a cursor that fell, a row that was passed over."""
        queues = {queue for room in roomy if not room.alone for queue in room.queues}
        look, now = self.watermark.next_look(monotonic()), monotonic()
        return min(inf if look is None else look, self.passed_over.next_look(queues)) - now

    async def _look(self, roomy: Sequence[Room]) -> None:
        """A poll: have both kinds fetched, unless one cheap read-only statement proves that there is no job."""
        link = self._session.link
        [[(head, snapshot, paused)]] = await self._send(link.statement("fetch_probe"))
        kinds = (self.kinds.plain, self.kinds.keyed)
        lanes = [lane for room in roomy for kind in kinds for lane in self._asked(room, kind).lanes]
        known = self._session.generation == self._generation
        if not known or not self.watermark.idle(Reading(head, None, snapshot), frozenset(paused), lanes, monotonic()):
            self.kinds.unknown()

    async def _fetch(self, room: Room, kind: Kind) -> bool | None:
        """Ask these queues for jobs of this kind, and deliver them. Whether there were any; None if that is not
        known."""
        asked = self._asked(room, kind, next(self._queue_turns[room.queues[0]]))
        n = room.free if kind is self.kinds.plain else self.keyed_claim.room(room.free, self._state.live_workers)
        if kind.most is not None:
            n = min(n, kind.most)
        other, beyond = self.kinds.other(kind), self.kinds.beyond(kind, room.queues)
        kind.known.update(room.queues)
        if beyond == NO_RANK and not room.alone and not self._due(other.lanes(asked.lanes)):
            other.known.update(room.queues)  # unless the reading sees one, or a wake comes meanwhile
        await self._session.ready()
        claim = await self._state.claims.begin()
        if self._session.generation != self._generation:  # looked at last: another service may have connected anew
            self._begin_anew()
        self._begin(asked, monotonic())
        self.asking = (room.queues, n)
        claimed: Claimed | psycopg.Error
        try:
            claimed = await self._claim(kind, asked, n, claim, beyond=beyond)
        except psycopg.errors.UniqueViolation as error:
            self._forget()
            if trigger_of(error) is not None:
                raise
            await self._resolve_doubles()
            return None
        except BaseException as error:
            if not isinstance(error, psycopg.errors.QueryCanceled) and not refuses_row(error):
                # Whether rows were taken is unknown. Reconciliation hands them back once this claim counts as given up.
                self._forget()
                self._state.in_doubt()
                raise
            claimed = cast("psycopg.Error", error)
        finally:
            self._state.claims.end(claim)
            self.asking = ((), 0)
            self._receiver.fetched()
        if isinstance(claimed, psycopg.Error):
            await self._narrow(kind, asked, n, claimed)
            return None
        self.fetches += 1
        if kind.most is not None:
            kind.most = None if 2 * n >= room.free else 2 * n
        fetch = Fetch(
            claimed.reading,
            asked.lanes,
            asked.mosts,
            claimed.scanned,
            claimed.taken,
            n,
            claimed.looked if beyond == NO_RANK else {},
        )
        repeat = self.watermark.fetched(fetch, monotonic(), self._session.took * self._state.live_workers)
        self._has_passed(asked, monotonic())
        if repeat:
            self.kinds.unknown()
        if claimed.more(n) or room.alone:
            kind.known.difference_update(room.queues)
        kind.known -= self._short_of_limit(asked, claimed.taken, n)
        self.kinds.claimed(
            kind, room.queues, asked.lanes, claimed.taken, claimed.other, monotonic(), self._session.took
        )
        if jobs := claimed.jobs:
            self._put_aside = 0
            places = {lane: place for place, lane in enumerate(asked.lanes)}
            jobs.sort(key=lambda job: (places[job.queue, job.rank, kind.keyed], job.pos, job.id))
            self._receiver.deliver(jobs)
        return bool(jobs)

    # Rows that the server refuses -------------------------------------------------------------------------------------

    async def _narrow(self, kind: Kind, asked: Asked, n: int, error: psycopg.Error) -> None:
        """The server has refused a claim of n jobs for a row: ask for fewer, or find that row."""
        self.kinds.unknown()
        kind.most = max(1, n // NARROWER)
        self.keyed_claim.long_rows = False
        if n > 1:
            log.warning("a claim of %d jobs was refused (%s): fewer are claimed at once", n, without_values(error))
            return
        if isinstance(error, psycopg.errors.QueryCanceled):  # the server is slow: no fault of the job
            raise error
        link, worker_id = self._session.link, self._state.id
        first = link.statement(kind.first, **self._lanes(asked.ranges()), worker_id=worker_id)
        [found] = await self._session.run(first)
        if found:
            queue, rank, pos, id, task = found[0]
            await self._claim_alone(kind, (queue, rank, kind.keyed), pos, f"job {id} ({task})", id)

    async def _claim_alone(self, kind: Kind, lane: Lane, pos: int, name: str, id: int) -> None:
        """Claim the job at this position, and no other. If it is refused, put it aside.

        The watermark learns nothing of this claim: it looks at no other position.
        """
        alone = Asked([lane], [0], [NO_END], [(lane, pos)])
        claim = await self._state.claims.begin()
        try:
            claimed = await self._claim(kind, alone, 1, claim)
        except psycopg.Error as error:
            if not refuses_row(error):
                self._state.in_doubt()
                raise
            refusal = error
        except BaseException:
            self._state.in_doubt()
            raise
        else:
            if claimed.jobs:
                self._receiver.deliver(claimed.jobs)
            return
        finally:
            self._state.claims.end(claim)
        await self._refuse(id, pos, name, refusal)

    async def _refuse(self, id: int, pos: int, name: str, error: psycopg.Error) -> None:
        """This job fails, reason `refused`. If its arguments or headers cannot be read at all, without them."""
        said = without_values(error)
        params = {
            "id": id,
            "pos": pos,
            "worker_id": self._state.id,
            "error_type": type(error).__name__,
            "message": f"the server refuses to start this job: {said}"[:MESSAGE_MOST],
            "notify": self._state.settings.notify,
        }
        link = self._session.link
        try:
            [rows] = await self._session.run(link.statement("fetch_put_aside", **params, bare=False))
        except psycopg.Error as again:
            if not refuses_row(again):
                raise
            [rows] = await self._session.run(link.statement("fetch_put_aside", **params, bare=True))
        if rows:
            log.error("%s cannot be started: it is failed, reason refused (%s)", name, said, extra={"job_id": id})
        self._put_aside += 1
        if self._put_aside >= REFUSED_MOST:
            raise error

    def _begin(self, asked: Asked, now: float) -> None:
        """Settle where the claim of these lanes begins."""
        for lane, to in self.passed_over.falls(now).items():
            self.watermark.fall(lane, to)
        asked.starts = self.watermark.starts(asked.lanes, now)
        asked.passed_over = self._due(asked.lanes)

    def _due(self, lanes: Sequence[Lane]) -> list[tuple[Lane, int]]:
        """The positions of these lanes that are to be asked for by themselves now."""
        if not self.passed_over.remembers:
            return []
        return self.passed_over.due(dict(zip(lanes, self.watermark.cursors(lanes), strict=True)), monotonic())

    def _has_passed(self, asked: Asked, now: float) -> None:
        """A claim was committed: the ranges that its cursors have passed are to be read once more."""
        self.passed_over.asked(asked.passed_over, now)
        for lane, start, cursor in zip(asked.lanes, asked.starts, self.watermark.cursors(asked.lanes), strict=True):
            if cursor > start:
                self.passed_over.passed(lane, start, cursor, now)

    def _forget(self) -> None:
        """Which rows a claim has taken is unknown: both kinds begin anew."""
        self.watermark.forget()
        self.passed_over.forget()
        self.kinds.unknown()

    def _begin_anew(self) -> None:
        """There is a new connection, perhaps to a server that has forgotten what this worker completed: begin anew."""
        self.watermark.forget()
        self.passed_over.forget()
        if self._generation:
            self._state.in_doubt()
        self._generation = self._session.generation

    async def _resolve_doubles(self) -> None:
        """Available jobs have the ids of others that run or are blocked."""
        link, notify = self._session.link, self._state.settings.notify
        await resolve(self._session, link.statement("fetch_resolve_doubles", notify=notify))

    def _asked(self, room: Room, kind: Kind, turn: int = 0) -> Asked:
        """The lanes to ask, most urgent first. Queues take turns within a rank; a poison job comes alone."""
        turn %= len(room.queues)
        queues = [*room.queues[turn:], *room.queues[:turn]]
        poison = self._capacity.poison_ranks()
        ranks = poison if room.alone else (*poison, *RANKS)
        return Asked(
            [(queue, rank, kind.keyed) for rank in ranks for queue in queues],
            [1 if rank in poison else room.free for rank in ranks for _ in queues],
        )

    async def _send(self, *statements: Statement[Any], on: int | None = None) -> list[Any]:
        """Send these in one transaction, with a reading of passed ranges if one is due, and with the statements of
        `beside`."""
        ranges = self.passed_over.to_read(monotonic())
        beside = [_passed_over(self._session.link, ranges, self._tasks)] if ranges else []
        answers = await self._session.run(*statements, *beside, *self._beside(), on=on)
        if ranges:
            seconds = self._session.took * self._state.live_workers
            self.passed_over.read(ranges, answers[len(statements)], monotonic(), seconds)
        return answers[: len(statements)]

    async def _claim(self, kind: Kind, asked: Asked, n: int, claim: int, *, beyond: int = NO_RANK) -> Claimed:
        other = self.kinds.other(kind).lanes(asked.lanes)
        reading = self._session.link.statement(
            kind.reading,
            queues=texts(queue for queue, _, _ in asked.lanes),
            ranks=integers(rank for _, rank, _ in asked.lanes),
            others=integers(self.watermark.cursors(other)),
            beyond=beyond,
            tasks=self._tasks,
        )
        places = asked.ranges()
        lanes = self._lanes(places)
        how = {"worker_id": self._state.id, "claim": claim, "n": n}
        send = self._claim_plain if kind is self.kinds.plain else self._claim_keyed
        [(head, xid, snapshot, rank, place, pos, paused, *_)], summary, jobs = await send(reading, asked, lanes, how)
        blocked = () if summary.blocked is None else summary.blocked.lanes
        looked = {lane: head for lane in other[: len(other) if place is None else place - 1] if lane[0] not in paused}
        if place is not None:
            looked[other[place - 1]] = min(pos - 1, head)
        return Claimed(
            reading=Reading(head, xid, snapshot),
            scanned={places[place - 1][0] for place in summary.lanes},
            taken=_taken(kind, jobs, blocked),
            jobs=jobs,
            blocked=sum(count for _, _, count, _ in blocked),
            other=rank,
            looked=looked,
        )

    def _lanes(self, places: Sequence[tuple[Lane, int, int, int]]) -> dict[str, str]:
        """These ranges (see `Asked.ranges`) as statements want them."""
        return {
            "queues": texts(queue for (queue, _, _), *_ in places),
            "ranks": integers(rank for (_, rank, _), *_ in places),
            "afters": integers(after for _, after, _, _ in places),
            "uptos": integers(upto for _, _, upto, _ in places),
            "mosts": integers(most for *_, most in places),
            "tasks": self._tasks,
        }

    async def _claim_plain(
        self, reading: Statement[Any], asked: Asked, lanes: dict[str, str], how: dict[str, Any]
    ) -> Answer:
        claim = self._session.link.statement("fetch_claim", **lanes, **how)
        read, [first, *rows] = await self._send(reading, claim)
        return read, msgspec.json.decode(first[-1], type=ClaimSummary), [Job(row, how["claim"]) for row in rows]

    async def _claim_keyed(
        self, reading: Statement[Any], asked: Asked, lanes: dict[str, str], how: dict[str, Any]
    ) -> Answer:
        link, on = self._session.link, self._session.lasting
        self._holder_cursors.on(on)
        alone = self.kinds.plain.known.issuperset(queue for queue, _, _ in asked.lanes)
        # After a refusal none goes ahead: what is blocked there would not be counted in the n of the claim.
        narrow = self.kinds.keyed.most is not None
        ahead = (
            []
            if narrow
            else self.keyed_claim.statements(
                link, lanes, how["n"], self._state.id, self._state.live_workers, alone=alone
            )
        )
        positions = self._keys.waiter_cursors.known(LOCK)
        cursors = {"starts": self._holder_cursors.often(), "lines": _positions(positions)}
        claim = link.statement("keyed_claim_move", **lanes, **how, **cursors)
        read, *answers, [first, *rows] = await self._send(reading, *ahead, claim, on=on)
        summary = msgspec.json.decode(first[-1], type=ClaimSummary)
        if jobs := [Job(row, how["claim"]) for row in rows]:
            self._keys.granted(jobs)
            self._given(summary, jobs, positions)
        blocked = Blocked([], {}) if summary.blocked is None else summary.blocked
        keys, singly, lowest = self.keyed_claim.handle_answer(answers, blocked, len(jobs))
        if keys:
            self._keys.blocked(keys, singly, lowest)
        return read, summary, jobs

    def _given(self, summary: ClaimSummary, jobs: Sequence[Job], positions: Mapping[str, Position]) -> None:
        """Remember where the holders of the locks that this claim has given begin."""
        if summary.lowest_hold is not None:
            held = set(summary.held)
            keys = [key for job in jobs if (key := job.lock_key) is not None and key not in held]
            self._holder_cursors.granted(keys, summary.lowest_hold)
            self._keys.waiter_cursors.empty(
                (line for key in keys if (line := LOCK + key) not in positions), self._session.sent
            )

    @staticmethod
    def _short_of_limit(asked: Asked, taken: Mapping[Lane, tuple[int, int]], n: int) -> set[str]:
        """The queues with a lane that gave all it was allowed to: the lane may have more."""
        return {
            lane[0]
            for lane, most in zip(asked.lanes, asked.mosts, strict=True)
            if most < n and taken.get(lane, (0, 0))[0] >= most
        }


def _positions(cursors: Mapping[str, Position]) -> str:
    """The cursors of waiters, as a claim wants them: a JSON object by lock."""
    return msgspec.json.encode({key.removeprefix(LOCK): place for key, place in cursors.items()}).decode()


def _passed_over(link: Link, ranges: Sequence[Passed], tasks: str) -> Statement[list[tuple[int, int]]]:
    """Which rows of these tasks lie in these ranges."""
    return link.statement(
        "passed_over",
        queues=texts(one.lane[0] for one in ranges),
        ranks=integers(one.lane[1] for one in ranges),
        keyed=integers(int(one.lane[2]) for one in ranges),
        lows=integers(one.low for one in ranges),
        highs=integers(one.high for one in ranges),
        most=POSITIONS_MOST + 1,
        tasks=tasks,
    )


def _taken(
    kind: Kind, jobs: Collection[Job], blocked: Sequence[tuple[str, int, int, int]] = ()
) -> dict[Lane, tuple[int, int]]:
    """How many rows each lane gave, blocked ones too, and the highest position of them."""
    taken: dict[Lane, tuple[int, int]] = {
        (queue, rank, kind.keyed): (count, pos) for queue, rank, count, pos in blocked
    }
    for job in jobs:
        lane = (job.queue, job.rank, kind.keyed)
        count, highest = taken.get(lane, (0, 0))
        taken[lane] = (count + 1, job.pos if job.pos > highest else highest)
    return taken
