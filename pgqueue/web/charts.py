"""The steps that charts are made of, and small lines beside a number. `panel.py` makes whole charts of the steps.

Pure. The history comes in minutes or hours, and only those in which something happened. Here each chart has the same
number of steps, and an empty one is a zero or a gap. A template draws them; no text is made here.
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
class Chart:
    """A small line without an axis. `top` is the value of its upper edge, and `lines` the points of each piece."""

    top: float
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
    return Chart(top, tuple(pieces))


def _short(number: float) -> float:
    return round(number, 2)
