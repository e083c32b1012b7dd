"""What an operator changes, in a real browser: a job by a form, a limit, a supervisor; and what axe-core says of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
from browsers import WIDTHS, Tab, tab
from web_processes import OPERATOR, serving

import pgqueue
from pgqueue.pytest_plugin import Databases

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.second

TASKS = """
import datetime, decimal, enum
import pgqueue

class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"

@pgqueue.task(name="shop.order")
def order(
    customer: int, price: decimal.Decimal, express: bool, size: Size, items: list[dict[str, int]],
    note: str = "none", api_token: str = "sesame", **rest: str
) -> None: ...
"""
LOOKED_AT = ("/limits", "/limits/jobs?limit=api", "/workers", "/outbox", "/enqueue", "/enqueue?task=shop.order")


@pytest.fixture(scope="module")
def dsn(pgqueue_databases: Databases) -> Iterator[str]:
    """A database with a limit, a rate, a lock and a supervisor."""
    with pgqueue_databases.copy() as made, psycopg.connect(made, autocommit=True) as conn:
        conn.execute("INSERT INTO pgqueue.key_limit (name, n, declared, set_at) VALUES ('api', 5, 7, now())")
        conn.execute("INSERT INTO pgqueue.key_rate (name, count, period, set_at) VALUES ('mail', 10, 60, now())")
        conn.execute(
            "INSERT INTO pgqueue.job (task, state, lock_key, limit_key, holds) "
            "VALUES ('shop.x', 'available', 'k', 'api', true)"
        )
        conn.execute(
            "INSERT INTO pgqueue.supervisor (host, pid, size, active, state, beat_at) "
            "VALUES ('web1', 1, 2, 2, 'running', now() + interval '1 hour')"
        )
        yield made


@pytest.fixture(scope="module")
def url(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("web")
    (place / "shop_browser_tasks.py").write_text(TASKS)
    with serving(dsn, place / "log", "shop_browser_tasks", "--app-dir", str(place), "--auth") as url:
        yield url


@pytest.fixture
def seen(browser: Browser, url: str) -> Iterator[Tab]:
    with tab(browser, url) as made:
        made.sign_in(OPERATOR)
        yield made


@pytest.mark.promise("F148", "F149", "F150", "F151")
@pytest.mark.parametrize("width", [WIDTHS["phone"], WIDTHS["desk"]])
def test_the_pages_are_accessible_with_all_that_can_be_opened(browser: Browser, url: str, width: int) -> None:
    with tab(browser, url, width) as seen:
        seen.sign_in(OPERATOR)
        for path in LOOKED_AT:
            seen.go(path)
            seen.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
            assert seen.findings() == [], path
            assert seen.overflow() == 0, path


@pytest.mark.promise("F150")
def test_a_form_that_is_refused_keeps_what_was_typed_and_is_sent_again(
    browser: Browser, url: str, seen: Tab, dsn: str
) -> None:
    page = seen.page
    seen.go("/enqueue")
    page.get_by_role("link", name="shop.order").click()
    page.get_by_label("customer").fill("7")
    page.get_by_label("price").fill("9.90")
    page.get_by_label("express").select_option("true")
    page.get_by_label("size").select_option("LARGE")
    page.get_by_label("items").fill('[{"a": 1}')
    page.get_by_label("note").fill("two\nlines")
    page.get_by_role("button", name="Enqueue").click()
    assert "items: is not JSON" in page.get_by_role("alert").inner_text()
    assert page.get_by_label("note").input_value() == "two\nlines"
    assert page.get_by_label("size").input_value() == '"l"'
    assert seen.findings() == []
    seen.said.clear()  # a browser writes the status 422 to its console
    with tab(browser, url) as beside:  # has been told of a change, and shows it
        beside.sign_in(OPERATOR)
        beside.go("/jobs")
        for _ in range(2):
            with psycopg.connect(dsn, autocommit=True) as conn:
                id = str(pgqueue.remote("shop.x").enqueue(conn).id)
            beside.page.locator("tbody").get_by_role("link", name=re.compile(rf"\b{id}$")).wait_for()
    assert "items: is not JSON" in page.get_by_role("alert").inner_text()
    assert page.get_by_label("note").input_value() == "two\nlines"
    page.get_by_label("items").fill('[{"a": 1}]')
    page.get_by_role("button", name="Enqueue").click()
    page.wait_for_url(re.compile(r"/jobs/\d+"))
    assert "The job is enqueued." in page.get_by_role("status").inner_text()
    with psycopg.connect(dsn) as conn:
        found = conn.execute("SELECT args FROM pgqueue.job WHERE task = 'shop.order'").fetchall()
    want = {"customer": 7, "price": "9.90", "express": True, "size": "l", "items": [{"a": 1}], "note": "two\nlines"}
    assert found == [(want,)]


@pytest.mark.promise("F148", "F149")
def test_a_limit_is_set_and_a_supervisor_ordered_by_keyboard(seen: Tab) -> None:
    page = seen.page
    seen.go("/limits")
    page.get_by_label("api: jobs at once").fill("2")
    page.get_by_label("api: jobs at once").press("Enter")
    page.get_by_text("The limit is set").wait_for()
    assert page.get_by_label("api: jobs at once").input_value() == "2"
    seen.go("/workers")
    page.get_by_label("Worker processes of supervisor").fill("3")
    page.get_by_label("Worker processes of supervisor").press("Enter")
    page.get_by_text("The order is given").wait_for()
    assert page.get_by_text(re.compile("scale to 3,.*not done yet")).is_visible()
