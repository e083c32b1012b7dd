"""Open pages in a real browser: a change is seen, nothing that a visitor does is lost, and a page rests when it should.

That a page rests is seen beside another one, which has been told of the same change and shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from browsers import Tab, tab
from playwright.sync_api import expect
from web_processes import serving

import pgqueue
from pgqueue.client import schedules

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.second

TASK = pgqueue.remote("orders.ship")


@pytest.fixture(scope="module", autouse=True)
def patience_of_expect() -> None:
    expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def dsn(shop: str) -> str:
    return shop


@pytest.fixture(scope="module")
def url(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(dsn, tmp_path_factory.mktemp("web") / "log", "--open") as url:
        yield url


@pytest.fixture
def seen(browser: Browser, url: str) -> Iterator[Tab]:
    with tab(browser, url) as made:
        yield made


@pytest.fixture
def beside(browser: Browser, url: str) -> Iterator[Tab]:
    """Another browser at the newest jobs."""
    with tab(browser, url) as made:
        made.go("/jobs")
        yield made


def enqueue(dsn: str, **options: Any) -> str:
    """The id of a new job."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        return str(TASK.using(**options).enqueue(conn, order_id=1).id)


def row(at: Tab, id: str) -> Any:
    return at.page.locator("tbody").get_by_role("link", name=re.compile(rf"\b{id}$"))


@pytest.mark.promise("F154")
def test_a_new_job_is_seen_and_the_focus_stays_with_its_row(seen: Tab, dsn: str) -> None:
    seen.go("/jobs")
    kept = seen.page.locator("tbody a").first
    id = kept.inner_text()
    kept.focus()
    for _ in range(2):
        expect(row(seen, enqueue(dsn))).to_be_visible()
    assert seen.page.evaluate("document.activeElement.innerText") == id
    expect(seen.page.locator("tbody tr").nth(2)).to_contain_text(id)


@pytest.mark.promise("F154")
def test_what_is_open_and_scrolled_stays_so(seen: Tab, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        [(id,)] = conn.execute("SELECT max(id) FROM pgqueue.job_dead").fetchall()
        seen.page.set_viewport_size({"width": 1280, "height": 400})
        seen.go(f"/jobs/{id}")
        seen.page.get_by_text("Discard…").click()
        seen.page.evaluate("scrollTo(0, 300)")
        at = seen.page.evaluate("scrollY")
        assert at > 0
        conn.execute("INSERT INTO pgqueue.audit (actor, action, jobs) VALUES ('bert', 'retry', %s)", [[id]])
        enqueue(dsn)
        expect(seen.page.get_by_text("retry by bert")).to_be_attached()
    assert seen.page.get_by_role("button", name="Delete this job").is_visible()
    assert seen.page.evaluate("scrollY") == at


@pytest.mark.promise("F154")
def test_a_page_rests_while_a_field_is_edited(seen: Tab, beside: Tab, dsn: str) -> None:
    seen.go("/jobs")
    seen.page.get_by_text("All filters").click()
    field = seen.page.get_by_label("Task", exact=True)
    field.fill("orders")
    seen.page.locator("h1").click()  # typed input counts without the focus, too
    told(beside, dsn)
    id = told(beside, dsn)
    assert row(seen, id).count() == 0 and field.input_value() == "orders"
    field.fill("")
    seen.page.locator("h1").click()
    expect(row(seen, id)).to_be_visible()


@pytest.mark.promise("F154")
def test_a_page_rests_while_a_choice_is_made_and_while_text_is_selected(seen: Tab, beside: Tab, dsn: str) -> None:
    seen.go("/jobs")
    seen.page.get_by_text("All filters").click()
    choice = seen.page.get_by_label("failed", exact=True)
    choice.check()
    told(beside, dsn)
    id = told(beside, dsn)
    assert row(seen, id).count() == 0 and choice.is_checked()
    choice.uncheck()
    expect(row(seen, id)).to_be_visible()
    seen.page.evaluate("getSelection().selectAllChildren(document.querySelector('caption'))")
    told(beside, dsn)
    id = told(beside, dsn)
    assert row(seen, id).count() == 0
    seen.page.evaluate("getSelection().empty()")
    expect(row(seen, id)).to_be_visible()


@pytest.mark.promise("F154", "F300")
def test_a_page_rests_while_jobs_are_chosen(browser: Browser, url: str, beside: Tab, dsn: str) -> None:
    with tab(browser, url) as seen:
        seen.go("/jobs")
        box = seen.page.get_by_role("checkbox", name="Choose job").nth(1)
        chosen = box.input_value()
        box.check()
        told(beside, dsn)
        id = told(beside, dsn)
        assert row(seen, id).count() == 0 and box.is_checked() and box.input_value() == chosen
        box.uncheck()
        expect(row(seen, id)).to_be_visible()


def told(beside: Tab, dsn: str) -> str:
    """The id of a new job, which the other page shows."""
    id = enqueue(dsn)
    expect(row(beside, id)).to_be_visible()
    return id


def becomes(dsn: str, id: str, state: str) -> None:
    """The job has ended so, as if a worker had run it."""
    with psycopg.connect(dsn) as conn:
        conn.execute("DELETE FROM pgqueue.job WHERE id = %s", [id])
        conn.execute(
            "INSERT INTO pgqueue.job (id, task, state, attempt, started_at, finished_at, reason) "
            "OVERRIDING SYSTEM VALUE VALUES (%s, 'orders.ship', %s, 1, now(), now(), %s)",
            [id, state, None if state == "completed" else "error"],
        )


@pytest.mark.promise("F154")
@pytest.mark.parametrize(("before", "label"), [("available", "Cancel"), ("failed", "Retry")])
def test_a_button_with_the_focus_never_becomes_that_of_another_action(
    seen: Tab, beside: Tab, dsn: str, before: str, label: str
) -> None:
    """A completed job is run again as a new one: that is another action than to retry, although by the same path."""
    id = enqueue(dsn)
    if before == "failed":
        becomes(dsn, id, "failed")
    seen.go(f"/jobs/{id}")
    sent: list[str] = []
    seen.page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    seen.page.get_by_role("button", name=label, exact=True).focus()
    becomes(dsn, id, "completed")
    told(beside, dsn)
    expect(seen.page.get_by_role("button", name="Run again")).to_be_visible()
    assert seen.page.evaluate("document.activeElement.id") == "main"
    seen.page.keyboard.press("Enter")
    seen.page.keyboard.press(" ")
    told(beside, dsn)
    assert sent == []


@pytest.mark.promise("F154")
def test_in_a_row_the_focus_stays_with_the_same_action_alone(seen: Tab, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        schedules.add(conn, "focus", pgqueue.Every(32_400), TASK)
        seen.go("/schedules")
        its = seen.page.locator("tr", has=seen.page.get_by_role("rowheader", name="focus", exact=True))
        its.get_by_role("button", name="Run now").focus()
        schedules.pause(conn, "focus")
        enqueue(dsn)
        expect(its.get_by_role("button", name="Resume")).to_be_visible()
        assert seen.page.evaluate("document.activeElement.innerText") == "Run now"
        its.get_by_role("button", name="Resume").focus()
        schedules.resume(conn, "focus")
        enqueue(dsn)
        expect(its.get_by_role("button", name="Pause")).to_be_visible()
        assert seen.page.evaluate("document.activeElement.id") == "main"


@pytest.mark.promise("F154")
@pytest.mark.parametrize("way", ["pointer", "space"])
def test_what_is_pressed_is_what_is_done(seen: Tab, beside: Tab, dsn: str, way: str) -> None:
    """The job completes between pressing and releasing."""
    id = enqueue(dsn)
    seen.go(f"/jobs/{id}")
    sent: list[str] = []
    seen.page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    button = seen.page.get_by_role("button", name="Cancel", exact=True)
    if way == "pointer":
        button.hover()
        seen.page.mouse.down()
    else:
        button.focus()
        seen.page.keyboard.down(" ")
    becomes(dsn, id, "completed")
    told(beside, dsn)
    told(beside, dsn)
    assert button.is_visible()
    if way == "pointer":
        seen.page.mouse.up()
    else:
        seen.page.keyboard.up(" ")
    expect(seen.page.get_by_text("Nothing was done: the job had ended before.")).to_be_visible()
    assert sent == [f"{seen.url}/jobs/{id}/cancel"]


HIDE = """
value => {
    Object.defineProperty(document, "hidden", {value, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
}
"""


@pytest.mark.promise("F154")
def test_a_hidden_page_asks_for_nothing_until_it_is_seen_again(seen: Tab, beside: Tab, dsn: str) -> None:
    seen.go("/jobs")
    seen.page.evaluate(HIDE, True)
    asked: list[str] = []
    # The browser asks for the icon when it likes: it is no question of the page.
    seen.page.on("request", lambda request: asked.append(request.url))
    told(beside, dsn)
    id = told(beside, dsn)
    assert [url for url in asked if "/static/" not in url] == [] and row(seen, id).count() == 0
    seen.page.evaluate(HIDE, False)
    expect(row(seen, id)).to_be_visible()


@pytest.mark.promise("F154")
def test_it_can_be_switched_off_and_stays_so(seen: Tab, beside: Tab, dsn: str) -> None:
    seen.go("/jobs")
    seen.page.get_by_role("button", name="Live updates: on").click()
    seen.go("/jobs")
    switch = seen.page.get_by_role("button", name="Live updates: off")
    assert switch.get_attribute("aria-pressed") == "false"
    told(beside, dsn)
    id = told(beside, dsn)
    assert row(seen, id).count() == 0
    switch.click()
    expect(row(seen, id)).to_be_visible()


@pytest.mark.promise("F154")
def test_without_a_stream_the_page_asks_by_itself(seen: Tab, dsn: str) -> None:
    """As under WSGI."""
    seen.page.route("**/events?*", lambda route: route.fulfill(status=204))
    seen.go("/jobs")
    expect(row(seen, enqueue(dsn))).to_be_visible()


@pytest.mark.promise("F154")
def test_without_javascript_every_page_works(browser: Browser, url: str, dsn: str) -> None:
    with tab(browser, url, java_script_enabled=False) as seen:
        seen.go("/jobs?task=orders.ship")
        id = enqueue(dsn)
        seen.page.get_by_text("All filters").click()
        seen.page.get_by_role("button", name="Search").click()
        expect(row(seen, id)).to_be_visible()
        assert seen.page.get_by_role("button", name=re.compile("Live updates|zone")).count() == 0


@pytest.mark.promise("F156")
def test_times_are_utc_or_those_of_the_browsers_zone(browser: Browser, url: str, dsn: str) -> None:
    with tab(browser, url, timezone_id="Asia/Tokyo") as seen:
        seen.go(f"/jobs/{enqueue(dsn)}")
        shown = seen.page.locator(".facts time").first
        at = datetime.fromisoformat(str(shown.get_attribute("datetime"))).astimezone(UTC)
        assert shown.inner_text() == f"{at:%Y-%m-%d %H:%M:%S}"
        assert "All times are UTC" in seen.page.locator("footer").inner_text()
        seen.page.get_by_role("button", name="Show my zone").click()
        there = at + timedelta(hours=9)
        assert shown.inner_text() == f"{there:%Y-%m-%d %H:%M:%S}"
        assert shown.get_attribute("title") == f"{at:%Y-%m-%d %H:%M:%S} UTC"
        assert "All times are in Asia/Tokyo" in seen.page.locator("footer").inner_text()
        seen.go("/jobs")  # it is remembered
        assert "All times are in Asia/Tokyo" in seen.page.locator("footer").inner_text()
        id = enqueue(dsn)
        expect(row(seen, id)).to_be_visible()
        link = seen.page.get_by_role("link", name=re.compile(rf"\b{id}$"))
        new = seen.page.locator("tbody tr", has=link).locator("time").first
        at = datetime.fromisoformat(str(new.get_attribute("datetime"))).astimezone(UTC)
        assert new.get_attribute("title") == f"{at + timedelta(hours=9):%Y-%m-%d %H:%M:%S} Asia/Tokyo"
        assert re.fullmatch(r"\d+ (s|min) ago", new.inner_text())
        assert seen.findings() == []
        seen.page.get_by_role("button", name="Show UTC").click()
        assert "All times are UTC" in seen.page.locator("footer").inner_text()
