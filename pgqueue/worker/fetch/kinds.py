"""Plain jobs and jobs with keys (a lock, a limit, a rate): which kind a fetch asks, and what is known of the other.

Part of the fetch, asked by the fetcher before and after each claim. It does no I/O and has no clock (`now` is any
monotonic time in seconds).

Each kind has lanes and a claim of its own; a fetch asks one kind. So the claim of a plain job knows nothing of keys. No
plain job waits behind jobs that need one. How the kinds go together:

1. Each reading also looks for the most urgent lane of the *other* kind that has a job behind its cursor. The claim then
   asks no lane of a lower priority. So priority is strict over what the reading saw.
2. The lanes before that one have no job in the reading's own snapshot, which has locked rows, too. So their cursors
   move to its head, as if they had been asked. That lane has none before the job, so its cursor moves to the job. If
   the reading saw no job at all, the other kind need not be asked.
3. If a claim was held back and took nothing, the other kind is asked next. Jobs that the other kind then passes over
   are locked: the next reading looks beyond their ranks, and moves no cursor. So no kind starves, and both come to
   rest.
4. Within a priority the kinds take turns. After a claim of jobs with keys plain jobs come first for as long as it took.
   It may take forty times as long as a claim of a few plain jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from pgqueue.jobs.job import Lane

NO_RANK, ANY_RANK = -32768, 32767
"""Below and above all ranks."""


@dataclass(slots=True, eq=False)
class Kind:
    """Plain jobs, or jobs with keys."""

    keyed: bool
    reading: str
    """The statement that is sent before a claim of this kind."""
    first: str
    """The statement that names the job a claim of one would take."""
    known: set[str] = field(default_factory=set)
    """Queues that have no more jobs of this kind, by all this worker knows."""
    most: int | None = None
    """How many jobs a claim asks for at most, after the server has refused one; None: as many as there is room for."""

    def lanes(self, lanes: Iterable[Lane]) -> list[Lane]:
        """The lanes of this kind of the same queues and ranks."""
        return [(queue, rank, self.keyed) for queue, rank, _ in lanes]


@dataclass(slots=True)
class Turn:
    """Which kind is next, for queues that share slots and may have jobs of both."""

    next: Kind | None = None
    """The kind that must be asked next: the other kind was held back for its sake, or it was held back itself."""
    held_back: bool = False
    """Whether the last claim left lanes out for the sake of the other kind, and took nothing."""
    beyond: int = NO_RANK
    """The reading before `next` looks beyond this rank: up to there the other kind was just asked, and gave nothing."""
    keyed_wait: bool = False
    """Whether the last reading before a claim of plain jobs saw a job with keys."""
    plain_until: float = 0.0
    """Until then plain jobs come first: for as long as the last claim of jobs with keys has taken."""


class Kinds:
    """What one worker knows of both kinds, by the queues that share slots."""

    def __init__(self) -> None:
        self.plain, self.keyed = (
            Kind(False, "fetch_reading", "fetch_first"),
            Kind(True, "keyed_claim_reading", "keyed_claim_first"),
        )
        self._turns: defaultdict[str, Turn] = defaultdict(Turn)

    def other(self, kind: Kind) -> Kind:
        """The other kind."""
        return self.keyed if kind is self.plain else self.plain

    def hungry(self, queues: Collection[str]) -> bool:
        """Whether there may be jobs in these queues that were not taken for want of room."""
        return not (self.plain.known.issuperset(queues) and self.keyed.known.issuperset(queues))

    def unknown(self) -> None:
        """There may be more of both kinds in all queues."""
        self.plain.known.clear()
        self.keyed.known.clear()

    def next(self, queues: Sequence[str], now: float) -> Kind:
        """Which kind to ask of these queues."""
        turn = self._turns[queues[0]]
        if self.plain.known.issuperset(queues):
            return self.keyed
        if self.keyed.known.issuperset(queues):
            return self.plain
        if turn.next is not None:
            return turn.next
        return self.keyed if turn.keyed_wait and now >= turn.plain_until else self.plain

    def beyond(self, kind: Kind, queues: Sequence[str]) -> int:
        """The rank beyond which the reading before this claim looks at the other kind; `NO_RANK`: it looks at all
        ranks."""
        turn = self._turns[queues[0]]
        return turn.beyond if turn.next is kind else NO_RANK

    def claimed(
        self,
        kind: Kind,
        queues: Sequence[str],
        asked: Collection[Lane],
        taken: Collection[Lane],
        other_rank: int | None,
        now: float,
        seconds: float,
    ) -> None:
        """A claim of this kind was committed; it took this number of seconds.

        `asked`: the lanes it was sent with. `taken`: the lanes that gave rows. `other_rank`: the rank of the most
        urgent lane of the other kind in which the reading saw a job.
        """
        turn, other = self._turns[queues[0]], self.other(kind)
        bound = ANY_RANK if other_rank is None else other_rank | 1  # both ranks of its priority
        left_out = any(rank > bound for _, rank, _ in asked)
        lowest = min([rank for _, rank, _ in taken], default=None)
        for_other = turn.held_back and turn.next is kind
        turn.next, turn.held_back, turn.beyond = None, left_out and lowest is None, NO_RANK
        if for_other:
            turn.next, turn.beyond = other, bound if lowest is None else (lowest & ~1) - 1
        elif turn.held_back:
            turn.next = other
        turn.keyed_wait = kind is self.plain and other_rank is not None
        if kind is self.keyed:
            turn.plain_until = now + seconds
        if other_rank is not None:
            other.known.difference_update(queues)
        if left_out:
            kind.known.difference_update(queues)
