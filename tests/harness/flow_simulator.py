"""Flows in memory: workers that end jobs and look, in a random order of their steps, by the rules of releaser.py and by
naive ones.

A step is what a database does at once: a statement with its snapshot, or a COMMIT. A worker is a generator that yields
between its steps, and may die there. No I/O.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from random import Random
from typing import Literal

Rule = Literal["right", "no second look", "four statements", "counter"]
TABLES = ("available", "scheduled", "blocked", "running")
Steps = Generator[None, None, None]


@dataclass
class Waiter:
    """A job that waits for all of `after`, and watches one of them."""

    after: list[int]
    watches: int
    left: int
    """What the naive counter counts down: nodes that have not ended."""
    locked: bool = False
    released: int = 0
    early: bool = False


@dataclass
class Flow:
    """Jobs of some nodes, and the jobs that wait for these nodes."""

    random: Random
    rule: Rule
    deaths: float = 0.0
    jobs: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By id the node and the table of each job that lives."""
    waiters: list[Waiter] = field(default_factory=list)

    @classmethod
    def made(cls, seed: int, rule: Rule, deaths: float = 0.0) -> Flow:
        random = Random(seed)
        flow = cls(random, rule, deaths)
        for node in range(4):
            for _ in range(random.randint(1, 2)):
                flow.jobs[len(flow.jobs)] = (node, "available")
        for _ in range(3):
            after = sorted(random.sample(range(4), random.randint(1, 4)))
            flow.waiters.append(Waiter(after, after[-1], len(after)))
        return flow

    def lives(self, node: int) -> bool:
        return any(of == node for of, _ in self.jobs.values())

    def run(self) -> None:
        """Run to the end: every job has a worker; then sweeps, until none finds anything."""
        working = [self.worker(id) for id in self.jobs]
        while working:
            at = self.random.randrange(len(working))
            try:
                next(working[at])
            except StopIteration:
                working.pop(at)

    def sweep(self) -> None:
        """Look at each node that is watched: nothing else happens."""
        while any(not waiter.released and not self.lives(waiter.watches) for waiter in self.waiters):
            for node in {waiter.watches for waiter in self.waiters if not waiter.released}:
                for _ in self.look(node):
                    pass

    @property
    def stuck(self) -> int:
        """How many jobs wait though all has ended."""
        return sum(not waiter.released for waiter in self.waiters)

    @property
    def early(self) -> int:
        return sum(waiter.early for waiter in self.waiters)

    @property
    def twice(self) -> int:
        return sum(waiter.released > 1 for waiter in self.waiters)

    # Workers ---------------------------------------------------------------------------------------------------------

    def worker(self, id: int) -> Steps:
        """Moves its job from table to table, ends it, and looks: or dies before it looks."""
        node, _ = self.jobs[id]
        for _ in range(self.random.randint(1, 3)):
            yield
            self.jobs[id] = (node, self.random.choice(TABLES))
        yield
        last = sum(of == node for of, _ in self.jobs.values()) == 1
        del self.jobs[id]
        yield
        if self.random.random() < self.deaths:
            return
        if self.rule != "counter":
            yield from self.look(node)
        elif last:
            yield from self.count_down(node)

    def count_down(self, node: int) -> Steps:
        for waiter in self.waiters:
            if node in waiter.after:
                waiter.left -= 1
                if not waiter.left:
                    self.release(waiter)
                yield

    def look(self, node: int) -> Steps:
        """One statement with one snapshot moves the watches, or releases; then its COMMIT; then the nodes that came
        of it are looked at."""
        if self.rule == "four statements":
            seen = False
            for table in TABLES:
                seen = seen or any(of == node and where == table for of, where in self.jobs.values())
                yield
            if seen:
                return
        elif self.lives(node):
            return
        mine = [w for w in self.waiters if w.watches == node and not w.locked and not w.released]
        nexts = [next((at for at in reversed(w.after) if self.lives(at) and at != node), None) for w in mine]
        for waiter in mine:
            waiter.locked = True
        yield
        for waiter, after in zip(mine, nexts, strict=True):
            waiter.locked = False
            if after is None:
                self.release(waiter)
            else:
                waiter.watches = after
        if self.rule != "no second look":
            for after in {after for after in nexts if after is not None}:
                yield
                yield from self.look(after)

    def release(self, waiter: Waiter) -> None:
        waiter.released += 1
        waiter.early |= any(self.lives(node) for node in waiter.after)
