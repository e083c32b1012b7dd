"""The dashboard in a real browser: what visitors do there, from the login to the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from browsers import launched, tab
from web_processes import OPERATOR, serving

from pgqueue.pytest_plugin import Databases

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.second, pytest.mark.promise("F153")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as made:
        yield made


@pytest.fixture(scope="module")
def url(pgqueue_databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard in a process of its own."""
    log = tmp_path_factory.mktemp("web") / "log"
    with pgqueue_databases.copy() as dsn, serving(dsn, log, "--auth") as url:
        yield url


def test_an_operator_signs_in_and_sees_the_overview(browser: Browser, url: str) -> None:
    with tab(browser, url) as seen:
        seen.go("/")
        assert seen.page.get_by_role("heading", name="Sign in").is_visible()
        assert seen.findings() == []
        seen.sign_in(OPERATOR)
        assert seen.page.get_by_role("heading", name="Overview").is_visible()
        assert seen.findings() == []
