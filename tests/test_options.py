"""An option that there is not gets an answer that names the one that may be meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import pgqueue


@pytest.mark.promise("F75")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: pgqueue.Lock("k", limt=3), r"Lock: no option limt \(did you mean limit\?\)"),  # type: ignore[call-arg]
        (lambda: pgqueue.Limit(3, nam="x"), r"Limit: no option nam \(did you mean name\?\)"),  # type: ignore[call-arg]
        (lambda: pgqueue.Rate("1/s", brst=1), r"Rate: no option brst \(did you mean burst\?\)"),  # type: ignore[call-arg]
        (lambda: pgqueue.Unique("k", ttl=3), "Unique: no option ttl; there are key, hold"),  # type: ignore[call-arg]
        (lambda: pgqueue.Cron("* * * * *", timezone="UTC"), r"timezone \(did you mean tz\?\)"),  # type: ignore[call-arg]
        (lambda: pgqueue.Every(minutes=5), "Every: no option minutes; there are seconds, catch_up"),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_option_names_those_that_there_are(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(pgqueue.InvalidOption, match=why):
        make()


@pytest.mark.parametrize(
    "cls", [pgqueue.Lock, pgqueue.Limit, pgqueue.Rate, pgqueue.Unique, pgqueue.Cron, pgqueue.Every]
)
def test_what_is_missing_or_too_much_is_pythons_own_error(cls: Any) -> None:
    with pytest.raises(TypeError, match="missing 1 required"):
        cls()
    assert "self" not in inspect.signature(cls).parameters
    assert "options" not in inspect.signature(cls).parameters
