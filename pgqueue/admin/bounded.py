"""A list that is read up to a bound: its rows, and whether there may be others.

A command and a page say so in the same words: `cut_at` is of the list `items`, `steps_cut_at` of the list `steps`
beside it. It is the bound at which the reading has ended; None if all was read.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounded(Generic[T]):
    """The rows of a list, and the bound at which its reading has ended; None if all was read."""

    rows: list[T]
    cut_at: int | None


def cut_at(rows: Sized, most: int) -> int | None:
    """The bound of a reading that takes `most` rows, if it has ended there. There may be no other row.

    >>> cut_at("abc", 3), cut_at("ab", 3)
    (3, None)
    """
    return most if len(rows) >= most else None
