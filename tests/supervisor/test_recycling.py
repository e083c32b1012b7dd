"""Who is to be replaced although it works, decided with a clock and a scale of the test's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from pgqueue.supervisor import recycling
from pgqueue.supervisor.fleet import Child, Fleet, State
from pgqueue.supervisor.recycling import BOOT_SECONDS, Recycling, Terms


@dataclass
class Looked:
    """A process as the recycling sees it."""

    child: Child
    pid: int = 1
    vitals: dict[str, Any] = field(default_factory=lambda: {"lost": 0, "ended": 0})
    failure: str = ""
    killed: bool = False
    said: list[str] = field(default_factory=list)

    @property
    def pipe(self) -> Any:
        return self

    def say(self, what: str, **facts: object) -> None:
        self.said.append(what)

    def kill(self) -> None:
        self.killed = True


def make(monkeypatch: pytest.MonkeyPatch, **terms: Any) -> tuple[Recycling, Any, list[int]]:
    """A recycling, a process of it that runs, and the sizes it is weighed at."""
    fleet, sizes, child = Fleet(1), [100], Child(1, 1, state=State.RUNNING)
    fleet.children[1] = child
    monkeypatch.setattr(recycling, "rss", lambda pid: sizes[-1])
    return Recycling(Terms(1, (), **terms), fleet), Looked(child), sizes


@pytest.mark.promise("S13")
@pytest.mark.parametrize("every", [2.0, 300.0])
def test_memory_is_looked_at_as_often_as_was_said(every: float, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, process, sizes = make(monkeypatch, memory_limit=200, check_every=every)
    process.vitals["ended"] = 1
    looks.look([process], 1.0)
    sizes.append(300)
    looks.look([process], 1.0 + every - 0.1)
    assert not process.child.unfit
    looks.look([process], 1.0 + every)
    assert process.child.unfit == "it was over its memory limit" and process.said == ["over"]
    looks.look([process], 2.0 + 2 * every)
    assert process.said == ["over"], "told once"


def test_one_that_is_too_fat_before_it_has_run_anything_is_kept_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, process, _ = make(monkeypatch, memory_limit=50)
    for now in (1.0, 10.0, 20.0):
        looks.look([process], now)
    assert not process.child.unfit and caplog.text.count("below what the code needs") == 1
    process.child.busy = 1
    looks.look([process], 30.0)
    assert process.child.unfit


def test_without_a_limit_nobody_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, process, _ = make(monkeypatch)
    process.vitals["ended"] = 1
    looks.look([process], 1.0)
    assert not process.child.unfit


@pytest.mark.parametrize("most", [10, 1000])
def test_enough_jobs_and_a_lost_slot_make_unfit(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, process, _ = make(monkeypatch, max_jobs=most)
    process.vitals = {"lost": 0, "ended": most - 1}
    assert not looks.worn(process)
    process.vitals = {"lost": 0, "ended": most}
    assert looks.worn(process) and f"{most:,} jobs" in process.child.unfit
    looks, process, _ = make(monkeypatch)
    process.vitals = {"lost": 1, "ended": 10**6}
    assert looks.worn(process) and "did not stop" in process.child.unfit
    assert not looks.worn(process), "said once"


@pytest.mark.promise("S19")
def test_one_that_does_not_announce_itself_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, process, _ = make(monkeypatch)
    process.child = Child(1, 1, since=7.0)
    looks.look([process], 7.0 + BOOT_SECONDS)
    assert not process.killed
    process.child.announced = True
    looks.look([process], 8.0 + BOOT_SECONDS)
    assert not process.killed
    process.child.announced = False
    looks.look([process], 8.0 + BOOT_SECONDS)
    assert process.killed and "had not announced itself" in process.failure
