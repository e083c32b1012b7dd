"""What README.md and docs/compare.md quote of the last whole run, and of the list of peers: marked blocks in them.

A block begins with `<!-- NAME: python -m bench report --write -->` and ends with `<!-- end of NAME -->`. Nothing
between them is written by hand, and a test compares it with bench/results/peers.json. Without it there is no figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.peers import record, report
from bench.peers.bars import judge
from bench.peers.chart import number
from bench.peers.install import ROOT
from bench.peers.peer import OURS, Peer, read
from bench.peers.record import Record
from bench.peers.scenarios import SCENARIOS, Scenario, applies

RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "compare.md")
LED_BY = ("application", "drain-1", "start")
"""What README.md says, in this order."""


class NoPlace(Exception):
    """A page has no such block, or no end of it."""


def last() -> Record | None:
    """The last whole run; None while there is none."""
    file = RESULTS / report.RECORD
    return record.read(file) if file.exists() else None


def lacking(found: Record) -> str:
    """What this run lacks to be quoted: sizes that mean something, and a sample of each peer in every scenario that
    does not take long; nothing if it is whole."""
    if found.about.get("quick"):
        return "sizes that mean something: it is of --quick"
    peers = [this for this in read().peers.values() if this.reason is None]
    if strangers := [this.name for this in peers if this.name not in found.peers]:
        return f"the peers {', '.join(strangers)}"
    return "; ".join(
        f"{scenario.name} of {', '.join(absent)}"
        for scenario in SCENARIOS.values()
        if not scenario.full_only and not scenario.once and (absent := _absent(found, scenario, peers))
    )


def _absent(found: Record, scenario: Scenario, peers: list[Peer]) -> list[str]:
    """The peers without a sample."""
    return [
        this.name
        for this in peers
        if applies(scenario, this)
        and found.peers[this.name]["reason"] is None
        and not found.has(scenario.name, this.name, 1)
    ]


def write() -> list[Path]:
    """Fill each block of each page from the last whole run; the pages that have changed."""
    changed = []
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = filled(before, texts(last()))
        if after != before:
            page.write_text(after, encoding="utf-8")
            changed.append(page)
    return changed


def texts(found: Record | None) -> Mapping[str, str]:
    """Every block by its name."""
    peers = list(read().peers.values())
    return {"headline": _headline(found), "figures": _figures(found), "peers": _peers(peers)}


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """The page with these texts in its blocks; those that it does not have are left out. NoPlace: one has no end."""
    for name, text in blocks.items():
        mark, end = f"<!-- {name}: python -m bench report --write -->\n", f"<!-- end of {name} -->"
        head, found, rest = page.partition(mark)
        if not found:
            continue
        _, closed, tail = rest.partition(end)
        if not closed:
            raise NoPlace(f"the block {name} has no end")
        page = f"{head}{mark}{text}\n{end}{tail}"
    return page


def _headline(found: Record | None) -> str:
    """Short: README.md has little room left."""
    if found is None:
        return "There is no whole run of this version yet."
    rows = [row for name in LED_BY if (row := _row(found, name))]
    return report.table(["measured", "pgqueue", "best other", "ratio"], rows)


def _row(found: Record, name: str) -> list[str] | None:
    scenario = SCENARIOS[name]
    first = scenario.measures[0]
    ranked = found.ranked(name, first.key, less_is_better=first.less_is_better)
    # No ratio is taken to nothing: while a broker confirms a message, its job may begin before the enqueue returns.
    others = [other for other in ranked if other != OURS and ranked[other] > 0]
    if OURS not in ranked or not others:
        return None
    best = others[0]
    ratio = found.ratio(name, first.key, OURS, best)
    title = f"{scenario.title}, {first.heading}"
    return [
        title,
        number(ranked[OURS]),
        f"{number(ranked[best])} ({found.title(best)})",
        "" if ratio is None else number(ratio),
    ]


def _figures(found: Record | None) -> str:
    if found is None:
        return "There is no whole run of this version yet, so this page has no figure."
    about = found.about
    machine = ", ".join(str(about[key]) for key in ("cpu", "machine", "memory") if key in about)
    kept = [f"- {verdict.word}: {verdict.sentence}" for verdict in judge(found) if verdict.figure is not None]
    parts = [
        f"Seen {about.get('begun', '?')} on {machine}. A ratio is pgqueue's figure over that of the best other.",
        report.effort(found),
        report.table(
            ["measured", "pgqueue", "best other", "ratio"], [row for name in SCENARIOS if (row := _row(found, name))]
        ),
        "What pgqueue is to reach:",
        "\n".join(kept),
        *(["Not run:", "\n".join(absent)] if (absent := report.absent(found)) else []),
        "Every table, chart and setting: [bench/results](../bench/results/peers.md).",
    ]
    return "\n\n".join(parts)


def _peers(peers: list[Peer]) -> str:
    parts = []
    for peer in peers:
        if peer.reason is not None:
            continue
        points = {
            "done": peer.done,
            "history": peer.history,
            "durability": peer.durability,
            "more": peer.more,
            "less": peer.less,
        }
        heading = {"done": "A job is done when", "history": "History:", "durability": "Durability:"}
        heading |= {"more": "More than pgqueue:", "less": "Less than pgqueue:"}
        lines = [f"- {heading[key]} {text}." for key, text in points.items() if text != "-"]
        parts.append(f"### {peer.title}\n\n" + "\n".join(lines))
    absent = [f"- {peer.title}: {peer.reason}." for peer in peers if peer.reason is not None]
    if absent:
        parts.append("### Not measured\n\n" + "\n".join(absent))
    return "\n\n".join(parts)
