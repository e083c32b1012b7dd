"""A scenario as SVG: bars with the peers' names beside them, and a line for each peer where there are several points.

Colours follow the reader's light or dark scheme. The ground is transparent, so a chart stands on any page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from bench.peers.peer import OURS
from bench.peers.record import Record
from bench.peers.scenarios import Curve, Scenario

_ROW, _NAME, _WIDTH, _SPAN = 26, 170, 720, 430  # of a chart of bars, in pixels
_TOP, _HEIGHT, _LEFT, _RIGHT, _LABEL = 50, 300, 70, 520, 15  # of a chart of lines
_STYLE = """<style>
  text { fill: #1f2328; }
  .other { fill: #8fb0d0; stroke: none; } .ours { fill: #1f4e79; stroke: none; }
  polyline { fill: none; stroke: #8fb0d0; stroke-width: 1.5; } polyline.mine { stroke: #1f4e79; stroke-width: 3; }
  .axis { stroke: #8b949e; stroke-width: 1; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .other { fill: #4a6785; } .ours { fill: #79c0ff; }
    polyline { stroke: #4a6785; } polyline.mine { stroke: #79c0ff; }
  }
</style>"""


def bars(record: Record, scenario: Scenario) -> str:
    """Bars of the first measure, the best on top."""
    measure = scenario.measures[0]
    medians = record.ranked(scenario.name, measure.key, less_is_better=measure.less_is_better)
    most = max(medians.values(), default=1.0) or 1.0
    title = f"{scenario.title}, {measure.heading}{' (less is better)' if measure.less_is_better else ''}"
    lines = []
    for row, (name, value) in enumerate(medians.items()):
        top, width = 34 + row * _ROW, max(1.0, _SPAN * value / most)
        side = "ours" if name == OURS else "other"
        lines += [
            f'<text x="{_NAME - 8}" y="{top + 14}" text-anchor="end">{escape(record.title(name))}</text>',
            f'<rect class="{side}" x="{_NAME}" y="{top}" width="{width:.1f}" height="18"/>',
            f'<text x="{_NAME + width + 6:.1f}" y="{top + 14}">{number(value)}</text>',
        ]
    return _svg(title, 40 + _ROW * len(medians), lines)


def lines(record: Record, scenario: Scenario, curve: Curve) -> str:
    """A line for each peer with two points or more, its name at the end. On the scale ten times is always as far."""
    found = curve_of(record, scenario, curve)
    values = [value for points in found.values() for value in points.values()]
    low, high = min(values), max(values)
    scale = math.log(high / low) or 1.0
    across = {
        point: _LEFT + (_RIGHT - _LEFT) * step / max(1, len(curve.points) - 1)
        for step, point in enumerate(curve.points)
    }

    def down(value: float) -> float:
        return _TOP + _HEIGHT * (1 - math.log(value / low) / scale)

    drawn = [
        f'<line class="axis" x1="{_LEFT}" y1="{_TOP + _HEIGHT + 8}" x2="{_RIGHT}" y2="{_TOP + _HEIGHT + 8}"/>',
        f'<text x="{_LEFT - 8}" y="{_TOP + 4}" text-anchor="end">{number(high)}</text>',
        f'<text x="{_LEFT - 8}" y="{_TOP + _HEIGHT}" text-anchor="end">{number(low)}</text>',
        *(f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 26}" text-anchor="middle">{p:,}</text>' for p, x in across.items()),
        f'<text x="{_RIGHT}" y="{_TOP + _HEIGHT + 44}" text-anchor="end">{escape(curve.axis)}</text>',
    ]
    below = -math.inf
    for name, points in sorted(found.items(), key=lambda pair: down(list(pair[1].values())[-1])):
        path = " ".join(f"{across[point]:.1f},{down(value):.1f}" for point, value in points.items())
        side = ' class="mine"' if name == OURS else ""
        last = list(points)[-1]
        at = below = max(below + _LABEL, down(points[last]) + 4)
        drawn += [
            f'<polyline{side} points="{path}"/>',
            f'<text x="{_RIGHT + 10}" y="{at:.1f}">{escape(record.title(name))}</text>',
        ]
    bottom = max(_TOP + _HEIGHT + 44, below if found else 0)
    better = " (less is better)" if curve.less_is_better else ""
    return _svg(f"{scenario.title}: {curve.heading}{better}", math.ceil(bottom) + 12, drawn)


def curve_of(record: Record, scenario: Scenario, curve: Curve) -> dict[str, dict[int, float]]:
    """The medians of each peer by point, of peers that have two or more; what is 0 has no place on the scale."""
    found: dict[str, dict[int, float]] = {}
    for name in record.samples.get(scenario.name, {}):
        points = {p: record.median(scenario.name, name, f"{curve.key}@{p}") for p in curve.points}
        known = {point: value for point, value in points.items() if value}
        if len(known) > 1:
            found[name] = known
    return found


def charts(record: Record, measured: list[Scenario]) -> Mapping[str, str]:
    """All of them by the name of their file."""
    found = {f"{scenario.name}.svg": bars(record, scenario) for scenario in measured}
    for scenario in measured:
        for curve in scenario.curves:
            if curve_of(record, scenario, curve):
                found[curve_file(scenario, curve)] = lines(record, scenario, curve)
    return found


def curve_file(scenario: Scenario, curve: Curve) -> str:
    return f"{scenario.name}-{curve.key}.svg"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _svg(title: str, height: int, body: list[str]) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{escape(title)}">',
        _STYLE,
        f'<text x="8" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"
