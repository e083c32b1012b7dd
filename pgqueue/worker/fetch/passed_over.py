"""Rows that a claim passed over because another transaction had locked them, or because the claim had left them out.

Part of the fetch, asked by the fetcher beside the watermark. Decides positions only: it does no I/O and has no clock
(`now` is any monotonic time in seconds).

**Why.** SKIP LOCKED passes a locked row, and the cursor goes by. The transaction that locked it may roll back.
It may be the claim of a worker that died, a cancellation that was undone, or an application that met a duplicate and
waits. Then the row is free again, and behind the cursor. A row that the server refused is left out for a while
(`refused_rows`), and lies behind the cursor when its time is over.

**Why no row stays behind.**

1. Each range that a claim has passed is read once more, without locks, `READ_AFTER` seconds later or more.
2. At that reading a row of the range is visible, or gone, or of a transaction that was in progress at the fetch. That
   transaction has a floor: the cursor falls below the row when it ends (see watermark).
3. A visible row was passed over. Its position is remembered.
4. A remembered position is asked for by itself: a lane of one position, under the same conditions as every lane. So it
   is a range that was passed, and 1 holds for it. A row that is still visible is remembered again, for twice as long.
5. A position is forgotten for two reasons only: a reading did not see its row, or its lane's cursor lies below it.
6. More than `POSITIONS_MOST` rows are not remembered one by one. The cursor falls back below the lowest of them, and
   what it then passes is a range again.

A reading that fails changes nothing: its ranges are read again.

**What it costs.** The reading of a range walks the index entries that the claim has walked (docs/design/fetch.md has
the figure). Ranges younger than `READ_AFTER` are not read: most of their locked rows are claims of other workers, which
commit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pgqueue.jobs.job import Lane

READ_AFTER, READ_EVERY = 0.1, 0.2
"""Seconds. No range is read before it has the first age. When the oldest has the second age, all that are due are
read."""
ASK_FIRST, ASK_MOST = 0.01, 5.0
"""Seconds until a remembered position is asked for; twice as long each time, up to the second number."""
POSITIONS_MOST = 1_000
"""How many rows of one reading are remembered by position."""
ASKED_MOST = 100
"""How many remembered positions go with one claim."""
FALL_SHARE = 100
"""A fall below many locked rows waits this multiple of the time of the reading, times the workers: 1 % of one core."""


@dataclass(frozen=True, slots=True)
class Passed:
    """The positions of a lane above `low`, up to `high`, that a claim has passed at a time."""

    lane: Lane
    low: int
    high: int
    at: float
    delay: float = 0.0
    """Seconds that a remembered position waited before it was asked for; 0 for a range."""


@dataclass(frozen=True, slots=True)
class PassedRead:
    """A reading of these ranges, and what it has found."""

    ranges: Sequence[Passed]
    found: Collection[tuple[int, int]]
    """The rows, as (index of the range, position), in order, `POSITIONS_MOST` + 1 at most."""
    fleet_seconds: float
    """What the reading took, times the number of workers."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Something is due at a time, after a delay in seconds."""

    at: float
    delay: float


class PassedOver:
    """The rows that one worker's claims have passed over, on one connection; one reading in flight at a time."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as the watermark does: every lane starts at zero."""
        self._passed: list[Passed] = []
        self._positions: dict[tuple[Lane, int], Waits] = {}
        self._falls: dict[Lane, tuple[int, Waits]] = {}
        self._fall_delays: dict[Lane, float] = {}

    def passed(self, lane: Lane, low: int, high: int, now: float) -> None:
        """A committed claim has moved the cursor of this lane from `low` to `high`."""
        self._passed.append(Passed(lane, low, high, now))

    def asked(self, positions: Iterable[tuple[Lane, int]], now: float) -> None:
        """A committed claim has asked for these positions by themselves."""
        for lane, pos in positions:
            waited = self._positions.pop((lane, pos), None)
            if waited is not None:  # else all was forgotten meanwhile
                self._passed.append(Passed(lane, pos - 1, pos, now, waited.delay))

    # The reading

    def next_reading(self) -> float:
        """Return when a reading is due; infinity if no range was passed."""
        return self._passed[0].at + READ_EVERY if self._passed else math.inf

    def to_read(self, now: float) -> list[Passed]:
        """Return the ranges to read, if a reading is due."""
        if now < self.next_reading():
            return []
        return _merged([passed for passed in self._passed if passed.at <= now - READ_AFTER])

    def read(self, read: PassedRead, now: float) -> None:
        """A reading was answered."""
        ranges, found = read.ranges, read.found
        until = max(passed.at for passed in ranges)
        self._passed = [passed for passed in self._passed if passed.at > until]
        if len(found) + len(self._positions) > POSITIONS_MOST:
            self._fall_back(ranges, found, now, read.fleet_seconds)
            return
        for passed in ranges:
            self._fall_delays.pop(passed.lane, None)
        for index, pos in found:
            delay = min(max(2 * ranges[index].delay, ASK_FIRST), ASK_MOST)
            self._positions[ranges[index].lane, pos] = Waits(now + delay, delay)

    def _fall_back(
        self, ranges: Sequence[Passed], found: Collection[tuple[int, int]], now: float, fleet_seconds: float
    ) -> None:
        """Too many rows: their lanes fall back below the lowest, and so do those that the reading did not come to."""
        lowest: dict[Lane, int] = {}
        last = max(index for index, _ in found)
        unread = ((index, passed.low + 1) for index, passed in enumerate(ranges) if index > last)
        for index, pos in (*found, *unread):
            lane = ranges[index].lane
            lowest[lane] = min(pos, lowest.get(lane, pos))
        for lane, pos in lowest.items():
            delay = min(max(2 * self._fall_delays.get(lane, 0.0), ASK_FIRST), ASK_MOST)
            self._fall_delays[lane] = delay
            to, _ = self._falls.get(lane, (pos - 1, None))
            self._falls[lane] = (min(to, pos - 1), Waits(now + max(delay, FALL_SHARE * fleet_seconds), delay))

    # What to ask for

    @property
    def remembers(self) -> bool:
        """Whether any position is remembered."""
        return bool(self._positions)

    def falls(self, now: float) -> dict[Lane, int]:
        """Return the positions to which cursors have to fall back now. Each is returned once."""
        due = {lane: to for lane, (to, waits) in self._falls.items() if waits.at <= now}
        for lane in due:
            del self._falls[lane]
        return due

    def due(self, cursors: Mapping[Lane, int], now: float) -> list[tuple[Lane, int]]:
        """Return the positions of these lanes to be asked for now, the longest due first.

        A position above its lane's cursor is forgotten: the lane itself comes to it.
        """
        ahead = [key for key in self._positions if key[1] > cursors.get(key[0], key[1])]
        for key in ahead:
            del self._positions[key]
        due = [key for key, waits in self._positions.items() if waits.at <= now and key[0] in cursors]
        due.sort(key=lambda key: self._positions[key].at)
        return due[:ASKED_MOST]

    def next_look(self, queues: Collection[str]) -> float:
        """Return when a claim of these queues has something to ask for; infinity if never."""
        waits = [waits.at for (lane, _), waits in self._positions.items() if lane[0] in queues]
        waits += [waits.at for lane, (_, waits) in self._falls.items() if lane[0] in queues]
        return min(waits, default=math.inf)


def _merged(passed: Collection[Passed]) -> list[Passed]:
    """The same positions in fewer ranges: those of a lane that touch become one, as young as the youngest."""
    merged: list[Passed] = []
    for one in sorted(passed, key=lambda one: (one.delay, one.lane, one.low)):
        last = merged[-1] if merged else None
        if last is not None and not one.delay and (last.lane, last.delay) == (one.lane, 0.0) and one.low <= last.high:
            merged[-1] = Passed(one.lane, last.low, max(last.high, one.high), max(last.at, one.at))
        else:
            merged.append(one)
    return merged
