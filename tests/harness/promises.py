"""A pytest plugin: which test proves which row of promises.md.

`@pytest.mark.promise("E01", ...)` names rows; a row that does not exist is an error at collection. `pytest --promises`
lists every row with the tests that carry it, long ones included, and the rows that have none, and runs nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "promises.md"
_ROW = re.compile(r"^\| ([A-Z]\d{2,3}) \| (.*?) \|", re.MULTILINE)
_FOUND = pytest.StashKey[dict[str, list[str]]]()


def rows(page: str) -> dict[str, str]:
    """Every row of the page: its name and its promise, in the page's order."""
    return dict(_ROW.findall(page))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--promises", action="store_true", help="list the rows of tests/promises.md and their tests, run none"
    )


@pytest.hookimpl(tryfirst=True)  # before -m takes the long ones away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = rows(PAGE.read_text(encoding="utf-8"))
    found: dict[str, list[str]] = defaultdict(list)
    for item in items:
        for row in _named(item):
            if row not in known:
                raise pytest.UsageError(f"{item.nodeid}: promises.md has no row {row!r}")
            name = item.nodeid.split("[", 1)[0]
            if name not in found[row]:
                found[row].append(name)
    config.stash[_FOUND] = found


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.getoption("--promises"):
        return None
    known = rows(PAGE.read_text(encoding="utf-8"))
    print("", *report(known, session.config.stash[_FOUND]), sep="\n")
    return True  # nothing is run


def report(known: dict[str, str], found: dict[str, list[str]]) -> list[str]:
    """The lines of the list: kept promises with their tests, then those without."""
    kept = ["\n       ".join([f"{row}  {promise}", *found[row]]) for row, promise in known.items() if row in found]
    bare = [f"{row}  {promise}" for row, promise in known.items() if row not in found]
    return [*kept, "", f"without a test: {len(bare)} of {len(known)}", *bare]


def _named(item: pytest.Item) -> list[str]:
    return [row for marker in item.iter_markers("promise") for row in marker.args]
