"""A record as one page of Markdown, and a chart of each scenario as SVG. The row like an application comes first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from bench.peers.bars import judge
from bench.peers.chart import charts, curve_file, curve_of, number
from bench.peers.drain import WITH_START
from bench.peers.peer import OURS
from bench.peers.record import LEFT_OUT, PIECES, Record
from bench.peers.scenarios import SCENARIOS, Measure, Scenario

FIRST = ("application", "drain-1", "drain-2")
PAGE = "peers.md"
RECORD = "peers.json"


def write(record: Record, folder: Path) -> list[Path]:
    """Write the page, its charts and the record into that folder; what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {PAGE: markdown(record)}
    texts |= charts(record, _measured(record))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    record.write(folder / RECORD)
    return [*(folder / name for name in texts), folder / RECORD]


def markdown(record: Record) -> str:
    """The page: what was run, a table of each scenario, the bars, and what each peer's figures mean."""
    parts = [_head(record), *(_section(record, scenario) for scenario in _measured(record)), _bars(record)]
    return "\n\n".join([*parts, _peers(record), _settings(record)]) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _head(record: Record) -> str:
    about = record.about
    lines = ["# pgqueue beside other job queues", ""]
    if about.get("quick"):
        lines += ["**A run of `--quick`: it shows that each peer runs. Its figures mean nothing.**", ""]
    lines += [
        f"{about.get('rounds', '?')} rounds, the peers in turn, on {about.get('machine', '?')} that client and server "
        "share. A figure is the median of the rounds. A ratio is pgqueue's figure over the peer's, the median of the "
        "rounds' own ratios.",
        "",
        effort(record),
    ]
    return "\n".join(lines)


def effort(record: Record) -> str:
    """How large the samples were, and what the run left out: short, for a page of any kind."""
    scale = record.about.get("scale", 1.0)
    size = "at full size" if scale == 1.0 else f"at {scale:.0%} of the full size"
    absent = Counter(SCENARIOS[name].title for name, _, _ in record.about.get(LEFT_OUT, []))
    lines = [f"- {title}: {count}" for title, count in absent.items()]
    left = ["", "There was no time for these samples, by scenario:", "", *lines] if lines else []
    pieces = [str(piece.get("begun", "?")) for piece in record.about.get(PIECES, [])]
    parted = (
        f" They were taken in {len(pieces)} pieces, begun {', '.join(pieces)}. A ratio is of samples of one piece."
        if len(pieces) > 1
        else ""
    )
    return "\n".join([f"Samples were taken {size}.{parted}", *left])


def _section(record: Record, scenario: Scenario) -> str:
    first = scenario.measures[0]
    measures = [measure for measure in scenario.measures if _has(record, scenario, measure)]
    found = record.ranked(scenario.name, first.key, less_is_better=first.less_is_better)
    rows = [
        [
            record.title(name),
            *(_cell(record.median(scenario.name, name, measure.key)) for measure in measures),
            "" if name == OURS else _cell(record.ratio(scenario.name, first.key, OURS, name)),
        ]
        for name in found
    ]
    head = ["peer", *(measure.heading for measure in measures), f"pgqueue's {first.heading} over it"]
    notes = [
        f"- {record.title(name)} has no figure here: {_one_line(record.error(scenario.name, name))}"
        for name in record.samples[scenario.name]
        if name not in found
    ]
    notes += [
        f"- Starting its processes is in the figure of {record.title(name)}: its jobs were too few for another."
        for name in found
        if record.values(scenario.name, name, WITH_START)
    ]
    most = max((record.rounds(scenario.name, name, first.key) for name in found), default=0)
    fewer: dict[int, list[str]] = {}
    for name in found:
        if (rounds := record.rounds(scenario.name, name, first.key)) < most:
            fewer.setdefault(rounds, []).append(record.title(name))
    notes += [f"- {rounds} of {most} rounds: {', '.join(names)}." for rounds, names in sorted(fewer.items())]
    better = "Less is better." if first.less_is_better else "More is better."
    parts = [f"## {scenario.title}", f"![{scenario.title}]({scenario.name}.svg)", better, table(head, rows)]
    parts += [
        f"![{scenario.title}: {curve.heading}]({curve_file(scenario, curve)})"
        for curve in scenario.curves
        if curve_of(record, scenario, curve)
    ]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _bars(record: Record) -> str:
    rows = [
        [
            verdict.bar.text,
            f"{'<=' if verdict.bar.at_most else '>='} {verdict.bar.value:g}",
            _cell(verdict.figure),
            record.title(verdict.beside) if verdict.beside else "",
            f"{verdict.word}: {verdict.bar.why}" if verdict.word == "missed" else verdict.word,
        ]
        for verdict in judge(record)
    ]
    return "## What pgqueue is to reach\n\n" + table(["figure", "bar", "measured", "beside", ""], rows)


def _peers(record: Record) -> str:
    rows = [
        [
            about["title"],
            ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items()),
            *(about[key] for key in ("done", "history", "durability", "more", "less")),
        ]
        for about in record.peers.values()
        if not about.get("reason")
    ]
    head = ["peer", "versions", "a job is done when", "history", "durability", "does more", "does less"]
    parts = ["## What the figures of each peer mean", table(head, rows)]
    return "\n\n".join([*parts, *(["Not run:", "\n".join(lines)] if (lines := absent(record)) else [])])


def absent(record: Record) -> list[str]:
    """A line for each peer that this run could not measure, with the reason."""
    return [
        f"- {about['title']}: {_one_line(about['reason']).rstrip('.')}."
        for about in record.peers.values()
        if about.get("reason")
    ]


def _settings(record: Record) -> str:
    rows = [[about["title"], _json(about["settings"]), _json(about.get("twenty"))] for about in record.peers.values()]
    server = "\n".join(f"- {name}: {value}" for name, value in record.about.items() if name not in (LEFT_OUT, PIECES))
    return f"## Settings and machine\n\n{table(['peer', 'settings', 'for 20 jobs at once'], rows)}\n\n{server}"


def _measured(record: Record) -> list[Scenario]:
    order = [*FIRST, *(name for name in SCENARIOS if name not in FIRST)]
    return [SCENARIOS[name] for name in order if name in record.samples]


def _has(record: Record, scenario: Scenario, measure: Measure) -> bool:
    return bool(record.ranked(scenario.name, measure.key, less_is_better=measure.less_is_better))


def _one_line(text: str | None) -> str:
    return " ".join((text or "it was not measured").split())[:300]


def _json(settings: dict[str, object] | None) -> str:
    return f"`{json.dumps(settings)}`" if settings else ""


def _cell(value: float | None) -> str:
    return "" if value is None else number(value)
