"""A figure with its goal, and the table of all figures (at most 100 columns)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from bench.samples import Sample, Side


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure must reach, and what would be better still; for ratios at least, for times and counts at most."""

    value: float
    reach: float | None = None
    at_most: bool = False

    def met(self, figure: float) -> bool:
        return figure <= self.value if self.at_most else figure >= self.value

    def show(self, value: float | None) -> str:
        return "" if value is None else f"{'<=' if self.at_most else '>='}{value:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report. Without a goal it is only reported."""

    scenario: str
    name: str
    value: float
    unit: str
    goal: Goal | None = None
    ours: Side | None = None
    other: Side | None = None

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return "-"
        return "pass" if self.goal.met(self.value) else "FAIL"


# One line per figure; the samples behind it are in the JSON.
_LINE = "{:<34} {:>9} {:>7} {:>7} {:>4}  {:>15}  {:>15}"
_HEAD = _LINE.format("figure", "value", "goal", "reach", "", "ours", "against").rstrip()


def table(figures: Iterable[Figure]) -> str:
    """The figures as text: value, goal, verdict, then both sides as jobs/s and CPU µs per job, client+server."""
    return "\n".join([_HEAD, "-" * len(_HEAD), *(line for figure in figures for line in _lines(figure))])


def _lines(figure: Figure) -> Iterable[str]:
    goal = figure.goal
    yield _LINE.format(
        f"{figure.scenario}: {figure.name}"[:34],
        f"{_number(figure.value)} {figure.unit}".strip(),
        goal.show(goal.value) if goal else "",
        goal.show(goal.reach) if goal else "",
        figure.verdict,
        _rate(figure.ours),
        _rate(figure.other),
    ).rstrip()
    if figure.ours is not None:
        yield _LINE.format("", "", "", "", "", _cpu(figure.ours), _cpu(figure.other)).rstrip()


def document(about: dict[str, Any], figures: Iterable[Figure]) -> dict[str, Any]:
    """The same for machines, with every sample."""
    return {"about": about, "figures": [{**asdict(figure), "verdict": figure.verdict} for figure in figures]}


def figures_of(found: dict[str, Any]) -> list[Figure]:
    """The figures of such a document."""
    return [
        Figure(
            **{key: each[key] for key in ("scenario", "name", "value", "unit")},
            goal=Goal(**each["goal"]) if each["goal"] else None,
            ours=_side(each["ours"]),
            other=_side(each["other"]),
        )
        for each in found["figures"]
    ]


def _side(found: dict[str, Any] | None) -> Side | None:
    return None if found is None else Side(found["name"], tuple(Sample(**sample) for sample in found["samples"]))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rate(side: Side | None) -> str:
    return "" if side is None else f"{side.rate:,.0f}/s"


def _cpu(side: Side | None) -> str:
    return "" if side is None else f"{side.client:.1f}+{side.server:.1f} µs"
