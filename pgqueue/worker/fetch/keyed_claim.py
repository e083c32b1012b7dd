"""The claim of jobs with keys: which keys it locks ahead, and what it blocks many at a time.

Asked by the fetcher, which sends these statements before the claim itself, in the claim's transaction
(sql/worker/keyed_claim.sql), and says here what came of them. Plain jobs have lanes and a claim of their own.

Why a claim may take a job of a key:

1. `keyed_claim_lock` locks the keys that the next rows need: those that it can have without waiting.
2. The claim's snapshot is from after these locks. It takes the first job of each key that no job holds or waits for.
3. A row becomes a holder only in a transaction that has locked its key, and has counted in a later statement.
4. The claim blocks the jobs of a key that it has not locked, and of one with a holder or a waiter.
5. The claim keeps its locks until its commit. A waiter may be hidden by a cursor (waiter_cursors): that decides which
   job is first, never how many run.

A job that is blocked takes no slot, so the fetch is repeated. Where such jobs stand in long rows for few keys, that
would be one claim after another for nothing. So the next claim first blocks many of them (`keyed_claim_block`).

Decides nothing about a job: what it remembers says only which way the next claim goes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement
from pgqueue.jobs.keys import RATE

# How many jobs that need a key are blocked ahead of a claim, where they stand in long rows: so many to a key, or so
# many whose keys were not free.
BLOCK_MOST, LONG_ROW, ROW_LEAST = 2_000, 4, 32
# So many where plain jobs wait meanwhile: they should not wait for long.
BLOCK_FEW = 200
# While there are jobs with keys, so many to a claim at most; so many if no more can be locked: the rest is blocked
# then, which costs less than small claims do; and for how many claims without any the next still looks for them.
KEYED_MOST, KEYED_LEAST, KEYED_CLAIMS = 2_000, 32, 16


Waiting = tuple[Mapping[str, Collection[int]], Collection[str], tuple[int, int] | None]
"""Keys that somebody waits for, with the ids to be skipped if they are held; which keys have the limit 1; and the
lowest rank and the lowest id of those who wait."""


class Blocked(msgspec.Struct):
    """What a claim has blocked: (queue, rank, how many, highest position) of each lane; keys with the ids to be skipped
    if they are held; keys with a limit above 1; the lowest rank and the lowest id."""

    lanes: list[tuple[str, int, int, int]]
    keys: dict[str, list[int]]
    several: list[str] | None = None
    lowest: tuple[int, int] | None = None

    def __len__(self) -> int:
        return sum(count for _, _, count, _ in self.lanes)


class BlockedAhead(msgspec.Struct):
    """The same of what was blocked ahead of a claim, and how many those were."""

    n: int
    keys: dict[str, list[int]]
    several: list[str] | None
    lowest: tuple[int, int]


class KeyedClaim:
    """What goes ahead of the claims of one fetcher."""

    def __init__(self) -> None:
        self.long_rows = False
        """Whether many jobs stand in long rows for few keys: the next claim first blocks many of them."""
        self.left = 0
        """For how many claims yet keys are locked ahead."""
        self._locks = 0

    def room(self, n: int, workers: int) -> int:
        """How many of n the next claim may ask for. There are so many `workers`: what it cannot lock it would block."""
        if self.long_rows:
            return max(1, n // 2)  # the rest is for jobs that are unblocked meanwhile
        return min(n, max(KEYED_LEAST, min(KEYED_MOST, self._locks // workers))) if self.left else n

    def statements(
        self, link: Link, lanes: Mapping[str, str], n: int, worker_id: int, workers: int, *, alone: bool
    ) -> list[Statement[Any]]:
        """What to send before a claim of n jobs of these lanes; `alone`: no plain jobs wait meanwhile."""
        if self.long_rows:
            most = BLOCK_MOST if alone else BLOCK_FEW
            return [link.statement("keyed_claim_block", **lanes, worker_id=worker_id, n=most)]
        return [link.statement("keyed_claim_lock", **lanes, n=n, workers=workers)] if self.left else []

    def handle_answer(self, answers: Sequence[Any], blocked: Blocked, taken: int) -> Waiting:
        """What was sent was answered so; the claim has taken so many jobs and blocked some. Keys that jobs wait for."""
        if answers and not self.long_rows:
            [[(self._locks, _)]] = answers
        if taken or blocked.keys:
            keyed = taken > 0 or any(not key.startswith(RATE) for key in blocked.keys)
            self.left = KEYED_CLAIMS if keyed else max(0, self.left - 1)
        return self._waiting(answers, blocked, taken) if blocked.keys or answers else ({}, (), None)

    def _waiting(self, answers: Sequence[Any], blocked: Blocked, taken: int) -> Waiting:
        keys, several, lowest = blocked.keys, set(blocked.several or ()), blocked.lowest
        # Where keys were looked for, whoever was blocked all the same has others before him: a long row of few keys.
        looked = bool(answers) and not self.long_rows
        many = len(blocked) >= LONG_ROW * len(keys) > 0
        many = many or (looked and len(blocked) > max(ROW_LEAST, taken))
        for (found,) in answers[0] if self.long_rows else ():
            before = msgspec.json.decode(found, type=BlockedAhead)
            many = before.n >= LONG_ROW * len(before.keys)
            several.update(before.several or ())
            (rank, job_id), other = before.lowest, lowest or before.lowest
            lowest = (min(rank, other[0]), min(job_id, other[1]))
            for key, ids in before.keys.items():
                keys[key] = [*keys.get(key, ()), *ids]
        self.long_rows = many
        return keys, keys.keys() - several, lowest
