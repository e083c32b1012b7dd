"""Where the next measurement of depth begins to read lanes and scheduled jobs. No I/O; `depth` says why it is right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pgqueue.jobs.job import Lane
from pgqueue.worker.fetch.watermark import Fetch, Reading, Watermark

QUEUES_MOST = 1_000
LANES_MOST = 10_000
"""Of so many lanes the cursors are kept: those of the queues that were known first. Others are read from the start."""
READ_MOST = 200_000
"""A measurement reads no more jobs than this, and of a lane no more than LANE_MOST; fewer if many lanes have jobs."""
LANE_LEAST, LANE_MOST = 500, 10_001
RANKS = range(-2, 20)
LATE_SECONDS = 60.0
WHOLE_EVERY = 100


class DepthCursors:
    """The queues that are known, and how far their lanes are empty."""

    def __init__(self) -> None:
        self._watermark = Watermark()
        self._known: dict[str, None] = {}
        self._most = LANE_MOST
        self._lanes: list[Lane] = []
        self._firsts: list[tuple[float, float]] = []
        """Of the measurements of the last minute: the time, and from when on the next ones may read scheduled jobs."""

    def lanes(self, now: float) -> dict[str, Any]:
        """The parameters of `depth_lanes`. `now` is any monotonic time in seconds."""
        per_queue = 2 * len(RANKS)
        queues = list(self._known)[: LANES_MOST // per_queue]
        self._lanes = [(queue, rank, keyed) for queue in queues for rank in RANKS for keyed in (False, True)]
        starts = self._watermark.starts(self._lanes, now) if self._lanes else []
        asked = [(lane, after) for lane, after in zip(self._lanes, starts, strict=True) if after]
        return {
            "known": list(self._known),
            "queues": [lane[0] for lane, _ in asked],
            "ranks": [lane[1] for lane, _ in asked],
            "keyed": [lane[2] for lane, _ in asked],
            "afters": [after for _, after in asked],
            "most": self._most,
        }

    def read(
        self, reading: Sequence[Any], lanes: Sequence[Sequence[Any]], served: Iterable[str], now: float, took: float
    ) -> bool:
        """Take the answer of `depth_lanes`: the lanes with jobs, and the queues that workers serve.

        Answers whether to read them once more at once: a transaction has ended that had been open for long, and its
        jobs may lie where this did not look.
        """
        again = False
        new = [(queue, rank, keyed) for queue, rank, keyed, _, _ in lanes if queue not in self._known]
        self._watermark.starts(new, now)  # these were read from their start
        self._lanes += new
        whole = sum(number for *_, number, _ in lanes) < READ_MOST
        if whole and self._lanes:  # else the lanes at the end were not looked at
            again = self._rise(
                Reading(*reading), {(queue, rank, keyed): first for queue, rank, keyed, _, first in lanes}, now, took
            )
        for queue in (*served, *(lane[0] for lane in lanes)):
            if len(self._known) < QUEUES_MOST:
                self._known[queue] = None
        self._most = max(LANE_LEAST, min(LANE_MOST, READ_MOST // (len(lanes) + 1)))
        return again

    def _rise(self, reading: Reading, first: dict[Lane, int], now: float, took: float) -> bool:
        # A lane with a job counts as full, so that its cursor rises to the position before the job and no further.
        taken = {lane: (1, first[lane] - 1) for lane in self._lanes if lane in first}
        full = len(self._lanes) + 1
        fetch = Fetch(reading, self._lanes, [1] * len(self._lanes), set(self._lanes), taken, full)
        return self._watermark.fetched(fetch, now, took)

    def scheduled(self, measurements: int) -> float | None:
        """From which time on scheduled jobs are read, in seconds since 1970; None: all."""
        if measurements % WHOLE_EVERY == 0 or not self._firsts:
            return None
        return self._firsts[0][1]

    def read_scheduled(self, first: float | None, at: float) -> None:
        """Take the time of the first scheduled job (None: there is none) at this measurement."""
        if self._firsts and at < self._firsts[-1][0]:
            self._firsts.clear()  # the clock was set back
        self._firsts.append((at, min(at, at if first is None else first) - LATE_SECONDS))
        while len(self._firsts) > 1 and self._firsts[1][0] <= at - LATE_SECONDS:
            del self._firsts[0]
