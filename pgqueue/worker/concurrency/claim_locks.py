"""Goes ahead of a claim while there are jobs with keys: locks keys that can be had, or parks long rows of jobs.

Asked by the fetcher, which sends what this gives it before a claim, in the claim's transaction (sql/worker/), and
says here what came of it.

Why a claim may take a job of a key. `claim_locks_take` locks the keys that the next rows need, those it can have
without waiting, and the claim, whose snapshot is from after these locks, takes at once the first job of each key that
nobody holds and nobody waits for. That is right for the reasons admit is: a row becomes a holder only in a transaction
that has locked its key, and that has counted in a statement after the one that locked it. A key that it has not locked,
or that has a holder or a line, goes the long way: the claim parks its jobs. What it locks it has until its commit.
Whether somebody waits may be judged by a line's known part only (see waiter_cursors): that decides who is first, never
how many.

Why long rows are parked ahead. What is parked took nobody's slot, so the fetch is repeated; where such jobs stand in
long rows for few keys, that would be one claim after another for nothing. So the next one first parks many of them.

Why nothing is left behind. Behind such a row there may be jobs that need no key. So while it lasts the claim passes
over all that need one, as far as `REACH` positions, for to look at a row costs a fiftieth of parking it. Such a claim
leaves rows behind, so the watermark is told that it scanned no lane: cursors stay, or fall, and when the row is at its
end the next claim begins where the last ordinary one had ended. Once a second one is ordinary, however long the row
lasts. What a claim has taken is not there any more; while it passes over jobs it is followed by another fetch always.

Decides nothing about a job: what it remembers says only which way the next claim goes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import monotonic
from typing import Any

import msgspec

from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement
from pgqueue.jobs.keys import RATE

# How many jobs that need a key are parked ahead of a claim, where they stand in long rows: so many to a key, or so many
# whose keys were not free.
PARK_MOST, LONG_ROW, ROW_LEAST = 2_000, 4, 32
# How far to look for others behind such rows; and how many times not to, where there were none.
REACH, BLANK = 200_000, 4
# So long claims may pass over jobs without an ordinary one in between, which raises cursors and starts at zero.
PASS_SECONDS = 1.0
# While there are jobs with keys, so many to a claim at most; so many if no more can be locked: the rest is parked then,
# which costs less than small claims do; and for how many claims without any the next still looks for them.
KEYED_MOST, KEYED_LEAST, KEYED_CLAIMS = 2_000, 32, 16


Waiting = tuple[Mapping[str, Collection[int]], Collection[str], tuple[int, int] | None]
"""Keys that somebody waits for, with the ids to be skipped if they are held; which keys have the limit 1; and the
lowest rank and the lowest id of those who wait."""


class Parked(msgspec.Struct):
    """What a claim has parked: (queue, rank, how many, highest position) of each lane; keys with the ids to be skipped
    if they are held; keys with a limit above 1; the lowest rank and the lowest id."""

    lanes: list[tuple[str, int, int, int]]
    keys: dict[str, list[int]]
    several: list[str] | None = None
    lowest: tuple[int, int] | None = None

    def __len__(self) -> int:
        return sum(count for _, _, count, _ in self.lanes)


class ParkedAhead(msgspec.Struct):
    """The same of what was parked ahead of a claim, and how many those were."""

    n: int
    keys: dict[str, list[int]]
    several: list[str] | None
    lowest: tuple[int, int]


class Keyed:
    """What goes ahead of the claims of one fetcher."""

    def __init__(self) -> None:
        self.long_rows = False
        """Whether there are long rows: claims pass over them."""
        self.left = 0
        """For how many claims yet keys are looked for."""
        self.blank = 0
        """While above 1, nobody was found behind the rows, and a claim does not look."""
        self._ordinary_at = 0.0
        self._locks = 0

    def room(self, n: int, workers: int) -> int:
        """How many of n the next claim may ask for: what it could not lock, for there are so many `workers`, it would
        park for nothing. Whether it passes over jobs is settled here."""
        if self.long_rows and monotonic() >= self._ordinary_at:
            self.long_rows = False  # this claim says whether there still is one
        if self.long_rows:
            return max(1, n // 2)  # the rest is for those whom admits let in meanwhile
        return min(n, max(KEYED_LEAST, min(KEYED_MOST, self._locks // workers))) if self.left else n

    @property
    def reach(self) -> str | None:
        """How far the claim looks behind rows that it passes over; None if it passes over none.

        A text: with None and numbers of several sizes, each would be a statement to prepare.
        """
        return ("0" if self.blank > 1 else str(REACH)) if self.long_rows else None

    def statements(
        self, link: Link, lanes: Mapping[str, str], n: int, worker_id: int, workers: int
    ) -> list[Statement[Any]]:
        """What to send before a claim of n jobs of these lanes."""
        if self.long_rows:
            return [link.statement("claim_locks_park", **lanes, worker_id=worker_id, n=PARK_MOST)]
        return [link.statement("claim_locks_take", **lanes, n=n, workers=workers)] if self.left else []

    def brought(self, answers: Sequence[Any], parked: Parked, taken: int, *, keyed: bool) -> Waiting:
        """What was sent was answered so; the claim has taken so many jobs, `keyed` if any has a key, and parked some.
        Who waits now."""
        if answers and not self.long_rows:
            [[(self._locks, _)]] = answers
        if self.long_rows:
            self.blank = 0 if taken else max(0, self.blank - 1) or BLANK
        if taken or parked.keys:
            keyed = keyed or any(not key.startswith(RATE) for key in parked.keys)
            self.left = KEYED_CLAIMS if keyed else max(0, self.left - 1)
        return self._waiting(answers, parked, taken) if parked.keys or answers else ({}, (), None)

    def _waiting(self, answers: Sequence[Any], parked: Parked, taken: int) -> Waiting:
        keys, several, lowest = parked.keys, set(parked.several or ()), parked.lowest
        # Where keys were looked for, whoever was parked all the same has others before him: a long row of few keys.
        looked = bool(answers) and not self.long_rows
        many = len(parked) >= LONG_ROW * len(keys) > 0
        many = many or (looked and len(parked) > max(ROW_LEAST, taken))
        for (found,) in answers[0] if self.long_rows else ():
            before = msgspec.json.decode(found, type=ParkedAhead)
            many = before.n >= LONG_ROW * len(before.keys)
            several.update(before.several or ())
            (rank, job_id), other = before.lowest, lowest or before.lowest
            lowest = (min(rank, other[0]), min(job_id, other[1]))
            for key, ids in before.keys.items():
                keys[key] = [*keys.get(key, ()), *ids]
        if many and not self.long_rows:
            self._ordinary_at = monotonic() + PASS_SECONDS
        self.long_rows = many
        return keys, keys.keys() - several, lowest
