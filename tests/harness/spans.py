"""When which job of which key ran, and how many ran at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from workers import Process


class Spans:
    """When which job of which key ran."""

    def __init__(self) -> None:
        self.all: list[tuple[str, float, float]] = []

    def add(self, key: object, began: float, ended: float) -> None:
        self.all.append((str(key), began, ended))

    def most(self) -> dict[str, int]:
        """How many ran at the same time, at most, by key."""
        steps: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for key, began, ended in self.all:
            steps[key] += [(began, 1), (ended, -1)]
        most: dict[str, int] = {}
        for key, moments in steps.items():
            running = 0
            for _, step in sorted(moments):
                running += step
                most[key] = max(most.get(key, 0), running)
        return most

    @classmethod
    def told(cls, processes: Iterable[Process]) -> Spans:
        """From the events `ran` of worker processes, whose clocks are one."""
        spans = cls()
        for process in processes:
            for event in process.all("ran"):
                spans.add(event["key"], event["began"], event["at"])
        return spans
