"""The pages as a site: they build without a warning, and none leads to a section that is not there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browsers import launched
from pages import PAGES, ROOT

pytestmark = pytest.mark.promise("F353")


def build(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(root / "mkdocs.yml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


# The page copies by an event of its own; in a file of the disk it has no right to write the clipboard.
HEAR = "addEventListener('copy', () => { window.taken = document.activeElement.value }, true)"


def copied_from(page: Path, text: str) -> str:
    """What the copy button of the block with this text takes."""
    with launched() as browser:
        tab = browser.new_page()
        tab.add_init_script(HEAR)
        tab.goto(page.as_uri())
        block = tab.locator(".highlight", has_text=text)
        block.get_by_role("button", name="Copy to clipboard").click()
        tab.wait_for_function("window.taken !== undefined")
        return str(tab.evaluate("window.taken"))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What the site is made of, for a build that leaves nothing in the checkout."""
    for name in ("mkdocs.yml", "docs", "tests/harness/site_links.py"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target)
    return tmp_path


@pytest.mark.second
@pytest.mark.promise("F438")
def test_the_site_builds_without_a_warning_and_can_be_searched(copied: Path) -> None:
    done = build(copied)
    assert done.returncode == 0, done.stderr
    site = copied / "build" / "site"
    assert "the-disk-fills" in (site / "night.html").read_text(encoding="utf-8")
    assert (site / "images" / "order.svg").is_file()
    assert "Not run here" not in (site / "dashboard.html").read_text(encoding="utf-8")
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    night = (site / "night.html").read_text(encoding="utf-8")
    assert {"default", "slate"} <= set(re.findall(r'data-md-color-scheme="(\w+)"', night)), "light and dark"
    taken = copied_from(site / "tutorial.html", "touch bank_is_open")
    assert [line for line in taken.splitlines() if line] == [
        "touch bank_is_open",
        "pgqueue reschedule 3 --now",
        "pgqueue work receipts cards",
        "pgqueue jobs --task cards.charge",
    ]


@pytest.mark.second
def test_a_link_to_no_section_fails_the_build(copied: Path) -> None:
    page = copied / "docs" / "night.md"
    page.write_text(page.read_text(encoding="utf-8").replace("(#the-disk-fills)", "(#no-such-section)"))
    done = build(copied)
    assert done.returncode != 0 and "no-such-section" in done.stderr


def test_the_site_leads_to_each_page_once() -> None:
    named = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    there = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if (ROOT / "docs") in page.parents]
    assert sorted(named) == sorted(there)
