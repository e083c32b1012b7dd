"""A model of PostgreSQL as far as the watermark can see it, and schedules that interleave everything in it.

Used by worker/fetch/test_watermark.py. One seed is one schedule: enqueuers, claimers, cancels, pauses and deaths are
generators, and a random choice says which takes the next step. Nothing here is a thread, a clock or a database: a
failing seed fails again.

What the model keeps, because each of it has stranded rows: ids are drawn when first needed, positions only after them;
a savepoint takes an id that stands in no list; xmax is the latest *ended* id + 1, so ids above it are open and
unlisted; a row is visible from its commit on, in whatever order commits come; SKIP LOCKED passes what others hold, and
what they hold comes back when they roll back; a statement sees one snapshot, two statements see two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from pgqueue.jobs.job import Lane
from pgqueue.worker.fetch.passed_over import POSITIONS_MOST, PassedOver, PassedRead
from pgqueue.worker.fetch.watermark import Fetch, Reading, Watermark

Steps = Generator[None, None, None]
POLL = 1.0


@dataclass(frozen=True, slots=True)
class World:
    """What may happen in a schedule; the last group holds the mistakes a naive watermark makes."""

    sweep_every: float = math.inf
    deaths: bool = False  # claimers that die in mid-claim and never return
    cancels: bool = False  # rows locked by somebody who rolls back
    rewinds: bool = False  # failover to a standby that has not seen everything
    drawn_again: bool = False  # and then positions are drawn that were drawn before
    kinds: bool = False  # a fetch asks the lanes of one kind of jobs
    glances: bool = False  # workers are told of the lane of a job, and claim from it alone; polls are rare beside that
    told: bool = True  # workers hear of a failover (a new connection), or not (a pooler hides it)

    order: str = "snapshot head xid claim"
    reads: Callable[[Reading], Reading] = lambda reading: reading
    paused_is_exhausted: bool = False
    failed_is_processed: bool = False
    probe_stores_head: bool = False
    passed_forgotten: bool = False
    read_once: bool = False
    unasked_stay_exhausted: bool = False
    paused_is_empty: bool = False
    glance_moves_cursor: bool = False
    rows_counted: bool = False
    account_outlives_forget: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    stranded: tuple[int, ...]
    """Positions of committed rows that nobody had claimed when every worker saw nothing left to do."""
    longest: float
    """Seconds the last row to be found had been free to take, once nobody else did anything."""
    rows: int
    fetches: int
    glances: int
    skipped: int
    lowered: int


@dataclass(slots=True)
class Row:
    pos: int
    lane: Lane
    xid: int
    undone: bool = False  # by ROLLBACK TO SAVEPOINT
    locked_by: int = 0
    gone: bool = False


@dataclass(slots=True)
class Postgres:
    next_xid: int = 100
    latest_ended: int = 99
    running: set[int] = field(default_factory=set)
    committed: dict[int, int] = field(default_factory=dict)  # id -> the moment of its commit
    moment: int = 0
    head: int = 0
    rows: list[Row] = field(default_factory=list)
    paused: set[str] = field(default_factory=set)

    def begin(self) -> int:
        """Draw an id; transactions that write nothing never come here."""
        xid = self.savepoint()
        self.running.add(xid)
        return xid

    def savepoint(self) -> int:
        """A subtransaction's id comes from the same counter; a snapshot lists only those of whole transactions."""
        self.next_xid += 1
        return self.next_xid - 1

    def insert(self, xid: int, lane: Lane) -> Row:
        self.head += 1
        self.rows.append(Row(self.head, lane, xid))
        return self.rows[-1]

    def snapshot(self, own: int = 0) -> str:
        xmax = self.latest_ended + 1
        listed = sorted(xid for xid in self.running if xid < xmax and xid != own)
        return f"{min(self.running, default=xmax)}:{xmax}:{','.join(map(str, listed))}"

    def lock(self, row: Row, xid: int, moment: int) -> bool:
        """FOR UPDATE SKIP LOCKED of one row, by a statement whose snapshot was taken at `moment`."""
        visible = self.committed.get(row.xid, math.inf) <= moment
        if not visible or row.undone or row.gone or row.locked_by:
            return False
        row.locked_by = xid
        return True

    def commit(self, xid: int, youngest: int = 0) -> None:
        """End with everything kept; rows locked are rows deleted. `youngest`: of its savepoints' ids."""
        self.moment += 1
        self.committed[xid] = self.moment
        for row in self.rows:
            row.gone |= row.locked_by == xid
        self._end(xid, youngest)

    def rollback(self, xid: int, youngest: int = 0) -> None:
        self._end(xid, youngest)

    def undo_savepoint(self, subxid: int, rows: Iterable[Row]) -> None:
        for row in rows:
            row.undone = True
        self.latest_ended = max(self.latest_ended, subxid)

    def _end(self, xid: int, youngest: int) -> None:
        for row in self.rows:
            if row.locked_by == xid:
                row.locked_by = 0
        self.running.discard(xid)
        self.latest_ended = max(self.latest_ended, xid, youngest)

    def waiting(self) -> list[Row]:
        return [row for row in self.rows if row.xid in self.committed and not row.undone and not row.gone]

    def copy(self, ahead: int) -> Postgres:
        """What a standby holds: everything committed so far, nothing open, no lock.

        `ahead`: the log of a sequence runs so far ahead of it at most, so that its head need not go back.
        """
        return replace(
            self,
            running=set(),
            latest_ended=self.next_xid - 1,
            head=self.head + ahead - self.head % ahead,
            committed=dict(self.committed),
            rows=[replace(row, locked_by=0) for row in self.rows],
            paused=set(self.paused),
        )


class RowsCounted(Watermark):
    """Counts the rows that were taken, wherever they were."""

    __slots__ = ()

    def _all_taken(self, floor: int) -> bool:
        return self._head - floor <= len(self._taken)


class Unforgetting(Watermark):
    """Keeps its account where everything is to be forgotten."""

    __slots__ = ()

    def forget(self) -> None:
        taken: set[int] = getattr(self, "_taken", set())
        super().forget()
        self._taken = taken


@dataclass(slots=True)
class Worker:
    mark: Watermark
    mortal: bool
    over: PassedOver = field(default_factory=PassedOver)
    woken: bool = False
    told: set[Lane] = field(default_factory=set)
    dead: bool = False
    fetches: int = 0
    glances: int = 0
    skipped: int = 0
    lowered: int = 0


class Schedule:
    """One seed played to its end. `run` is the whole of it."""

    def __init__(self, seed: int, world: World) -> None:
        self.world, self.dice, self.now = world, Random(seed), 0.0
        self.db = Postgres(head=self.dice.choice((0, 0, 7)))
        queues = ["a", "b"][: self.dice.choice((1, 2, 2))]
        self.lanes: list[Lane] = [
            (queue, rank, keyed)
            for keyed in ((False, True) if world.kinds else (False,))
            for rank in (-2, 11)[-self.dice.choice((1, 2)) :]
            for queue in queues
        ]
        # Both heal mistakes (all begins at zero again, all falls back far), so that a world full of them proves little.
        self.trouble = self.dice.choice((0.0, 0.0, 0.1))  # claims that fail
        self.patience = self.dice.choice((0.0, 0.2))  # transactions that stay open
        self.server = 0  # raised by a failover: steps of a transaction of the old server come to nothing
        workers = range(self.dice.choice((1, 2, 3)))
        kept = Unforgetting if world.account_outlives_forget else Watermark
        kind = RowsCounted if world.rows_counted else kept
        self.workers = [Worker(kind(world.sweep_every), mortal=world.deaths and i > 0) for i in workers]
        self.others: list[tuple[float, Steps]] = []

    def run(self) -> Outcome:
        self._mingle()
        self.db.paused.clear()
        freed_at, found_at = self.now, self._settle()
        return Outcome(
            stranded=tuple(row.pos for row in self.db.waiting()),
            longest=found_at - freed_at,
            rows=len(self.db.rows),
            fetches=sum(worker.fetches for worker in self.workers),
            glances=sum(worker.glances for worker in self.workers),
            skipped=sum(worker.skipped for worker in self.workers),
            lowered=sum(worker.lowered for worker in self.workers),
        )

    # The two parts: everybody at once; then the workers alone, until none of them has anything left to do

    def _mingle(self) -> None:
        for _ in range(self.dice.randint(2, 8)):
            self._join(self._enqueue())
        self._join(self._pause())
        if self.world.cancels:
            self._join(self._cancel())
            self._join(self._cancel())
        if self.world.rewinds:
            self._join(self._fail_over())
        turns = [(self._speed(), self._work(worker)) for worker in self.workers]
        while self.others:
            self.now += self.dice.choice((0.0, 0.001, 0.02))
            pool = self.others + turns
            entry = self.dice.choices(pool, [speed for speed, _ in pool])[0]
            try:
                next(entry[1])
            except StopIteration:
                (turns if entry in turns else self.others).remove(entry)
        for worker in self.workers:
            worker.woken, worker.told = False, set()
        for _, steps in turns + self.others:  # let what is in flight arrive
            for _ in steps:
                pass

    def _settle(self) -> float:
        """Poll, and look when asked to, until every probe says that there is nothing; when was the last row found?"""
        found_at = self.now
        living = [worker for worker in self.workers if not worker.dead]
        exact = self.world.sweep_every == math.inf
        end = self.now + (30 if exact else 3 * self.world.sweep_every * len(self.lanes))
        while self.now < end:
            left = len(self.db.waiting())
            active = [self._turn_alone(worker) for worker in living]
            if len(self.db.waiting()) < left:
                found_at = self.now
            looks = [look for worker in living for look in self._looks(worker)]
            if not any(active) and exact and min(looks) == math.inf:
                break
            self.now = min(self.now + POLL, *(look for look in looks if look > self.now), end)
        return found_at

    def _looks(self, worker: Worker) -> list[float]:
        look = worker.mark.next_look(self.now)
        queues = {queue for queue, _, _ in self.lanes}
        return [math.inf if look is None else look, worker.over.next_look(queues), worker.over.next_reading()]

    def _turn_alone(self, worker: Worker) -> bool:
        before = worker.fetches
        for _ in self._turn(worker):
            pass
        return worker.fetches > before

    def _join(self, steps: Steps) -> None:
        self.others.append((self._speed(), steps))

    def _speed(self) -> float:
        return self.dice.choice((1, 4, 16))

    # Everybody but the workers

    def _enqueue(self) -> Steps:
        """Transactions, long and short, with savepoints; id first, then the position, and room between them."""
        for _ in range(self.dice.randint(1, 5)):
            yield
            db, server, xid, youngest, lanes = self.db, self.server, self.db.begin(), 0, set[Lane]()
            yield
            for _ in range(self.dice.choice((0, 1, 1, 2, 4))):
                if self.dice.random() < 0.2:
                    youngest = db.savepoint()
                    yield
                rows = [db.insert(xid, self.dice.choice(self.lanes))]
                lanes.add(rows[0].lane)
                yield
                if youngest and self.dice.random() < 0.4:
                    db.undo_savepoint(youngest, rows)
            if self.dice.random() < self.patience:
                yield from self._linger(12)
            if server != self.server:
                continue
            if self.dice.random() < 0.15:
                db.rollback(xid, youngest)
            else:
                db.commit(xid, youngest)
                self._wake(lanes)

    def _wake(self, lanes: set[Lane]) -> None:
        """Notifications come, or do not; that of a plain job names its lane."""
        for worker in self.workers:
            if self.dice.random() < (0.8 if self.world.glances else 0.5):
                plain = {lane for lane in lanes if self.world.glances and not lane[2] and lane[1] > 0}
                worker.told |= plain
                worker.woken |= plain != lanes

    def _linger(self, most: int) -> Steps:
        for _ in range(self.dice.randint(0, most)):
            yield

    def _pause(self) -> Steps:
        for _ in range(self.dice.choice((0, 1, 2))):
            yield from self._linger(10)
            self.db.paused.add(self.lanes[0][0])
            yield from self._linger(20)
            self.db.paused.discard(self.lanes[0][0])

    def _cancel(self) -> Steps:
        """Lock a row as a cancel does, and undo it."""
        for _ in range(2):
            yield from self._linger(10)
            free = [row for row in self.db.waiting() if not row.locked_by]
            if free:
                db, xid = self.db, self.db.begin()
                db.lock(self.dice.choice(free), xid, db.moment)
                yield from self._linger(20)
                db.rollback(xid)

    def _vanish(self, db: Postgres, xid: int) -> Steps:
        """The session of a dead claimer: its locks stay a while, then the server notices."""
        yield from self._linger(30)
        db.rollback(xid)

    def _fail_over(self) -> Steps:
        yield from self._linger(20)
        standby = self.db.copy(1 if self.world.drawn_again else 32)
        yield from self._linger(20)
        self.db, self.server = standby, self.server + 1
        for worker in self.workers:
            worker.woken = True
            if self.world.told:
                worker.mark.forget()

    # A worker: wakes and polls; probes; fetches; and the ways in which a fetch goes wrong

    def _work(self, worker: Worker) -> Steps:
        while self.others and not worker.dead:
            yield
            yield from self._turn(worker)

    def _turn(self, worker: Worker) -> Steps:
        """One wake or poll. Clears the wake before it looks."""
        woken, worker.woken = worker.woken, False
        told, worker.told = worker.told, set()
        self._read(worker)
        if len(told) == 1 and not woken and worker.mark.settled:
            woken = yield from self._glance(worker, *told)
            if not woken:
                return
        woken = woken or bool(told)
        rare = self.world.glances and self.others and worker.mark.settled
        if rare and not woken and self.dice.random() < 0.99:
            return
        due = worker.over.next_look({queue for queue, _, _ in self.lanes}) <= self.now
        if not woken and not due and self._skips(worker):
            worker.skipped += 1
            return
        for keyed in self._order():
            while (yield from self._fetch(worker, keyed)):
                pass

    def _read(self, worker: Worker) -> None:
        """Read the ranges that are due, without locks: what is visible, locked or not."""
        ranges = worker.over.to_read(self.now)
        rows = self.db.waiting()
        found = [
            (index, row.pos)
            for index, one in enumerate(ranges)
            for row in rows
            if row.lane == one.lane and one.low < row.pos <= one.high
        ]
        if ranges:
            worker.over.read(PassedRead(ranges, found[: POSITIONS_MOST + 1], 0.0), self.now)
        if self.world.read_once:  # and what was asked for once is not read again
            worker.over._passed = [one for one in worker.over._passed if not one.delay]

    def _skips(self, worker: Worker) -> bool:
        db = self.db
        probe = self.world.reads(Reading(db.head, None, db.snapshot()))
        skips = worker.mark.idle(probe, frozenset(db.paused), self.lanes, self.now)
        if self.world.probe_stores_head:
            worker.mark._floor_heads[-1] = probe.head
        return skips

    def _order(self) -> list[bool]:
        """Which kinds are asked now, one after the other; while others act, often one only."""
        if not self.world.kinds:
            return [False]
        order = self.dice.choice(([False, True], [True, False]))
        return order[:1] if self.others and self.dice.random() < 0.5 else order

    def _asked(self, keyed: bool) -> list[Lane]:
        """Mostly all lanes of a kind; while others act, now and then one is left out, as the lane of suspects is."""
        lanes = [lane for lane in self.lanes if lane[2] == keyed]
        leave_out = self.others and len(lanes) > 2 and self.dice.random() < 0.2
        return lanes[1:] if leave_out else lanes

    def _fetch(self, worker: Worker, keyed: bool) -> Generator[None, None, bool]:
        """Fetch once; True if the worker should fetch again at once."""
        worker.fetches += 1
        db, server, lanes, mark = self.db, self.server, self._asked(keyed), worker.mark
        n = self.dice.choice((1, 2, 3, 5))
        limits = [1 if rank < 0 and self.dice.random() < 0.5 else n for _, rank, _ in lanes]
        head, xid, snapshot = 0, 0, ""
        paused: frozenset[str] = frozenset()
        taken: dict[Lane, tuple[int, int]] = {}
        positions: list[int] = []
        for lane, to in worker.over.falls(self.now).items():
            mark.fall(lane, to)
        starts = mark.starts(lanes, self.now)
        alone = worker.over.due(dict(zip(lanes, starts, strict=True)), self.now)
        places = [(lane, pos - 1, pos, 1) for lane, pos in sorted(alone)]
        places += [(lane, start, 2**63, limit) for lane, start, limit in zip(lanes, starts, limits, strict=True)]
        places.sort(key=lambda place: lanes.index(place[0]))
        looked: dict[Lane, int | None] = {}
        for step in self.world.order.split():
            match step:
                case "snapshot":
                    snapshot = db.snapshot(xid)
                    looked = self._look(mark, [lane for lane in self.lanes if lane[2] != keyed])
                case "head":
                    head = db.head
                case "xid":
                    xid = db.begin()
                case "claim":
                    paused = frozenset(db.paused)
                    yield from self._claim(db, xid, places, n, paused, taken, positions)
            yield
            if self.others and self.dice.random() < 0.2:  # a slow network: much happens between two statements
                yield from self._linger(12)
        if server != self.server:
            mark.forget()
            worker.over.forget()
            return False
        if worker.mortal and self.others and self.dice.random() < 0.2:
            worker.dead = True
            self._join(self._vanish(db, xid))
            return False
        failed = (self.others or self.world.sweep_every == math.inf) and self.dice.random() < self.trouble
        if failed:
            db.rollback(xid)
        else:
            db.commit(xid)
            yield
        if self.others and self.dice.random() < self.trouble / 2:
            mark.forget()  # the answer was lost
            worker.over.forget()
        if server != self.server or (failed and not self.world.failed_is_processed):
            return False
        opened = [lane for lane in lanes if self.world.paused_is_exhausted or lane[0] not in paused]
        reading = self.world.reads(Reading(head, xid, snapshot))
        before = mark._exhausted
        upto = {lane: head if pos is None else min(pos - 1, head) for lane, pos in looked.items()}
        fetch = Fetch(reading, lanes, limits, opened, taken, n, upto, positions)
        again = mark.fetched(fetch, self.now, 0.001 * len(self.workers))
        if self.world.unasked_stay_exhausted:
            mark._exhausted |= before.difference(lanes)
        if not self.world.passed_forgotten:
            worker.over.asked(alone, self.now)
            for lane, start, cursor in zip(lanes, starts, mark.cursors(lanes), strict=True):
                if cursor > start:
                    worker.over.passed(lane, start, cursor, self.now)
        worker.lowered += again
        return again or (not self.others and self._full(lanes, limits, n, taken))

    def _glance(self, worker: Worker, lane: Lane) -> Generator[None, None, bool]:
        """Claim from one lane, at its cursor; True if everything is to be fetched."""
        worker.glances += 1
        db, server, mark = self.db, self.server, worker.mark
        [after] = mark.cursors([lane])
        snapshot = db.snapshot()
        xid, taken, positions = db.begin(), dict[Lane, tuple[int, int]](), list[int]()
        yield from self._claim(db, xid, [(lane, after, 2**63, 5)], 5, frozenset(db.paused), taken, positions)
        if server != self.server:
            mark.forget()
            worker.over.forget()
            return True
        if worker.mortal and self.others and self.dice.random() < 0.2:
            worker.dead = True
            self._join(self._vanish(db, xid))
            return False
        if (self.others or self.world.sweep_every == math.inf) and self.dice.random() < self.trouble:
            db.rollback(xid)
            return True
        db.commit(xid)
        yield
        if self.others and self.dice.random() < self.trouble / 2:
            mark.forget()  # the answer was lost
            worker.over.forget()
            return True
        if server != self.server:
            return True
        mark.took(positions)
        if self.world.glance_moves_cursor and taken:
            mark._cursors[lane] = max(after, taken[lane][1])
        return mark.missed(snapshot)

    def _look(self, mark: Watermark, lanes: list[Lane]) -> dict[Lane, int | None]:
        """The reading: the lanes of the other kind up to the first one with a row behind its cursor, locked or not.

        Of that one the position of the row; of those before it None.
        """
        looked: dict[Lane, int | None] = {}
        for lane, after in zip(lanes, mark.cursors(lanes), strict=True):
            if lane[0] in self.db.paused:
                looked |= {lane: None} if self.world.paused_is_empty else {}
                continue
            looked[lane] = min(
                (row.pos for row in self.db.waiting() if row.lane == lane and row.pos > after), default=None
            )
            if looked[lane] is not None:
                break
        return looked

    def _full(self, lanes: list[Lane], limits: list[int], n: int, taken: dict[Lane, tuple[int, int]]) -> bool:
        """Whether more may wait: a worker that has nothing else to do takes it as soon as it has run what it took."""
        gave = [taken.get(lane, (0, 0))[0] for lane in lanes]
        return sum(gave) == n or any(count == limit for count, limit in zip(gave, limits, strict=True))

    def _claim(
        self,
        db: Postgres,
        xid: int,
        places: list[tuple[Lane, int, int, int]],
        n: int,
        paused: frozenset[str],
        taken: dict[Lane, tuple[int, int]],
        positions: list[int],
    ) -> Steps:
        """The claim statement: its snapshot, then place by place; others act in between."""
        moment = db.moment
        yield
        for lane, after, upto, limit in places:
            if lane[0] in paused:
                continue
            room = min(limit, n - sum(gave for gave, _ in taken.values()))
            ahead = (row for row in db.rows if row.lane == lane and after < row.pos <= upto)
            for _, row in zip(range(room), (row for row in ahead if db.lock(row, xid, moment)), strict=False):
                taken[lane] = (taken.get(lane, (0, 0))[0] + 1, row.pos)
                positions.append(row.pos)
            yield


def stranding_seeds(world: World, seeds: Iterable[int]) -> Iterator[int]:
    """Yield the seeds whose schedule leaves a row behind."""
    return (seed for seed in seeds if Schedule(seed, world).run().stranded)


def first_stranding_seed(world: World, most: int) -> int | None:
    return next(stranding_seeds(world, range(most)), None)
