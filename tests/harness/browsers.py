"""A real browser for the tests: the machine's own Chromium, driven by Playwright; axe-core looks at its pages.

Nothing is fetched: Playwright is told where Chromium is, and axe-core comes in a package. Without Chromium the tests
are skipped with this reason; where CI is set they fail.

Playwright's sync interface runs a loop in the thread of the tests. So a module with a browser has no async tests.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, FloatRect, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa"]}}
"""The rules of axe-core for WCAG 2.0, 2.1 and 2.2, levels A and AA."""
WIDTHS = {"phone": 360, "desk": 1280, "wall": 3840}
HEIGHT = 900
PATIENCE = 30_000  # milliseconds

# What the policy of a page refuses is an event.
_WATCH = "addEventListener('securitypolicyviolation', e => console.error('policy', e.violatedDirective, e.blockedURI))"


def chromium() -> str:
    """The path of Chromium. Without one the test is skipped, and fails where CI is set."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found
    leave_out(f"no browser: none of {', '.join(PROGRAMS)} is on the PATH (on Debian: apt-get install chromium)")


def leave_out(why: str) -> NoReturn:
    """Skip, but not where CI is set."""
    if os.environ.get("CI"):
        pytest.fail(f"{why}; CI leaves nothing out")
    pytest.skip(why)


@contextmanager
def launched() -> Iterator[Browser]:
    """A headless Chromium with an empty profile of its own, which is gone at the end."""
    path = chromium()
    from playwright.sync_api import sync_playwright  # here: the everyday tests collect this module, too

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass(slots=True)
class Tab:
    """A page of the browser at a dashboard, and what its console says."""

    page: Page
    url: str
    said: list[str] = field(default_factory=list)

    def go(self, path: str) -> None:
        """Open this path of the dashboard; a status of 400 or more is an error."""
        answer = self.page.goto(self.url + path)
        assert answer is not None and answer.status < 400, (path, answer and answer.status)

    def sign_in(self, secret: str) -> None:
        """Fill in the form of the login."""
        self.page.goto(f"{self.url}/login")
        self.page.get_by_label("Secret").fill(secret)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(re.compile(r"/$"))

    def clean(self) -> None:
        """No error and no warning was in the console, and the policy of the page refused nothing."""
        assert self.said == []

    def findings(self) -> list[str]:
        """What axe-core finds on the page as it is: the rule, and where. Of a chart it looks at the whole only."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page, {"exclude": [["svg[role=img] > *"]]}, RULES).response
        assert found["passes"], "axe-core has looked at nothing"
        return [
            f"{each['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for each in found["violations"]
            for node in each["nodes"]
        ]

    def header(self) -> dict[str, FloatRect]:
        """What is seen in the header, from left to right, and where. It has one row: none stands on another one."""
        found = {
            name: box
            for name in (".menu", ".brand", ".database", ".search", ".live", ".role")
            if (each := self.page.locator(f"header {name}")).is_visible() and (box := each.bounding_box()) is not None
        }
        boxes, bottom = list(found.values()), self.page.locator("header").bounding_box()
        assert bottom is not None and bottom["height"] <= 64
        assert all(box["y"] >= 0 and box["y"] + box["height"] <= bottom["height"] + 1 for box in boxes), found
        assert all(one["x"] + one["width"] <= other["x"] for one, other in pairwise(boxes)), found
        assert found[".search"]["width"] >= 100, found
        return found

    def overflow(self) -> int:
        """By how many pixels the whole page can be scrolled sideways."""
        wide: int = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return wide


@contextmanager
def tab(browser: Browser, url: str, width: int = WIDTHS["desk"], **options: Any) -> Iterator[Tab]:
    """A tab in a context of its own, with no cookies. What its console says is looked at when it is closed."""
    context: BrowserContext = browser.new_context(viewport={"width": width, "height": HEIGHT}, **options)
    context.set_default_timeout(PATIENCE)
    context.add_init_script(_WATCH)
    try:
        made = Tab(context.new_page(), url)
        made.page.on("console", lambda message: _heard(made, message))
        made.page.on("pageerror", lambda error: made.said.append(str(error)))
        yield made
        made.clean()
    finally:
        context.close()


def _heard(tab: Tab, message: ConsoleMessage) -> None:
    if message.type in ("error", "warning"):
        tab.said.append(f"{message.type}: {message.text}")
