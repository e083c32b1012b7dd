"""The claim of jobs with keys: which keys it locks ahead, and how many jobs it blocks at once.

Asked by the fetcher, which sends these statements before the claim itself, in the claim's transaction
(sql/worker/keyed_claim.sql). The fetcher passes their answers to `handle_answer`. Plain jobs have lanes and a claim of
their own.

Why a claim may take a job of a key:

1. `keyed_claim_lock` locks the keys that the next rows need, if it can have them without waiting.
2. The claim's snapshot is from after these locks. It takes the first job of each key that no job holds or waits for.
3. A row becomes a holder only in a transaction that has locked its key, and has counted in a later statement.
4. The claim blocks the jobs of a key that it has not locked, and of a key with a holder or a waiter.
5. The claim keeps its locks until its commit. A waiter may be hidden by a cursor (waiter_cursors): that decides which
   job is first, never how many run.

A job that is blocked takes no slot, so the fetch is repeated. Where these jobs stand in long rows for few keys, that
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

# Up to `BLOCK_MOST` jobs that need a key are blocked ahead of a claim if they stand in long rows. That is so if the
# last claim blocked `LONG_ROW` jobs of each key, or more than `ROW_LEAST` jobs of keys that were not free.
BLOCK_MOST, LONG_ROW, ROW_LEAST = 2_000, 4, 32
# The most that are blocked ahead while plain jobs wait: those should not wait for long.
BLOCK_FEW = 200
# While there are jobs with keys, a claim asks for `KEYED_MOST` jobs at most. If fewer keys can be locked, it asks for
# fewer, at least `KEYED_LEAST`: the rest is blocked then, which costs less than small claims do. After a claim without
# jobs with keys, the next `KEYED_CLAIMS` claims still look for them.
KEYED_MOST, KEYED_LEAST, KEYED_CLAIMS = 2_000, 32, 16


Waiting = tuple[Mapping[str, Collection[int]], Collection[str], tuple[int, int] | None]
"""Three things.

1. Keys that jobs wait for, with the ids to be skipped if the key is held.
2. The keys of which all these jobs have the limit 1.
3. The lowest rank and the lowest id of these jobs.
"""


class Blocked(msgspec.Struct):
    """What a claim has blocked.

    `lanes`: (queue, rank, how many, highest position). `keys`: with the ids to be skipped if the key is held.
    `several`: keys with a limit above 1. `lowest`: the lowest rank and the lowest id.
    """

    lanes: list[tuple[str, int, int, int]]
    keys: dict[str, list[int]]
    several: list[str] | None = None
    lowest: tuple[int, int] | None = None

    def __len__(self) -> int:
        return sum(count for _, _, count, _ in self.lanes)


class BlockedAhead(msgspec.Struct):
    """What was blocked ahead of a claim, and how many jobs that were."""

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
        """For how many more claims keys are locked ahead."""
        self._locks = 0

    def room(self, n: int, workers: int) -> int:
        """How many of n jobs the next claim may ask for, with this number of workers. It would block what it cannot
        lock."""
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
        """Take the answers to `statements`, and what the claim has blocked and how many jobs it took. Answers the keys
        that jobs wait for."""
        if answers and not self.long_rows:
            [[(self._locks, _)]] = answers
        if taken or blocked.keys:
            keyed = taken > 0 or any(not key.startswith(RATE) for key in blocked.keys)
            self.left = KEYED_CLAIMS if keyed else max(0, self.left - 1)
        return self._waiting(answers, blocked, taken) if blocked.keys or answers else ({}, (), None)

    def _waiting(self, answers: Sequence[Any], blocked: Blocked, taken: int) -> Waiting:
        keys, several, lowest = blocked.keys, set(blocked.several or ()), blocked.lowest
        # If keys were looked for and a job was blocked all the same, others are before it: a long row of few keys.
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
