"""How long the runs of a task took, as shares by length: before the newest version, and since it.

Pure. Drawn by the template `charts.html`. Both parts are shares of their own attempts, so a version that has run for
minutes is compared with one that has run for days. Bounds are those of the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgqueue.jobs.histogram import BOUNDS
from pgqueue.web.panel import HEIGHT, UNIT, round_number

LABELS_MOST = 6
GAP = 0.16
"""Between the bars of one length and those of the next, as a share of the column."""


@dataclass(frozen=True, slots=True)
class Part:
    """The attempts of one part: how many took each of the lengths, and their share of all, in per cent."""

    name: str
    total: int
    counts: tuple[int, ...]
    shares: tuple[float, ...]
    path: str


@dataclass(frozen=True, slots=True)
class Durations:
    """The lengths that occur, in seconds: each is an upper bound, None is longer than all of them."""

    bounds: tuple[float | None, ...]
    labelled: tuple[bool, ...]
    ticks: tuple[float, float, float]
    parts: tuple[Part, ...]


def durations(given: Mapping[str, Sequence[int]]) -> Durations | None:
    """The histograms by name, those without an attempt left out; None if no attempt is counted."""
    counted = {name: counts for name, counts in given.items() if any(counts)}
    if not counted:
        return None
    used = [place for counts in counted.values() for place, n in enumerate(counts) if n]
    first, last = max(0, min(used) - 1), max(used) + 1
    columns = last - first
    cut = {name: [*counts[first:last], *[0] * (last - len(counts))][:columns] for name, counts in counted.items()}
    shares = {name: [100 * n / sum(counts) for n in counts] for name, counts in cut.items()}
    top = round_number(max(max(each) for each in shares.values()))
    width = (1 - GAP) * UNIT / len(cut)
    parts = tuple(
        Part(name, sum(counts), tuple(counts), tuple(shares[name]), _path(shares[name], top, number * width, width))
        for number, (name, counts) in enumerate(cut.items())
    )
    every = -(-columns // LABELS_MOST)
    bounds = tuple(BOUNDS[place] if place < len(BOUNDS) else None for place in range(first, last))
    return Durations(bounds, tuple(place % every == 0 for place in range(columns)), (top, top / 2, 0.0), parts)


def _path(shares: Sequence[float], top: float, offset: float, width: float) -> str:
    """A bar for each length that occurs."""
    bars = []
    for place, share in enumerate(shares):
        if share:
            left, high = (place + GAP / 2) * UNIT + offset, HEIGHT - share / top * HEIGHT
            bars.append(f"M{left:.1f} {HEIGHT}V{high:.1f}h{width:.1f}V{HEIGHT}z")
    return "".join(bars)
