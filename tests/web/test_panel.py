"""The charts of a page: one axis of time, round numbers, marks by name, and no 0 where nothing is counted yet."""

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
from pgqueue.web.panel import Drawing, Mark, round_number, round_time
from pgqueue.web.rendering import took

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
LATER = FIRST + timedelta(days=1)
NONE = (0,) * (len(histogram.BOUNDS) + 1)
KINDS = (("completed", "completed"), ("failed", "failed"))
JSON = {"accept": "application/json"}


def row(minute: float, counted: int | None = 0, **numbers: Any) -> HistoryRow:
    names = ("started", "completed", "failed", "retried", "snoozed", "cancelled", "expired", "skipped", "interrupted")
    base: dict[str, Any] = dict.fromkeys((*names, "rescued", "wait_seconds", "run_seconds"), counted)
    given = base | {"wait": NONE, "run": NONE} | numbers
    return HistoryRow(at=FIRST + minute * MINUTE, queue=None, task=None, **given)


def drawing(*rows: HistoryRow, number: int = 3, now: datetime = LATER) -> Drawing:
    return Drawing(charts.steps(rows, FIRST, MINUTE, number), MINUTE, now)


@pytest.mark.promise("F147")
def test_bars_stand_on_each_other_below_a_round_number() -> None:
    made = drawing(row(0, completed=3, failed=1), row(2, failed=2)).bars("ended", "", KINDS)
    assert list(made.ticks) == [4, 2, 0]
    assert [part.numbers for part in made.parts] == [(3, 0, 0), (1, 0, 2)]
    assert [part.path for part in made.parts] == ["M0.8 100V25H9.2V100z", "M0.8 25V0H9.2V25zM20.8 100V50H29.2V100z"]


@pytest.mark.promise("F147")
def test_a_line_runs_through_the_middle_of_its_steps_and_has_gaps() -> None:
    """A value that stands alone is drawn, too: naive is a line to nowhere, which is not seen."""
    made = drawing(row(0, oldest=5.0), row(1, oldest=10.0), row(3, oldest=0.0), number=5)
    figure = made.line("oldest", "", "oldest", lambda step: step.most("oldest"), is_time=True)
    assert (figure.ticks, figure.parts[0].path) == ((10, 5, 0), "M5 50L15 0M30.8 100H39.2")


@pytest.mark.promise("F311")
def test_an_axis_ends_at_a_round_number_not_far_above_the_highest_value() -> None:
    for most in (*range(2, 3_000), 86_399, 86_401, 3_000_000):
        number, time = round_number(most), round_time(most)
        assert most <= number <= 2 * most and most <= time <= 2 * most, most
        assert number % 2 == 0 and float(f"{number / 2:.1g}") == number / 2, "its half is as round"
        assert took(time).count(" ") == took(time / 2).count(" ") == 1, "one unit"


@pytest.mark.promise("F312")
def test_a_step_that_is_not_counted_yet_is_no_0() -> None:
    """Naive is the sum of no rows. The newest two minutes are unknown, but for what the database has counted there."""
    measured = row(3, counted=None, available=7, blocked=0)
    made = drawing(row(0, completed=1), measured, row(4, completed=2), number=5, now=FIRST + 4.5 * MINUTE)
    bars = made.bars("ended", "", KINDS)
    line = made.line("waiting", "", "waiting", lambda step: step.most("available"))
    panel = made.panel([bars, line])
    assert list(bars.parts[0].numbers) == [1, 0, 0, None, 2]
    assert [column.is_counted for column in panel.columns] == [True, True, True, False, True] and panel.uncounted == 1
    assert bars.uncounted == "M30 0V100h10V0z" and line.uncounted == "", "it is measured"


@pytest.mark.promise("F313")
def test_marks_are_named_where_there_is_room_and_numbered_where_not() -> None:
    marks = [
        Mark(FIRST + minute * MINUTE, kind, flag, f"{flag or 'pause'} {minute}")
        for minute, kind, flag in [
            (50, "version", "v3"), (1, "version", "v1"), (5, "version", "12"), (7, "change", ""), (7.5, "change", ""),
            (-1, "version", "v0"), (60, "change", ""), (7.9, "change", ""),
        ]
    ]  # fmt: skip
    panel = drawing(number=60).panel([], marks)
    assert [(mark.flag, mark.text) for mark in panel.marks] == [
        ("v1", "v1 1"), ("2", "12 5"), ("3", "pause 7"), ("4", "pause 7.5"), ("5", "pause 7.9"), ("v3", "v3 50"),
    ]  # fmt: skip
    flags = {place: (column.kind, column.flags) for place, column in enumerate(panel.columns) if column.flags}
    assert flags == {
        1: ("version", ("v1",)), 5: ("version", ("2",)), 7: ("change", ("3–5",)), 50: ("version", ("v3",)),
    }  # fmt: skip
    assert [place for place, column in enumerate(panel.columns) if column.is_labelled] == [0, 15, 30, 45]


@pytest.mark.promise("F311", "F312", "F313")
@pytest.mark.parametrize("range_", ["1h", "6h", "24h", "30d"])
async def test_the_page_has_an_axis_values_of_each_step_and_links_to_its_jobs(
    dsn: str, eyes: Eyes, range_: str
) -> None:
    table, ago = ("hour", "2 hours") if range_ == "30d" else ("minute", "3 minutes")
    eyes.do(
        f"INSERT INTO pgqueue.history_{table} (at, bin, queue, task, started, completed, failed) "  # noqa: S608
        f"SELECT date_trunc('{table}', pgqueue.now() - interval '{ago}'), bin, 'a&b', 'mail.send', 12, 9000, 3 "
        f"FROM pgqueue.ring WHERE kind = '{table}'"
    )
    pgqueue.pause(eyes.conn, "mail", actor="ann<b>")
    async with reading(dsn) as browser:
        asked = {"range": range_, "queue": "a&b"}
        page = (await browser.get("/history", params=asked)).text
        found = (await browser.get("/history", params=asked, headers=JSON)).json()
        columns, [place] = found["charts"]["columns"], [at for at, value in _values(found) if value]
        assert "<span>10,000</span><span>5,000</span><span>0</span>" in page
        tip = re.findall(r'<li[^>]*><a tabindex="-1" href="([^"]+)"><span class="tip">(.*?)</span></a>', page)
        assert len(tip) == len(columns)
        link, text = tip[place]
        assert "9,000 completed" in text and "3 failed" in text
        assert link.endswith("&amp;queue=a%26b")
        since, until = (columns[place][name][:16].replace(":", "%3A") for name in ("at", "until"))
        led = await browser.get(link.replace("&amp;", "&"))
        assert led.headers["location"] == f"/jobs?since={since}&until={until}&queue=a%26b"
        assert (await browser.get(led.headers["location"])).status_code == 200
        assert "1: pause by ann&lt;b&gt;, 1" in page and "ann<b>" not in page
        labels = re.findall(r'</a><time class="(\w+)" datetime="[^"]+">([^<]+)</time>', page)
        assert 3 <= len(labels) <= 7
        assert all(re.fullmatch(r"\d\d:00|\d\d:15|\d\d:30|\d\d:45|\d\d-\d\d", label) for _, label in labels), labels
        newest = found["items"][-1]
        if range_ == "1h":
            assert (newest["is_counted"], newest["completed"]) == (False, None)
            assert "not counted yet" in tip[-1][1] and "0 completed" not in tip[-1][1]
            assert page.count("<td>not counted yet") == 3 * found["charts"]["uncounted"] > 0
        assert len(page) <= 60_000, len(page)


def _values(document: dict[str, Any]) -> list[tuple[int, float | None]]:
    return list(enumerate(document["charts"]["figures"][0]["parts"][0]["numbers"]))
