"""The scheme of the relay loses nothing and doubles nothing, whatever happens; and each part of it is needed."""

from __future__ import annotations

import pytest
from relay_simulator import Model, Scheme

# The scheme without one of its parts, and the first schedule that finds it out.
WITHOUT = {
    "the fence": (Scheme(fence=False), 5),
    "the uid": (Scheme(uid=False), 2),
    "a fence for each session": (Scheme(fence_per_session=False), 50),
    "the durable commit": (Scheme(durable=False), 19),
    "the look at the whole outbox": (Scheme(looked=False), 457),
    "the end of a session that holds the fence for ever": (Scheme(ends_holder=False), 2),
}
without = pytest.mark.parametrize(("scheme", "seed"), WITHOUT.values(), ids=list(WITHOUT))


def faults(scheme: Scheme, number: int) -> tuple[int, int]:
    """Of this number of schedules: how many lose a job, and how many double one."""
    outcomes = [Model(scheme, seed).run() for seed in range(number)]
    assert sum(outcome.staged for outcome in outcomes) > 20 * number
    return sum(bool(outcome.lost) for outcome in outcomes), sum(bool(outcome.doubled) for outcome in outcomes)


@pytest.mark.promise("E10")
def test_nothing_is_lost_and_nothing_is_doubled() -> None:
    assert faults(Scheme(), 300) == (0, 0)


@pytest.mark.promise("E10")
@pytest.mark.promise("F204")
@without
def test_a_schedule_finds_out_that_a_part_is_missing(scheme: Scheme, seed: int) -> None:
    outcome = Model(scheme, seed).run()
    assert outcome.lost or outcome.doubled
    outcome = Model(Scheme(), seed).run()
    assert (outcome.lost, outcome.doubled) == ((), ())


@pytest.mark.second
@pytest.mark.promise("E10")
def test_nothing_is_lost_and_nothing_is_doubled_in_three_thousand_schedules() -> None:
    assert faults(Scheme(), 3_000) == (0, 0)


@pytest.mark.long
@pytest.mark.promise("E10")
@without
def test_three_thousand_schedules_find_out_that_a_part_is_missing(scheme: Scheme, seed: int) -> None:
    assert sum(faults(scheme, 3_000)) > 0
