"""What has happened to the jobs of a process, as plain numbers that can be added up, sent and read. No I/O.

A worker counts (`worker/counters.py`), a supervisor adds up what its processes say, `telemetry` shows it. All numbers
of `Totals` only ever grow. `Numbers` has the present state beside them.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pgqueue.jobs.histogram import BOUNDS

TASKS_MOST = 200
OTHERS = "other tasks"
"""The name under which the rest is counted, for each queue. It has a blank, so no task has it."""
PLACES = len(BOUNDS) + 1

Sample = tuple[str, Mapping[str, str], float]
"""A gauge: its name, its labels, its value."""


class Counts:
    """What has happened to the jobs of one queue and task."""

    __slots__ = ("happened", "run", "run_seconds", "wait", "wait_seconds")

    def __init__(self) -> None:
        self.happened: dict[str, int] = {"completed": 0}
        self.wait = [0] * PLACES
        self.run = [0] * PLACES
        self.wait_seconds = self.run_seconds = 0.0

    def add(self, done: int, run_seconds: float, wait_seconds: float) -> None:
        """Add completed jobs, whose times are in the histograms already."""
        self.happened["completed"] += done
        self.run_seconds += run_seconds
        # If the database's clock has just been set back, these jobs seem to have begun before they could.
        self.wait_seconds += max(0.0, wait_seconds)

    def include(self, now: Counts, before: Counts) -> None:
        """Add what `now` has more than `before`."""
        for what, n in now.happened.items():
            self.happened[what] = self.happened.get(what, 0) + n - before.happened.get(what, 0)
        self.wait = _grown(self.wait, now.wait, before.wait)
        self.run = _grown(self.run, now.run, before.run)
        self.wait_seconds += now.wait_seconds - before.wait_seconds
        self.run_seconds += now.run_seconds - before.run_seconds

    def as_json(self, queue: str, task: str) -> dict[str, Any]:
        """The object in `history_part.counts`."""
        made: dict[str, Any] = {"queue": queue, "task": task}
        made |= {what: n for what, n in self.happened.items() if n}
        if started := sum(self.wait):
            made |= {"started": started, "wait": _trimmed(self.wait), "wait_seconds": round(self.wait_seconds, 6)}
        if any(self.run):
            made |= {"run": _trimmed(self.run), "run_seconds": round(self.run_seconds, 6)}
        return made

    @classmethod
    def of_json(cls, said: Mapping[str, Any]) -> Counts:
        """The counts of such an object."""
        made = cls()
        made.happened |= {what: n for what, n in said.items() if what not in _NO_OUTCOMES}
        made.wait, made.wait_seconds = _whole(said.get("wait", ())), said.get("wait_seconds", 0.0)
        made.run, made.run_seconds = _whole(said.get("run", ())), said.get("run_seconds", 0.0)
        return made


_NO_OUTCOMES = {"queue", "task", "started", "wait", "wait_seconds", "run", "run_seconds"}


@dataclass(slots=True)
class Times:
    """How often something took how long: a histogram by `BOUNDS`, and the sum in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * PLACES)
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Once more, for so long."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def include(self, now: Times, before: Times) -> None:
        """Add what `now` has more than `before`."""
        self.counts = _grown(self.counts, now.counts, before.counts)
        self.seconds += now.seconds - before.seconds


_COUNTED = ("fenced", "rescued", "swept_nodes", "lost_slots")
"""What is one number of a process."""


@dataclass(slots=True)
class Totals:
    """What one process has done since it began, or several."""

    tasks: dict[tuple[str, str], Counts] = field(default_factory=dict)
    """By queue and task. Beyond 200 of them, the rest is counted under `OTHERS`."""
    claims: Times = field(default_factory=Times)
    flushes: Times = field(default_factory=Times)
    fenced: int = 0
    """Outcomes that were dropped, because the job had been given to another worker."""
    rescued: int = 0
    """Jobs of dead workers that were given back."""
    swept_nodes: int = 0
    """Nodes of flows that had ended, and were waited for, when the sweep looked."""
    lost_slots: int = 0
    """How often a slot was lost to a handler that did not stop."""

    def include(self, now: Totals, before: Totals | None = None) -> None:
        """Add what `now` has more than `before`, which are the earlier totals of the same process."""
        before = before or Totals()
        self.include_tasks(now.tasks, before.tasks)
        self.claims.include(now.claims, before.claims)
        self.flushes.include(now.flushes, before.flushes)
        self.fenced += now.fenced - before.fenced
        self.rescued += now.rescued - before.rescued
        self.swept_nodes += now.swept_nodes - before.swept_nodes
        self.lost_slots += now.lost_slots - before.lost_slots

    def include_tasks(
        self, now: Mapping[tuple[str, str], Counts], before: Mapping[tuple[str, str], Counts] | None = None
    ) -> None:
        """The same for what has happened to jobs."""
        before, nothing = before or {}, Counts()
        for (queue, task), counts in now.items():
            self.of(queue, task).include(counts, before.get((queue, task), nothing))

    def of(self, queue: str, task: str) -> Counts:
        """The counts of this queue and task, or those of the rest. The same ones each time."""
        found = self.tasks.get((queue, task))
        if found is None:
            found = self.tasks.setdefault((queue, task if len(self.tasks) < TASKS_MOST else OTHERS), Counts())
        return found


@dataclass(slots=True)
class Numbers:
    """What is shown of one process, or of several: what they have done, and what they are doing."""

    totals: Totals = field(default_factory=Totals)
    slots: dict[str, int] = field(default_factory=lambda: {"busy": 0, "free": 0, "lost": 0})
    """How many slots are in which state just now."""
    leads: bool = False
    """Whether this worker does the leader's duties."""
    gauges: Sequence[Sample] = ()
    """What the leader has read of the database."""

    def lines(self, most: int) -> Iterator[dict[str, Any]]:
        """All of it as JSON objects, for `of_lines`. The text of each has `most` bytes and a few hundred more."""
        totals, said = self.totals, 0
        line: dict[str, Any] = {"tasks": [], "gauges": []}
        items = [("tasks", counts.as_json(*names)) for names, counts in totals.tasks.items()]
        for kind, item in [*items, *(("gauges", each) for each in self.gauges)]:
            size = len(json.dumps(item))
            if said and said + size > most:
                yield line
                line, said = {"tasks": [], "gauges": []}, 0
            line[kind].append(item)
            said += size
        rest = {name: getattr(totals, name) for name in _COUNTED}
        times = {name: [_trimmed(each.counts), each.seconds] for name, each in _times(totals).items()}
        yield line | rest | times | {"slots": self.slots, "leads": self.leads}

    @classmethod
    def of_lines(cls, lines: Sequence[Mapping[str, Any]]) -> Numbers:
        """The numbers that were sent as these lines, the last one last."""
        last = lines[-1]
        totals = Totals(**{name: last[name] for name in _COUNTED})
        totals.claims, totals.flushes = (Times(_whole(last[name][0]), last[name][1]) for name in ("claims", "flushes"))
        for line in lines:
            totals.tasks |= {(each["queue"], each["task"]): Counts.of_json(each) for each in line["tasks"]}
        gauges: list[Sample] = [(name, labels, value) for line in lines for name, labels, value in line["gauges"]]
        return cls(totals, dict(last["slots"]), bool(last["leads"]), tuple(gauges))


def _times(totals: Totals) -> dict[str, Times]:
    return {"claims": totals.claims, "flushes": totals.flushes}


def _grown(counts: list[int], now: list[int], before: list[int]) -> list[int]:
    return [n + more - less for n, more, less in zip(counts, now, before, strict=True)]


def _trimmed(counts: list[int]) -> list[int]:
    """The counts up to the last that is not 0."""
    last = max((place for place, n in enumerate(counts) if n), default=-1)
    return counts[: last + 1]


def _whole(counts: Sequence[int]) -> list[int]:
    """The counts that were trimmed."""
    return [*counts, *([0] * (PLACES - len(counts)))]
