"""Where to begin to read the waiters of a key: after those that have gone.

As with holders (see holder_cursors), an index keeps the entries of jobs that were unblocked, as long as a transaction
holds an older snapshot. The waiters of a key are read by each of its unblockings, and by each claim that meets a job of
it. So a worker remembers the position of the last job that it unblocked, and reads on from there.

This may be wrong for a moment: any worker may block a job before those that wait. So the cursor is a hint, used under
these conditions:

1. Only for busy keys, of which many jobs are unblocked, and many a second (`BUSY_TAKEN`, `BUSY_RATE`).
2. Not past the jobs that this worker blocks itself.
3. For `HINT_SECONDS` only. Then the waiters are read from the start once.
4. If no waiter seems to be left while there is room, the waiters are read from the start before that is believed.

So no job is left behind. All that changes: of a busy key, a job that another worker has blocked before those that wait
is seen a second later at most. Jobs that are unblocked meanwhile run before it.

Each end of a job makes some looks that ask whether a job waits. If reading from the start has become slow, so are
these looks. It is slow if the quickest of several took `SLOW_SECONDS` for a key. Then every reader of any key starts at
its cursor. If a reader finds no waiting job there, the worker reads the waiters again from the start one second later,
unless that was done meanwhile. At shutdown the worker does so at once.

Nothing is decided here about which job may hold a key: the holders are counted, under the key's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from pgqueue.steady_clock import monotonic

Position = tuple[int, int]
"""(rank, id) of a waiter."""

FRONT: Position = (-32768, 0)
"""The start: before any waiter."""

KEYS_MOST = 4_096
"""The number of keys that are remembered."""
SENT_MOST = 256
"""How many cursors, the last used ones, go with a claim, which does not know the keys it will meet."""
BUSY_TAKEN, BUSY_RATE, HINT_SECONDS = 100, 10, 1.0
"""A key is busy if `BUSY_TAKEN` of its jobs were unblocked, and `BUSY_RATE` of them in the last second. Its cursor is
used for `HINT_SECONDS`."""
SLOW_SECONDS, SLOW_LOOKS = 50e-6, 8
"""Reading is slow when each of `SLOW_LOOKS` looks in a row took `SLOW_SECONDS` for a key."""


@dataclass(slots=True)
class WaiterCursor:
    """What is remembered of the waiters of one key."""

    last: Position
    """The position of the last job that was unblocked."""
    read_at: float
    """When the waiters were read from the start."""
    reread: bool = True
    """Whether they are to be read from the start, until it is known what was found there."""
    unblocked: int = 0
    recent: int = 0
    """How many jobs were unblocked since `recent_since`."""
    recent_since: float = 0.0
    lowest_blocked: Position | None = None
    """The lowest position of the jobs that we have blocked since the waiters were read last."""


class WaiterCursors:
    """What one worker remembers of the waiters of keys."""

    def __init__(self) -> None:
        self.slow = False
        """Whether reading waiters from the start is slow."""
        self._times: deque[float] = deque(maxlen=SLOW_LOOKS)
        self._cursors: dict[str, WaiterCursor] = {}
        """The key used last stands last."""

    def position(self, key: str) -> Position:
        """The position after which an unblocking is to read the waiters of this key now. The caller does read them."""
        now = monotonic()
        cursor = self._cursors.get(key) or self._new(key, now)
        cursor.lowest_blocked = None
        if now - cursor.read_at >= HINT_SECONDS:
            cursor.read_at, cursor.reread = now, True
        self._judge(cursor, now)
        return cursor.last if self._from_cursor(cursor) else FRONT

    def _judge(self, cursor: WaiterCursor, now: float) -> None:
        """A key of which few jobs were unblocked lately is not busy any more."""
        if now - cursor.recent_since >= HINT_SECONDS:
            cursor.unblocked = cursor.unblocked if cursor.recent >= BUSY_RATE else 0
            cursor.recent, cursor.recent_since = 0, now

    def _new(self, key: str, now: float) -> WaiterCursor:
        """Made before the waiters are read, so that no job that we block meanwhile is forgotten."""
        if len(self._cursors) >= KEYS_MOST:
            del self._cursors[next(iter(self._cursors))]
        cursor = self._cursors[key] = WaiterCursor(FRONT, now, recent_since=now)
        return cursor

    def position_to_look(self, key: str) -> Position:
        """The position for a look whether a job waits."""
        return self.position(key) if self.slow else FRONT

    def known(self, kind: str) -> dict[str, Position]:
        """The positions for claims, which may read any key of this kind. Keys that are to be read from the start are
        left out."""
        since = monotonic() - HINT_SECONDS
        last = islice(
            ((key, cursor) for key, cursor in reversed(self._cursors.items()) if key.startswith(kind)), SENT_MOST
        )
        sure = ((key, cursor) for key, cursor in last if self._from_cursor(cursor) and cursor.read_at > since)
        return {key: cursor.last for key, cursor in sure if cursor.last != FRONT}

    def _from_cursor(self, cursor: WaiterCursor) -> bool:
        return not cursor.reread and (self.slow or cursor.unblocked >= BUSY_TAKEN)

    def unblocked(self, key: str, position: Position, number: int = 1) -> None:
        """`number` jobs at the head of this key's waiters, up to and including this one, have left them."""
        cursor = self._cursors.pop(key, None)
        if cursor is None:  # dropped since then: whether we blocked a job meanwhile is not known
            cursor = self._new(key, monotonic())
        else:
            self._cursors[key] = cursor
            cursor.reread = cursor.lowest_blocked is not None and cursor.lowest_blocked <= position
        cursor.last = position
        cursor.unblocked += number
        cursor.recent += number

    def empty(self, keys: Iterable[str], at: float) -> None:
        """Statements that were sent at that time have read the waiters of these keys from the start and found none."""
        for key in keys if self._cursors else ():
            cursor = self._cursors.get(key)
            if cursor is not None and at >= cursor.read_at:
                cursor.read_at = at
                cursor.reread = cursor.lowest_blocked is not None and cursor.lowest_blocked <= cursor.last
                self._judge(cursor, at)

    def blocked(self, keys: Iterable[str], lowest: Position) -> None:
        """We have blocked jobs of these keys, none at a lower position than `lowest`."""
        for key in keys:
            cursor = self._cursors.get(key)
            if cursor is not None:
                cursor.lowest_blocked = lowest if cursor.lowest_blocked is None else min(lowest, cursor.lowest_blocked)
                cursor.reread = cursor.reread or lowest <= cursor.last

    def ended(self, key: str) -> bool:
        """An unblocking that began at the cursor found no waiter. Whether the waiters are to be read from the start at
        once.

        If reading is slow, this is done a while later instead.
        """
        if not self.slow:
            self.doubt(key)
        return not self.slow

    def doubt(self, key: str) -> None:
        """A job may wait before those we know: the waiters of this key are to be read from the start."""
        cursor = self._cursors.get(key)
        if cursor is not None:
            cursor.reread = True

    def read_since(self, key: str, at: float) -> bool:
        """Whether the waiters of this key were read from the start after that time, and none that we blocked since is
        unread."""
        cursor = self._cursors.get(key)
        return cursor is not None and cursor.read_at > at and not cursor.reread

    def took(self, seconds: float, keys: int) -> None:
        """The server took this time to read the waiters of this number of keys from the start."""
        self._times.append(seconds / keys)
        self.slow = len(self._times) == SLOW_LOOKS and min(self._times) >= SLOW_SECONDS
