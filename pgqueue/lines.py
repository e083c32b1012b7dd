"""What the rates keep of each line, and what room they are told of. Decides only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LOOK_SECONDS = 1.0
"""How often a line is looked at although no slot seems to be free for it."""


@dataclass(frozen=True, slots=True)
class Free:
    """Queues that share slots, how many of those are free, and how many jobs more could be at hand; `suspects` are the
    ranks of those that may be run now."""

    pools: Sequence[tuple[Sequence[str], int, int]]
    suspects: Sequence[int] = ()
    ordinary: bool = True

    @property
    def queues(self) -> list[str]:
        return [queue for served, _, _ in self.pools for queue in served]

    @property
    def full(self) -> set[int]:
        """The places of the pools without a free slot, from 1."""
        return {place for place, (_, free, _) in enumerate(self.pools, 1) if not free}

    def any(self) -> bool:
        return any(free for _, free, _ in self.pools)


@dataclass(slots=True)
class Line:
    """What we remember of a key: when it may be asked for, which pools had no slot for it, and who was faster."""

    at: float
    full: set[int] = field(default_factory=set)
    asked: float = 0.0
    last: int | None = None
    pushed: float = 0.0

    def fits(self, roomy: set[int], now: float) -> bool:
        """Whether a slot may be free for it, now that these pools have some; it is looked now and then all the same."""
        return not self.full or bool(self.full & roomy) or now - self.asked >= LOOK_SECONDS
