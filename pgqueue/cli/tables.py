"""Tables and times for people: aligned columns that fit the terminal, short ages.

Only what goes to a terminal is cut. What goes to a file or to another program is whole, whatever COLUMNS says.
"""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Sequence
from datetime import timedelta
from math import inf
from typing import TypeVar

from pgqueue.jobs.values import UNITS
from pgqueue.plain_text import plain

T = TypeVar("T")

MARGIN = 2
NARROWEST = 8


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], *, right: str = "", gives: str = "") -> list[str]:
    """The lines of a table. `right` names columns that are aligned to the right, `gives` those shortened first.

    table(["ID", "TASK"], [[7, "mail.send"]], right="ID", gives="TASK")
    """
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    widths = [max(columns_of(cell) for cell in column) for column in zip(heads, *cells, strict=True)]
    _fit(widths, [heads.index(head) for head in gives.split()], [len(head) for head in heads])
    to_right = right.split()
    return [
        (" " * MARGIN)
        .join(
            _padded(short(cell, width), width, to_right=head in to_right)
            for head, cell, width in zip(heads, row, widths, strict=True)
        )
        .rstrip()
        for row in [list(heads), *cells]
    ]


def short(text: str, width: int) -> str:
    """`text`; if it takes more than `width` columns, cut with an ellipsis."""
    if columns_of(text) <= width:
        return text
    end = max(0, width - 1)
    while columns_of(text[:end]) > max(0, width - 1):
        end -= 1
    return f"{text[:end]}…"


def columns_of(text: str) -> int:
    """How many columns a text takes on a terminal: two for a wide character, none for one that joins the one before.

    >>> columns_of("mail"), columns_of("日本"), columns_of("e\\u0301")
    (4, 4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "FW") for one in text)


def span(seconds: float | timedelta | None) -> str:
    """A length of time in two or three characters: `250ms`, `12s`, `5m`, `3h`, `8d`."""
    if seconds is None:
        return ""
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    most = (("s", 120), ("m", 120), ("h", 48), ("d", inf))
    unit = next(unit for unit, number in most if seconds < UNITS[unit] * number)
    return f"{seconds / UNITS[unit]:.0f}{unit}"


def width() -> int | None:
    """The width of tables: that of the terminal, at least 80. None: the output is no terminal, and is not cut."""
    return max(80, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else None


def fits(widths: Sequence[int]) -> bool:
    """Whether columns of these widths fit the terminal."""
    most = width()
    return most is None or _whole(widths) <= most


def fitting(items: Sequence[T], most: int) -> tuple[Sequence[T], int]:
    """The first `most` of the items on a terminal, else all of them; and how many are left out."""
    shown = items if width() is None else items[:most]
    return shown, len(items) - len(shown)


def cut_line(cut_at: int | None, what: str, order: str, finds: str = "") -> list[str]:
    """The line that says that a list was not read to its end; none if it was. `finds` is an option that finds others.

    >>> cut_line(1000, "keys", "by name", "--begins")
    ['Only the first 1,000 keys by name were looked at. There may be others: --begins finds them.']
    """
    if cut_at is None:
        return []
    others = f"There may be others: {finds} finds them." if finds else "There may be others."
    return [f"Only the first {cut_at:,} {what} {order} were looked at. {others}"]


def _whole(widths: Sequence[int]) -> int:
    return sum(widths) + MARGIN * (len(widths) - 1)


def _padded(text: str, width: int, *, to_right: bool) -> str:
    blank = " " * (width - columns_of(text))
    return blank + text if to_right else text + blank


def _fit(widths: list[int], gives: Sequence[int], heads: Sequence[int]) -> None:
    """Shorten columns until the table fits: first those in `gives` in turn, then the others."""
    most = width()
    if most is None:
        return
    over = _whole(widths) - most
    widest_first = sorted(range(len(widths)), key=lambda place: -widths[place])
    for place in [*gives, *(place for place in widest_first if place not in gives)]:
        cut = min(max(0, over), max(0, widths[place] - max(NARROWEST, heads[place])))
        widths[place] -= cut
        over -= cut
