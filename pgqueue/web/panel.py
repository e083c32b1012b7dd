"""The charts of a page, as numbers: they share one axis of time, the columns of its steps, and the marks on them.

Pure. Made by pages and drawn by the template `charts.html`; no text of HTML is made here. A step that is not counted
yet has no values: it is drawn as such, and never as 0. Each axis of values ends at a round number, and so does its
half. The drawing has `UNIT` units for each step and `HEIGHT` for the whole axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pgqueue.jobs.values import EPOCH
from pgqueue.web.charts import Step

UNIT, HEIGHT = 10, 100
BAR = 0.84
"""The width of a bar, as a share of its step."""
UNCOUNTED = timedelta(minutes=2)
"""The minutes that began within this time are not counted yet, unless the database says that they are."""
CLOSE = 0.2
"""As a share of the axis. A version that starts so shortly after another one is marked by a number: names need room."""
ROUND = (1, 2, 4, 6, 8, 10)
MINUTE, HOUR, DAY = 60, 3_600, 86_400
ROUND_TIMES = (
    *(n * unit for unit in (0.001, 0.01, 0.1, 1) for n in (1, 2, 4, 6)), 10, 20, 30,
    *(n * MINUTE for n in (1, 2, 4, 6, 10, 20, 30)), *(n * HOUR for n in (1, 2, 4, 6, 12)),
    *(n * DAY for n in (1, 2, 4, 6, 10, 20, 40)),
)  # fmt: skip
LABELS = (timedelta(minutes=15), timedelta(hours=1), timedelta(hours=4), timedelta(days=5))
"""A time stands below each step that begins at such a time of the clock: of these the first that is seldom enough."""
LABELS_MOST = 7


@dataclass(frozen=True, slots=True)
class Part:
    """A row of numbers, one for each step: None where there is none, or none yet. `path` draws it."""

    name: str
    label: str
    numbers: tuple[float | None, ...]
    path: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart: bars that stand on each other, or a line. `ticks` are the top, the middle, the ground of its axis."""

    name: str
    title: str
    is_time: bool
    is_line: bool
    ticks: tuple[float, float, float]
    parts: tuple[Part, ...]
    uncounted: str
    """Draws the steps that have no values because they are not counted yet."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What happened at a time: the first start of a version, or a change by hand. `flag` is how the axis calls it."""

    at: datetime
    kind: str
    flag: str
    text: str
    is_named: bool = False
    """Whether `flag` is the name of the version; else it is a number."""


@dataclass(frozen=True, slots=True)
class Column:
    """A step, in all charts of the page. `flags` are those of its marks; `is_labelled`: its time stands on the axis."""

    at: datetime
    until: datetime
    is_counted: bool
    is_labelled: bool
    is_late: bool
    kind: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """The charts of a page."""

    columns: tuple[Column, ...]
    figures: tuple[Figure, ...]
    marks: tuple[Mark, ...]
    uncounted: int
    """How many steps are not counted yet."""


class Drawing:
    """Figures over these steps."""

    def __init__(self, steps: Sequence[Step], length: timedelta, now: datetime) -> None:
        self._steps, self._length, self._now = steps, length, now
        self._counted = [_is_counted(step, now) for step in steps]

    def bars(self, name: str, title: str, kinds: Sequence[tuple[str, str]]) -> Figure:
        """A bar for each step: a part for each of these numbers and its label, the first one at the ground."""
        values = [[self._sum(kind, place) for place in range(len(self._steps))] for kind, _ in kinds]
        top = round_number(max((sum(filter(None, each)) for each in zip(*values, strict=True)), default=0))
        ground, parts = [float(HEIGHT)] * len(self._steps), []
        for (kind, label), row in zip(kinds, values, strict=True):
            path = []
            for place, value in enumerate(row):
                if value:
                    left, right = _bar(place)
                    low = ground[place]
                    ground[place] -= value / top * HEIGHT
                    path.append(f"M{left} {_short(low)}V{_short(ground[place])}H{right}V{_short(low)}z")
            parts.append(Part(kind, label, tuple(row), "".join(path)))
        return Figure(name, title, False, False, (top, top / 2, 0.0), tuple(parts), self._uncounted(values[0]))

    def line(
        self, name: str, title: str, label: str, value: Callable[[Step], float | None], *, is_time: bool = False
    ) -> Figure:
        """A line through the steps that have a value, with a gap where one has none."""
        values = [value(step) for step in self._steps]
        most = max((each for each in values if each is not None), default=0.0)
        top = round_time(most) if is_time else round_number(most)
        path = "".join(_piece(piece, top) for piece in _pieces(values))
        part = Part(name, label, tuple(values), path)
        return Figure(name, title, is_time, True, (top, top / 2, 0.0), (part,), self._uncounted(values))

    def panel(self, figures: Iterable[Figure], marks: Iterable[Mark] = ()) -> Panel:
        """All of it with these marks; those outside of the time are left out."""
        first, last = self._steps[0].at, self._steps[-1].at + self._length
        shown = _flagged(
            [mark for mark in sorted(marks, key=lambda mark: mark.at) if first <= mark.at < last], last - first
        )
        every = next((each for each in LABELS if (last - first) / each < LABELS_MOST), LABELS[-1])
        columns = []
        for place, step in enumerate(self._steps):
            at, until = step.at, step.at + self._length
            here = [mark for mark in shown if at <= mark.at < until]
            columns.append(
                Column(
                    at,
                    until,
                    self._counted[place],
                    (at - EPOCH) % every < self._length and place < 0.95 * len(self._steps),
                    2 * place > len(self._steps),
                    "version" if any(mark.kind == "version" for mark in here) else here[0].kind if here else "",
                    _flags(here),
                )
            )
        return Panel(tuple(columns), tuple(figures), tuple(shown), self._counted.count(False))

    def _uncounted(self, values: Sequence[float | None]) -> str:
        empty = [place for place, value in enumerate(values) if value is None and not self._counted[place]]
        return "".join(f"M{place * UNIT} 0V{HEIGHT}h{UNIT}V0z" for place in empty)

    def _sum(self, kind: str, place: int) -> float | None:
        return self._steps[place].sum(kind) if self._counted[place] else None


def _is_counted(step: Step, now: datetime) -> bool:
    return step.at <= now - UNCOUNTED or any(row.started is not None for row in step.rows)


def round_number(most: float) -> float:
    """The least round number of jobs, 2 or more, that is not below `most`; its half is a whole number, too.

    >>> [round_number(each) for each in (0, 1, 3, 9, 11, 61, 890, 1_066)]
    [2, 2, 4, 10, 20, 80, 1000, 2000]
    """
    unit = 1
    while ROUND[-1] * unit < most:
        unit *= 10
    return next(n * unit for n in ROUND if n * unit >= max(most, 2))


def round_time(most: float) -> float:
    """The least round time in seconds that is not below `most`.

    >>> [round_time(each) for each in (0, 0.013, 0.7, 5, 45, 100, 5_000, 90_000)]
    [0.001, 0.02, 1, 6, 60, 120, 7200, 172800]
    """
    return next((each for each in ROUND_TIMES if each >= most), most)


def _flagged(marks: Sequence[Mark], whole: timedelta) -> list[Mark]:
    """Each mark with its flag: the name of a version, if there is room behind the last name; else a number."""
    found, named = list[Mark](), datetime.min.replace(tzinfo=UTC)
    for number, mark in enumerate(marks, 1):
        has_room = mark.kind == "version" and mark.at - named >= CLOSE * whole
        named = mark.at if has_room else named
        flag = mark.flag if has_room else str(number)
        found.append(Mark(mark.at, mark.kind, flag, mark.text, is_named=has_room))
    return found


def _flags(marks: Sequence[Mark]) -> tuple[str, ...]:
    """The flags of one step: the numbers as a range."""
    names = [mark.flag for mark in marks if mark.is_named]
    numbers = [mark.flag for mark in marks if not mark.is_named]
    return (*names, *numbers) if len(numbers) < 2 else (*names, f"{numbers[0]}–{numbers[-1]}")


def _pieces(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """The values that stand beside each other, with their places."""
    pieces, piece = list[list[tuple[int, float]]](), list[tuple[int, float]]()
    for place, value in enumerate([*values, None]):
        if value is not None:
            piece.append((place, value))
        elif piece:
            pieces.append(piece)
            piece = []
    return pieces


def _piece(piece: Sequence[tuple[int, float]], top: float) -> str:
    """A line through the middle of its steps; a value alone is as wide as a bar."""
    if len(piece) == 1:
        [(place, value)] = piece
        left, right = _bar(place)
        return f"M{left} {_high(value, top)}H{right}"
    points = [f"{_short((place + 0.5) * UNIT)} {_high(value, top)}" for place, value in piece]
    return f"M{'L'.join(points)}"


def _bar(place: int) -> tuple[str, str]:
    return _short((place + (1 - BAR) / 2) * UNIT), _short((place + (1 + BAR) / 2) * UNIT)


def _high(value: float, top: float) -> str:
    return _short(HEIGHT - value / top * HEIGHT)


def _short(number: float) -> str:
    """With one digit behind the point at most.

    >>> [_short(each) for each in (12.0, 0.84, 99.96)]
    ['12', '0.8', '100']
    """
    return f"{round(number, 1):g}"
