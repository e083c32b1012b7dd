"""What pgqueue says leads to a page of the manual: one function makes each address, and each section is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT, anchors

from pgqueue import manual
from pgqueue.admin.why.reasons import CODES, Reason
from pgqueue.manual import Symptom, at_night

PACKAGE = ROOT / "pgqueue"
MODULES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
TEMPLATES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.html"))}

pytestmark = pytest.mark.promise("F350")


def there(address: str) -> bool:
    """Whether this page of the manual is there, with the section that the address names."""
    file, _, section = address.partition("#")
    page = ROOT / file
    return page.is_file() and (not section or section in anchors(page))


def named() -> Iterator[str]:
    """The address that each call of `page` and `at_night` in the code makes, and each `manual` in a template."""
    for path, source in MODULES.items():
        if "pgqueue.manual import" not in source or path.name == "manual.py":
            continue
        for call in ast.walk(ast.parse(source)):
            match call:
                case ast.Call(func=ast.Name(id="page"), args=[ast.Constant(), *_] as given):
                    yield manual.page(*(each.value for each in given if isinstance(each, ast.Constant)))  # type: ignore[arg-type]
                case ast.Call(func=ast.Name(id="at_night"), args=[ast.Attribute(attr=symptom)]):
                    yield at_night(Symptom[symptom])
    for source in TEMPLATES.values():
        for given in re.findall(r"\bmanual\(([^)]*)\)", source):
            yield manual.page(*re.findall(r'"([^"]*)"', given))


def spoken(source: str) -> Iterator[str]:
    """The texts of a module that are no docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_each_page_and_section_that_is_named_is_there() -> None:
    found = list(named())
    assert len(found) > 30 and {each.partition("#")[0] for each in found} >= {"docs/night.md", "docs/rates.md"}
    assert [each for each in found if not there(each)] == []
    assert not there("docs/night.md#nothing") and not there("docs/nothing.md")


def test_each_reason_names_a_page_that_is_there() -> None:
    pages = {code: Reason(code, "").page for code in CODES}
    assert [code for code, page in pages.items() if not there(page)] == []
    assert {page.partition("#")[2] for page in pages.values()} - {symptom.value for symptom in Symptom} == {""}


def test_no_text_has_an_address_of_its_own() -> None:
    texts: dict[Path, list[str]] = {path: list(spoken(source)) for path, source in MODULES.items()}
    texts |= {path: [source] for path, source in TEMPLATES.items()}
    found = {path.name: [each for each in said if "docs/" in each] for path, said in texts.items()}
    assert {name: said for name, said in found.items() if said} == {"manual.py": ["docs/"]}
