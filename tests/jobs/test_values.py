"""Values: a duration is seconds, a timedelta, or a text such as "30s", wherever one is taken; numbers; rates."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import pgqueue
from pgqueue import Every, InvalidOption, Retry, RetryPolicy, Snooze, Unique, Worker
from pgqueue.client.handle import JobHandle
from pgqueue.client.tasks import task
from pgqueue.jobs.values import HIGHEST_ID, digits, is_moment, length, number, per, seconds, whole

FORMS = [90, 90.0, timedelta(seconds=90), "90s", "1.5m", "1.5 m"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (timedelta(days=1), 86_400.0),
        ("0s", 0.0),
        ("250ms", 0.25),
        ("30s", 30.0),
        ("5m", 300.0),
        ("2h", 7_200.0),
        ("1.5d", 129_600.0),
    ],
)
def test_seconds(given: Any, expected: float) -> None:
    assert seconds(given, "x") == expected


NONE = [-1, True, None, "30", "s", "", "-1s", "1w", "1m30s", "1e3s", " 1s", "1s\n", "\u0661s", "99999999d", [1]]


@pytest.mark.parametrize("given", [*NONE, float("nan"), float("inf"), timedelta(seconds=-1)])
def test_what_is_no_duration_is_refused(given: Any) -> None:
    with pytest.raises(InvalidOption, match=r'^lease .*: give seconds, a timedelta or "30s", "5m", "2h"'):
        seconds(given, "lease")


@task(name="durations.plain")
def plain(n: int = 0) -> None: ...


def nothing() -> None: ...


def declared(**options: Any) -> Any:
    return task(name="durations.declared", **options)(nothing)


def worker(**options: Any) -> Any:
    return Worker(dsn="postgresql:///x", tasks=[plain], **options).settings


PLACES: dict[str, Callable[[Any], Any]] = {
    "delay": lambda given: plain.using(delay=given).new().delay,
    "deadline": lambda given: plain.using(deadline=given).new().deadline,
    "timeout": lambda given: plain.using(timeout=given).job_timeout,
    "first": lambda given: RetryPolicy(first=given).first,
    "most": lambda given: RetryPolicy(most=given).most,
    "a retry function": lambda given: RetryPolicy.of(lambda attempt, error: given).wait(1, OSError()),
    "Snooze": lambda given: Snooze(given).delay,
    "Retry": lambda given: Retry(given).delay,
    "hold": lambda given: Unique("k", hold=given).hold,
    "debounce": lambda given: Unique("k", debounce=given).debounce,
    "debounce_max": lambda given: Unique("k", debounce=1, debounce_max=given).debounce_max,
    "@task(timeout)": lambda given: declared(timeout=given).timeout,
    "@task(deadline)": lambda given: declared(deadline=given).deadline,
    "Every": lambda given: float(Every(given).line.removeprefix("every ")),
    "poll": lambda given: worker(poll=given).poll,
    "lease": lambda given: worker(lease=given).lease,
    "idle": lambda given: worker(idle=given).idle,
    "fail_unknown": lambda given: worker(fail_unknown=given).fail_unknown,
}


@pytest.mark.promise("F60")
@pytest.mark.parametrize("place", PLACES)
def test_every_place_takes_all_forms(place: str) -> None:
    for given in FORMS:
        assert PLACES[place](given) == 90.0, (place, given)
    with pytest.raises(InvalidOption):
        PLACES[place]("soon")


@pytest.mark.promise("F60")
def test_the_wait_for_a_result_takes_a_text_and_refuses_what_is_none(dsn: str) -> None:
    with pytest.raises(InvalidOption, match=r'timeout .*"30s"'):
        JobHandle(1).result("soon")
    pgqueue.configure(dsn=dsn)
    with pytest.raises(pgqueue.JobNotFound):
        JobHandle(1).result("250ms")


# Numbers, rates, moments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, 0, HIGHEST_ID + 1])
def test_what_is_no_whole_number_in_the_bounds(value: object) -> None:
    assert whole(1, 1) and whole(HIGHEST_ID, 1) and not whole(value, 1)


@pytest.mark.parametrize("value", [True, "1", None, 0.9, 10**400, float("inf"), float("nan")])
def test_what_is_no_number_in_the_bounds(value: object) -> None:
    assert number(1, 1) and number(1e300, 1) and not number(value, 1, 1e300)
    assert not number(float("inf"), 1)


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1_0", "\u0661", "\u00b2", "1" * 20])
def test_what_are_no_digits(text: str) -> None:
    assert digits("0" * 18 + "7") == 7 and digits(text) is None


@pytest.mark.parametrize("text", ["", "m", "5 w", "5m3s", "-5m", "5 M", "1e3s", "\u0661s", "5m\n"])
def test_what_is_no_length_of_time(text: str) -> None:
    assert length("5 m") == length("300", "s") == 300.0 and length(text) is None and length(text, "s") is None


@pytest.mark.parametrize("text", ["", "5", "/s", "5/", "5/w", "-5/s", "5/0.5.1s", "\u0661/s", "5/s\n"])
def test_what_is_no_rate(text: str) -> None:
    assert per("30/minutes") == per("30 / m") == (30.0, 60.0) and per(text) is None


def test_a_moment_has_a_time_zone() -> None:
    assert is_moment(datetime(2026, 1, 1, tzinfo=UTC))
    assert not is_moment(datetime(2026, 1, 1)) and not is_moment(0) and not is_moment("2026-01-01T00:00Z")
