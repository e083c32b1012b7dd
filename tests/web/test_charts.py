"""The history on the dashboard: where bars, lines and marks stand, and that the page draws them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from dashboards import reading
from workers import Eyes

import pgqueue
from pgqueue.admin.history import HistoryRow
from pgqueue.jobs import histogram
from pgqueue.web import charts

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
NONE = (0,) * (len(histogram.BOUNDS) + 1)


def row(minute: float, **numbers: Any) -> HistoryRow:
    names = ("started", "completed", "failed", "retried", "snoozed", "cancelled", "expired", "skipped", "interrupted")
    counted: dict[str, Any] = dict.fromkeys((*names, "rescued"), 0) | {"wait_seconds": 0.0, "run_seconds": 0.0}
    given = counted | {"wait": NONE, "run": NONE} | numbers
    return HistoryRow(at=FIRST + minute * MINUTE, queue=None, task=None, **given)


@pytest.mark.promise("F147")
def test_each_step_has_the_rows_of_its_time_and_no_other() -> None:
    rows = [row(-1, completed=1), row(0, completed=2), row(1.5, completed=4), row(2, completed=8), row(4, completed=16)]
    given = charts.steps(rows, FIRST, 2 * MINUTE, 2)
    assert [step.sum("completed") for step in given] == [6, 8]
    assert [step.at for step in given] == [FIRST, FIRST + 2 * MINUTE]


@pytest.mark.promise("F147")
def test_a_line_has_a_gap_where_nothing_was_measured() -> None:
    given = charts.steps([row(0, oldest=5.0), row(1, oldest=10.0), row(3, oldest=0.0)], FIRST, MINUTE, 4)
    chart = charts.line(given, lambda step: step.most("oldest"))
    assert chart.top == 10
    assert chart.lines == ("0.0,70.0 153.0,70.0 180.0,0.0 333.0,0.0", "540.0,140.0 693.0,140.0")
    empty = charts.line(charts.steps([], FIRST, MINUTE, 4), lambda step: step.most("oldest"))
    assert (empty.lines, empty.top) == ((), 1)


@pytest.mark.promise("F162")
async def test_the_overview_draws_the_last_hour(dsn: str, eyes: Eyes) -> None:
    async with reading(dsn) as browser:
        assert 'class="plot"' not in (await browser.get("/")).text
        eyes.do(
            "INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, failed, wait) "
            "SELECT date_trunc('minute', pgqueue.now() - make_interval(mins => g)), bin, 'mail', 'mail.send', 12, 9, "
            "3, ARRAY[0, 0, 12] FROM pgqueue.ring, generate_series(5, 6) AS g WHERE kind = 'minute'"
        )
        found = (await browser.get("/", headers={"accept": "application/json"})).json()
        ended, waits = found["charts"]["figures"]
        values = {part["name"]: [each for each in part["numbers"] if each] for part in ended["parts"]}
        assert values == {"completed": [9, 9], "retried": [], "failed": [3, 3]}
        assert waits["parts"][0]["path"].count("M") == 1 and found["hour"]["completed"] == 18
        page = (await browser.get("/")).text
        assert page.count('class="plot"') == 2 and {"bar-completed", "bar-failed"} <= set(re.findall(r"bar-\w+", page))


@pytest.mark.promise("F147")
@pytest.mark.parametrize("range_", ["1h", "6h", "24h", "30d"])
async def test_the_page_draws_what_happened_and_marks_changes_by_hand(dsn: str, eyes: Eyes, range_: str) -> None:
    # An hour is added up from its minutes only if it was not over when the database was migrated.
    table, ago = ("hour", "2 hours") if range_ == "30d" else ("minute", "0 minutes")
    eyes.do(
        f"INSERT INTO pgqueue.history_{table} (at, bin, queue, task, started, completed, failed) "  # noqa: S608
        f"SELECT date_trunc('{table}', pgqueue.now() - interval '{ago}'), bin, 'mail', 'mail.send', 12, 9, 3 "
        f"FROM pgqueue.ring WHERE kind = '{table}'"
    )
    pgqueue.pause(eyes.conn, "mail", actor="ann")
    async with reading(dsn) as browser:
        page = await browser.get("/history", params={"range": range_})
        assert page.status_code == 200, page.text
        assert {"bar-completed", "bar-failed"} <= set(re.findall(r"bar-\w+", page.text))
        assert 'class="change late"' in page.text and "1: pause by ann" in page.text
        assert 'style="' not in page.text
        found = (await browser.get("/history", params={"range": range_}, headers={"accept": "application/json"})).json()
        [item] = [each for each in found["items"] if each["is_counted"]]
        assert (item["started"], item["completed"], item["failed"]) == (12, 9, 3)
        none = await browser.get("/history", params={"range": range_, "queue": "other"})
        assert "Nothing happened" in none.text
        assert (await browser.get("/history?range=1y")).status_code == 400


@pytest.mark.promise("F156")
async def test_a_version_is_marked_where_its_first_worker_started(dsn: str, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, started_at, dead_at) "
        "SELECT '1 hour', 1, 1, 'h', version, '{default}', 'running', pgqueue.now() - ago::interval, dead "
        "FROM (VALUES ('v1', '3 days', NULL), ('v2<b>', '30 minutes', NULL), ('v2<b>', '20 minutes', NULL), "
        "             ('v0', '10 minutes', pgqueue.now())) AS given (version, ago, dead)"
    )
    eyes.do(
        "INSERT INTO pgqueue.history_minute (at, bin, queue, task, completed) "
        "SELECT date_trunc('minute', pgqueue.now() - interval '9 minutes'), bin, 'mail', 'mail.send', 9 "
        "FROM pgqueue.ring WHERE kind = 'minute'"
    )
    async with reading(dsn) as browser:
        asked = {"accept": "application/json"}
        found = (await browser.get("/history", headers=asked)).json()["charts"]
        assert [each["text"] for each in found["marks"]] == ["Version v2<b> began"]
        [place] = [place for place, each in enumerate(found["columns"]) if each["kind"] == "version"]
        assert 27 <= place <= 31 and found["columns"][place]["flags"] == ["v2<b>"]
        page = (await browser.get("/history")).text
        assert page.count('class="version') == 1 and '<span class="flag">v2&lt;b&gt;</span>' in page
        found = (await browser.get("/history?range=30d", headers=asked)).json()["charts"]["marks"]
        assert [each["text"] for each in found] == ["Version v1 began", "Version v2<b> began"]
