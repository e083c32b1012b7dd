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

If the worker is idle and is told of a job of one lane, a `glance` claims from that lane alone; no fetch precedes it.

A poll asks whether anything has happened. How often, and why no job waits for it longer than it must, is in `poll`.

If the server refuses a claim for a value of one row, `refused_rows` says what to do. It does, too, if an open
transaction has inserted the id of a job. The first claim that meets that waits two seconds, the next ones 20 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Protocol, TypeVar

import msgspec
import psycopg

from pgqueue.database.backoff import persist, wait
from pgqueue.database.row_errors import meets_open_id, refuses_move
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Row, Statement, integers, texts
from pgqueue.jobs.job import Job, Lane
from pgqueue.jobs.keys import LOCK
from pgqueue.jobs.totals import Times
from pgqueue.steady_clock import monotonic
from pgqueue.worker.concurrency.holder_cursors import HolderCursors
from pgqueue.worker.concurrency.waiter_cursors import Position, WaiterCursors
from pgqueue.worker.doubles import is_double, resolve
from pgqueue.worker.fetch.claim import NO_END, Answer, Asked, Claimed, ClaimSummary, taken_of
from pgqueue.worker.fetch.glance import Glances
from pgqueue.worker.fetch.keyed_claim import KeyedClaim
from pgqueue.worker.fetch.kinds import NO_RANK, Kind, Kinds
from pgqueue.worker.fetch.passed_over import POSITIONS_MOST, Passed, PassedOver, PassedRead
from pgqueue.worker.fetch.paused_tasks import PausedTasks
from pgqueue.worker.fetch.poll import Polls, spaced
from pgqueue.worker.fetch.refused_rows import RefusedRow, RefusedRows
from pgqueue.worker.fetch.watermark import SWEEP_EVERY, Fetch, Reading, Watermark
from pgqueue.worker.run.slots import Room
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

T = TypeVar("T")

RANKS = tuple(range(20))
# A fetch wanted now is due at once where there is room; without room the loop must not spin.
SOON = 0.01
# How often to see whether there is room. A slot that is kept for an unblocking is free after a time, without a wake.
FULL_SECONDS = 1.0
# For so long after a claim has met an id that an open transaction has inserted, claims wait 20 ms for such a one: not
# two seconds, in which no other job starts.
IMPATIENT_SECONDS = 60.0
# The watermark learns the positions of the jobs of a claim if these are so few. A worker with more to do needs none.
FEW_TAKEN = 50


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
    """Keeps the executor supplied with jobs of `tasks`. `wake`, `told` and `slots_freed` wake it.

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
        idle = state.settings.idle
        self.watermark = Watermark(idle) if idle > SWEEP_EVERY else Watermark()
        self.passed_over = PassedOver()
        self.paused_tasks = PausedTasks()
        self.kinds = Kinds()
        self.keyed_claim = KeyedClaim()
        self.refused_rows = RefusedRows(session, state)
        self.glances = Glances()
        self.polls = Polls()
        self.fetches = 0
        self.claim_times = Times()
        """How long each round trip of a claim took."""
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
        self._impatient_until = 0.0

    def wake(self, zero: bool = False) -> None:
        """Jobs may have become available; `zero`: even behind the watermark (a rescue freed rows)."""
        if zero:
            self.watermark.start_at_zero()
        self.polls.told()
        self.kinds.unknown()
        self._wake.set()

    def told(self, queue: str, rank: int) -> None:
        """A plain job has become available in this lane; nothing is said of other lanes."""
        self.polls.told()
        rest = self.glances.told((queue, rank, False), monotonic())
        if rest:
            self._rest(rest)
        elif rest is not None:
            self._wake.set()

    def _rest(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._rested)

    def _rested(self) -> None:
        self.glances.rested()
        self._wake.set()

    def probed(self, head: int, snapshot: str, sent: float) -> None:
        """A heartbeat that was sent then has asked whether anything has happened: this is a poll, if polls are slow."""
        roomy = [room for room in self._capacity.to_fetch() if room.free]
        if not self._is_slow(roomy) or any(self.hungry(room.queues) for room in roomy):
            return
        reading, lanes = Reading(head, None, snapshot), self._lanes_of(roomy)
        if self._take(reading, frozenset(), lanes, sent, known=self._session.generation == self._generation):
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
            await self._send(self._glance_statement((room.queues[0], RANKS[0], False), 0, 0))

    async def run(self) -> None:
        """Fetch until `quiet`; if the database is away, wait for it."""
        answers = self._session.answers
        await persist(self._step, name="fetch", answers=answers, until=lambda: self._quiet, past_data=True)

    async def _step(self) -> None:
        roomy = [room for room in self._capacity.to_fetch() if room.free]
        glance = self._glance_at(roomy)
        hungry = [room for room in roomy if self.hungry(room.queues)]
        if glance is not None:
            self._wake.clear()
            await self._glance(*glance)
        elif hungry:
            self._wake.clear()
            # One group at a time: together, each lane of a group could fill that whole group.
            room = hungry[next(self._group_turns) % len(hungry)]
            await (
                self._fetch_alone(room) if room.alone else self._fetch(room, self.kinds.next(room.queues, monotonic()))
            )
        elif await wait(self._wake, self._patience(roomy) if roomy else FULL_SECONDS):
            self._wake.clear()
        elif roomy and self._wanted(roomy) <= 0:
            self.kinds.unknown()
        elif roomy and not self._is_early(roomy):
            await self._look(roomy)

    def _glance_at(self, roomy: Sequence[Room]) -> tuple[Room, Lane] | None:
        """The room and the lane that the worker was told of, if nothing else may wait; else have everything fetched."""
        told = self.glances.due(monotonic())
        if not told:
            return None
        idle = self.watermark.settled and not any(self.hungry(room.queues) for room in roomy)
        whole = self.kinds.plain.most is None and not self.refused_rows.left_out()
        if len(told) == 1 and idle and whole and self._session.generation == self._generation:
            [lane] = told
            for room in roomy:
                if lane[0] in room.queues and not room.alone:
                    return room, lane
        self.kinds.unknown()
        return None

    async def _glance(self, room: Room, lane: Lane) -> None:
        """Claim what this lane has behind its cursor, and deliver it. What else there is to do comes after that."""
        try:
            await self._session.ready()
            claim = await self._state.claims.begin()
        except BaseException:
            self.kinds.unknown()  # what the worker was told is not asked
            raise
        if self._session.generation != self._generation:  # the cursors belong to another connection
            self._state.claims.end(claim)
            self.kinds.unknown()
            return
        self.asking = (room.queues, room.free)
        try:
            answer = await self._taken(self._send(self._glance_statement(lane, claim, room.free), on=self._generation))
        finally:
            self._state.claims.end(claim)
            self.asking = ((), 0)
            self._receiver.fetched()
        if isinstance(answer, psycopg.Error):
            self._refused(answer)
            return
        [[first, *rows]], passed = answer
        took, jobs = self._session.took, [Job(row, claim) for row in rows]
        self.claim_times.add(took)
        if jobs:
            jobs.sort(key=lambda job: job.pos)
            self._receiver.deliver(jobs)
            await asyncio.sleep(0)  # the handlers begin; what is still to do can wait for that
        if passed is not None:
            self.passed_over.read(passed, monotonic())
        self.watermark.took(_positions_of(jobs))
        due = self.glances.ended(len(jobs), monotonic(), took * self._state.live_workers)
        if rest := self.glances.rest(monotonic()):  # told meanwhile, when it was no rest yet
            self._rest(rest)
        if due or len(jobs) == room.free or self._wanted([room]) <= 0 or self.watermark.missed(first[-1]):
            self.kinds.unknown()

    def _glance_statement(self, lane: Lane, claim: int, n: int) -> Statement[Any]:
        [after], (queue, rank, _) = self.watermark.cursors([lane]), lane
        how = {"tasks": self._tasks, "worker_id": self._state.id, "claim": claim, "n": n}
        return self._session.link.statement("fetch_glance", queue=queue, rank=rank, after=after, **how)

    async def _fetch_alone(self, room: Room) -> None:
        """Ask both kinds for a poison job that must run alone. If neither kind has one, that is delivered, too."""
        for kind in (self.kinds.plain, self.kinds.keyed):
            if await self._fetch(room, kind) is not False:
                return
        self._receiver.deliver([])

    def _patience(self, roomy: Sequence[Room]) -> float:
        """Seconds until the next look without a wake."""
        if self.polls.ended(monotonic()):
            self._state.pace.untold()
        reading = max(self.passed_over.next_reading() - monotonic(), SOON)
        return min(spaced(max(self._wanted(roomy), SOON), self._state.settings.poll), reading)

    def _is_slow(self, roomy: Sequence[Room]) -> bool:
        """Whether polls are slow."""
        passed = not self.paused_tasks.passed.isdisjoint(self._state.tasks)
        known = self._state.pace.told and not (passed or self.glances.in_a_row) and bool(roomy)
        return known and self.watermark.exhausted(self._lanes_of(roomy))

    def _is_early(self, roomy: Sequence[Room]) -> bool:
        """Whether it is too early for a slow poll, and no reading is due."""
        return monotonic() < min(self.polls.slow_at, self.passed_over.next_reading()) and self._is_slow(roomy)

    def _wanted(self, roomy: Sequence[Room]) -> float:
        """Seconds until a fetch is wanted: a start at zero, a cursor that fell, a row that was passed over."""
        queues = {queue for room in roomy if not room.alone for queue in room.queues}
        look, now = self.watermark.next_look(monotonic()), monotonic()
        return min(inf if look is None else look, self.passed_over.next_look(queues)) - now

    async def _look(self, roomy: Sequence[Room]) -> None:
        """A poll: have both kinds fetched, unless one cheap read-only statement proves that there is no job."""
        link = self._session.link
        [[(head, snapshot, paused, paused_tasks)]], read = await self._send(link.statement("fetch_probe"))
        self.glances.fetched(monotonic() + self._state.settings.poll)
        if read is not None:
            self.passed_over.read(read, monotonic())
        lanes = self._lanes_of(roomy)
        known = self._session.generation == self._generation and not self.paused_tasks.reopened(paused_tasks)
        self._take(Reading(head, None, snapshot), frozenset(paused), lanes, self._session.sent, known=known)

    def _take(
        self, reading: Reading, paused: frozenset[str], lanes: Sequence[Lane], sent: float, *, known: bool
    ) -> bool:
        """Take the answer of a poll; return whether to fetch both kinds. `known`: nothing but jobs can be new."""
        if known and self.watermark.idle(reading, paused, lanes, monotonic()):
            self.polls.proved(sent, self._state.pace.poll)
            return False
        self.polls.leads(alone=known and not self.asking[1])  # a claim under way may be of what this answer has seen
        self.kinds.unknown()
        return True

    def _lanes_of(self, rooms: Sequence[Room]) -> list[Lane]:
        """The lanes of both kinds of these groups of slots."""
        kinds = (self.kinds.plain, self.kinds.keyed)
        return [lane for room in rooms for kind in kinds for lane in self._asked(room, kind).lanes]

    async def _fetch(self, room: Room, kind: Kind) -> bool | None:
        """Ask these queues for jobs of this kind, and deliver them. Whether there were any; None if that is not
        known."""
        asked = self._asked(room, kind, next(self._queue_turns[room.queues[0]]))
        n = room.free if kind is self.kinds.plain else self.keyed_claim.room(room.free, self._state.live_workers)
        if kind.most is not None:
            n = min(n, kind.most)
        other, beyond = self.kinds.other(kind), self.kinds.beyond(kind, room.queues)
        await self._session.ready()
        claim = await self._state.claims.begin()
        kind.known.update(room.queues)  # not before: if there is no connection, nothing is known
        if beyond == NO_RANK and not room.alone and not self._due(other.lanes(asked.lanes)):
            other.known.update(room.queues)  # unless the reading sees one, or a wake comes meanwhile
        if self._session.generation != self._generation:  # looked at last: another service may have connected anew
            self._begin_anew()
        self._begin(asked, monotonic())
        self.asking = (room.queues, n)
        try:
            claimed = await self._taken(self._claim(kind, asked, n, claim, beyond=beyond))
        finally:
            self._state.claims.end(claim)
            self.asking = ((), 0)
            self._receiver.fetched()
        if isinstance(claimed, psycopg.Error):
            self._refused(claimed)
            if is_double(claimed) and await resolve(self._session, claimed, notify=self._state.settings.notify):
                return None
            self.keyed_claim.long_rows = False
            if self.refused_rows.narrow(kind, n, claimed):
                await self._find_refused(kind, asked)
            return None
        self._learn(room, kind, asked, n, claimed, beyond)
        return bool(claimed.jobs)

    async def _taken(self, claim: Awaitable[T]) -> T | psycopg.Error:
        """What this claim answers, or the error if the server refuses it for a row: then nothing was taken."""
        try:
            return await claim
        except psycopg.errors.UniqueViolation as error:
            self._forget()
            return error
        except BaseException as error:
            if isinstance(error, psycopg.Error) and (
                isinstance(error, psycopg.errors.QueryCanceled) or refuses_move(error)
            ):
                return error
            # Whether rows were taken is unknown. Reconciliation hands them back once this claim has ended.
            self._forget()
            self._state.in_doubt()
            raise

    def _refused(self, error: psycopg.Error) -> None:
        """A claim was refused: have everything fetched."""
        if meets_open_id(error):
            self._impatient_until = monotonic() + IMPATIENT_SECONDS
        self.kinds.unknown()

    def _learn(self, room: Room, kind: Kind, asked: Asked, n: int, claimed: Claimed, beyond: int) -> None:
        """Take the answer to this claim of n jobs. What this worker remembers of jobs changes here, and in this order.

        1. The ranges that were read beside the claim are forgotten. What the claim has passed (3) is not among them.
        2. The keys of its jobs are held, and what it has blocked waits. No job runs before that (6).
        3. The next claim of this kind may ask for more, if the server had refused one. The cursors rise, or fall.
           `passed_over` notes what they have passed: it compares them with where they began.
        4. If a task was passed over while it was paused, and is open again, all cursors start at zero, whatever 3 did.
        5. `known` loses the queues that may have more jobs. It only shrinks here, so this order does not matter. Before
           the claim was sent they were in it: a wake that came meanwhile has taken them out, and they stay out.
        6. The jobs run.

        No step waits. So no other task of the worker sees the answer in part.
        """
        self.fetches += 1
        self.glances.fetched(monotonic() + self._state.settings.poll)
        self.polls.proved(self._session.sent, self._state.pace.poll)
        self.polls.fetched(self._session.sent, any=bool(claimed.taken))
        self.claim_times.add(self._session.took)
        self._learn_rest(kind, claimed.answer)

        self.refused_rows.claimed(kind, n, room.free, any=bool(claimed.jobs))
        now, fleet_seconds = monotonic(), self._session.took * self._state.live_workers
        looked = claimed.looked if beyond == NO_RANK else {}
        positions = _positions_of(claimed.jobs)
        fetch = Fetch(claimed.reading, asked.lanes, asked.mosts, claimed.scanned, claimed.taken, n, looked, positions)
        repeat = self.watermark.fetched(fetch, now, fleet_seconds)
        self._has_passed(asked, now)

        if self.paused_tasks.answered(*claimed.paused):
            self.watermark.start_at_zero()
            repeat = True

        if repeat:
            self.kinds.unknown()
        if claimed.more(n) or room.alone:
            kind.known.difference_update(room.queues)
        kind.known -= self._short_of_limit(asked, claimed.taken, n)
        self.kinds.claimed(
            kind, room.queues, asked.lanes, claimed.taken, claimed.other, monotonic(), self._session.took
        )
        self._deliver(kind, asked, claimed.jobs)

    def _learn_rest(self, kind: Kind, answer: Answer) -> None:
        """Learn what an answer says beside where to look next: the rows that were passed over, and the keys of jobs."""
        if answer.passed is not None:
            self.passed_over.read(answer.passed, monotonic())
        if kind.keyed:
            if answer.jobs:
                self._keys.granted(answer.jobs)
                self._given(answer)
            keys, singly, lowest = self.keyed_claim.handle_answer(answer.ahead, answer.blocked, len(answer.jobs))
            if keys:
                self._keys.blocked(keys, singly, lowest)

    def _deliver(self, kind: Kind, asked: Asked, jobs: list[Job]) -> None:
        """Hand these jobs on, most urgent lane first."""
        if jobs:
            places = {lane: place for place, lane in enumerate(asked.lanes)}
            jobs.sort(key=lambda job: (places[job.queue, job.rank, kind.keyed], job.pos, job.id))
            self._receiver.deliver(jobs)

    async def _find_refused(self, kind: Kind, asked: Asked) -> None:
        """A claim of one job was refused. Claim that job by its position alone; refused again, it is put aside."""
        link, worker_id = self._session.link, self._state.id
        first = link.statement(kind.first, **self._lanes(asked.ranges()), worker_id=worker_id)
        [found] = await self._session.run(first)
        if found:
            row = RefusedRow.read(found[0], kind.keyed)
            if refusal := await self._claim_alone(kind, row):
                await self.refused_rows.put_aside(row, refusal)

    async def _claim_alone(self, kind: Kind, row: RefusedRow) -> psycopg.Error | None:
        """Claim the job at this position, and no other. Answers the error if the server refuses it.

        The watermark learns nothing of this claim: it looks at no other position.
        """
        alone = Asked([row.lane], [0], [NO_END], [(row.lane, row.pos)])
        claim = await self._state.claims.begin()
        try:
            claimed = await self._claim(kind, alone, 1, claim)
        except psycopg.Error as error:
            if not (refuses_move(error) or is_double(error)):
                self._state.in_doubt()
                raise
            return error
        except BaseException:
            self._state.in_doubt()
            raise
        finally:
            self._state.claims.end(claim)
        self._learn_rest(kind, claimed.answer)
        if claimed.jobs:
            self._receiver.deliver(claimed.jobs)
        return None

    def _begin(self, asked: Asked, now: float) -> None:
        """Settle where the claim of these lanes begins."""
        for lane, to in self.passed_over.falls(now).items():
            self.watermark.fall(lane, to)
        asked.starts = self.watermark.starts(asked.lanes, now)
        asked.passed_over = self._due(asked.lanes)
        asked.left_out = self.refused_rows.left_out()

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

    async def _send(self, *statements: Statement[Any], on: int | None = None) -> tuple[list[Any], PassedRead | None]:
        """Send these in one transaction, with a reading of passed ranges if one is due, and with the statements of
        `beside`. Answers what these and the reading have answered."""
        ranges = self.passed_over.to_read(monotonic())
        beside = [_passed_over(self._session.link, ranges, self._passable())] if ranges else []
        ahead = int(monotonic() < self._impatient_until)
        sent = (self._lock_timeout("20ms"), *statements, self._lock_timeout("2s")) if ahead else statements
        answers = await self._session.run(*sent, *beside, *self._beside(), on=on)
        seconds = self._session.took * self._state.live_workers
        read = PassedRead(ranges, answers[len(sent)], seconds) if ranges else None
        return answers[ahead : ahead + len(statements)], read

    def _lock_timeout(self, timeout: str) -> Statement[Any]:
        return self._session.link.statement("fetch_lock_timeout", timeout=timeout)

    def _passable(self) -> str:
        """The tasks of jobs that a claim may have passed over while they were locked."""
        passed = self.paused_tasks.passed
        return texts(task for task in self._state.tasks if task not in passed) if passed else self._tasks

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
        answer = await send(reading, asked, lanes, how)
        self._state.claims.end(claim)
        head, xid, snapshot, rank, place, pos, paused, paused_tasks, *_ = answer.reading
        looked = {lane: head for lane in other[: len(other) if place is None else place - 1] if lane[0] not in paused}
        if place is not None:
            looked[other[place - 1]] = min(pos - 1, head)
        return Claimed(
            answer=answer,
            reading=Reading(head, xid, snapshot),
            scanned={places[place - 1][0] for place in answer.summary.lanes},
            taken=taken_of(kind, answer.jobs, answer.blocked.lanes),
            other=rank,
            looked=looked,
            paused=(paused_tasks, answer.summary.paused),
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
        ([read], [first, *rows]), passed = await self._send(reading, claim)
        return Answer(read, _summary(first), _jobs(rows, how), passed)

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
        waiters = self._keys.waiter_cursors.known(LOCK)
        cursors = {"starts": self._holder_cursors.often(), "lines": _positions(waiters)}
        claim = link.statement("keyed_claim_move", **lanes, **how, **cursors)
        ([read], *answers, [first, *rows]), passed = await self._send(reading, *ahead, claim, on=on)
        return Answer(read, _summary(first), _jobs(rows, how), passed, answers, waiters)

    def _given(self, answer: Answer) -> None:
        """Remember where the holders of the locks that this claim has given begin."""
        summary = answer.summary
        if summary.lowest_hold is not None:
            held = set(summary.held)
            keys = [key for job in answer.jobs if (key := job.lock_key) is not None and key not in held]
            self._holder_cursors.granted(keys, summary.lowest_hold)
            self._keys.waiter_cursors.empty(
                (line for key in keys if (line := LOCK + key) not in answer.waiters), self._session.sent
            )

    @staticmethod
    def _short_of_limit(asked: Asked, taken: Mapping[Lane, tuple[int, int]], n: int) -> set[str]:
        """The queues with a lane that gave all it was allowed to: the lane may have more."""
        return {
            lane[0]
            for lane, most in zip(asked.lanes, asked.mosts, strict=True)
            if most < n and taken.get(lane, (0, 0))[0] >= most
        }


def _summary(first: Row) -> ClaimSummary:
    """From the first row of a claim's answer."""
    return msgspec.json.decode(first[-1], type=ClaimSummary)


def _jobs(rows: Sequence[Row], how: Mapping[str, Any]) -> list[Job]:
    """From the other rows, which are jobs that this claim has taken."""
    return [Job(row, how["claim"]) for row in rows]


def _positions_of(jobs: Sequence[Job]) -> Sequence[int]:
    """Where these jobs were, if they are few."""
    return [job.pos for job in jobs] if len(jobs) <= FEW_TAKEN else ()


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
