"""What pgqueue must reach beside the peers, in the same run. A bar that is missed stays in the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.peers.peer import OURS
from bench.peers.record import Record


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio to the best of some peers, or a plain figure (`among` is None)."""

    text: str
    scenario: str
    measure: str
    value: float
    among: Callable[[str, dict[str, str]], bool] | None
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar with what was measured; `figure` is None where the run has nothing to compare."""

    bar: Bar
    figure: float | None
    beside: str

    @property
    def word(self) -> str:
        if self.figure is None:
            return "not measured"
        met = self.figure <= self.bar.value if self.bar.at_most else self.figure >= self.bar.value
        return "met" if met else "MISSED"


def _any(name: str, about: dict[str, str]) -> bool:
    return True


def _python(name: str, about: dict[str, str]) -> bool:
    return about["language"] == "python"


def _postgresql(name: str, about: dict[str, str]) -> bool:
    return about["server"] == "postgresql"


def _graphile(name: str, about: dict[str, str]) -> bool:
    return name == "graphile-worker"


BARS = (
    Bar("drain, 1 process, of the best peer", "drain-1", "jobs_s", 1.0, _any),
    Bar("drain, 2 processes, of the best peer", "drain-2", "jobs_s", 1.0, _any),
    Bar("drain, 1 process, of the best Python peer", "drain-1", "jobs_s", 3.0, _python),
    Bar("drain, 2 processes, of the best Python peer", "drain-2", "jobs_s", 3.0, _python),
    Bar("bulk, of the best PostgreSQL peer", "bulk", "jobs_s", 1.7, _postgresql),
    Bar("one per transaction, of the best PostgreSQL peer", "one", "jobs_s", 1.0, _postgresql),
    Bar("start p50, of graphile-worker's", "start", "p50_ms", 1.05, _graphile, at_most=True),
    Bar("start p99, of graphile-worker's", "start", "p99_ms", 1.05, _graphile, at_most=True),
    Bar("WAL bytes a plain job, claim to end", "drain-1", "wal_bytes", 900, None, at_most=True),
    Bar("drain under an old snapshot, of the one before", "held", "share", 0.95, None),
)


def judge(record: Record, bars: Iterable[Bar] = BARS) -> list[Verdict]:
    """Every bar with its figure, and the peer it was measured beside."""
    return [_verdict(record, bar) for bar in bars]


def _verdict(record: Record, bar: Bar) -> Verdict:
    if bar.among is None:
        return Verdict(bar, record.median(bar.scenario, OURS, bar.measure), "")
    others = [name for name, about in record.peers.items() if name != OURS and bar.among(name, about)]
    ratios = {name: record.ratio(bar.scenario, bar.measure, OURS, name) for name in others}
    found = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not found:
        return Verdict(bar, None, "")
    # The best peer is the one beside which pgqueue looks worst.
    best = (max if bar.at_most else min)(found, key=found.__getitem__)
    return Verdict(bar, found[best], best)
