"""Durations: seconds, a timedelta, or a text such as "30s", in every place that takes one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import pgqueue
from pgqueue import Every, InvalidOption, Retry, RetryPolicy, Snooze, Unique, Worker
from pgqueue.client.handle import JobHandle
from pgqueue.client.tasks import task
from pgqueue.jobs.durations import seconds

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
