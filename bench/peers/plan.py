"""Which samples a run takes, in which order, and how long they are likely to take.

A run may end before its plan does, because its minutes are over or because somebody stops it. So the order is:

1. One round of every scenario that does not take long, of all peers.
2. The other rounds of the peers near pgqueue: those whose `size` is a fifteenth of pgqueue's or more.
3. What takes long (`once`), of these peers.
4. The other rounds of the other peers. Beside a ratio of ten, a second sample says little.
5. What takes long, of the other peers.

With `--minutes`, every sample is made smaller by the same factor, so that parts 1 to SURE fit. Parts 4 and 5 take the
time that is left. The factor is never less than LEAST: below it the drain of the quickest peer is over in less than a
second, and there are too few starts. What does not fit then is left out, the last in this order first. The record says
which factor it was, and what was left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from bench.peers.peer import OURS, Peer
from bench.peers.scenarios import Scenario, applies
from bench.peers.size import LEAST

SURE = 3
NEAR = 1 / 15
SPARE = 0.95  # of the minutes are planned
LIMIT_SECONDS, LIMIT_FACTOR = 90.0, 4.0


@dataclass(frozen=True, slots=True)
class Step:
    """One sample to take."""

    scenario: Scenario
    peer: Peer
    turn: int
    part: int
    """Of the order at the head of this file."""

    def seconds(self, scale: float, *, full: bool) -> float:
        """How long it is likely to take, everything around it included."""
        scenario = self.scenario
        return scenario.around_s + scale * (scenario.full_s if full and scenario.full_s else scenario.scaled_s)

    def limit(self, scale: float, *, full: bool) -> float:
        """When it is given up."""
        return LIMIT_SECONDS + LIMIT_FACTOR * self.seconds(scale, full=full)

    @property
    def words(self) -> str:
        return f"{self.scenario.name}, round {self.turn}, {self.peer.title}"


def steps(
    contenders: list[Peer], wanted: Iterable[Scenario], *, rounds: int, full: bool, named: bool = False
) -> list[Step]:
    """All of them in their order. In a round the peers take turns, and their order is turned round each time.

    `named`: the scenarios are those that somebody has named, so each is measured of every peer.
    """
    least = NEAR * next((peer.size for peer in contenders if peer.name == OURS), 0)

    def near(peer: Peer) -> bool:
        return peer.size >= least

    def part(scenario: Scenario, peer: Peer, turn: int) -> int:
        if scenario.once:
            return 3 if near(peer) else 5
        return 1 if turn == 1 else 2 if near(peer) else 4

    found = [
        Step(scenario, peer, turn, part(scenario, peer, turn))
        for scenario in wanted
        for turn in range(1, (1 if scenario.once and not full else rounds) + 1)
        for peer in (contenders if turn % 2 else contenders[::-1])
        if applies(scenario, peer) and (full or named or near(peer) or not scenario.near_only)
    ]
    return sorted(found, key=attrgetter("part"))


def seconds(these: Iterable[Step], scale: float, *, full: bool) -> float:
    """How long all of them are likely to take."""
    return sum(step.seconds(scale, full=full) for step in these)


def scale_for(these: list[Step], minutes: float, *, full: bool) -> float:
    """The factor by which every sample is made smaller, so that the first parts fit as far as they can."""
    first = [step for step in these if step.part <= SURE]
    around, whole = seconds(first, 0.0, full=full), seconds(first, 1.0, full=full)
    if whole <= around:
        return 1.0
    return round(min(1.0, max(LEAST, (60.0 * minutes * SPARE - around) / (whole - around))), 2)
