"""Samples, and how two sides are compared on a machine that is never quite quiet.

The sides take turns within one run, the order changes with each round, and a round's ratio is taken between
neighbours in time. The median of these ratios is what is reported: a slow minute hits both sides of its rounds, and a
single odd sample nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import click


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one side: jobs, wall seconds, CPU seconds of the client's processes and of the server's."""

    jobs: float
    seconds: float
    client: float
    server: float
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.jobs / self.seconds


@dataclass(frozen=True, slots=True)
class Side:
    """The samples of one side: the median rate; CPU as µs per job over all samples, for its clock ticks in 10 ms."""

    name: str
    samples: tuple[Sample, ...]

    @property
    def rate(self) -> float:
        return median(one.rate for one in self.samples)

    @property
    def client(self) -> float:
        return 1e6 * sum(one.client for one in self.samples) / sum(one.jobs for one in self.samples)

    @property
    def server(self) -> float:
        return 1e6 * sum(one.server for one in self.samples) / sum(one.jobs for one in self.samples)


def alternate(rounds: int, sides: Mapping[str, Callable[[], Sample]]) -> list[Side]:
    """Measure the sides in turn, the order turned round each time; the sides with their samples, in the order given."""
    found: dict[str, list[Sample]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in names:
            sample = sides[name]()
            found[name].append(sample)
            click.echo(f"  round {number + 1}  {name:<20} {sample.rate:>12,.1f}/s", err=True)
    return [Side(name, tuple(samples)) for name, samples in found.items()]


def ratio(ours: Side, other: Side, value: Callable[[Sample], float] = lambda sample: sample.rate) -> float:
    """The median of the rounds' own ratios."""
    return median(value(a) / value(b) for a, b in zip(ours.samples, other.samples, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)]
