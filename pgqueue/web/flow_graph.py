"""The graph of a flow as places: each node stands in a column behind all nodes that it waits for. Pure.

Called by the page of a flow. A template draws it as SVG, and takes all texts from the nodes themselves: no text is made
here. All columns have the same rows. So a line that passes a column runs between two rows, and behind no node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgqueue.admin.flows import NodeInfo

NODES_MOST = 200
EDGES_MOST = 1_000
"""More lines than these are a grey area on a screen, and most of the page."""
WIDE, HIGH = 200, 44
"""Of a node, in pixels. The style sheet has the same."""
GAP, ROW = 56, 60
"""Between two columns; from one row to the next."""


@dataclass(frozen=True, slots=True)
class Column:
    """The nodes of a column from top to bottom: the place of each among the nodes of the flow, and its upper edge."""

    x: int
    nodes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """`lines` are the paths for each kind of condition: `completed`, `ended`, `failed`."""

    width: int
    height: int
    columns: tuple[Column, ...]
    lines: Mapping[str, str]


def graph_of(nodes: Sequence[NodeInfo]) -> Graph | None:
    """The graph of these nodes, which are in the order of their numbers. None if there are none, or too many."""
    if not 1 <= len(nodes) <= NODES_MOST or sum(map(_edges, nodes)) > EDGES_MOST:
        return None
    columns = _columns(nodes)
    places = {nodes[at].number: (x, row) for x, column in enumerate(columns) for row, at in enumerate(column)}
    lines: dict[str, list[str]] = {"completed": [], "ended": [], "failed": []}
    for node in nodes:
        for kind, numbers in zip(lines, (node.after, node.after_end, node.after_failure), strict=True):
            lines[kind] += [_line(places[number], places[node.number]) for number in numbers if number in places]
    return Graph(
        width=len(columns) * (WIDE + GAP) - GAP,
        height=max(map(len, columns)) * ROW - (ROW - HIGH),
        columns=tuple(
            Column(x * (WIDE + GAP), tuple((at, row * ROW) for row, at in enumerate(column)))
            for x, column in enumerate(columns)
        ),
        lines={kind: "".join(each) for kind, each in lines.items() if each},
    )


def _edges(node: NodeInfo) -> int:
    return len(node.after) + len(node.after_end) + len(node.after_failure)


def _columns(nodes: Sequence[NodeInfo]) -> list[list[int]]:
    """The nodes by columns, each in the order of the rows of what they wait for: so fewer lines cross."""
    depth: dict[int, int] = {}
    found: list[list[int]] = []
    for at, node in enumerate(nodes):  # what a node waits for has a lower number
        depth[node.number] = 1 + max((depth.get(each, -1) for each in _before(node)), default=-1)
        found += [[] for _ in range(len(found), depth[node.number] + 1)]
        found[depth[node.number]].append(at)
    rows: dict[int, int] = {}
    for column in found:
        column.sort(key=lambda at: (_mean([rows[each] for each in _before(nodes[at]) if each in rows]), at))
        rows |= {nodes[at].number: row for row, at in enumerate(column)}
    return found


def _before(node: NodeInfo) -> tuple[int, ...]:
    return node.after + node.after_end + node.after_failure


def _mean(rows: Sequence[int]) -> float:
    return sum(rows) / len(rows) if rows else 0.0


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    """A curve from the right of one node to the left of another one."""
    (column, row), (to, to_row) = start, end
    passed, down = to - column - 1, (to_row - row) * ROW
    begin = f"M{column * (WIDE + GAP) + WIDE} {row * ROW + HIGH // 2}"
    if not passed:
        return begin + _curve(down)
    return begin + _curve(ROW // 2) + f"h{passed * (WIDE + GAP) - GAP}" + _curve(down - ROW // 2)


def _curve(down: int) -> str:
    return f"c{GAP // 2} 0 {GAP // 2} {down} {GAP} {down}" if down else f"h{GAP}"
