"""The pages as a site: they build without a warning, and none leads to a section that is not there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

pytestmark = [pytest.mark.second, pytest.mark.promise("F353")]


def build(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(root / "mkdocs.yml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What the site is made of, for a build that leaves nothing in the checkout."""
    for name in ("mkdocs.yml", "docs", "tests/harness/site_links.py"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target)
    return tmp_path


def test_the_site_builds_without_a_warning_and_can_be_searched(copied: Path) -> None:
    done = build(copied)
    assert done.returncode == 0, done.stderr
    site = copied / "build" / "site"
    assert "the-disk-fills" in (site / "night.html").read_text(encoding="utf-8")
    assert "Not run here" not in (site / "dashboard.html").read_text(encoding="utf-8")
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_a_link_to_no_section_fails_the_build(copied: Path) -> None:
    page = copied / "docs" / "night.md"
    page.write_text(page.read_text(encoding="utf-8").replace("(#the-disk-fills)", "(#no-such-section)"))
    done = build(copied)
    assert done.returncode != 0 and "no-such-section" in done.stderr
