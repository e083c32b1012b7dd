"""Paths of the machine that measured are not for those who read a record: of each only the last name is kept."""

from __future__ import annotations

import re
from typing import Any

_PATH = re.compile(r"(?<![\w.:/~-])(?:~|(?=/))(?:/[\w.+@%=~-]+){2,}/?")
"""Two names or more behind a slash, or behind `~/`. What follows a word, a colon or a slash is no path of its own."""


def bare(found: Any) -> Any:
    """The same document; in each of its texts `…/NAME` stands for a path."""
    if isinstance(found, str):
        return _PATH.sub(lambda path: "…/" + path[0].rstrip("/").rpartition("/")[2], found)
    if isinstance(found, dict):
        return {key: bare(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [bare(value) for value in found]
    return found
