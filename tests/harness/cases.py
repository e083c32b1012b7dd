"""Which cases of a test with several parameters run every day: `@pytest.mark.each_value`.

Combinations of all values multiply, and most of them find what their neighbours find. With this marker, some
combinations run every day, so that each value of each parameter is in at least one of them. All others are of the
second stage. Used by conftest only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

Values = frozenset[tuple[str, int]]
"""What a case tries: the name of each parameter with the place of its value."""


def every_day(cases: Sequence[Values]) -> set[int]:
    """The places of the cases that run every day: again and again the one that has most values not tried yet."""
    missing, chosen = set[tuple[str, int]]().union(*cases), set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda place: len(cases[place] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def choose(items: Sequence[pytest.Item]) -> None:
    """Mark as `second` what does not run every day."""
    products: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("each_value"):
            products[item.nodeid.partition("[")[0]].append(item)
    for product in products.values():
        daily = every_day(_values([item.callspec.params for item in product]))
        for place, item in enumerate(product):
            if place not in daily:
                item.add_marker(pytest.mark.second)


def _values(cases: Sequence[dict[str, Any]]) -> list[Values]:
    """The same cases with the place of each value, in the order of their first cases. Values are told by identity."""
    seen: defaultdict[str, dict[int, int]] = defaultdict(dict)
    return [
        frozenset((name, seen[name].setdefault(id(value), len(seen[name]))) for name, value in case.items())
        for case in cases
    ]
