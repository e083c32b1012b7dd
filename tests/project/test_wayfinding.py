"""The page of questions leads where it says: every file is there, and holds the name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("test_wayfinding.md")
ROWS = re.findall(r"^\| (.+\?) \| `([\w/.]+)` \| `(\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def names(path: Path) -> set[str]:
    """What a module defines at its top."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_page_asks_enough_and_nothing_twice() -> None:
    assert len(ROWS) >= 30
    assert len({question for question, _, _ in ROWS}) == len({file for _, file, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("question", "file", "name"), ROWS, ids=[file for _, file, _ in ROWS])
def test_the_file_is_there_and_holds_the_name(question: str, file: str, name: str) -> None:
    assert name in names(ROOT / file), question
