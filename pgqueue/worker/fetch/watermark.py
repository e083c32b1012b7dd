"""Where each lane's next claim begins: fast under an old snapshot, and no row left behind.

Part of the fetch, asked by the fetcher of one worker before and after each claim. It decides positions only, never
which job is more urgent. It does no I/O and has no clock (`now` is any monotonic time in seconds).

**Why.** While a transaction holds an old snapshot, Postgres can remove no dead index entry. Then a claim that begins at
the head of the index walks over every job taken since. A claim that begins after the last position looked at does not.

**The naive version** keeps the highest position taken and asks for `pos > cursor`. It loses jobs: A draws 10 and stays
open. B draws 11 and commits. 11 is taken, and the cursor is 11. Then A commits, and no claim ever looks at 10 again.

**What we know instead.** A transaction draws its id before any `pos`. A fetch reads, in this order, the snapshot, the
head `h` and its own id `w`; only then it claims. Three facts follow:

1. A position up to h was drawn before w was. So it belongs to an id below w.
2. At the moment of the snapshot, an id below w had ended or was in progress. If it had ended, the claim, which sees
   more, saw its rows. In progress means: listed, or at least the snapshot's xmax. (xmax is the latest id that has
   *ended*, plus 1. A younger id may be open and stands in no list.)
3. An id in progress that the previous fetch did not find in progress is younger than that fetch's w. So it drew all its
   positions after that fetch had read its head: they are above it. That head is its **floor**.

**The invariant** is about every row of a lane that is at or below its cursor and still to be taken. The row belongs to
an id in progress at the last fetch, and lies above that id's floor; or it is one of the exceptions below, each of which
has another way back. It holds because:

1. A cursor rises only over rows that the claim has scanned, or that the reading has looked at (`Fetch.looked`), and
   never above h. The reading has the fetch's own snapshot, so facts 1 and 2 hold of what it has looked at. It answers
   the first row that it sees, and the cursor stays below that row.
2. So, by facts 1 and 2, a row that it leaves behind belongs to an id in progress. By fact 3 it lies above the floor.
3. Once the id has ended, cursors fall back to its floor, and the row is ahead again.
4. If a lane's claim began at or below the floor, its cursor need not fall. That scan began after the id had ended, and
   below its rows.

By fact 3 a floor depends on nothing but the id. It is the head of the youngest fetch with w < id, and a younger id
never has a lower floor. So no floor is stored per id: between xmax and w there may be a million of them. The pairs (w,
h) of the fetches are the steps of a function. Of all ids that have ended only the oldest matters.

**The account.** A snapshot lists the ids of every database of the server. So beside foreign writers an id has ended at
nearly each fetch, and cursors would fall for nothing. Of the rows that this worker has taken, the watermark keeps the
positions, at most 1,000 of them. If each position above the oldest ended id's floor, up to the last head, is among
them, no cursor falls, and nothing was missed:

1. A position is drawn once, and one committed row has it at most. A job that becomes available again draws a new one.
   So once a row is taken and its claim committed, no row has its position any more.
2. All rows of ids that have ended since the last fetch lie above that floor: no younger id has a lower one. Those that
   a cursor has passed lie at or below the last head. By 1, none of these is left. The others are still ahead.
3. Positions count, rows do not: an older row that is taken meanwhile says nothing of this range. If one position of it
   was rolled back, blocked for its key, or taken by another worker, it is not among them, and the cursors fall.
4. Only what a committed claim has answered is among them. After a claim in doubt, a new connection or another server,
   which may draw a position again, the account is empty (`forget`).
5. To leave positions out is safe. So a busy worker names none.

**The exceptions**: rows that were visible, that the claim has not taken, and that the cursor has gone by.

- Locked rows. When its lock is rolled back, such a row is behind the cursor. `passed_over` finds it.
- Rows that the server refuses, so that the claim leaves them out for a while (`refused_rows`). `passed_over` finds
  them, too, and they are asked for when their time is over.
- Rows of tasks that this worker does not know. They are for other workers, which have cursors of their own.
- Rows of paused tasks. When the task is resumed, all cursors start at zero (`paused_tasks`).

`idle` may say that there is nothing to do although one of them is there: each has a time or an event of its own at
which a fetch is asked for. Behind all that stands a sweep that trusts no proof: once a minute one lane starts at zero.
All workers together spend at most 1 % of a core on it, but none waits longer than an hour for the next one. After a
rescue all lanes start at zero at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pgqueue.jobs.job import Lane

SWEEP_EVERY = 60.0  # seconds between two lanes that start at zero, at least
SWEEP_MOST = 3_600.0  # but no later: one slow answer must not cancel the sweep
SWEEP_SHARE = 100  # and at least this multiple of what one costs the fleet: 1 % of one core for all workers together
LOOK_AGAIN = 0.010  # seconds; without it one fetch was followed by a chain of 139 (other workers' fetches have ids too)
MOST_FLOORS = 1_000
MOST_TAKEN = 1_000


@dataclass(frozen=True, slots=True)
class Reading:
    """What the first statement of a fetch, or a probe, saw; read in this order: snapshot, head, xid."""

    head: int
    """The last position drawn; 0 before the first."""
    xid: int | None
    """The fetch's own transaction id; None for a probe, which takes none."""
    snapshot: str
    """The text of `pg_current_snapshot()`: `xmin:xmax:xip,xip,…`, ascending."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A committed fetch: what was asked, and what came of it."""

    reading: Reading
    lanes: Sequence[Lane]
    """In the order asked."""
    limits: Sequence[int]
    """How many rows of each of these lanes were asked for at most."""
    open: Collection[Lane]
    """The lanes that are not paused."""
    taken: Mapping[Lane, tuple[int, int]]
    """How many rows each lane gave, blocked ones too, and the highest position of them."""
    n: int
    """How many rows were asked for in total."""
    looked: Mapping[Lane, int] = field(default_factory=dict)
    """Lanes that were not asked, and the position up to which the reading has seen no row of them, in its own
    snapshot."""
    positions: Collection[int] = ()
    """Of rows that it has taken, as far as they are worth keeping."""


class Watermark:
    """The cursors of one worker on one connection. `starts`, the claim, `fetched`; one claim in flight at a time.

    A claim that failed and certainly took nothing is not reported: it changes nothing. Call `forget` after a claim that
    may have taken rows, after a new connection, and after any doubt.
    """

    __slots__ = (
        "_cursors", "_exhausted", "_floor_heads", "_floor_xids", "_head", "_in_flight", "_listed", "_look_at", "_owed",
        "_repeated", "_sweep_due", "_sweep_every", "_swept", "_taken", "_xid", "_xmax", "_zero_asked",
    )  # fmt: skip

    def __init__(self, sweep_every: float = SWEEP_EVERY) -> None:
        self._sweep_every = sweep_every
        self.forget()

    def forget(self) -> None:
        """Begin anew, every lane at zero. An answer still on its way is not believed any more."""
        self._cursors: dict[Lane, int] = {}
        self._in_flight = False
        # The last fetch processed. Its ids in progress are those listed, and those from xmax up to, not including, xid.
        self._head = self._xid = self._xmax = 0
        self._listed: list[int] = []
        self._exhausted: set[Lane] = set()
        # The floor of id x is the head beside the last xid below x. Before the first fetch, nothing is known: 0.
        self._floor_xids, self._floor_heads = [-1], [0]
        self._taken: set[int] = set()  # positions of rows that this worker has taken
        self._repeated = False
        self._look_at = math.inf
        self._zero_asked = True
        self._swept: dict[Lane, float] = {}  # when the lane last started at zero
        self._sweep_due = 0.0  # when the next lane is to start at zero
        self._owed: set[Lane] = set()  # lanes that started at zero and have not been scanned since

    def start_at_zero(self) -> None:
        """The next claim looks at everything: a rescue has freed rows that we may have passed while they were
        locked."""
        self._zero_asked = True

    def starts(self, lanes: Sequence[Lane], now: float) -> list[int]:
        """For each lane the position after which the next claim must look; 0 where it must look at everything."""
        for lane in lanes:
            if lane not in self._cursors:
                self._begin_at_zero(lane, now)
        if self._zero_asked:
            self._zero_asked = False
            self._sweep_due = now + self._sweep_every
            for lane in self._cursors:
                self._begin_at_zero(lane, now)
        elif lanes and now >= self._sweep_due:
            self._sweep_due = now + self._sweep_every
            self._begin_at_zero(min(_both_kinds(lanes), key=lambda lane: self._swept.get(lane, -math.inf)), now)
        self._in_flight = True
        return [self._cursors[lane] for lane in lanes]

    def fall(self, lane: Lane, to: int) -> None:
        """The next claim of this lane looks after this position, if it would look after a higher one."""
        if self._cursors.get(lane, 0) > to:
            self._cursors[lane] = to
            self._exhausted.discard(lane)

    def cursors(self, lanes: Sequence[Lane]) -> list[int]:
        """For each lane how far it has been looked at; no claim begins with this."""
        return [self._cursors.get(lane, 0) for lane in lanes]

    def fetched(self, fetch: Fetch, now: float, cost: float = 0.0) -> bool:
        """Process a committed fetch; True if it should be repeated at once. `cost`: its seconds, times the number of
        workers."""
        reading, lanes, taken = fetch.reading, fetch.lanes, fetch.taken
        assert reading.xid is not None, "a probe is not a fetch"
        if not self._in_flight or self._went_backwards(reading.head, reading.xid):
            self.forget()
            return True
        self._in_flight = False
        self.took(fetch.positions)
        xmax, listed = _parse(reading.snapshot)
        floor = self._lowest_floor_of_ended(reading.head, xmax, listed)
        lowered = [lane for lane, start in self._cursors.items() if start > floor]  # where this claim began

        full = sum(count for count, _ in taken.values()) >= fetch.n
        last = max((i for i, lane in enumerate(lanes) if lane in taken), default=-1) if full else len(lanes)
        reached = [i for i, lane in enumerate(lanes[: last + 1]) if lane in fetch.open]
        # If no position was drawn since, a lane that this fetch has not asked is as it was. An id that has come since
        # then draws its positions above this head.
        same = reading.head == self._head
        self._exhausted = self._exhausted.difference(lanes) if same else set()
        for lane, upto in fetch.looked.items():
            self._cursors[lane] = max(upto, self._cursors.get(lane, 0))
            if upto == reading.head:
                self._exhausted.add(lane)
        for i in reached:
            lane = lanes[i]
            count, highest = taken.get(lane, (0, 0))
            if i < last and count < fetch.limits[i]:
                self._cursors[lane] = reading.head
                self._exhausted.add(lane)
            elif count:
                # Above h no floor would guard it. The cursor never goes down here: a row that was passed over lies
                # below it.
                self._cursors[lane] = max(self._cursors[lane], min(highest, reading.head))
        for lane in lowered:
            self._cursors[lane] = floor
        self._exhausted.difference_update(lowered)

        self._count_sweep({lanes[i] for i in reached}.union(fetch.looked), now, cost)
        self._remember(reading.head, reading.xid, xmax, listed)
        return self._repeat(bool(lowered), full, now)

    def took(self, positions: Collection[int]) -> None:
        """A committed claim of this worker has taken the rows at these positions."""
        if len(self._taken) + len(positions) > MOST_TAKEN:
            self._taken.clear()
        if len(positions) <= MOST_TAKEN:
            self._taken.update(positions)

    def idle(self, reading: Reading, paused: frozenset[str], lanes: Sequence[Lane], now: float) -> bool:
        """Whether a probe proves that a fetch of these lanes would find nothing. Stores nothing."""
        return (
            reading.head == self._head
            and not self._zero_asked
            and now < self._sweep_due
            and all(lane[0] in paused or lane in self._exhausted for lane in lanes)
            and not self.missed(reading.snapshot)
        )

    @property
    def settled(self) -> bool:
        """Whether no start at zero is asked for: a claim at the cursors as they stand misses nothing but what `missed`
        tells."""
        return not self._zero_asked

    def missed(self, snapshot: str) -> bool:
        """Whether a claim at the cursors, which had this snapshot, may have left a row below them: an id that the last
        fetch found in progress had ended, and this worker has not taken all that may be its rows."""
        return self._lowest_floor_of_ended(self._head, *_parse(snapshot)) < self._head

    def exhausted(self, lanes: Collection[Lane]) -> bool:
        """Whether all of these lanes were empty at the last fetch."""
        return self._exhausted.issuperset(lanes)

    def next_look(self, now: float) -> float | None:
        """When, not before `now`, a fetch is wanted even if no wake and no poll comes; None if never."""
        at = min(self._look_at, self._sweep_due)
        return now if self._zero_asked else None if at == math.inf else max(now, at)

    # Ids and floors

    def _oldest_ended(self, xmax: int, listed: list[int]) -> int | None:
        """The oldest id that the last fetch found in progress and this snapshot does not."""
        still = set(listed)
        for x in self._listed:
            if x not in still:
                return x if x < xmax else None
        x = self._xmax
        while x in still:
            x += 1
        return x if x < min(self._xid, xmax) else None

    def _lowest_floor_of_ended(self, head: int, xmax: int, listed: list[int]) -> int:
        """Where cursors fall to. The head if they need not: none is above it."""
        oldest = self._oldest_ended(xmax, listed)
        if oldest is None:
            return head
        floor = self._floor_heads[self._step(oldest)]
        return head if self._all_taken(floor) else floor

    def _all_taken(self, floor: int) -> bool:
        """Whether this worker has taken a row of each position above this floor, up to the last head."""
        number = self._head - floor
        return number <= len(self._taken) and self._taken.issuperset(range(floor + 1, self._head + 1))

    def _step(self, xid: int) -> int:
        return bisect_left(self._floor_xids, xid) - 1

    def _remember(self, head: int, xid: int, xmax: int, listed: list[int]) -> None:
        self._head, self._xid, self._xmax, self._listed = head, xid, xmax, listed
        self._floor_xids.append(xid)
        self._floor_heads.append(head)
        if len(self._floor_xids) > 2 * MOST_FLOORS:
            self._tidy_floors()

    def _tidy_floors(self) -> None:
        """Drop the steps that no id in progress needs. Of more than 1,000, merge the oldest: a lower floor is safe."""
        unlisted = range(self._step(self._xmax), len(self._floor_xids))
        keep = sorted({self._step(xid) for xid in self._listed}.union(unlisted))
        if len(keep) > MOST_FLOORS:
            keep = keep[:1] + keep[1 - MOST_FLOORS :]
        self._floor_xids = [self._floor_xids[i] for i in keep]
        self._floor_heads = [self._floor_heads[i] for i in keep]

    def _went_backwards(self, head: int, xid: int) -> bool:
        """Whether another server answers: a standby promoted before it had seen everything.

        Its sequence may stand up to 32 higher than the lost one (the log runs ahead of it), so the head alone does not
        tell. Ids do not run ahead.
        """
        return head < self._head or xid <= self._xid

    # Repeats

    def _repeat(self, lowered: bool, full: bool, now: float) -> bool:
        """Repeat once at once, for the sake of speed. From then on, as long as cursors keep falling, 10 ms apart."""
        again = lowered and not full and not self._repeated
        self._repeated = lowered and (again or self._repeated)
        self._look_at = now + LOOK_AGAIN if lowered and not again else math.inf
        return again

    # Starts at zero

    def _begin_at_zero(self, lane: Lane, now: float) -> None:
        """If a claim does not reach the lane, its cursor stays there, and the scan is still owed."""
        self._cursors[lane] = 0
        self._exhausted.discard(lane)  # if this claim fails, no probe may skip its repetition
        self._owed.add(lane)
        self._swept[lane] = now

    def _count_sweep(self, reached: set[Lane], now: float, fleet_seconds: float) -> None:
        """An expensive scan from zero puts off the next sweep."""
        if not self._owed.isdisjoint(reached):
            self._sweep_due = max(self._sweep_due, now + min(SWEEP_SHARE * fleet_seconds, SWEEP_MOST))
        self._owed -= reached


def _both_kinds(lanes: Sequence[Lane]) -> list[Lane]:
    """These lanes and those of the other kind: a reading looks at the other kind, so its sweep is part of it."""
    return [(queue, rank, keyed) for keyed in (False, True) for queue, rank, _ in lanes]


def _parse(snapshot: str) -> tuple[int, list[int]]:
    """The xmax and the ids in progress below it, ascending."""
    _, xmax, listed = snapshot.split(":")
    return int(xmax), [int(xid) for xid in listed.split(",")] if listed else []
