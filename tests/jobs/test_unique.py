"""What a declaration says about unique keys: checked when it is declared, rendered when a job is made."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pgqueue import InvalidArguments, InvalidOption, Unique
from pgqueue.client.tasks import Task, task
from pgqueue.jobs.keys import Keys


@task(name="uniqueness.report", unique="report:{shop}:{day}", lock="shop:{shop}")
def report(shop: int, day: str | None = "today") -> None: ...


def keys(asked: Task[..., Any], *args: Any, **kwargs: Any) -> Keys | None:
    return asked.new(*args, **kwargs).keys


def test_a_template_is_filled_with_arguments_and_defaults() -> None:
    assert keys(report, 7) == Keys("report:7:today")
    assert keys(report, 7, day="monday") == Keys("report:7:monday")
    assert keys(report, 7, day=None) is None, "a parameter that is None: no key"
    assert report.new(7).lock_key == "shop:7", "beside a lock"


def test_using_takes_the_place_of_the_tasks_own_and_an_idempotency_key_is_beside_it() -> None:
    assert keys(report.using(unique="other:{shop}"), 7) == Keys("other:7")
    assert keys(report.using(idempotency_key="i"), 7) == Keys("report:7:today", "i")
    assert keys(report.using(idempotency_key="i", unique="u:{shop}").using(priority=0), 7) == Keys("u:7", "i")
    assert keys(report.using(idempotency_key="i"), 7, day=None) == Keys(None, "i")
    assert keys(report, 7) == Keys("report:7:today"), "the declared one stays as it is"
    assert Keys("u", "i").names() == ["idempotency:i", "unique:u"] == sorted(Keys("u", "i").names())


@pytest.mark.parametrize(
    ("unique", "hold", "seconds"),
    [
        (Unique("k"), "live", 0.0),
        (Unique("k", hold="pending"), "pending", 0.0),
        (Unique("k", hold=90), "after", 90.0),
        (Unique("k", hold=timedelta(minutes=2)), "after", 120.0),
        (Unique("k", hold=0), "after", 0.0),
        (Unique("k", on_duplicate="replace"), "pending", 0.0),
        (Unique("k", on_duplicate="replace", hold="live"), "live", 0.0),
        (Unique("k", debounce=5), "pending", 0.0),
    ],
)
def test_how_long_it_holds(unique: Unique, hold: str, seconds: float) -> None:
    made = keys(report.using(unique=unique), 7)
    assert made is not None and (made.hold, made.seconds) == (hold, seconds)


def test_debounce_is_a_delay_unless_a_time_is_given() -> None:
    index = report.using(unique=Unique("k", debounce=timedelta(seconds=5), debounce_max=60))
    made = index.new(7)
    assert made.delay == 5.0 and made.keys is not None
    assert (made.keys.on_duplicate, made.keys.debounce_max) == ("replace", 60.0)
    assert index.using(delay=9).new(7).delay == 9.0
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    assert (index.using(run_at=moment).new(7).run_at, index.using(run_at=moment).new(7).delay) == (moment, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key": 7}, "the key is a template or a function"),
        ({"key": "k", "hold": "forever"}, 'use "pending", "live" or "30s"'),
        ({"key": "k", "hold": -1}, "hold"),
        ({"key": "k", "on_duplicate": "ignore"}, 'use "return", "raise" or "replace"'),
        ({"key": "k", "debounce": -1}, "debounce"),
        ({"key": "k", "debounce": 5, "on_duplicate": "raise"}, "debounce replaces"),
        ({"key": "k", "debounce_max": 5}, "no less than a debounce"),
        ({"key": "k", "debounce": 5, "debounce_max": 4}, "no less than a debounce"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        Unique(**options)


@pytest.mark.parametrize("key", ["{nobody}", "{shop!r}", "{shop:5}", "{shop", lambda nobody: "k", lambda shop, /: "k"])
def test_a_key_names_parameters_of_the_task(key: Any) -> None:
    with pytest.raises(InvalidOption, match=r"uniqueness\.report"):
        report.using(unique=key)
    with pytest.raises(InvalidOption):

        @task(name="uniqueness.never", unique=key)
        def never(shop: int) -> None: ...


def test_a_function_may_say_that_there_is_none_or_something_that_is_none() -> None:
    assert keys(report.using(unique=lambda shop, **_: None if shop == 1 else f"s{shop}"), 1) is None
    with pytest.raises(InvalidArguments, match="unique key 7"):
        report.using(unique=lambda shop: shop).new(7)
