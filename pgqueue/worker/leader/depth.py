"""Measures how many jobs there are and since when they wait, for all that shows numbers. A duty of the leader, as
housekeeping.

Counting live is slow in the very incident for which people need the numbers: a long backlog, and a snapshot that keeps
dead rows from being removed. So one worker measures now and then, and readers read table `depth`. The pause after a
measurement is 100 times as long as it took, between 5 and 120 seconds. So measuring takes one percent of the time, and
more only if one takes longer than 1.2 s.

**Why a held snapshot does not make it slow.** Dead entries lie where jobs were taken: at the front of each lane.

1. Each lane is read from a cursor of this service, by the rule of `fetch/watermark`. A measurement takes no job. So the
   position before the first job that it sees counts as looked at, and everything up to the head if it sees none.
2. The cursors of the fetcher would be wrong here: they rise over jobs of tasks that this worker does not know.
3. Queues are found by jumps along the index. A jump lands on what a queue has left behind. So it is made only between
   the queues that are known already. A queue stays known when it is empty.
4. Scheduled jobs are read from the first one seen a minute ago, or from a minute ago. An earlier one can be missing
   only if its transaction was open for longer. Each hundredth measurement reads all of them.
5. What is blocked, what runs and history are read as whole tables, which costs a tenth of a look by an index.

**Why the table of measurements stays cheap.** A held snapshot keeps its deleted rows, too: all of an hour.

1. A measurement appends rows with its time `at`, and deletes those before, in one statement. A reader sees one or the
   other.
2. The newest rows are at the end of the primary key, and none of them is dead. A reader takes the last `at`, and the
   rows with it, and so meets no dead row, however many there are.
3. The deletion begins ten minutes ago, and so meets the dead rows of ten minutes at most. The first one of a worker
   begins at the start of the table.
4. An UPDATE in place would be no better: each version of a row is one more to be walked over by each reader.
5. If the clock is set back, the rows of a time to come are deleted, too. Until then a reader does not believe them.

**At rest.** If a measurement has found no job that is available, blocked or running, the next one comes after
`REST_SECONDS`. Each job that becomes available draws a position, and each heartbeat reads the last one drawn. Once that
has moved, the next measurement is due. Without such news it is, too.

Two workers may measure at once, after a change of the leader: each appends, and the newer one is read. A worker first
looks whether a measurement is due, so workers that lead without a lock do not all measure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from pgqueue.database.backoff import jittered
from pgqueue.database.sessions import Session
from pgqueue.steady_clock import monotonic
from pgqueue.worker.leader.depth_cursors import DepthCursors
from pgqueue.worker.leader.longest_blocked import LongestBlocked

MOVING = ("available", "blocked", "running")
"""A job in one of these states may move at any time."""
PAUSE_LEAST, PAUSE_MOST, PAUSE_TIMES = 5.0, 120.0, 100
FIRST_SECONDS = 15.0
"""So long a worker that leads waits for its first measurement, once to twice. Readers measure before, if need be."""
OVERDUE_SECONDS = 60.0
"""A worker that does not lead looks now and then, and measures if a measurement is overdue by so much."""
KEPT_SECONDS = 600.0
REST_SECONDS = 25.0
"""Less than half a minute: each minute of the history has a measurement."""
NEWS_SECONDS = 12.0
"""For so long the position that a heartbeat has read is news."""


class Depth:
    """Measures over the given session."""

    def __init__(self, session: Session, *, leads: Callable[[], bool]) -> None:
        self.measurements = 0
        """How often this worker has measured."""
        self.took = PAUSE_LEAST / PAUSE_TIMES
        """How long the last measurement took, in seconds."""
        self._session = session
        self._leads = leads
        self._cursors = DepthCursors()
        self._longest = LongestBlocked()
        self._head = 0
        """The last position drawn before the last measurement."""
        self._rests_until = 0.0
        self._heard, self._heard_at = 0, -inf
        """The last position drawn, as a heartbeat has read it, and when it was told."""

    def heard(self, head: int) -> None:
        """This is the last position drawn."""
        self._heard, self._heard_at = head, monotonic()

    def _rests(self) -> bool:
        """Whether nothing has become available since a measurement that has found no job but scheduled ones."""
        now = monotonic()
        news = self._heard > self._head or not self._is_told(now)
        return self._leads() and now < self._rests_until and not news

    async def round(self) -> float:
        """Measure, if a measurement is due; answer the seconds until the next look."""
        if self._rests():
            return PAUSE_LEAST
        if self._leads() and monotonic() < self._rests_until:  # what it has written said a later time
            return await self.measure()
        [[(left, age)]] = await self._session.run(self._session.link.statement("depth_due"))
        late = 0.0 if self._leads() else OVERDUE_SECONDS
        if left is not None and left + late > 0.1 and age is not None:
            return min(PAUSE_MOST, float(left) + jittered(0.1))
        return await self.measure()

    async def measure(self) -> float:
        """Measure once; answer how long the pause after it is, in seconds."""
        session = self._session
        link, (available, took) = session.link, await self._lanes()
        scheduled = link.statement("depth_scheduled", after=self._cursors.scheduled(self.measurements))
        # One message: the setting in the middle holds for the last statement only.
        [(later, first, at)], _, [(others,)] = await session.run(
            scheduled, link.statement("depth_whole"), link.statement("depth_others")
        )
        took += session.took
        self._cursors.read_scheduled(first, at)
        found = [*available, *json.loads(later), *json.loads(others)]
        if any(state == "blocked" for _, state, *_ in found):
            look = link.statement("depth_blocked", **self._longest.asks())
            [[(roomy, after)]] = await session.run(look)
            took += session.took
            self._longest.looked(json.loads(roomy), after, monotonic())
        else:
            self._longest.none_waits()
        pause = min(PAUSE_MOST, max(PAUSE_LEAST, PAUSE_TIMES * took))
        now, rests = monotonic(), all(state not in MOVING for _, state, *_ in found)
        self._rests_until = now + REST_SECONDS if rests and pause < REST_SECONDS and self._is_told(now) else 0.0
        pause = REST_SECONDS if self._rests_until else pause
        since = None if self.measurements == 0 else at - KEPT_SECONDS
        rows = json.dumps(with_longest(found, self._longest.since(monotonic(), at)))
        await session.run(link.statement("depth_write", at=at, next_at=at + pause, since=since, groups=rows))
        self.measurements += 1
        self.took = took
        return PAUSE_LEAST if self._rests_until else pause

    def _is_told(self, now: float) -> bool:
        return now <= self._heard_at + NEWS_SECONDS

    async def _lanes(self) -> tuple[list[list[Any]], float]:
        """The groups of available jobs, and how long it took to read them."""
        session = self._session
        link, took, found = session.link, 0.0, []
        for _ in range(2):
            lanes = link.statement("depth_lanes", **self._cursors.lanes(monotonic()))
            [[reading], [(groups, read, served)]] = await session.run(link.statement("depth_reading"), lanes)
            took += session.took
            found, self._head = json.loads(groups), reading[0]
            if not self._cursors.read(reading, json.loads(read), served, monotonic(), session.took):
                break
        return found, took


def with_longest(groups: list[list[Any]], longest: Mapping[tuple[str, str], float]) -> list[list[Any]]:
    """The groups, each with one more value: since when a blocked job of this queue and kind of key could have gone on.

    >>> with_longest([["mail", "blocked", "lock", "", 2, True, None]], {("mail", "lock"): 7.5})
    [['mail', 'blocked', 'lock', '', 2, True, None, 7.5]]
    """
    return [[*each, longest.get((each[0], each[2])) if each[1] == "blocked" else None] for each in groups]
