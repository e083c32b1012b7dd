"""When something recurs: what lines mean, also where clocks are turned, and which ticks are to be made after a gap."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from time import process_time
from zoneinfo import ZoneInfo

import pytest

from pgqueue import Cron, Every, InvalidOption
from pgqueue.jobs.cron import CatchUp, When, parse, pending, tick_of

DAY = timedelta(days=1)


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-{text}").replace(tzinfo=UTC)


def ticks(when: When, after: datetime, until: datetime) -> list[datetime]:
    """Every tick in between, each reckoned from the one before, as rows do."""
    found: list[datetime] = []
    moment = when.next(after)
    while moment is not None and moment <= until:
        found.append(moment)
        moment = when.next(moment)
    return found


def shown(expr: str, tz: str, first: str, days: int) -> str:
    """The ticks of some days from midnight there on, as day and time in UTC."""
    start = datetime.fromisoformat(f"2026-{first}").replace(tzinfo=ZoneInfo(tz)).astimezone(UTC)
    found = ticks(Cron(expr, tz), start - timedelta(seconds=1), start + days * DAY - timedelta(hours=2))
    return " ".join(f"{tick:%d/%H:%M}" for tick in found)


# Lines ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expr", "after", "expected"),
    [
        ("*/15 * * * *", "03-01T10:20:00", "03-01T10:30:00"),
        ("0,15,30,45 * * * *", "03-01T10:45:00", "03-01T11:00:00"),
        ("*/15 * * * *", "03-01T10:30:00", "03-01T10:45:00"),
        ("*/15 * * * *", "03-01T10:29:59.999999", "03-01T10:30:00"),
        ("*/10 * * * * *", "03-01T10:20:05", "03-01T10:20:10"),
        ("0 0 L * *", "02-03T00:00:00", "02-28T00:00:00"),
        ("0 9 * * MON-FRI", "03-06T09:00:00", "03-09T09:00:00"),
        ("  0   9 * * mon  ", "03-06T09:00:00", "03-09T09:00:00"),
    ],
)
def test_the_first_tick_after_a_moment_is_later_than_it(expr: str, after: str, expected: str) -> None:
    assert Cron(expr).next(at(after)) == at(expected)


@pytest.mark.parametrize(
    ("expr", "words"),
    [
        ("61 * * * *", ["minute", "'61'", "0 to 59"]),
        ("* 24 * * *", ["hour", "'24'", "0 to 23"]),
        ("* * 0 * *", ["day-of-month", "'0'"]),
        ("* * * 13 *", ["month", "'13'"]),
        ("* * * FOO *", ["month", "'FOO'"]),
        ("* * * * 8", ["day-of-week", "'8'"]),
        ("* * * * MON#9", ["day-of-week", "'MON#9'"]),
        ("99 * * * * *", ["second", "'99'"]),
        ("0 99 * * * *", ["minute", "'99'"]),
        ("*/0 * * * *", ["minute", "'*/0'"]),
        ("5-1 * * * *", ["minute", "'5-1'"]),
        (", * * * *", ["minute", "','"]),
        ("0 0 31 2 *", ["day-of-month", "'31'", "month '2'"]),
        ("* * * *", ["4 fields", "5 (minute"]),
        ("@daily", ["1 field"]),
        ("", ["5 or 6 fields"]),
        ("* " * 300, ["5 or 6 fields"]),
    ],
)
def test_a_wrong_line_names_the_field_and_its_value(expr: str, words: list[str]) -> None:
    with pytest.raises(InvalidOption) as error:
        Cron(expr)
    assert [word for word in words if word not in str(error.value)] == []


def test_no_garbage_raises_anything_else() -> None:
    random = Random(5)
    for _ in range(3_000):
        expr = " ".join("".join(random.choices("0159*/-,#LW²MON ", k=random.randint(1, 5))) for _ in range(5))
        with suppress(InvalidOption):
            Cron(expr)


@pytest.mark.parametrize("tz", ["Europe/Berln", "Europe", "/etc/passwd", "../x", "", None, 7])
def test_a_zone_that_is_none_is_named(tz: str) -> None:
    with pytest.raises(InvalidOption, match="no such time zone"):
        Cron("* * * * *", tz)


@pytest.mark.parametrize("given", [0, 0.5, -1, True, "60", None, 1e12, float("nan"), timedelta(0)])
def test_an_interval_is_a_second_at_least(given: float) -> None:
    with pytest.raises(InvalidOption, match="every"):
        Every(given)


@pytest.mark.parametrize("catch_up", ["last", None, True])
def test_catch_up_is_one_of_three(catch_up: CatchUp) -> None:
    for make in (lambda: Cron("* * * * *", catch_up=catch_up), lambda: Every(60, catch_up)):
        with pytest.raises(InvalidOption, match="latest"):
            make()


@pytest.mark.parametrize(
    ("every", "after", "expected"),
    [
        (Every(900), "03-01T10:20:00", "03-01T10:30:00"),
        (Every(900), "03-01T10:30:00", "03-01T10:45:00"),
        (Every(timedelta(hours=1)), "03-01T10:30:00", "03-01T11:00:00"),
        (Every(1.5), "03-01T00:00:00", "03-01T00:00:01.500000"),
    ],
)
def test_intervals_are_counted_from_1970(every: Every, after: str, expected: str) -> None:
    assert every.next(at(after)) == at(expected)


@pytest.mark.parametrize(
    "when", [Cron("*/5  3 * * *", "Europe/Berlin", "all"), Every(900, "none"), Every(1.25), Every(timedelta(days=7))]
)
def test_what_stands_in_a_row_is_read_back(when: When) -> None:
    back = parse(when.line, when.tz, when.catch_up)
    assert (back.line, back.catch_up) == (when.line, when.catch_up)
    assert back.next(at("03-01T00:00:00")) == when.next(at("03-01T00:00:00"))


@pytest.mark.parametrize("line", ["every", "every soon", "every 0", "every -5", "7 * *"])
def test_a_row_with_a_wrong_line_is_refused(line: str) -> None:
    with pytest.raises(InvalidOption):
        parse(line, "UTC", "latest")


@pytest.mark.parametrize("headers", [{}, {"pgqueue:tick": 7}, {"pgqueue:tick": "soon"}, {"pgqueue:tick": None}])
def test_a_header_that_is_no_time_is_no_tick(headers: dict[str, object]) -> None:
    assert tick_of(headers) is None


# Where clocks are turned ---------------------------------------------------------------------------------------------


@pytest.mark.promise("F10")
@pytest.mark.parametrize(
    ("expr", "spring", "autumn"),
    [
        # at a time that the gap leaves out: right behind it; at one that comes twice: once, the first time
        ("30 2 * * *", "29/01:00 30/00:30", "25/00:30 26/01:30"),
        ("0,30 2 * * *", "29/01:00 30/00:00 30/00:30", "25/00:00 25/00:30 26/01:00 26/01:30"),
        ("0 3 * * *", "29/01:00 30/01:00", "25/02:00 26/02:00"),
        # with a star for the minute or the hour: by the time that has really passed
        ("*/30 2 * * *", "30/00:00 30/00:30", "25/00:00 25/00:30 25/01:00 25/01:30 26/01:00 26/01:30"),
    ],
)
def test_europe(expr: str, spring: str, autumn: str) -> None:
    """Berlin: 29 March 2026, 2:00 becomes 3:00 (01:00 UTC); 25 October, 3:00 becomes 2:00 (01:00 UTC)."""
    assert shown(expr, "Europe/Berlin", "03-29", 2) == spring
    assert shown(expr, "Europe/Berlin", "10-25", 2) == autumn


@pytest.mark.promise("F10")
@pytest.mark.parametrize(
    ("expr", "spring", "autumn"),
    [
        ("30 2 * * *", "08/07:00 09/06:30", "01/07:30 02/07:30"),
        ("30 1 * * *", "08/06:30 09/05:30", "01/05:30 02/06:30"),
        (
            "*/30 1 * * *",
            "08/06:00 08/06:30 09/05:00 09/05:30",
            "01/05:00 01/05:30 01/06:00 01/06:30 02/06:00 02/06:30",
        ),
    ],
)
def test_america(expr: str, spring: str, autumn: str) -> None:
    """New York: 8 March 2026, 2:00 becomes 3:00 (07:00 UTC); 1 November, 2:00 becomes 1:00 (06:00 UTC)."""
    assert shown(expr, "America/New_York", "03-08", 2) == spring
    assert shown(expr, "America/New_York", "11-01", 2) == autumn


@pytest.mark.second
@pytest.mark.promise("F10")
@pytest.mark.parametrize("tz", ["Europe/Berlin", "America/New_York", "Asia/Kathmandu"])
@pytest.mark.parametrize("expr", ["*/15 * * * *", "0,15,30,45 * * * *", "15 * * * *"])
def test_every_quarter_is_every_quarter_of_the_year_whatever_the_clocks_do(tz: str, expr: str) -> None:
    found = ticks(Cron(expr, tz), at("01-01T00:00:00"), at("12-31T00:00:00"))
    steps = {later - earlier for earlier, later in pairwise(found)}
    assert steps == ({timedelta(hours=1)} if expr.startswith("15") else {timedelta(minutes=15)})


@pytest.mark.promise("F10")
@pytest.mark.each_value
@pytest.mark.parametrize("tz", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca"])
@pytest.mark.parametrize("expr", ["30 2 * * *", "30 1 * * *", "*/7 1-3 * * *", "5,50 * * * *", "0 12 * * *"])
def test_ticks_are_the_same_wherever_the_reckoning_begins_and_each_is_later(tz: str, expr: str) -> None:
    """A worker that takes over reckons from the last tick, one that starts from its own time: also within the gap."""
    random = Random(f"{tz} {expr}")
    when = Cron(expr, tz)
    whole = ticks(when, at("01-01T00:00:00"), at("12-31T00:00:00"))
    assert whole == sorted(set(whole))
    for month, day in ((3, 8), (3, 29), (4, 5), (10, 4), (10, 25), (11, 1)):
        for _ in range(60):
            start = datetime(2026, month, day, tzinfo=UTC) - DAY + timedelta(seconds=random.randrange(3 * 86_400))
            assert when.next(start) == next(tick for tick in whole if tick > start)


# What was missed -----------------------------------------------------------------------------------------------------

QUARTERS = "*/15 * * * *"


@pytest.mark.promise("F10")
@pytest.mark.parametrize("make", [lambda c: Cron(QUARTERS, catch_up=c), lambda c: Every(900, c)])
@pytest.mark.parametrize(
    ("catch_up", "now", "made"),
    [
        ("latest", "03-01T10:00:01", ["03-01T10:00:00"]),
        ("latest", "03-01T11:07:00", ["03-01T11:00:00"]),
        ("latest", "03-01T11:00:00", ["03-01T11:00:00"]),
        ("latest", "05-01T11:07:00", ["05-01T11:00:00"]),
        ("none", "03-01T10:00:59", ["03-01T10:00:00"]),
        ("none", "03-01T10:01:01", []),
        ("none", "03-01T11:00:30", ["03-01T11:00:00"]),
        ("none", "05-01T11:07:00", []),
        ("all", "03-01T10:37:00", ["03-01T10:00:00", "03-01T10:15:00", "03-01T10:30:00"]),
    ],
)
def test_what_was_missed_is_made_by_catch_up(make: object, catch_up: str, now: str, made: list[str]) -> None:
    when: When = make(catch_up)  # type: ignore[operator]
    found, after = pending(when, at("03-01T10:00:00"), at(now), 100)
    assert found == [at(tick) for tick in made]
    assert after == when.next(at(now))


def test_all_of_a_long_outage_comes_in_pieces_of_the_size_asked_for() -> None:
    when = Every(60, "all")
    due, now = at("03-01T00:00:00"), at("03-01T12:00:00")
    found: list[datetime] = []
    pieces = 0
    while due <= now:
        made, after = pending(when, due, now, 100)
        assert len(made) <= 100 and after is not None
        found += made
        due = after
        pieces += 1
    assert (pieces, len(found), len(set(found))) == (8, 721, 721)


@pytest.mark.parametrize(
    "expr", ["* * * * *", "* * * * * *", "*/7 3-4 * * *", "0 0 29 2 *", "* 5 1 1 *", "30 2 * * MON#1"]
)
@pytest.mark.parametrize("gap", [1, 100, 5_000, 90_000, 3_000_000, 100_000_000])
def test_the_latest_is_found_soon_however_long_it_was(expr: str, gap: int) -> None:
    when = Cron(expr, "Europe/Berlin")
    due = when.next(at("01-01T00:00:00"))
    assert due is not None
    now = due + timedelta(seconds=gap)
    began = process_time()
    [latest], after = pending(when, due, now, 1)
    assert process_time() - began < 1.0
    assert due <= latest <= now
    assert after == when.next(now) == when.next(latest)
