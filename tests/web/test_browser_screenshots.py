"""The pictures of docs/dashboard.md.

A usual run makes them and throws them away. With PGQUEUE_SCREENSHOTS=docs/images they are written there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from browsers import Tab, tab
from psycopg.conninfo import conninfo_to_dict
from web_processes import OPERATOR, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.second, pytest.mark.promise("F157")]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "dashboard.md"
PICTURES: dict[str, tuple[str, Any, str]] = {
    "overview": ("/", "light", "header"),
    "jobs": ("/jobs?state=failed&task=cards.charge", "light", ".head"),
    "job": ("/jobs/{id}", "dark", "header"),
    "history": ("/history", "light", ".charts"),
    "workers": ("/workers", "dark", "header"),
}
"""The name of the picture, the page, the theme, and what stands at the top of the picture."""
HEIGHTS = {"overview": 960}
"""Of the picture, where 560 pixels do not show what it is for: the parts that stand side by side."""
MOST = 180_000  # bytes
NAME = """
([name, instead]) => {
    const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.nodeValue = texts.currentNode.nodeValue.replaceAll(name, instead);
}
"""
"""The database of a test has a name that says nothing to readers."""


@pytest.fixture(scope="module")
def dsn(shop: str) -> str:
    return shop


@pytest.fixture(scope="module")
def operator(browser: Browser, dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    log = tmp_path_factory.mktemp("web") / "log"
    with serving(dsn, log, "--auth") as url, tab(browser, url) as made:
        made.sign_in(OPERATOR)
        yield made


@pytest.mark.parametrize("name", PICTURES)
def test_each_picture_of_the_docs_can_be_made(operator: Tab, dsn: str, name: str, tmp_path: Path) -> None:
    where = Path(os.environ.get("PGQUEUE_SCREENSHOTS") or tmp_path)
    path, theme, top = PICTURES[name]
    with psycopg.connect(dsn) as conn:
        [(id,)] = conn.execute("SELECT max(id) FROM pgqueue.job_dead WHERE state = 'failed'").fetchall()
    operator.page.set_viewport_size({"width": 1280, "height": HEIGHTS.get(name, 560)})
    operator.page.emulate_media(color_scheme=theme)
    operator.go(path.replace("{id}", str(id)))
    operator.page.evaluate(NAME, [conninfo_to_dict(dsn)["dbname"], "shop"])
    operator.page.locator(top).first.evaluate("each => each.scrollIntoView()")
    picture = operator.page.screenshot(path=where / f"{name}.png")
    assert picture.startswith(b"\x89PNG") and len(picture) < MOST
    assert f"(images/{name}.png)" in PAGE.read_text(encoding="utf-8")
    assert len((PAGE.parent / "images" / f"{name}.png").read_bytes()) < MOST


def test_there_is_no_other_picture() -> None:
    assert {path.stem for path in (PAGE.parent / "images").glob("*.png")} == set(PICTURES)
