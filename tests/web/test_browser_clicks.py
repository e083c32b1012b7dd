"""What operators have to do, and in how many clicks from the overview; typing and Enter are not counted.

Each with JavaScript and without. One browser and one server for all tests here; the database is that of a shop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
from browsers import Tab, tab
from web_processes import OPERATOR, serving

import pgqueue

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

pytestmark = [pytest.mark.second]


@pytest.fixture(scope="module")
def url(shop: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard in a process of its own."""
    with serving(shop, tmp_path_factory.mktemp("web") / "log", "--auth") as url:
        yield url


class Hand:
    """Clicks, and counts them."""

    def __init__(self, at: Tab) -> None:
        self.at, self.page, self.clicks = at, at.page, 0

    def click(self, *places: Locator) -> None:
        for place in places:
            place.click()
            self.clicks += 1


@pytest.fixture(scope="module", params=[True, False], ids=["with JavaScript", "without"])
def operator(browser: Browser, url: str, request: pytest.FixtureRequest) -> Iterator[Tab]:
    """A tab in which an operator has signed in."""
    with tab(browser, url, java_script_enabled=request.param) as made:
        made.sign_in(OPERATOR)
        yield made


@pytest.fixture
def hand(operator: Tab) -> Iterator[Hand]:
    """On the overview."""
    operator.go("/")
    yield Hand(operator)
    operator.clean()


@pytest.mark.promise("F306")
def test_whether_all_is_well_is_seen_first(hand: Hand) -> None:
    hand.page.set_viewport_size({"width": 390, "height": 844})
    verdict = hand.page.get_by_role("heading", level=1)
    assert verdict.inner_text() == "One thing needs you"
    box = hand.page.locator(".findings li").first.bounding_box()
    assert box is not None and box["y"] + box["height"] < 844
    assert hand.page.locator(".findings a").first.is_visible() and hand.clicks == 0
    hand.page.set_viewport_size({"width": 1280, "height": 844})


@pytest.mark.promise("F308")
def test_the_header_is_one_row_and_its_pages_are_a_menu(hand: Hand) -> None:
    page = hand.page
    for width in (360, 390, 641, 1200):
        page.set_viewport_size({"width": width, "height": 844})
        assert ".menu" in hand.at.header(), width
    assert not page.locator("#pages").is_visible()
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Jobs").click()
    page.set_viewport_size({"width": 390, "height": 844})
    hand.at.go("/jobs?state=failed")
    row = page.locator("tbody tr").first.bounding_box()
    assert row is not None and row["y"] <= 360
    page.set_viewport_size({"width": 1280, "height": 844})
    assert ".menu" not in hand.at.header()


@pytest.mark.promise("F307")
def test_what_fails_is_seen_by_cause_and_is_one_click_away_by_job(hand: Hand) -> None:
    cause = hand.page.locator("tbody tr", has_text="cards.charge").first
    assert cause.get_by_text("CardDeclined").is_visible() and cause.get_by_text("ago").count() == 2
    assert cause.get_by_text("the bank has declined the card").is_visible(), "the newest job of the cause says so"
    assert hand.clicks == 0
    hand.click(cause.get_by_role("link", name="CardDeclined", exact=True))
    assert hand.page.locator("tbody tr").count() == 9
    assert hand.page.locator(".cause b", has_text="CardDeclined").count() > 0 and hand.clicks == 1


@pytest.mark.promise("F301")
def test_to_retry_all_jobs_of_a_cause_takes_three_clicks_with_a_preview(hand: Hand, shop: str) -> None:
    page = hand.page
    hand.click(page.get_by_role("link", name="Errors", exact=True))
    hand.click(page.get_by_role("link", name="Retry all failed jobs of cards.charge with CardDeclined"))
    page.get_by_text("jobs fit now: state failed, task cards.charge, error CardDeclined").wait_for()
    assert page.locator(".ranked li").count() == 3
    hand.click(page.get_by_role("button", name="Retry 9 jobs"))
    page.get_by_role("status").get_by_text("The operation has begun.").wait_for()
    assert hand.clicks == 3
    with psycopg.connect(shop) as conn:
        [begun] = pgqueue.bulks(conn, limit=1)
        assert begun.target == {"states": ["failed"], "task": "cards.charge", "error_type": "CardDeclined"}


@pytest.mark.promise("F305")
def test_to_find_the_job_of_a_customer_takes_one_click(hand: Hand) -> None:
    page = hand.page
    field = page.get_by_label("Find jobs")
    hand.click(field)
    field.press_sequentially("order_id=3102")
    field.press("Enter")
    page.get_by_role("heading", name="orders.ship blocked").wait_for()
    assert page.get_by_text("warehouse:north").count() > 0 and page.get_by_role("heading", name="Why").is_visible()
    assert hand.clicks == 1


@pytest.mark.promise("F300")
def test_to_retry_three_chosen_jobs_takes_five_clicks(hand: Hand, shop: str) -> None:
    page = hand.page
    hand.click(page.locator(".states").get_by_role("link", name="failed"))
    boxes = page.get_by_role("checkbox", name="Choose job")
    chosen = [int(boxes.nth(n).input_value()) for n in (0, 2, 3)]
    hand.click(*(boxes.nth(n) for n in (0, 2, 3)))
    hand.click(page.get_by_role("button", name="Retry", exact=True))
    page.get_by_role("status").get_by_text("The operation has begun.").wait_for()
    assert hand.clicks == 5
    with psycopg.connect(shop) as conn:
        [begun] = pgqueue.bulks(conn, limit=1)
        assert (begun.action, begun.target["ids"]) == ("retry", sorted(chosen))


@pytest.mark.promise("F330")
def test_to_see_which_actor_changed_what_takes_one_click(hand: Hand) -> None:
    page = hand.page
    hand.click(page.get_by_role("link", name="Changes", exact=True))
    page.get_by_role("heading", name="Changes by hand").wait_for()
    row = page.get_by_role("row").filter(has_text="pause")
    assert (
        row.get_by_role("link", name="queue reports").is_visible() and row.get_by_role("link", name="ann").is_visible()
    )
    assert row.get_by_text("min ago").is_visible()
    assert hand.clicks == 1


@pytest.mark.promise("F332")
def test_to_see_what_is_new_since_the_deploy_takes_one_click(hand: Hand) -> None:
    page = hand.page
    hand.click(page.get_by_role("link", name="Tasks", exact=True))
    page.get_by_text("before version 2026.11.2").wait_for()
    row = page.get_by_role("row").filter(has_text="cards.charge")
    assert row.get_by_text("failing").is_visible() and row.get_by_text("→").first.is_visible()
    assert hand.clicks == 1


@pytest.mark.promise("F348")
def test_what_runs_unusually_long_and_where_is_seen_without_a_click(hand: Hand, shop: str) -> None:
    with psycopg.connect(shop, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, run) SELECT "
            "date_trunc('minute', now()), bin, 'reports', 'reports.monthly', 9, 9, "
            "array_fill(0, ARRAY[12]) || 9 FROM pgqueue.ring WHERE kind = 'minute'"
        )
    hand.at.go("/")
    row = hand.page.get_by_role("list", name="What runs longest").get_by_role("listitem").first
    for text in ("reports.monthly", "unusually long:", "on worker-2", re.compile(r"for \d+ min")):
        assert row.get_by_text(text).first.is_visible(), text
    assert row.get_by_role("link").count() == 2 and hand.clicks == 0
    for width in (360, 390, 660, 1280, 3840):
        hand.page.set_viewport_size({"width": width, "height": 844})
        assert hand.at.overflow() == 0, f"the overview scrolls sideways at {width} px"
    hand.page.set_viewport_size({"width": 1280, "height": 844})


CHARTS = ("/", "/history", "/queue?name=mail", "/task?name=cards.charge")


@pytest.mark.promise("F147", "F162")
def test_the_bars_of_charts_are_seen(hand: Hand) -> None:
    for path in CHARTS:
        hand.at.go(path)
        bars = hand.page.locator("svg.plot path.bar-completed")
        assert bars.count() > 0 and bars.first.is_visible(), path


@pytest.mark.promise("F311")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_step_says_its_values_on_hover_and_leads_to_its_jobs(hand: Hand, width: int) -> None:
    """Naive is a column that does not stand above its bar. The bar of a step has its middle in the middle of it."""
    page = hand.page
    page.set_viewport_size({"width": width, "height": 844})
    for path in CHARTS:
        hand.at.go(path)
        assert page.locator(".tip:visible").count() == 0
        column = page.locator(".columns li").nth(20)
        column.hover()
        [tip] = page.locator(".tip:visible").all()
        assert re.match(r"\d\d:\d\d · .*completed", tip.inner_text()), path
        box, shown = column.bounding_box(), tip.bounding_box()
        assert box is not None and shown is not None
        assert shown["x"] >= 0 and shown["x"] + shown["width"] <= width, "the values are on the page"
        for plot in page.locator(".charts").first.locator("svg.plot").all():
            drawn = plot.bounding_box()
            assert drawn is not None
            assert box["y"] <= drawn["y"] and box["y"] + box["height"] >= drawn["y"] + drawn["height"] - 1
            middle = drawn["x"] + 20.5 / 60 * drawn["width"]
            assert abs(box["x"] + box["width"] / 2 - middle) <= 1.5, path
    hand.click(page.locator(".columns li").nth(20))
    page.wait_for_url(re.compile(r"/jobs\?since=.*&until=.*&task=cards\.charge"))
    assert hand.clicks == 1
    page.set_viewport_size({"width": 1280, "height": 844})


@pytest.mark.promise("F311", "F313")
def test_the_axis_has_times_of_the_clock_and_names_the_version(hand: Hand) -> None:
    hand.at.go("/history")
    labels = hand.page.locator(".columns li > time")
    assert labels.count() >= 3
    assert all(re.fullmatch(r"\d\d:(00|15|30|45)", text) for text in labels.all_inner_texts())
    flag = hand.page.locator(".version .flag")
    assert flag.inner_text() == "2026.11.2" and flag.is_visible()


@pytest.mark.promise("F315", "F332")
def test_whether_a_task_is_slower_since_the_deploy_takes_one_click(hand: Hand) -> None:
    """The name of the task in a cause leads to its page."""
    page = hand.page
    hand.click(page.get_by_role("link", name="cards.charge", exact=True).first)
    page.get_by_role("heading", name="cards.charge").wait_for()
    for text in ("Since the version", "Before it", "95 % ran at most", "since 2026.11.2"):
        assert page.get_by_text(text).first.is_visible(), text
    assert page.locator("svg.plot path.bar-since").count() == 1 == page.locator("svg.plot path.bar-before").count()
    page.locator(".lengths li").nth(1).hover()
    said = page.locator(".tip:visible").inner_text()
    assert re.match(r"up to .* · before the version .* · since 2026\.11\.2 ", said)
    assert hand.clicks == 1


@pytest.mark.promise("F310", "F317")
def test_whether_a_cause_is_new_in_this_version_is_seen_without_a_click(hand: Hand, shop: str) -> None:
    with psycopg.connect(shop, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO pgqueue.version_start VALUES ('2026.11.1', now() - interval '9 days') ON CONFLICT DO NOTHING"
        )
        conn.execute("UPDATE pgqueue.error_group SET first_version = '2026.11.2' WHERE error_type = 'CardDeclined'")
        conn.execute("UPDATE pgqueue.error_group SET first_version = '2026.11.1' WHERE error_type LIKE 'SMTP%'")
    hand.at.go("/")
    new, old = (hand.page.locator("tbody tr", has_text=name).first for name in ("CardDeclined", "SMTPServer"))
    assert new.get_by_text("new in 2026.11.2").is_visible() and old.get_by_text("new in").count() == 0
    assert hand.clicks == 0


@pytest.mark.promise("F317")
def test_whether_a_queue_grows_is_seen_without_a_click_and_what_holds_it_with_one(hand: Hand) -> None:
    page = hand.page
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="mail", exact=True)).first
    assert row.get_by_text(re.compile(r"rising by|falling by|steady|not measured yet")).is_visible()
    assert row.locator("svg.spark").is_visible() and hand.clicks == 0
    hand.click(
        page.get_by_role("list", name="Why jobs wait").get_by_role(
            "link", name="another job has the lock warehouse:north"
        )
    )
    page.wait_for_url(re.compile(r"/limits\?lock=warehouse%3Anorth"))
    assert page.get_by_role("row").filter(has_text="warehouse:north").is_visible() and hand.clicks == 1
