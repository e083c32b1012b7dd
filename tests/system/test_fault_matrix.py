"""The fault matrix: its account finds what is wrong, and two of its faults run through the same code as the report."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import fault_matrix
import pytest
from fault_work import Books, judge


def run(kind: str, key: int, pid: int, began: float, over: float | None = None) -> list[dict[str, Any]]:
    """The notes of one run of a handler; one that is not over has lost its process, or goes on."""
    facts = {"kind": kind, "key": key, "pid": pid, "run": f"{pid}.{key}.{began}"}
    ended = [] if over is None else [{"event": "over", "at": over, **facts}]
    return [{"event": "began", "at": began, **facts}, *ended]


CLEAN = [*run("plain", 0, 1, 1, 2), *run("effect", 1, 2, 1, 2), *run("locked", 2, 1, 1, 2), *run("limited", 3, 1, 1, 2)]
"""One job of each kind. Key 2 has the lock."""


def books(*more: dict[str, Any], states: dict[int, str] | None = None, effects: Counter[int] | None = None) -> Books:
    """Four jobs that were committed and have ended as they should, but for what is said."""
    journal = [{"event": event, "key": key} for key in range(4) for event in ("asks", "has")]
    sound = dict.fromkeys(range(4), "completed")
    return Books(
        journal, [*CLEAN, *more], sound | (states or {}), Counter([1]) if effects is None else effects, 0.5, 1.5, 3.0
    )


@pytest.mark.promise("F46")
def test_the_account_of_the_matrix_finds_what_is_wrong() -> None:
    assert judge(books()).clean
    lost = books()
    del lost.states[0]
    assert judge(lost).lost == [0]
    assert judge(books(states={0: "failed"})).lost == [0]
    assert judge(books(states={8: "available"})).lost == [8]  # its COMMIT was not answered, and it is there
    assert judge(books(states={8: "completed"})).lost == [8]  # no handler has run
    assert judge(books(effects=Counter())).lost == [1]
    assert judge(books(effects=Counter([1, 1]))).doubled == [1]
    assert judge(books(effects=Counter([1, 9]))).doubled == [9]  # its job was rolled back
    twice = judge(books(*run("plain", 0, 2, 2.5, 2.6)))
    assert (twice.again, twice.clean) == (1, True)
    assert judge(books()).pause == 2.0  # from the begin of each kind at 1.0 to the end at 3.0
    killed = [*run("held", -1, 9, 0.4), {"event": "died", "pid": 9, "at": 0.6}, *run("held", -1, 1, 4.6, 5)]
    assert judge(books(*killed, states={-1: "completed"})).pause == pytest.approx(4.0)  # its key stood idle
    assert not judge(Books([], [], {}, Counter(), 0, 1, math.inf)).clean  # nothing began any more


@pytest.mark.promise("F46")
def test_the_account_of_the_matrix_finds_overlaps() -> None:
    def found(*more: dict[str, Any]) -> list[tuple[str, int, int]]:
        return [each[:3] for each in judge(books(*more)).overlaps]

    assert found(*run("locked", 6, 2, 2, 3)) == []  # one after the other
    assert found(*run("locked", 6, 2, 1.9, 3)) == [("locked", 2, 6)]
    assert found(*run("locked", 2, 2, 1.9, 3)) == [("locked", 2, 2)]  # the same job beside itself
    assert found(*run("locked", 2, 1, 1.9, 3)) == [("locked", 2, 2)]  # in the same process
    assert found(*run("limited", 7, 2, 1.5, 3)) == []  # two may run
    assert found(*run("limited", 7, 2, 1.5, 3), *run("limited", 11, 2, 1.6, 3)) == [("limited", 3, 11)]
    # A run ends with its process, and rests while that is frozen.
    endless, next_one = run("locked", 6, 2, 3), run("locked", 10, 1, 5, 6)
    assert found(*endless, *next_one) == [("locked", 6, 10)]
    assert found(*endless, *next_one, {"event": "died", "pid": 2, "at": 4}) == []
    frozen = {"event": "frozen", "pid": 2, "at": 4}
    assert found(*endless, *next_one, frozen, {"event": "thawed", "pid": 2, "at": 7}) == []
    assert found(*endless, *next_one, frozen, {"event": "thawed", "pid": 2, "at": 5.5}) == [("locked", 10, 6)]


@pytest.mark.promise("F46")
def test_a_fault_is_forgiven_what_it_is_known_to_do_and_nothing_else() -> None:
    faults = {fault.name: fault for fault in fault_matrix.FAULTS}
    frozen, killed = faults["SIGSTOP of a worker past its lease"], faults["kill -9 of a worker"]
    overlapping = judge(books(*run("locked", 6, 2, 1.9, 3), states={6: "completed"}))
    assert overlapping.overlaps and frozen.accepts(overlapping) and not killed.accepts(overlapping)
    losing, doubling = judge(books(states={0: "failed"})), judge(books(effects=Counter([1, 1])))
    assert not frozen.accepts(losing) and not frozen.accepts(doubling)
    assert killed.accepts(judge(books()))


@pytest.mark.second
@pytest.mark.promise("F46")
@pytest.mark.parametrize("name", ["kill -9 of a worker", "all sessions of workers ended, 20 times"])
def test_a_fault_of_the_matrix_leaves_the_account_clean(name: str) -> None:
    (fault,) = [fault for fault in fault_matrix.FAULTS if fault.name == name]
    verdict = fault_matrix.measure(fault)
    print(verdict)
    assert verdict.clean, verdict
    assert verdict.jobs > 4 * 2 * fault_matrix.FLOW - 4
