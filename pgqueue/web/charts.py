"""Charts as numbers: where each bar, line and mark of an SVG stands. A template draws them; no text is made here.

Pure. The history comes in minutes or hours, and only those in which something happened. Here each chart has the same
number of steps, and an empty one is a zero or a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import zip_longest

from pgqueue.admin.history import HistoryRow

WIDTH, HEIGHT = 720, 140
"""Of the view box, in its own units."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a step: `kind` says what it counts, `value` how many."""

    kind: str
    value: float
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of some steps. `top` is the value of its upper edge; `lines` are the points of a line without a gap."""

    top: float
    bars: tuple[Bar, ...] = ()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of the history between two times."""

    at: datetime
    rows: tuple[HistoryRow, ...]

    def sum(self, name: str) -> int | None:
        """The sum of a number of these rows; None if none of them is counted yet."""
        known = [value for row in self.rows if (value := getattr(row, name)) is not None]
        return sum(known) if known or not self.rows else None

    def most(self, name: str) -> float | None:
        """The largest of a number; None if there is none."""
        return max((value for row in self.rows if (value := getattr(row, name)) is not None), default=None)

    def merged(self, name: str) -> tuple[int, ...]:
        """The sum of a histogram of these rows."""
        return tuple(map(sum, zip_longest(*(getattr(row, name) for row in self.rows), fillvalue=0)))


def steps(rows: Iterable[HistoryRow], first: datetime, length: timedelta, number: int) -> list[Step]:
    """The rows in so many steps from `first` on. A row outside of them is left out."""
    found: list[list[HistoryRow]] = [[] for _ in range(number)]
    for row in rows:
        place = (row.at - first) // length
        if 0 <= place < number:
            found[place].append(row)
    return [Step(first + place * length, tuple(each)) for place, each in enumerate(found)]


def stacked(given: Sequence[Step], kinds: Sequence[str]) -> Chart:
    """A bar for each step, made of one part for each of these numbers, the first at the ground."""
    top = max((sum(step.sum(kind) or 0 for kind in kinds) for step in given), default=0) or 1
    width, bars = WIDTH / max(1, len(given)), []
    for place, step in enumerate(given):
        ground = float(HEIGHT)
        for kind in kinds:
            if value := step.sum(kind):
                height = value / top * HEIGHT
                ground -= height
                bars.append(
                    Bar(kind, value, _short(place * width), _short(ground), _short(0.85 * width), _short(height))
                )
    return Chart(top, tuple(bars))


def line(given: Sequence[Step], value: Callable[[Step], float | None], least: float = 0) -> Chart:
    """A line over the steps that have a value; the line has a gap where one has none. A step is as wide as a bar."""
    return line_of([value(step) for step in given], least)


def line_of(values: Sequence[float | None], least: float = 0) -> Chart:
    """A line over these values of steps. Its upper edge is the largest one, and not below `least`: so small numbers are
    not drawn as large ones."""
    top = max((each for each in values if each is not None), default=0)
    top = max(top, least) or 1
    width, pieces, piece = WIDTH / max(1, len(values)), list[str](), list[str]()
    for place, each in enumerate([*values, None]):
        if each is not None:
            y = _short(HEIGHT - each / top * HEIGHT)
            piece += [f"{_short(place * width)},{y}", f"{_short((place + 0.85) * width)},{y}"]
        elif piece:
            pieces.append(" ".join(piece))
            piece = []
    return Chart(top, lines=tuple(pieces))


def place_of(at: datetime, first: datetime, whole: timedelta) -> float | None:
    """Where a time stands on the axis; None if it is not on it."""
    share = (at - first) / whole
    return _short(share * WIDTH) if 0 <= share <= 1 else None


def _short(number: float) -> float:
    return round(number, 2)
