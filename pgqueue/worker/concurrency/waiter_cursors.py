"""Where to begin to read the line of jobs for a key: behind those of the line that have gone.

As with holders (see holder_cursors), an index keeps the entries of jobs that were let in for as long as a transaction
holds a snapshot from before; and a line is read by each admit of its key, and by each claim that meets a job of it. So
a worker remembers the place of the last job that it let in, and reads on from there.

Why that may be wrong for a moment, and for how long: any worker may block a job in front of those that wait. So it is
done for lines only from which many are let in, and many a second (`BUSY_TAKEN`, `BUSY_RATE`); not past what this worker
blocks itself; for `LINE_SECONDS`, then the line is read from its front once; and a line that seems to be at its end
while there is room is read from its front before that is believed. So no job is left behind, and all it changes is
this: of such a key, a job that another worker has blocked before those that wait is seen a second later at most, and
jobs that are let in meanwhile run before it.

Where reading from the front has become slow (`SLOW_SECONDS` for a line, the quickest of several; it takes some hundred
dead entries), so are the looks that ask whether a job waits, and each end of a job makes some. Then the looks, too,
begin behind the jobs that have gone, and all reads do so of any line. If a read finds no job so, the worker comes back
to the line a second after, unless it was read from its front meanwhile; or at once, when the worker leaves. That second
is all it costs.

Nothing is decided here about which job may hold a key: that is counted, under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from time import monotonic

Position = tuple[int, int]
"""(rank, id) in a line."""

FRONT: Position = (-32768, 0)
"""Before any row of a line."""

KEYS_MOST = 4_096
"""Of so many lines it is remembered which job was let in last."""
SENT_MOST = 256
"""So many of them, those let in from last, go with a claim, which does not know the keys it will meet."""
BUSY_TAKEN, BUSY_RATE, LINE_SECONDS = 100, 10, 1.0
"""A line that so many came from, and so many in the last second, is busy; for so long it is not read from the front."""
SLOW_SECONDS, SLOW_LOOKS = 50e-6, 8
"""Reading is slow when each of so many looks in a row took so long for a line."""


@dataclass(slots=True)
class WaiterCursor:
    """The place of the last job that was let in; when the line was read from its front, and whether it has to be until
    it is known what was found there; how many were let in, how many of them lately, and since when that is; the first
    place that was blocked at since it was read last."""

    last: Position
    looked: float
    anew: bool = True
    taken: int = 0
    lately: int = 0
    since: float = 0.0
    blocked: Position | None = None


class WaiterCursors:
    """What one worker remembers of the lines that it lets in from."""

    def __init__(self) -> None:
        self.slow = False
        """Whether reading lines from their fronts is slow."""
        self._times: deque[float] = deque(maxlen=SLOW_LOOKS)
        self._cursors: dict[str, WaiterCursor] = {}
        """The one let in from last is the last."""

    def position(self, key: str) -> Position:
        """Behind which place an admit is to read the line of this key now; the caller does read it."""
        now = monotonic()
        line = self._cursors.get(key) or self._new(key, now)
        line.blocked = None
        if now - line.looked >= LINE_SECONDS:
            line.looked, line.anew = now, True
        self._judge(line, now)
        return line.last if self._from_last(line) else FRONT

    def _judge(self, line: WaiterCursor, now: float) -> None:
        """One from which few were let in lately is not busy any more."""
        if now - line.since >= LINE_SECONDS:
            line.taken = line.taken if line.lately >= BUSY_RATE else 0
            line.lately, line.since = 0, now

    def _new(self, key: str, now: float) -> WaiterCursor:
        """From before the line is read, so that what we block meanwhile is not forgotten."""
        if len(self._cursors) >= KEYS_MOST:
            del self._cursors[next(iter(self._cursors))]
        line = self._cursors[key] = WaiterCursor(FRONT, now, since=now)
        return line

    def position_to_look(self, key: str) -> Position:
        """The same for a look whether a job waits."""
        return self.position(key) if self.slow else FRONT

    def known(self, kind: str) -> dict[str, Position]:
        """The same for claims, which may read any line of this kind, of those not to be read from the front."""
        since = monotonic() - LINE_SECONDS
        last = islice(((key, line) for key, line in reversed(self._cursors.items()) if key.startswith(kind)), SENT_MOST)
        sure = ((key, line) for key, line in last if self._from_last(line) and line.looked > since)
        return {key: line.last for key, line in sure if line.last != FRONT}

    def _from_last(self, line: WaiterCursor) -> bool:
        return not line.anew and (self.slow or line.taken >= BUSY_TAKEN)

    def unblocked(self, key: str, place: Position, number: int = 1) -> None:
        """The first `number` jobs in this line, when it was read (`behind`), were up to this place, and have gone."""
        line = self._cursors.pop(key, None)
        if line is None:  # put out since then: it is not known what was blocked meanwhile
            line = self._new(key, monotonic())
        else:
            self._cursors[key] = line
            line.anew = line.blocked is not None and line.blocked <= place
        line.last = place
        line.taken += number
        line.lately += number

    def empty(self, keys: Iterable[str], at: float) -> None:
        """Statements that were sent at that time have read these lines from their fronts and found no job."""
        for key in keys if self._cursors else ():
            line = self._cursors.get(key)
            if line is not None and at >= line.looked:
                line.looked = at
                line.anew = line.blocked is not None and line.blocked <= line.last
                self._judge(line, at)

    def blocked(self, keys: Iterable[str], lowest: Position) -> None:
        """We have blocked jobs of these keys, none of a lower rank or a lower id than these two."""
        for key in keys:
            line = self._cursors.get(key)
            if line is not None:
                line.blocked = lowest if line.blocked is None else min(lowest, line.blocked)
                line.anew = line.anew or lowest <= line.last

    def ended(self, key: str) -> bool:
        """An admit that did not read this line from its front has found no job in it. Whether another shall read it
        from there at once; else that is due in a while."""
        if not self.slow:
            self.doubt(key)
        return not self.slow

    def doubt(self, key: str) -> None:
        """A job may be in this line in front of those we know: it is to be read from its front."""
        line = self._cursors.get(key)
        if line is not None:
            line.anew = True

    def read_since(self, key: str, at: float) -> bool:
        """Whether this line was read from its front after that time, and it is known what was found there."""
        line = self._cursors.get(key)
        return line is not None and line.looked > at and not line.anew

    def took(self, seconds: float, lines: int) -> None:
        """To read so many lines from their fronts took the server so long."""
        self._times.append(seconds / lines)
        self.slow = len(self._times) == SLOW_LOOKS and min(self._times) >= SLOW_SECONDS
