"""The dashboard in a real browser: every page as people see it, and what visitors do from the login to the end.

One browser and one server for all tests here; the database is that of a shop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from browsers import HEIGHT, WIDTHS, Tab, tab
from web_processes import OPERATOR, READER, serving
from workers import workers

import pgqueue
from pgqueue.pytest_plugin import Databases
from pgqueue.web.routes import ROUTES

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.second, pytest.mark.promise("F153")]

QUERIES = {
    "limit_jobs": "?limit=warehouse",
    "preview": "?action=retry&state=failed",
    "jobs": "?state=failed",
    "task": "?name=cards.charge",
    "queue": "?name=mail",
    "preview_flow": "?action=cancel",
}
"""What these pages are asked for; the others need nothing."""
PAGES = [
    (route.name, route.path + QUERIES.get(route.name, "")) for route in ROUTES if route.page and route.method == "GET"
]
TASKS = """
@pgqueue.task(name="cards.charge")
def charge(order_id: int, amount: str, card: dict[str, str]) -> str:
    return "charged"
"""


@pytest.fixture(scope="module")
def dsn(shop: str) -> str:
    return shop


@pytest.fixture(scope="module")
def url(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard in a process of its own."""
    with serving(dsn, tmp_path_factory.mktemp("web") / "log", "--auth") as url:
        yield url


@pytest.fixture(scope="module")
def operator(browser: Browser, url: str) -> Iterator[Tab]:
    """A tab in which an operator has signed in."""
    with tab(browser, url) as made:
        made.sign_in(OPERATOR)
        yield made


@pytest.fixture(scope="module", autouse=True)
def ids(dsn: str) -> dict[str, int]:
    """A job that has failed, the operation of the shop, and a flow. Read before any test retries what has failed."""
    step = pgqueue.remote("orders.step").using(queue="orders")
    flow = pgqueue.Flow("order 7")
    flow.add(step.new(n=2), after=[flow.add(step.new(n=1), name="paid")])
    with psycopg.connect(dsn) as conn:
        made = flow.enqueue(conn).id
        [(job, bulk)] = conn.execute(
            "SELECT (SELECT max(id) FROM pgqueue.job_dead WHERE state = 'failed'), (SELECT max(id) FROM pgqueue.bulk)"
        ).fetchall()
    return {"job": job, "bulk": bulk, "flow": made, "preview_flow": made}


# Every page ----------------------------------------------------------------------------------------------------------


def test_the_login_can_be_used_by_everybody(browser: Browser, url: str) -> None:
    with tab(browser, url, WIDTHS["phone"]) as seen:
        seen.go("/")
        assert seen.page.get_by_role("heading", name="Sign in").is_visible()
        for scheme in ("light", "dark"):
            seen.page.emulate_media(color_scheme=scheme)
            assert (seen.findings(), seen.overflow()) == ([], 0)
        seen.page.get_by_label("Secret").fill("x" * 20)
        seen.page.get_by_role("button", name="Sign in").click()
        assert seen.page.get_by_role("alert").inner_text() == "This secret is wrong."
        assert seen.findings() == []
        assert len(seen.said) == 1 and "401" in seen.said.pop(), "the status is in the console, nothing else"


OVERFLOW = (360, 390, 660, 1280, 1920, 3840)
LONG = {
    "jobs": f"?task={'t' * 60}&error_type={'E' * 60}&arg={'a' * 60}={'v' * 300}",
    "task": f"?name={'t' * 60}",
    "queue": f"?name={'q' * 40}",
    "limits": f"?lock={'k' * 60}",
    "limit_jobs": f"?limit={'l' * 60}",
    "preview": f"?action=retry&state=failed&state=cancelled&task={'t' * 60}",
    "preview_flow": "?action=cancel",
}
"""What these pages are asked for, to show the longest names."""


HEALTHY = """
INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state, beat_at)
VALUES ('1 hour', 1, 5, 'here', '1', '{mail}', '{mail.send}', 'running', now());
INSERT INTO pgqueue.job (task, queue) VALUES ('mail.send', 'mail');
INSERT INTO pgqueue.job_done (state, task, queue, started_at, finished_at, bin, attempt)
SELECT 'completed', 'mail.send', 'mail', now(), now(), bin, 1 FROM pgqueue.ring WHERE kind = 'done';
INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed)
SELECT date_trunc('minute', now()) - interval '5 min', bin, 'mail', 'mail.send', 9, 9
FROM pgqueue.ring WHERE kind = 'minute';
"""
LOUD = """
() => {
    const probe = document.body.appendChild(document.createElement("i"));
    const loud = ["--bad", "--warn"].map(name => {
        probe.style.color = `var(${name})`;
        return getComputedStyle(probe).color;
    });
    probe.remove();
    const parts = ["color", "backgroundColor", "borderLeftColor", "fill", "stroke"];
    return [...document.querySelectorAll("body *")]
        .filter(e => [null, "::before"].some(of => parts.some(part => loud.includes(getComputedStyle(e, of)[part]))))
        .map(e => e.outerHTML.slice(0, 120));
}
"""
"""What is red or amber as a text is."""


def fonts(at: Tab, selector: str) -> set[str]:
    """The fonts in which the browser has drawn this element, by its own account."""
    session = at.page.context.new_cdp_session(at.page)
    session.send("DOM.enable")
    session.send("CSS.enable")
    root = session.send("DOM.getDocument")["root"]["nodeId"]
    node = session.send("DOM.querySelector", {"nodeId": root, "selector": selector})["nodeId"]
    used = session.send("CSS.getPlatformFontsForNode", {"nodeId": node})["fonts"]
    session.detach()
    return {each["familyName"] for each in used}


@pytest.mark.promise("F246")
def test_the_font_of_these_tests_is_a_wide_one(operator: Tab) -> None:
    operator.go("/")
    assert fonts(operator, "h1") == {"DejaVu Sans"}, "on Debian: apt-get install fonts-dejavu-core"


@pytest.mark.promise("F246")
@pytest.mark.parametrize("name", [name for name, _ in PAGES])
def test_no_page_has_a_violation_or_scrolls_sideways_with_long_names(
    operator: Tab, ids: dict[str, int], long: dict[str, int], name: str
) -> None:
    path = dict(PAGES)[name].replace("{id}", str(ids.get(name)))
    longest = dict(PAGES)[name].partition("?")[0].replace("{id}", str(long.get(name))) + LONG.get(name, "")
    for each in dict.fromkeys((longest, path)):
        operator.go(each)
        for width in OVERFLOW:
            operator.page.set_viewport_size({"width": width, "height": HEIGHT})
            assert operator.overflow() == 0, f"{each} scrolls sideways at {width} px"
    for width in (390, 1280):
        operator.page.set_viewport_size({"width": width, "height": HEIGHT})
        for scheme in ("light", "dark"):
            operator.page.emulate_media(color_scheme=scheme)
            assert operator.findings() == [], f"{path}, {scheme}, {width} px"
    operator.clean()


@pytest.mark.promise("F244")
def test_the_shape_of_a_state_is_drawn_in_both_themes_and_with_forced_colours(operator: Tab) -> None:
    operator.go("/")
    drawn = "[...document.querySelectorAll('.state')].map(e => getComputedStyle(e, '::before').content)"
    for media in ({"color_scheme": "light"}, {"color_scheme": "dark"}, {"forced_colors": "active"}):
        operator.page.emulate_media(**media)  # type: ignore[arg-type]
        shapes = operator.page.evaluate(drawn)
        assert len(set(shapes)) == len(shapes) > 4 and "none" not in shapes, media
    operator.page.emulate_media(forced_colors="none", color_scheme="light")
    assert operator.page.get_by_role("link", name=re.compile(r"^failed \d+$")).is_visible(), "the shape is not said"


SEEN = "checkVisibility({visibilityProperty: true})"
SMALL = f"""
[...document.querySelectorAll("a[href], button, input:not([type=hidden]), select, textarea, summary")]
    .filter(e => e.{SEEN} && e.tabIndex >= 0 && !e.matches(".skip"))
    .filter(e => {{
        if (getComputedStyle(e).display !== "inline" || e.closest("li, dd")) return true;
        const beside = e.parentElement.cloneNode(true);
        beside.querySelectorAll("a, button").forEach(each => each.remove());
        return !/\\p{{L}}/u.test(beside.textContent.replace(/^\\s*\\p{{L}}+:/u, ""));
    }})
    .map(e => [e.matches("[type=checkbox], [type=radio]") ? e.closest("label") ?? e : e, e.outerHTML.slice(0, 120)])
    .filter(([e]) => e.getBoundingClientRect().height < 43.5)
    .map(([e, html]) => `${{e.getBoundingClientRect().height}} ${{html}}`)
"""
"""Controls that are lower than a finger is wide. Links within a sentence are left out, as WCAG does: they have words
beside them, which are no links and no label before a colon. A link of a list stands alone, whatever is beside it."""
MORE = (
    "/jobs?limit=5",
    "/jobs?state=completed&limit=5",
    "/jobs?state=failed&queue=none",
    "/queues?limit=1&skip=1",
    "/tasks?limit=1&skip=1",
    "/limits?list=locks&limit=1&skip=1",
    "/limits?name=none",
    "/workers?host=none",
    "/changes?actor=none",
    "/errors?queue=none",
    "/bulk/new?action=retry&state=failed&queue=none",
)
"""Pages with more rows before and behind them, and lists that are empty: they have links that others have not."""


@pytest.mark.promise("F316")
@pytest.mark.parametrize(("name", "path"), PAGES, ids=[name for name, _ in PAGES])
def test_a_finger_meets_every_control_of_a_phone(operator: Tab, ids: dict[str, int], name: str, path: str) -> None:
    operator.page.set_viewport_size({"width": 390, "height": HEIGHT})
    operator.go(path.replace("{id}", str(ids.get(name))))
    assert operator.page.evaluate(SMALL) == []
    operator.page.get_by_role("button", name="Menu").click()
    assert operator.page.evaluate(SMALL) == [], "in the menu"
    assert operator.overflow() == 0
    operator.clean()


@pytest.mark.promise("F478")
@pytest.mark.parametrize("path", MORE)
def test_a_finger_meets_links_to_other_rows_and_links_of_empty_lists(
    operator: Tab, long: dict[str, int], path: str
) -> None:
    """Naive is a link as high as its line: 22 px; and a caption that does not break the long name of all rows."""
    for width in (360, 390, 640):
        operator.page.set_viewport_size({"width": width, "height": HEIGHT})
        operator.go(path)
        assert operator.page.evaluate(SMALL) == [], width
        assert operator.overflow() == 0, width
    operator.clean()


@pytest.mark.promise("F478")
def test_all_jobs_of_a_page_are_chosen_above_the_cards_of_a_phone_and_in_the_head_of_a_wide_window(
    operator: Tab,
) -> None:
    """Naive is a link in the head alone: on a phone the head is clipped to a pixel, and the focus is not seen there."""
    page = operator.page
    for width, place in ((360, ".choose"), (390, ".choose"), (640, ".choose"), (641, "thead"), (1280, "thead")):
        page.set_viewport_size({"width": width, "height": HEIGHT})
        operator.go("/jobs?state=failed")
        link = page.get_by_role("link", name="Choose all on this page")
        assert link.count() == 1 and link.is_visible(), width
        assert page.locator(f"{place} a:visible").count() == 1, width
        link.click()
        boxes = page.get_by_role("checkbox", name="Choose job")
        assert boxes.count() == page.locator(".pick input:checked").count() > 0, width
    operator.clean()


@pytest.mark.promise("F316")
def test_pages_stand_at_the_left_of_a_wide_window_and_in_a_menu_of_a_narrow_one(operator: Tab) -> None:
    """78 rem are 1248 px. The content lies beside the pages, and not below them, also where it is scrolled to."""
    page = operator.page
    operator.go("/jobs")
    for width in (1249, 1280, 3840):
        page.set_viewport_size({"width": width, "height": HEIGHT})
        pages, content = page.locator("#pages").bounding_box(), page.locator("main").bounding_box()
        assert pages is not None and content is not None
        assert (pages["x"], pages["height"]) == (0, HEIGHT - 52) and content["x"] >= pages["x"] + pages["width"]
        assert not page.get_by_role("button", name="Menu").is_visible()
        assert page.get_by_role("link", name="Jobs", exact=True).get_attribute("aria-current") == "page"
    page.set_viewport_size({"width": 1248, "height": HEIGHT})
    assert not page.locator("#pages").is_visible() and page.get_by_role("button", name="Menu").is_visible()


PARTS = ("What fails", "Why jobs wait", "Queues", "The last hour", "Running longest")


def boxes(at: Tab) -> dict[str, Any]:
    """Where each part of the overview stands."""
    found = {
        each: at.page.locator("section").filter(has=at.page.get_by_role("heading", name=each)).bounding_box()
        for each in PARTS
    }
    assert None not in found.values()
    return found


@pytest.mark.promise("F449")
def test_parts_of_the_overview_stand_side_by_side_in_a_wide_window_and_in_their_order_in_a_narrow_one(
    operator: Tab,
) -> None:
    """Two parts that belong together have one upper edge. What has no such part is as wide as the page."""
    operator.go("/")
    for width in (1200, 1280, 1920, 3840):
        operator.page.set_viewport_size({"width": width, "height": HEIGHT})
        found = boxes(operator)
        for left, right in (PARTS[0:2], PARTS[3:5]):
            one, other = found[left], found[right]
            assert one["y"] == other["y"] and one["x"] + one["width"] < other["x"], (width, left)
            assert 1.9 < one["width"] / other["width"] < 2.1, (width, left)
            assert found["Queues"]["x"] == one["x"], width
            assert found["Queues"]["width"] == pytest.approx(other["x"] + other["width"] - one["x"], abs=1), width
        assert found["Queues"]["y"] >= max(each["y"] + each["height"] for each in (found[name] for name in PARTS[:2]))
        assert found["The last hour"]["y"] >= found["Queues"]["y"] + found["Queues"]["height"], width
    for width in (360, 390, 660, 1199):
        operator.page.set_viewport_size({"width": width, "height": HEIGHT})
        found = boxes(operator)
        for one, other in pairwise(PARTS):
            assert found[other]["y"] >= found[one]["y"] + found[one]["height"], (width, other)
            assert found[other]["x"] == found[one]["x"], (width, other)
    operator.clean()


@pytest.mark.promise("F450")
def test_the_visitor_and_the_live_switch_stand_at_the_right_of_the_header_at_every_width(operator: Tab) -> None:
    """Naive is a header whose words have no room on a phone: there they are shapes, and readers of screens say them."""
    page = operator.page
    operator.go("/jobs")
    role, live = (page.get_by_role("button", name=each, exact=True) for each in ("operator", "Live updates: on"))
    for width in (360, 390, 640, 641, 1248, 1249, 1280, 3840):
        page.set_viewport_size({"width": width, "height": HEIGHT})
        found = operator.header()
        assert role.is_visible() and live.is_visible(), width
        assert width - 40 <= found[".role"]["x"] + found[".role"]["width"] <= width, (width, found)
        assert list(found)[-2:] == [".live", ".role"], width
        if width <= 640:
            assert min(found[".live"]["width"], found[".role"]["width"]) >= 44, (width, found)
        role.click()
        box = page.locator("#account").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] >= 52, width
        assert page.get_by_role("button", name="Sign out").is_visible(), width
        page.keyboard.press("Escape")
        assert not page.get_by_role("button", name="Sign out").is_visible(), width
    shapes = "getComputedStyle(document.querySelector('.live'), '::before').content"
    on = page.evaluate(shapes)
    live.click()
    off = page.get_by_role("button", name="Live updates: off")
    assert page.evaluate(shapes) != on and off.get_attribute("title") == "Live updates: off"
    off.click()
    operator.clean()


TABLES = """
() => {
    document.querySelectorAll("main details").forEach(e => { e.open = true; });
    const found = [];
    for (const table of document.querySelectorAll("main table")) {
        const [heads] = table.tHead.rows, rows = [...table.tBodies[0].rows], name = table.caption.innerText;
        const whole = rows.filter(e => e.cells.length === heads.cells.length);
        if (rows.length < 2) continue;
        for (const head of heads.cells) {
            if (getComputedStyle(head).position !== "sticky") found.push(`${name}: ${head.innerText} goes away`);
            const cells = whole.map(e => e.cells[head.cellIndex]);
            const own = "form, .button, input, svg, time";
            if (table.className !== "cards" || cells.some(e => e.querySelector(own))) continue;
            const seen = new Set(cells.map(e => e.innerText.trim()));
            if (/ ago$| MiB$/.test([...seen][0])) continue;
            if (whole.length > 1 && seen.size === 1) found.push(`${name}: ${head.innerText} says the same in all rows`);
        }
        for (const time of table.querySelectorAll(".cards td > time, .cards td span > time"))
            if (!time.matches(".ago") || !time.title) found.push(`${name}: ${time.innerText}`);
    }
    for (const time of document.querySelectorAll(".head + p time, .ranked time, .reasons time"))
        if (!time.matches(".ago") || !time.title) found.push(time.innerText);
    return found;
}
"""
"""What is amiss with the tables of a page. Cells with controls, lines and times may be alike by chance."""


@pytest.mark.promise("F452")
@pytest.mark.parametrize(("name", "path"), PAGES, ids=[name for name, _ in PAGES])
def test_heads_of_tables_stay_no_column_says_the_same_in_all_rows_and_times_are_relative(
    operator: Tab, ids: dict[str, int], long: dict[str, int], name: str, path: str
) -> None:
    operator.page.set_viewport_size({"width": 1280, "height": HEIGHT})
    operator.go(path.replace("{id}", str(ids.get(name))))
    assert operator.page.evaluate(TABLES) == []
    operator.clean()


def test_a_page_that_fails_can_be_read(operator: Tab) -> None:
    answer = operator.page.goto(f"{operator.url}/jobs/999999")
    assert answer is not None and answer.status == 404
    assert (operator.findings(), operator.overflow()) == ([], 0)
    assert len(operator.said) == 1 and "404" in operator.said.pop()


@pytest.mark.parametrize(("name", "path"), PAGES, ids=[name for name, _ in PAGES])
def test_everything_is_reached_by_keyboard_and_seen_there(
    operator: Tab, ids: dict[str, int], name: str, path: str
) -> None:
    operator.page.set_viewport_size({"width": WIDTHS["phone"], "height": HEIGHT})
    operator.go(path.replace("{id}", str(ids.get(name))))
    first, *reached = list(tabbed(operator))
    assert first["text"] == "Skip to the content"
    assert [each for each in (first, *reached) if not (each["outlined"] and each["inside"] and each["wide"])] == []
    wanted: int = operator.page.evaluate(
        "[...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, textarea, summary, "
        f'[tabindex="0"]\')].filter(e => e.{SEEN} && e.tabIndex >= 0).length'
    )
    radios: int = operator.page.evaluate("document.querySelectorAll('input[type=radio]').length")
    assert wanted - radios <= len(reached) + 1 <= wanted


def test_the_first_key_leads_to_the_content(operator: Tab) -> None:
    operator.go("/jobs")
    operator.page.keyboard.press("Tab")
    operator.page.keyboard.press("Enter")
    assert operator.page.evaluate("document.activeElement.id") == "main"


def tabbed(at: Tab) -> Iterator[dict[str, Any]]:
    """What has the focus after each press of the Tab key, until it has left the page.

    `wide`: the boxes around it leave more than a pixel of it.
    """
    for _ in range(400):  # a field for a time is left with the seventh press
        at.page.keyboard.press("Tab")
        found = at.page.evaluate(
            """() => {
                const e = document.activeElement;
                if (e === window.before) return "the same";
                window.before = e;
                if (e === document.body || window.reached?.has(e)) return null;
                (window.reached ??= new Set()).add(e);
                const style = getComputedStyle(e), box = e.getBoundingClientRect(), shown = {...box.toJSON()};
                for (let over = e.parentElement; over !== null; over = over.parentElement) {
                    if (getComputedStyle(over).overflowX === "visible") continue;
                    const frame = over.getBoundingClientRect();
                    for (const side of ["left", "top"]) shown[side] = Math.max(shown[side], frame[side]);
                    for (const side of ["right", "bottom"]) shown[side] = Math.min(shown[side], frame[side]);
                }
                return {wide: shown.right - shown.left > 1 && shown.bottom - shown.top > 1,
                        text: e.innerText, what: e.outerHTML.slice(0, 200),
                        outlined: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
                        inside: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth};
            }"""
        )
        if found is None:
            return
        if found != "the same":
            yield found
    raise AssertionError("the Tab key does not leave the page")


@pytest.mark.promise("F311", "F156")
def test_times_of_charts_are_those_of_the_zone_that_is_shown(browser: Browser, url: str) -> None:
    with tab(browser, url, timezone_id="Asia/Kathmandu") as seen:  # UTC and 5:45
        seen.sign_in(READER)
        seen.go("/history")
        times = seen.page.locator(".columns time.clock")
        assert times.count() > 60
        utc = [str(each.get_attribute("datetime"))[11:16] for each in times.all()]
        assert times.all_text_contents() == utc
        seen.page.get_by_role("button", name="Show my zone").click()
        minutes = [int(each[:2]) * 60 + int(each[3:]) + 345 for each in utc]
        assert times.all_text_contents() == [f"{each // 60 % 24:02}:{each % 60:02}" for each in minutes]


NOTHING = (
    "/jobs?state=failed&queue=none&error_type=KeyError",
    "/jobs?state=failed&state=cancelled",
    "/jobs?state=running",
    "/jobs?arg=order_id=7",
    "/jobs?after=1",
    "/task?name=none",
    "/queue?name=none",
    "/limits/jobs?limit=none",
    "/limits/jobs?rate=none",
    "/bulk/new?action=retry&state=failed",
    "/errors?queue=none",
    "/changes?actor=none",
)
"""What finds nothing."""


@pytest.mark.promise("F484")
def test_pages_of_an_empty_queue_say_what_to_do(browser: Browser, pgqueue_databases: Databases, tmp_path: Path) -> None:
    """Each paragraph by itself: naive is a page that says somewhere else what to do."""
    plain = [path for name, path in PAGES if "{id}" not in path and name not in QUERIES]
    with pgqueue_databases.copy() as dsn, serving(dsn, tmp_path / "log", "--open") as url, tab(browser, url) as seen:
        for path in (*plain, *NOTHING):
            seen.go(path)
            assert seen.findings() == [], path
            empty = seen.page.locator("main p:not(.verdict p)", has_text=re.compile(r"^(No|There is no|Nothing)\b"))
            assert path in plain or empty.count() > 0 or "nothing to do" in seen.page.locator("main").inner_text(), path
            for text in empty.all_inner_texts():
                hint = r"pgqueue \w+|docs/|Declare|Begin|Start|nothing to do|Take a part|Look at another state"
                assert re.search(hint, text), (path, text)


@pytest.mark.promise("F479")
def test_in_a_healthy_queue_nothing_of_the_overview_is_red_or_amber(
    browser: Browser, pgqueue_databases: Databases, tmp_path: Path
) -> None:
    """Naive is a state that is red whatever its number is: `failed 0`."""
    with pgqueue_databases.copy() as dsn:
        with psycopg.connect(dsn) as conn:
            conn.execute(HEALTHY.encode())
        with serving(dsn, tmp_path / "log", "--open") as url, tab(browser, url) as seen:
            for path in ("/", "/queue?name=mail", "/task?name=mail.send"):
                for scheme in ("light", "dark"):
                    seen.page.emulate_media(color_scheme=scheme)
                    seen.go(path)
                    assert seen.page.locator(".states .state-failed").count() == 1, path
                    assert seen.page.evaluate(LOUD) == [], (path, scheme)
            seen.go("/")
            assert seen.page.get_by_role("heading", name="All is well").is_visible()
            with psycopg.connect(dsn) as conn:
                conn.execute("UPDATE pgqueue.history_minute SET failed = 1")
            seen.go("/")
            assert seen.page.evaluate(LOUD) != [], "what needs somebody is red"


# What visitors do ----------------------------------------------------------------------------------------------------


def test_an_operator_filters_opens_and_retries_a_job_and_all_of_a_filter(
    operator: Tab, dsn: str, tmp_path: Path
) -> None:
    page = operator.page
    page.set_viewport_size({"width": WIDTHS["desk"], "height": HEIGHT})
    with workers(tmp_path, dsn, TASKS) as fleet:
        fleet.ready()
        operator.go("/jobs")
        page.get_by_text("All filters").click()
        page.get_by_label("failed", exact=True).check()
        page.get_by_label("Task", exact=True).fill("cards.charge")
        page.get_by_role("button", name="Search").click()
        page.wait_for_url(re.compile(r"state=failed&.*task=cards\.charge"))
        row = page.locator("tbody tr").first
        id = row.get_by_role("checkbox").input_value()
        row.get_by_role("link").first.click()
        page.get_by_role("heading", name=f"Job {id}: cards.charge failed").wait_for()
        assert page.get_by_text("CardDeclined").count() > 0
        page.get_by_role("button", name="Retry").click()
        # The page renews itself: the worker completes the job.
        page.get_by_role("heading", name=f"Job {id}: cards.charge completed").wait_for()

        page.goto(f"{operator.url}/jobs?state=failed&task=cards.charge")
        page.get_by_role("link", name="Retry all 8…").click()
        page.get_by_text("8 jobs fit now").wait_for()
        page.get_by_role("button", name="Retry 8 jobs").click()
        page.get_by_role("heading", name=re.compile(r"Operation \d+: retry, (done|over|ended|completed)")).wait_for()
        assert page.get_by_text("8 changed").is_visible()
        operator.go("/jobs?state=failed")
        assert page.get_by_text("No job fits").is_visible()
    operator.clean()


def test_an_operator_cancels_all_jobs_of_a_queue_and_sees_the_progress(operator: Tab, dsn: str, tmp_path: Path) -> None:
    page = operator.page
    operator.go("/jobs?state=available&queue=mail")
    page.get_by_role("link", name="Cancel all 40…").click()
    page.get_by_text("40 jobs fit now: state available, queue mail").wait_for()
    page.get_by_label("Jobs a second at most").fill("20")
    page.get_by_role("button", name="Cancel 40 jobs").click()
    page.get_by_role("heading", name=re.compile(r"Operation \d+: cancel, running")).wait_for()
    with workers(tmp_path, dsn, TASKS) as fleet:  # one that does not serve the queue, and leads
        fleet.ready()
        page.get_by_role("progressbar").wait_for()
        page.get_by_role("heading", name=re.compile(r"Operation \d+: cancel, (done|over|ended|completed)")).wait_for()
    assert page.get_by_text("40 changed, 0 left out").is_visible()
    operator.clean()


def test_a_reader_sees_the_pages_and_no_button(browser: Browser, url: str, ids: dict[str, int]) -> None:
    with tab(browser, url) as seen:
        seen.sign_in(READER)
        for name, path in PAGES:
            if next(route.needs for route in ROUTES if route.name == name) != "read":
                continue
            seen.go(path.replace("{id}", str(ids.get(name))))
            assert seen.page.locator("main form[method=post]").count() == 0, path
        assert seen.page.get_by_role("link", name="Retry all").count() == 0


def test_who_signs_out_sees_nothing_more(browser: Browser, url: str) -> None:
    with tab(browser, url) as seen:
        seen.sign_in(READER)
        assert not seen.page.get_by_role("button", name="Sign out").is_visible()
        seen.page.get_by_role("button", name="reader", exact=True).click()
        seen.page.get_by_text("You see every page, and can change nothing.").wait_for()
        assert seen.findings() == []
        seen.page.get_by_role("button", name="Sign out").click()
        seen.page.get_by_role("heading", name="Sign in").wait_for()
        seen.go("/jobs")
        assert seen.page.get_by_role("heading", name="Sign in").is_visible()
