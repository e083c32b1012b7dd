"""A flow in a real browser: its graph is read, reached by keyboard and not wider than the page; and is cancelled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from browsers import HEIGHT, Tab, tab
from web_processes import OPERATOR, serving

import pgqueue
from pgqueue import Flow
from pgqueue.pytest_plugin import Databases

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.second, pytest.mark.promise("F318")]

step = pgqueue.remote("orders.step")


@pytest.fixture(scope="module")
def dsn(pgqueue_databases: Databases) -> Iterator[str]:
    with pgqueue_databases.copy() as made:
        yield made


@pytest.fixture(scope="module")
def flow(dsn: str) -> int:
    """A flow of twelve layers with nodes in several states."""
    flow = Flow("order 7")
    paid = flow.add(step.new(n=0), name="paid")
    layer: list[pgqueue.Node[Any]] = [paid]
    for n in range(11):
        layer = [flow.add(step.new(n=n), name=f"a name of some length {n} {k}", after=layer) for k in "abc"]
    flow.add(step.new(n=99), name="refund", after=[paid.failed])
    with psycopg.connect(dsn) as conn:
        handle = flow.enqueue(conn)
        conn.commit()
        pgqueue.cancel(conn, max(handle._ids))
        return handle.id


@pytest.fixture(scope="module")
def operator(browser: Browser, dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with serving(dsn, tmp_path_factory.mktemp("web") / "log", "--auth") as url, tab(browser, url) as made:
        made.sign_in(OPERATOR)
        yield made


def test_a_graph_fits_phone_and_desk_in_both_themes(operator: Tab, flow: int) -> None:
    operator.go(f"/flows/{flow}")
    for width in (390, 1280):
        operator.page.set_viewport_size({"width": width, "height": HEIGHT})
        assert operator.overflow() == 0, width
        for scheme in ("light", "dark"):
            operator.page.emulate_media(color_scheme=scheme)
            assert operator.findings() == [], (width, scheme)
            colours = [
                operator.page.evaluate(
                    "e => getComputedStyle(e).stroke", operator.page.locator(f"{each} rect").first.element_handle()
                )
                for each in (".state-cancelled", ".state-running", ".state-waiting")
            ]
            assert colours[0] == colours[2] != colours[1], "what needs no one is quiet"
            lines = [
                operator.page.evaluate("e => getComputedStyle(e).stroke", line)
                for line in operator.page.locator(".graph path").element_handles()
            ]
            assert len(lines) > 1 == len(set(lines)), "dots say that a line is for a failure"
    operator.clean()


def test_an_edge_of_the_graph_is_dark_where_the_graph_goes_on(operator: Tab, flow: int) -> None:
    """Naive is a box that just ends: on a telephone nothing says that there is more of the flow."""
    page = operator.page
    page.set_viewport_size({"width": 390, "height": HEIGHT})
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        operator.go(f"/flows/{flow}")
        graph = page.get_by_role("region", name="Graph")
        box = graph.bounding_box()
        assert box is not None

        def edge(left: float, y: float = box["y"]) -> bytes:
            return page.screenshot(clip={"x": left, "y": y, "width": 8, "height": 1})

        left, right = box["x"], box["x"] + box["width"] - 8
        plain = edge(left)
        assert edge(right) != plain, "the graph goes on at the right"
        graph.evaluate("e => { e.scrollLeft = e.scrollWidth }")
        assert edge(right) == plain != edge(left), "here it ends, and goes on at the left"
    operator.clean()


def test_each_node_is_reached_by_keyboard_and_named(operator: Tab, flow: int) -> None:
    page = operator.page
    page.set_viewport_size({"width": 390, "height": HEIGHT})
    operator.go(f"/flows/{flow}")
    graph = page.get_by_role("region", name="Graph")
    nodes = graph.get_by_role("link")
    assert nodes.count() == 35
    last = graph.get_by_role("link", name="34 a name of some length… waiting")
    assert last.count() == 1
    graph.focus()
    for _ in range(35):
        page.keyboard.press("Tab")
    focused = page.evaluate(
        "(() => { const e = document.activeElement, box = e.getBoundingClientRect(), rect = e.querySelector('rect');"
        "return [e.textContent, box.left >= 0 && box.right <= innerWidth, getComputedStyle(rect).strokeWidth] })()"
    )
    assert focused == ["34 a name of some length… waiting", True, "4px"]
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(rf"/jobs\?flow={flow}&node=34"))
    operator.clean()


@pytest.mark.promise("F451")
def test_nodes_are_cards_on_a_phone_and_rows_with_a_head_that_stays_at_the_desk(operator: Tab, flow: int) -> None:
    """Naive is a table that is scrolled sideways. What a node waits for is then out of sight."""
    page = operator.page
    operator.go(f"/flows/{flow}")
    card = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=re.compile("^5 ")))
    for width in (360, 390, 640):
        page.set_viewport_size({"width": width, "height": HEIGHT})
        boxes = [each.bounding_box() for each in card.get_by_role("cell").all()]
        for box in boxes:
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width, (width, box)
        label = "getComputedStyle(e, '::before').content"
        assert card.get_by_role("cell").last.evaluate(f"e => {label}") == '"waits for "', width
        assert card.get_by_role("link").bounding_box()["height"] >= 44  # type: ignore[index]
        assert page.get_by_role("columnheader", name="Task").count() == 0, "all nodes are of one task"
    page.set_viewport_size({"width": 1280, "height": HEIGHT})
    page.get_by_role("row").last.scroll_into_view_if_needed()
    head = page.get_by_role("columnheader", name="Waits for").bounding_box()
    assert head is not None and head["y"] == pytest.approx(52, abs=1)
    operator.clean()


@pytest.mark.promise("F319")
def test_a_flow_is_cancelled_after_a_preview(operator: Tab, flow: int) -> None:
    page = operator.page
    page.set_viewport_size({"width": 1280, "height": HEIGHT})
    operator.go("/")
    page.get_by_role("link", name="Flows", exact=True).click()
    page.get_by_role("link", name=str(flow), exact=True).click()
    page.get_by_role("link", name="Cancel…").click()
    assert operator.findings() == []
    page.get_by_role("button", name="Cancel 34 jobs").click()
    page.get_by_role("heading", name=f"Flow {flow}: order 7 cancelled").wait_for()
    assert page.get_by_text("The jobs of the flow are cancelled.").is_visible()
    operator.clean()
