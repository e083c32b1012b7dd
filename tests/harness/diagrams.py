"""The diagrams of the pages as SVG, each made from a text beside it: `docs/images/NAME.txt`.

As a program (`.venv/bin/python tests/harness/diagrams.py`) it writes them, and a test says that they are what the texts
give. A text has a title, a sentence or two about the diagram, a grid of boxes as a table, and arrows:

    title: Two boxes
    about: One leads to the other.

    | one | other |

    one -> other: why

`..>` is a dashed arrow, a hint. An arrow is a straight line. So the text places the boxes such that no arrow crosses a
third one; a test looks. The colours follow the reader's light or dark scheme, on any ground.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[2] / "docs" / "images"
REGENERATE = ".venv/bin/python tests/harness/diagrams.py"
LETTER, LINE = 7.2, 16  # a letter's width and a line's height, in pixels, of the font below: rather too much
BOX, ROW_GAP, LEAST_GAP, MARGIN = 38, 48, 56, 14
APART = 8  # between an arrow and the one that leads back
_ARROW = re.compile(r"^(?P<start>.+?) (?P<line>->|\.\.>) (?P<end>[^:]+)(?:: (?P<label>.+))?$")
_STYLE = """<style>
  text { fill: #1f2328; } text.label { fill: #57606a; font-size: 12px; }
  rect { fill: #eef4fa; stroke: #1f4e79; stroke-width: 1.5; }
  line { stroke: #57606a; stroke-width: 1.5; } line.hint { stroke-dasharray: 4 4; } marker path { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } text.label { fill: #adbac7; }
    rect { fill: #1b2a3a; stroke: #79c0ff; }
    line { stroke: #adbac7; } marker path { fill: #adbac7; }
  }
</style>"""


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangle by its middle and its size."""

    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: Area) -> bool:
        return (
            abs(self.x - other.x) * 2 < self.width + other.width
            and abs(self.y - other.y) * 2 < self.height + other.height
        )


@dataclass(frozen=True, slots=True)
class Arrow:
    """A line between two boxes, and what stands beside it."""

    start: tuple[float, float]
    end: tuple[float, float]
    label: str
    where: Area
    hint: bool
    of: tuple[str, str]

    def points(self, steps: int = 60) -> Iterator[Area]:
        """Points of the line, to see what it crosses."""
        (x, y), (to_x, to_y) = self.start, self.end
        for step in range(1, steps):
            yield Area(x + (to_x - x) * step / steps, y + (to_y - y) * step / steps, 1, 1)


@dataclass(frozen=True, slots=True)
class Diagram:
    """What a text says, laid out."""

    title: str
    about: str
    boxes: dict[str, Area]
    arrows: list[Arrow]
    width: float
    height: float


def read(text: str) -> Diagram:
    """Lay out what this text says; ValueError if a line is none of its parts, or an arrow leads to no box."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = dict(line.split(": ", 1) for line in lines[:2])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:] if line.startswith("|")]
    arrows = []
    for line in lines[2 + len(rows) :]:
        if (found := _ARROW.match(line)) is None:
            raise ValueError(f"no arrow: {line}")
        arrows.append(found)
    pairs = [(found["start"], found["end"]) for found in arrows]
    if missing := {name for pair in pairs for name in pair}.difference(*rows):
        raise ValueError(f"no such box: {missing}")
    boxes, width = _boxes(rows, arrows)
    drawn = [_arrow(found, boxes, two_ways=(found["end"], found["start"]) in pairs) for found in arrows]
    height = MARGIN + LINE + 14 + len(rows) * (BOX + ROW_GAP) - ROW_GAP + MARGIN
    return Diagram(said["title"], said["about"], boxes, drawn, width, height)


def _boxes(rows: list[list[str]], arrows: list[re.Match[str]]) -> tuple[dict[str, Area], float]:
    """Where each box is, and how wide the diagram is. A gap has room for the labels of the arrows that cross it."""
    columns = range(max(map(len, rows)))
    of = {name: column for row in rows for column, name in enumerate(row) if name}
    widths = [max((len(row[each]) for row in rows if each < len(row)), default=0) * LETTER + 22 for each in columns]
    left, x = [], float(MARGIN)
    for column in columns:
        crossing = [
            len(found["label"] or "") * LETTER
            for found in arrows
            if min(of[found["start"]], of[found["end"]]) == column - 1 and of[found["start"]] != of[found["end"]]
        ]
        if column:
            x += max([LEAST_GAP, *(length + 26 for length in crossing)])
        left.append(x)
        x += widths[column]
    top = MARGIN + LINE + 14
    areas = {
        name: Area(left[column] + widths[column] / 2, top + row * (BOX + ROW_GAP) + BOX / 2, widths[column], BOX)
        for row, cells in enumerate(rows)
        for column, name in enumerate(cells)
        if name
    }
    return areas, x + MARGIN


def _arrow(found: re.Match[str], boxes: dict[str, Area], *, two_ways: bool) -> Arrow:
    start, end = boxes[found["start"]], boxes[found["end"]]
    along_x, along_y = end.x - start.x, end.y - start.y
    length = (along_x**2 + along_y**2) ** 0.5
    aside = APART / length if two_ways else 0.0
    off_x, off_y = along_y * aside, -along_x * aside
    begin = _edge(start, along_x, along_y, off_x, off_y)
    stop = _edge(end, -along_x, -along_y, off_x, off_y)
    label = found["label"] or ""
    x, y, width = (begin[0] + stop[0]) / 2, (begin[1] + stop[1]) / 2, len(label) * LETTER * 12 / 13
    if abs(along_y) < 1:  # level: above the line, or below it if that one leads back
        where = Area(x, y + (14 if two_ways and along_x < 0 else -9), width, LINE - 2)
    else:  # beside the line, on the side where it is free
        beside = width / 2 + 8 + abs(along_x / along_y) * (LINE / 2)
        right = along_y > 0 if two_ways and abs(along_x) < 1 else along_x * along_y <= 0
        where = Area(x + (beside if right else -beside), y, width, LINE - 2)
    return Arrow(begin, stop, label, where, found["line"] == "..>", (found["start"], found["end"]))


def _edge(box: Area, along_x: float, along_y: float, off_x: float, off_y: float) -> tuple[float, float]:
    """Where a line from the middle of a box, moved aside, leaves the box."""
    reach = min(
        (box.width / 2 + 3) / abs(along_x) if along_x else float("inf"),
        (box.height / 2 + 3) / abs(along_y) if along_y else float("inf"),
    )
    return box.x + off_x + along_x * reach, box.y + off_y + along_y * reach


def svg(diagram: Diagram, name: str) -> str:
    """The diagram as SVG, with its title and what it shows for readers that cannot see it."""
    width, height = round(diagram.width), round(diagram.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" role="img" aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">{escape(diagram.title)}</title>',
        f'<desc id="{name}-desc">{escape(diagram.about)}</desc>',
        _STYLE,
        f'<defs><marker id="{name}-head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L10 5 L0 10 z"/></marker></defs>',
        f'<text x="{MARGIN}" y="{MARGIN + 8}" font-weight="bold">{escape(diagram.title)}</text>',
    ]
    for arrow in diagram.arrows:
        (x, y), (to_x, to_y) = arrow.start, arrow.end
        hint = ' class="hint"' if arrow.hint else ""
        lines.append(
            f'<line{hint} x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" marker-end="url(#{name}-head)"/>'
        )
        if arrow.label:
            lines.append(_text(arrow.label, arrow.where, ' class="label"'))
    for label, area in diagram.boxes.items():
        left, top = area.x - area.width / 2, area.y - area.height / 2
        lines.append(f'<rect x="{left:.1f}" y="{top:.1f}" width="{area.width:.1f}" height="{area.height:.1f}" rx="5"/>')
        lines.append(_text(label, area))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(text: str, area: Area, style: str = "") -> str:
    return f'<text{style} x="{area.x:.1f}" y="{area.y + 4:.1f}" text-anchor="middle">{escape(text)}</text>'


def pictures() -> dict[Path, str]:
    """The SVG of each text."""
    return {
        text.with_suffix(".svg"): svg(read(text.read_text(encoding="utf-8")), text.stem)
        for text in sorted(IMAGES.glob("*.txt"))
    }


if __name__ == "__main__":
    for path, drawn in pictures().items():
        path.write_text(drawn, encoding="utf-8")
