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
    why: str
    """Where the cost is, said if the bar is missed: a fact of the design."""
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
        return "kept" if met else "missed"

    @property
    def sentence(self) -> str:
        """The bar, what was measured, and if it is missed, why."""
        bar = self.bar
        wanted = f"{'at most' if bar.at_most else 'at least'} {bar.value:g}"
        figure = "nothing" if self.figure is None else f"{self.figure:.3g}"
        return f"{bar.text} {wanted}, and it was {figure}.{f' {bar.why}' if self.word == 'missed' else ''}"


def _any(name: str, about: dict[str, str]) -> bool:
    return True


def _python(name: str, about: dict[str, str]) -> bool:
    return about["language"] == "python"


def _postgresql(name: str, about: dict[str, str]) -> bool:
    return about["server"] == "postgresql"


def _graphile(name: str, about: dict[str, str]) -> bool:
    return name == "graphile-worker"


_DELETED = "pgqueue writes a row of history for each job; graphile-worker deletes it."
_RUST = "The engine of one peer, awa-pg, is in Rust; its handlers are in Python."
_BULK = "The table has two indexes, two sequences and wide rows."
_ONE = "Each INSERT prepares the checks of its row anew."
_CLAIM = "A claim moves the row of its job to another table before the handler begins."
_WAL = "A job is written as running and as history."
_HELD = "Dead rows that the snapshot keeps are passed by the first claim after a start."
BARS = (
    Bar("drain, 1 process, of the best peer", "drain-1", "jobs_s", 1.0, _any, _DELETED),
    Bar("drain, 2 processes, of the best peer", "drain-2", "jobs_s", 1.0, _any, _DELETED),
    Bar("drain, 1 process, of the best Python peer", "drain-1", "jobs_s", 3.0, _python, _RUST),
    Bar("drain, 2 processes, of the best Python peer", "drain-2", "jobs_s", 3.0, _python, _RUST),
    Bar("bulk, of the best PostgreSQL peer", "bulk", "jobs_s", 1.7, _postgresql, _BULK),
    Bar("one per transaction, of the best PostgreSQL peer", "one", "jobs_s", 1.0, _postgresql, _ONE),
    Bar("start p50, of graphile-worker's", "start", "p50_ms", 1.05, _graphile, _CLAIM, at_most=True),
    Bar("start p99, of graphile-worker's", "start", "p99_ms", 1.0, _graphile, _CLAIM, at_most=True),
    Bar("WAL bytes a plain job, claim to end", "drain-1", "wal_bytes", 900, None, _WAL, at_most=True),
    Bar("jobs/s in the last half under a snapshot, of the first", "held", "last", 0.95, None, _HELD),
    Bar("drain under an old snapshot, of the one before", "held", "share", 0.95, None, _HELD),
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
