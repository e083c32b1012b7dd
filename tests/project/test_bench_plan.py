"""A comparison takes no longer than it is told, and takes what matters first."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from peer_records import about, plain_about

from bench.peers import command, peer, plan, record, report
from bench.peers.record import LEFT_OUT, Record
from bench.peers.scenarios import SCENARIOS
from bench.peers.size import LEAST, Size


def test_a_snapshot_is_held_as_long_in_a_run_that_has_few_minutes() -> None:
    """Naive is to make it smaller as all else: the last of 36 seconds says nothing about the last of 2 minutes."""
    assert Size(LEAST).whole_seconds(120.0) == Size(1.0).whole_seconds(120.0) == 120.0
    assert Size(0.02).whole_seconds(120.0) < 10.0, "it shows that the harness works"


def test_what_takes_long_has_one_round_but_in_a_full_run() -> None:
    known = peer.chosen(peer.read().peers, ["graphile-worker"])
    found = plan.steps(known, [SCENARIOS["held"], SCENARIOS["one"]], rounds=3, full=False)
    assert [(step.scenario.name, step.turn) for step in found if step.peer.name == peer.OURS] == [
        *(("one", turn) for turn in (1, 2, 3)),
        ("held", 1),
    ]
    assert len(plan.steps(known, [SCENARIOS["held"]], rounds=3, full=True)) == 6


@pytest.mark.promise("F238")
def test_a_run_that_ends_early_has_a_round_of_everything_and_then_the_near_peers() -> None:
    known = peer.chosen(peer.read().peers, ["graphile-worker", "rq"])
    found = plan.steps(known, [SCENARIOS["one"], SCENARIOS["killed"], SCENARIOS["bulk"]], rounds=2, full=False)
    assert [f"{step.scenario.name} {step.turn} {step.peer.name}" for step in found] == [
        *(f"one 1 {name}" for name in ("pgqueue", "graphile-worker", "rq")),
        *(f"bulk 1 {name}" for name in ("pgqueue", "graphile-worker", "rq")),
        *(f"{scenario} 2 {name}" for scenario in ("one", "bulk") for name in ("graphile-worker", "pgqueue")),
        *(f"killed 1 {name}" for name in ("pgqueue", "graphile-worker")),
        *("one 2 rq", "bulk 2 rq", "killed 1 rq"),
    ]


@pytest.mark.promise("F238")
def test_samples_are_made_smaller_until_all_fit_but_not_below_the_least() -> None:
    wanted = [scenario for scenario in SCENARIOS.values() if not scenario.full_only]
    found = plan.steps([this for this in peer.read().peers.values() if not this.reason], wanted, rounds=3, full=False)
    hour = plan.scale_for(found, command.MINUTES, full=False)
    sure = [step for step in found if step.part <= plan.SURE]
    assert 0.5 < hour < 1.0, "the far peers' other rounds and crashes take the time that is left"
    assert plan.seconds(sure, hour, full=False) <= 60 * command.MINUTES, "without an option it takes an hour"
    assert {step.scenario.name for step in sure} == {scenario.name for scenario in wanted}
    assert plan.scale_for(found, 1_000.0, full=False) == 1.0
    assert plan.scale_for(found, 1.0, full=False) == LEAST


@pytest.mark.promise("F238")
def test_what_the_minutes_leave_out_is_written_down_and_taken_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "peers.json"
    taken: list[str] = []

    def sample(servers: object, step: plan.Step, found: Record) -> record.Sample:
        taken.append(step.peer.name)
        return {"jobs_s": 1.0}

    monkeypatch.setattr(command, "_sample", sample)
    clock = count(0.0, 10.0)  # each look at it is ten seconds later
    monkeypatch.setattr(command, "monotonic", lambda: next(clock))
    known = peer.chosen(peer.read().peers, ["graphile-worker"])
    steps = plan.steps(known, [SCENARIOS["one"]], rounds=2, full=False)
    found = Record(plain_about(rounds=2), {name: about(name) for name in ("pgqueue", "graphile-worker")})
    servers: Any = None

    command._measure(found, servers, steps, to, begun=0.0, minutes=1.0)

    assert 0 < len(taken) < len(steps)
    left = record.read(to).about[LEFT_OUT]
    assert left == [["one", step.peer.name, step.turn] for step in steps[len(taken) :]]
    assert f"- Enqueue one per transaction: {len(left)}" in report.effort(found)
    command._measure(record.read(to), servers, steps, to, begun=0.0)
    assert len(taken) == len(steps) and record.read(to).about[LEFT_OUT] == []


def test_peers_take_turns_in_changing_order() -> None:
    known = peer.chosen(peer.read().peers, ["graphile-worker"])
    found = plan.steps(known, [SCENARIOS["one"]], rounds=2, full=False)
    assert [(step.peer.name, step.turn) for step in found] == [
        ("pgqueue", 1),
        ("graphile-worker", 1),
        ("graphile-worker", 2),
        ("pgqueue", 2),
    ]
