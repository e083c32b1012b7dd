"""What one claim asks for, and what it brings. Values only: the fetcher sends the claim.

Part of the fetch, next to the fetcher. It does no I/O and has no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pgqueue.database.statements import Row
from pgqueue.jobs.job import Job, Lane
from pgqueue.worker.concurrency.waiter_cursors import Position
from pgqueue.worker.fetch.keyed_claim import Blocked
from pgqueue.worker.fetch.kinds import Kind
from pgqueue.worker.fetch.passed_over import PassedRead
from pgqueue.worker.fetch.watermark import Reading

NO_END = 2**63 - 1


@dataclass(slots=True)
class Asked:
    """The lanes of one claim, in order, each with its limit."""

    lanes: list[Lane]
    mosts: list[int]
    starts: list[int] = field(default_factory=list)
    """The position after which each lane is asked."""
    passed_over: list[tuple[Lane, int]] = field(default_factory=list)
    """Positions at or before the start of their lane, which are asked for by themselves."""
    left_out: Collection[tuple[Lane, int]] = ()
    """Positions of rows that can be neither claimed nor put aside: they are not asked for."""

    def ranges(self) -> list[tuple[Lane, int, int, int]]:
        """What the claim is asked for, in order: (lane, after which position, up to which position, how many rows)."""
        alone: defaultdict[Lane, list[int]] = defaultdict(list)
        for lane, pos in sorted(self.passed_over):
            if (lane, pos) not in self.left_out:
                alone[lane].append(pos)
        gaps: defaultdict[Lane, list[int]] = defaultdict(list)
        for lane, pos in sorted(self.left_out):
            gaps[lane].append(pos)
        places: list[tuple[Lane, int, int, int]] = []
        for lane, start, most in zip(self.lanes, self.starts, self.mosts, strict=True):
            places += [(lane, pos - 1, pos, 1) for pos in alone[lane]]
            for gap in gaps[lane]:
                if gap > start:
                    places.append((lane, start, gap - 1, most))
                    start = gap
            places.append((lane, start, NO_END, most))
        return places


class ClaimSummary(msgspec.Struct):
    """What a claim says beside its jobs; only one of jobs with keys says more than which lanes were open."""

    lanes: list[int]
    """The places (from 1) of the lanes that were open."""
    paused: list[str] = []
    """The tasks that were paused."""
    lowest_hold: int | None = None
    """The lowest hold_pos of the jobs that run now; None if none does."""
    held: list[str] = []
    """The locks that came with such a job."""
    blocked: Blocked | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server has answered to a claim."""

    reading: Row
    summary: ClaimSummary
    jobs: list[Job]
    passed: PassedRead | None
    """What it has answered to a reading of passed ranges beside the claim."""
    ahead: Sequence[Any] = ()
    """Its answers to the statements that a claim of jobs with keys sends ahead."""
    waiters: Mapping[str, Position] = field(default_factory=dict)
    """The cursors of waiters that such a claim was sent with."""

    @property
    def blocked(self) -> Blocked:
        """What the claim has blocked."""
        return self.summary.blocked or Blocked([], {})


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim has brought."""

    answer: Answer
    reading: Reading
    scanned: set[Lane]
    """The lanes that the claim has looked at."""
    taken: dict[Lane, tuple[int, int]]
    """How many rows each of these lanes gave, blocked ones too, and the highest position of them."""
    other: int | None
    """The rank of the most urgent lane of the other kind that had a job; None if none had."""
    looked: dict[Lane, int]
    """How far the reading has looked at lanes of the other kind, and seen no job."""
    paused: tuple[list[str], list[str]]
    """The tasks that were paused, for the reading and for the claim."""

    @property
    def jobs(self) -> list[Job]:
        """The jobs that were taken."""
        return self.answer.jobs

    def more(self, n: int) -> bool:
        """Whether there may be more jobs: the claim has given all of n."""
        return len(self.jobs) + len(self.answer.blocked) >= n


def taken_of(
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
