"""Tables and times for people: aligned columns that fit the terminal, short ages.

Only what goes to a terminal is cut. What goes to a file or to another program is whole, whatever COLUMNS says.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

from pgqueue.plain_text import plain

T = TypeVar("T")

MARGIN = 2
NARROWEST = 8


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], *, right: str = "", gives: str = "") -> list[str]:
    """The lines of a table. `right` names columns that are aligned to the right, `gives` those shortened first.

    table(["ID", "TASK"], [[7, "mail.send"]], right="ID", gives="TASK")
    """
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(heads, *cells, strict=True)]
    _fit(widths, [heads.index(head) for head in gives.split()], [len(head) for head in heads])
    to_right = right.split()
    return [
        (" " * MARGIN)
        .join(
            short(cell, width).rjust(width) if head in to_right else short(cell, width).ljust(width)
            for head, cell, width in zip(heads, row, widths, strict=True)
        )
        .rstrip()
        for row in [list(heads), *cells]
    ]


def short(text: str, width: int) -> str:
    """`text`; if it is longer than `width`, cut with an ellipsis."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def span(seconds: float | timedelta | None) -> str:
    """A length of time in two or three characters: `250ms`, `12s`, `5m`, `3h`, `8d`."""
    if seconds is None:
        return ""
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    for unit, size, most in (("s", 1, 120), ("m", 60, 120), ("h", 3600, 48)):
        if seconds < size * most:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def width() -> int | None:
    """The width of tables: that of the terminal, at least 80. None: the output is no terminal, and is not cut."""
    return max(80, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else None


def fitting(items: Sequence[T], most: int) -> tuple[Sequence[T], int]:
    """The first `most` of the items on a terminal, else all of them; and how many are left out."""
    shown = items if width() is None else items[:most]
    return shown, len(items) - len(shown)


def _fit(widths: list[int], gives: Sequence[int], heads: Sequence[int]) -> None:
    """Shorten columns until the table fits: first those in `gives` in turn, then the others."""
    most = width()
    if most is None:
        return
    over = sum(widths) + MARGIN * (len(widths) - 1) - most
    widest_first = sorted(range(len(widths)), key=lambda place: -widths[place])
    for place in [*gives, *(place for place in widest_first if place not in gives)]:
        cut = min(max(0, over), max(0, widths[place] - max(NARROWEST, heads[place])))
        widths[place] -= cut
        over -= cut
