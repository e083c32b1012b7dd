"""The rules of the release, in each order of its steps that chance finds: naive ones fail, those that stand do not."""

from __future__ import annotations

import pytest
from flow_simulator import Flow, Rule

SEEDS = 2_000


def total(rule: Rule, deaths: float, *, swept: bool) -> tuple[int, int, int]:
    """Of all schedules: how many jobs started early, how many twice, how many wait for ever."""
    early = twice = stuck = 0
    for seed in range(SEEDS):
        flow = Flow.made(seed, rule, deaths)
        flow.run()
        if swept:
            flow.sweep()
        early, twice, stuck = early + flow.early, twice + flow.twice, stuck + flow.stuck
    return early, twice, stuck


@pytest.mark.promise("F372")
def test_no_job_is_early_and_none_is_left_without_a_sweep_unless_a_worker_dies() -> None:
    assert total("right", 0.0, swept=False) == (0, 0, 0)


@pytest.mark.promise("F373")
def test_what_dead_workers_have_not_looked_at_is_left_for_the_sweep_which_finds_all() -> None:
    assert total("right", 0.3, swept=False)[2] > 100
    assert total("right", 0.3, swept=True) == (0, 0, 0)


@pytest.mark.promise("F372")
def test_without_the_second_look_jobs_are_left() -> None:
    early, twice, stuck = total("no second look", 0.0, swept=False)
    assert (early, twice) == (0, 0)
    assert stuck > 10


@pytest.mark.promise("F372")
def test_a_look_in_four_statements_starts_jobs_early() -> None:
    assert total("four statements", 0.0, swept=False)[0] > 10


@pytest.mark.promise("F373")
def test_a_counter_loses_what_a_dead_worker_did_not_count() -> None:
    """And no sweep can tell: there is nothing that it could be compared with."""
    assert total("counter", 0.3, swept=False)[2] > 100
