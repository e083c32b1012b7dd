"""Several databases in a real browser: from the page of all to one of them, a change there, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from browsers import HEIGHT, Tab, tab
from web_processes import OPERATOR, serving

import pgqueue
from pgqueue.pytest_plugin import Databases

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.second, pytest.mark.promise("F409")]

AWAY = "postgresql://nobody@127.0.0.1:1/away?connect_timeout=2"
LONG = "b" * 40
WIDTHS = (360, 390, 641, 660, 1280, 1920, 3840)


@pytest.fixture(scope="module")
def other_dsn(pgqueue_databases: Databases) -> Iterator[str]:
    with pgqueue_databases.copy() as made:
        pgqueue.migrate(made, number=1)
        with psycopg.connect(made) as conn:
            conn.execute("INSERT INTO pgqueue.job (task, queue) VALUES ('mail.send_receipt', 'mail')")
        yield made


@pytest.fixture(scope="module")
def operator(browser: Browser, shop: str, other_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A tab at three databases, one of which is away."""
    named = [f"a={shop}", f"{LONG}={other_dsn}", f"away={AWAY}"]
    options = [option for each in named for option in ("--database", each)]
    log = tmp_path_factory.mktemp("web") / "log"
    with serving(None, log, "--auth", *options) as url, tab(browser, url) as made:
        made.sign_in(OPERATOR)
        yield made


def row(at: Tab, name: str) -> Any:
    return at.page.get_by_role("row").filter(has=at.page.get_by_role("link", name=name, exact=True))


def known(at: Tab) -> None:
    """Open the page of all, and wait until both databases have answered: the machine may be busy."""
    at.go("/")
    for name in ("a", LONG):
        row(at, name).get_by_role("cell").nth(2).wait_for()


def paused(dsn: str) -> int:
    with psycopg.connect(dsn) as conn:
        [[number]] = conn.execute("SELECT count(*) FROM pgqueue.queue WHERE paused_at IS NOT NULL").fetchall()
    return int(number)


def test_an_operator_goes_to_one_database_acts_there_and_comes_back(operator: Tab, shop: str, other_dsn: str) -> None:
    page, before = operator.page, paused(shop)
    known(operator)
    assert "The database cannot be reached" in row(operator, "away").inner_text()
    page.get_by_role("main").get_by_role("link", name=LONG).click()
    page.wait_for_url("**/db/*/")
    page.get_by_role("navigation").get_by_role("link", name="Queues").click()
    page.get_by_role("button", name="Pause").first.click()
    page.wait_for_url("**/queues?did=paused")
    assert (paused(other_dsn), paused(shop)) == (1, before)
    page.get_by_role("link", name=f"Database {LONG}").click()
    page.get_by_role("heading", name="Databases", exact=True).wait_for()
    with psycopg.connect(other_dsn) as conn:
        [[job]] = conn.execute("SELECT id FROM pgqueue.job LIMIT 1").fetchall()
    search = page.get_by_role("search").get_by_role("textbox")
    search.fill("order:7")
    search.press("Enter")
    page.get_by_role("alert").wait_for()
    page.get_by_role("link", name="Search in a", exact=True).click()
    page.wait_for_url("**/db/a/jobs?*")
    page.get_by_role("link", name="Database a").click()
    page.get_by_role("heading", name="Databases", exact=True).wait_for()
    search.fill(str(job))
    search.press("Enter")
    page.get_by_role("link", name=f"Search in {LONG}", exact=True).click()  # the one that is away may have it, too
    page.wait_for_url(f"**/db/{LONG}/jobs**")


@pytest.mark.promise("F246")
@pytest.mark.parametrize("path", ["/", "/?q=order:7", f"/db/{LONG}/", f"/db/{LONG}/jobs"])
def test_no_page_has_a_violation_and_its_header_is_one_row(operator: Tab, path: str) -> None:
    operator.go(path)
    for width in WIDTHS:
        operator.page.set_viewport_size({"width": width, "height": HEIGHT})
        assert operator.overflow() == 0, f"{path} scrolls sideways at {width} px"
        assert (".database" in operator.header()) == path.startswith("/db/")
    for width in (390, 1280):
        operator.page.set_viewport_size({"width": width, "height": HEIGHT})
        for scheme in ("light", "dark"):
            operator.page.emulate_media(color_scheme=scheme)
            assert operator.findings() == [], (width, scheme)
