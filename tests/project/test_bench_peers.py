"""The comparison with other job queues runs, goes on after an interruption, and says why a peer has no figure."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psycopg
import pytest
from click.testing import CliRunner

from bench.peers import chart, command, curves, peer, plan, quotes, record, report, starts
from bench.peers.bars import BARS, Bar, judge
from bench.peers.child import Child, Died, ending_at_sigterm, limited
from bench.peers.command import peers, write_report
from bench.peers.curves import DEPTHS
from bench.peers.drain import WITH_START
from bench.peers.record import LEFT_OUT, PIECES, Record
from bench.peers.scenarios import SCENARIOS
from bench.peers.size import Size

ADAPTERS = Path(command.__file__).parent / "adapters"
BROKEN = """
[peers.pgqueue]
title = "pgqueue"
language = "python"
adapter = "pgqueue_tasks"
settings = { concurrency = 10, bulk = 1000 }
size = 5000
done = "committed"
unfinished = "SELECT EXISTS (SELECT FROM pgqueue.job_available) OR EXISTS (SELECT FROM pgqueue.job_running)"
history = "always"
durability = "flushed"

[peers.broken]
title = "Broken"
language = "python"
adapter = "there_is_no_such_adapter"
done = "never"
history = "none"
durability = "none"

[peers.misread]
title = "Misread"
language = "python"
adapter = "pgqueue_tasks"
settings = { concurrency = 10, bulk = 1000 }
done = "in a table that there is not"
unfinished = "SELECT EXISTS (SELECT FROM there_is_no_such_table)"
history = "none"
durability = "none"

[peers.absent]
title = "Absent"
language = "python"
adapter = "there_is_no_such_adapter"
reason = "it needs a machine that there is not"
done = "never"
history = "none"
durability = "none"
"""


@pytest.mark.second
@pytest.mark.promise("F260")
def test_a_peer_that_fails_is_listed_and_the_others_are_measured(tmp_path: Path) -> None:
    table, to = tmp_path / "table.toml", tmp_path / "peers.json"
    table.write_text(BROKEN, encoding="utf-8")
    options = ["--quick", "--table", str(table), "--home", str(tmp_path / "home"), "--json", str(to)]

    first = CliRunner().invoke(peers, [*options, "--scenarios", "drain-1"])

    assert first.exit_code == 0, first.output
    found = record.read(to)
    drained = found.samples["drain-1"]["pgqueue"]["1"]
    assert drained.keys() - {WITH_START, command.TOOK} == {
        "jobs_s",
        "server_us",
        "worker_us",
        "wal_bytes",
        "transactions",
    }, drained
    assert drained["jobs_s"] > 0 and drained["wal_bytes"] > 0
    assert "ModuleNotFoundError" in (found.error("drain-1", "broken") or ""), "the end of what it wrote is its reason"
    assert "UndefinedTable" in (found.error("drain-1", "misread") or ""), "its tables are not as the table here says"
    assert "absent" not in found.samples["drain-1"]
    assert found.peers["pgqueue"]["versions"]["python"]
    assert "Absent: it needs a machine that there is not" in first.output


@pytest.mark.second
def test_curves_have_a_figure_at_each_point(tmp_path: Path) -> None:
    table, to = tmp_path / "table.toml", tmp_path / "peers.json"
    table.write_text(BROKEN.partition("[peers.broken]")[0], encoding="utf-8")
    options = ["--quick", "--table", str(table), "--home", str(tmp_path / "home"), "--json", str(to)]

    done = CliRunner().invoke(peers, [*options, "--scenarios", "depth,depth-start,held"])

    assert done.exit_code == 0, done.output
    for name in ("depth", "depth-start", "held"):
        sample = record.read(to).samples[name]["pgqueue"]["1"]
        measured = {measure.key for curve in SCENARIOS[name].curves for measure in curve.measures}
        points = {key for key in measured if not key.endswith(f"@{DEPTHS[-1]}")}  # too many for the size in this table
        seen = {key for key, value in sample.items() if value > 0}
        # In a part of a tenth of a second there is not always a commit that is timed.
        assert points - seen <= {measure for measure in points if name == "held" and "p50" in measure}, sample


class HeldStage:
    """Stands in for a stage of ten jobs: counts, at each fill, the sessions that hold a snapshot."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.peer = peer.read().peers[peer.OURS]
        self.holding: list[int] = []

    def fill(self, task: str, jobs: int) -> None:
        with psycopg.connect(self.dsn) as conn:
            found = conn.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND backend_xmin IS NOT NULL AND state = 'idle in transaction'"
            ).fetchone()
        assert found is not None
        self.holding.append(found[0])


def test_the_snapshot_is_older_than_the_first_job_and_held_to_the_last(dsn: str, monkeypatch: Any) -> None:
    rates = iter([(100.0, 10), (80.0, 10)])
    monkeypatch.setattr(curves, "_rate", lambda stage, part, processes, until_done: next(rates))
    monkeypatch.setattr(curves, "_flow", lambda stage, size, processes: {"last": 1.0})
    stage: Any = HeldStage(dsn)

    values = curves.held(stage, Size())

    assert stage.holding == [1, 1]
    assert values == {"share": 0.8, "jobs_s": 80.0, "last": 1.0}


@pytest.mark.promise("F257")
@pytest.mark.parametrize(
    ("milliseconds", "is_growth"),
    [
        ([5.0] * 60, False),
        ([float(n % 200) for n in range(600)], False),  # a peer that polls
        ([5.0, 400.0, 5.0] * 20, False),  # a busy machine
        ([12.0 * n for n in range(60)], True),
        ([169.0, 523.0, 720.0, 800.0, 1347.0, 1834.0, 2024.0, 2002.0], True),  # seen: 9,000 jobs/s, 5,400 taken
        ([1.0, 900.0], False),
    ],
)
def test_starts_that_come_later_and_later_are_of_a_queue_that_grows(milliseconds: list[float], is_growth: bool) -> None:
    assert starts.grows([(float(at), ms) for at, ms in enumerate(milliseconds)]) is is_growth


@pytest.mark.promise("F257")
def test_the_load_is_halved_until_the_peer_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage whose worker takes 3,000 jobs a second: a job waits for what was enqueued beyond that."""

    def beside(stage: object, probe: object, other: object, load: float, seconds: float) -> starts.Waits:
        late = max(0.0, load / 3_000 - 1.0)
        return [(at, 1.0 + 1e3 * late * at) for at in (0.05 * n for n in range(200))]

    monkeypatch.setattr(starts, "_at_work", lambda stage: None)
    monkeypatch.setattr(starts, "_beside", beside)
    stage: Any = HeldStage("")
    stage.client = lambda: None
    size = Size(found={"drain-1.jobs_s": 18_518.0, "bulk.jobs_s": 60_000.0})

    assert starts.start_loaded(stage, size) == {
        "p50_ms": 1.0,
        "p95_ms": 1.0,
        "p99_ms": 1.0,
        "beside_s": 2_314.75,
        "grows": 0.0,
    }
    slow = Size(found={"drain-1.jobs_s": 1_000_000.0})
    assert starts.start_loaded(stage, slow)["grows"] == 1.0


def test_a_depth_that_takes_too_long_to_fill_is_left_out() -> None:
    stage: Any = HeldStage("")
    assert curves._depths(stage, Size(found={"bulk.jobs_s": 4_000.0})) == [1_000, 10_000, 100_000]
    assert curves._depths(stage, Size(found={"bulk.jobs_s": 1.0})) == [1_000]
    assert curves._depths(stage, Size(found={"bulk.jobs_s": 50_000.0})) == list(DEPTHS)


def test_what_takes_long_has_one_round_but_in_a_full_run() -> None:
    known = peer.chosen(peer.read().peers, ["graphile-worker"])
    found = plan.steps(known, [SCENARIOS["held"], SCENARIOS["one"]], rounds=3, full=False)
    assert [(step.scenario.name, step.turn) for step in found if step.peer.name == peer.OURS] == [
        *(("one", turn) for turn in (1, 2, 3)),
        ("held", 1),
    ]
    assert len(plan.steps(known, [SCENARIOS["held"]], rounds=3, full=True)) == 6


@pytest.mark.promise("F238")
def test_a_run_that_ends_early_has_a_round_of_everything_and_then_the_near_peers() -> None:
    known = peer.chosen(peer.read().peers, ["graphile-worker", "rq"])
    found = plan.steps(known, [SCENARIOS["one"], SCENARIOS["killed"], SCENARIOS["bulk"]], rounds=2, full=False)
    assert [f"{step.scenario.name} {step.turn} {step.peer.name}" for step in found] == [
        *(f"one 1 {name}" for name in ("pgqueue", "graphile-worker", "rq")),
        *(f"bulk 1 {name}" for name in ("pgqueue", "graphile-worker", "rq")),
        *(f"{scenario} 2 {name}" for scenario in ("one", "bulk") for name in ("graphile-worker", "pgqueue")),
        *(f"killed 1 {name}" for name in ("pgqueue", "graphile-worker")),
        *("one 2 rq", "bulk 2 rq", "killed 1 rq"),
    ]


@pytest.mark.promise("F238")
def test_samples_are_made_smaller_until_all_fit_but_not_below_the_least() -> None:
    wanted = [scenario for scenario in SCENARIOS.values() if not scenario.full_only]
    found = plan.steps([this for this in peer.read().peers.values() if not this.reason], wanted, rounds=3, full=False)
    hour = plan.scale_for(found, command.MINUTES, full=False)
    assert plan.LEAST <= hour < 1.0
    assert plan.seconds(found, hour, full=False) <= 60 * command.MINUTES, "without an option all of it takes an hour"
    assert plan.scale_for(found, 1_000.0, full=False) == 1.0
    assert plan.scale_for(found, 1.0, full=False) == plan.LEAST


@pytest.mark.promise("F238")
def test_what_the_minutes_leave_out_is_written_down_and_taken_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "peers.json"
    taken: list[str] = []

    def sample(servers: object, step: plan.Step, found: Record) -> record.Sample:
        taken.append(step.peer.name)
        return {"jobs_s": 1.0}

    monkeypatch.setattr(command, "_sample", sample)
    clock = count(0.0, 10.0)  # each look at it is ten seconds later
    monkeypatch.setattr(command, "monotonic", lambda: next(clock))
    known = peer.chosen(peer.read().peers, ["graphile-worker"])
    steps = plan.steps(known, [SCENARIOS["one"]], rounds=2, full=False)
    found = Record(_plain_about(rounds=2), {name: _about(name) for name in ("pgqueue", "graphile-worker")})
    servers: Any = None

    command._measure(found, servers, steps, to, begun=0.0, minutes=1.0)

    assert 0 < len(taken) < len(steps)
    left = record.read(to).about[LEFT_OUT]
    assert left == [["one", step.peer.name, step.turn] for step in steps[len(taken) :]]
    assert f"- Enqueue one per transaction: {len(left)}" in report.effort(found)
    command._measure(record.read(to), servers, steps, to, begun=0.0)
    assert len(taken) == len(steps) and record.read(to).about[LEFT_OUT] == []


@pytest.mark.promise("F239")
def test_a_sample_that_hangs_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    """The handlers of signals are as before."""
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(Died, match="given up"), limited(0.05):
        threading.Event().wait(60)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert issubclass(Died, command.FAILURES)


@pytest.mark.promise("F239")
def test_a_peer_that_hangs_is_given_up_and_the_next_one_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging:
        """Servers that make a stage of each peer; that of graphile-worker never answers."""

        @contextmanager
        def stage(self, this: peer.Peer, *, history: bool) -> Iterator[peer.Peer]:
            yield this

    def take(stage: Any, size: Size) -> dict[str, float]:
        if stage.name == "graphile-worker":
            threading.Event().wait(60)
        return {"jobs_s": 1.0}

    monkeypatch.setattr(plan, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(plan, "LIMIT_FACTOR", 0.0)
    known = peer.chosen(peer.read().peers, ["graphile-worker", "rq"])
    steps = plan.steps(known, [replace(SCENARIOS["one"], take=take)], rounds=1, full=False)
    found = Record(_plain_about(), {this.name: _about(this.name) for this in known})
    servers: Any = Hanging()

    command._measure(found, servers, steps, tmp_path / "peers.json", begun=0.0)

    assert "given up" in (found.error("one", "graphile-worker") or "")
    assert found.median("one", "pgqueue", "jobs_s") == found.median("one", "rq", "jobs_s") == 1.0


@pytest.mark.promise("F239")
def test_a_stop_ends_what_the_run_has_started(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "import time; time.sleep(3600)"], {}, tmp_path / "log", folder=tmp_path)
    with pytest.raises(SystemExit) as stopped, ending_at_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()
        finally:
            child.end()
    assert stopped.value.code == 143 and child.ended()


@pytest.mark.promise("F260")
def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = tmp_path / "peers.json"
    taken: list[tuple[str, str]] = []

    def sample(servers: object, step: plan.Step, found: Record) -> record.Sample:
        if len(taken) == 3:
            raise KeyboardInterrupt
        taken.append((step.scenario.name, step.peer.name))
        return {"jobs_s": 1.0}

    monkeypatch.setattr(command, "_sample", sample)
    contenders = peer.chosen(peer.read().peers, ["graphile-worker"])
    steps = plan.steps(contenders, [SCENARIOS["one"], SCENARIOS["bulk"]], rounds=1, full=False)
    found = Record(_plain_about(), {name: _about(name) for name in ("pgqueue", "graphile-worker")})
    servers: Any = None
    with pytest.raises(KeyboardInterrupt):
        command._measure(found, servers, steps, to, begun=0.0)

    taken.clear()
    command._measure(record.read(to), servers, steps, to, begun=0.0)

    assert taken == [("bulk", "graphile-worker")]
    assert all(len(record.read(to).samples[scenario]) == 2 for scenario in ("one", "bulk"))


def test_every_peer_is_pinned_and_has_an_adapter() -> None:
    table = peer.read()
    assert next(iter(table.peers)) == peer.OURS
    for this in table.peers.values():
        if this.reason is not None:
            continue
        suffix = {"python": ".py", "node": ".mjs", "ruby": ".rb"}[this.language]
        assert (ADAPTERS / f"{this.adapter}{suffix}").is_file(), this.name
        assert this.unfinished and this.done and this.history and this.durability, this.name
        pin = {"python": "==", "node": "@", "ruby": "="}[this.language]
        assert all(pin in package[1:] for package in this.packages), this.name
        assert this.packages or this.name == peer.OURS
    assert all("==" in package for package in table.node)


def test_a_field_that_there_is_not_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text(BROKEN + 'verzion = "1"\n', encoding="utf-8")
    with pytest.raises(TypeError, match="verzion"):
        peer.read(table)


@pytest.mark.parametrize(("option", "word"), [("--only", "graphile-worker"), ("--scenarios", "drain-1")])
def test_an_unknown_name_is_a_usage_error_that_names_those_there_are(option: str, word: str) -> None:
    done = CliRunner().invoke(peers, [option, "drian"])
    assert done.exit_code == 2
    assert "drian" in done.output and word in done.output


def test_pgqueue_runs_beside_whatever_is_named() -> None:
    known = peer.read().peers
    assert [this.name for this in peer.chosen(known, ["graphile-worker"])] == ["pgqueue", "graphile-worker"]
    assert len(peer.chosen(known, [])) == len(known)


def test_peers_take_turns_in_changing_order() -> None:
    known = peer.chosen(peer.read().peers, ["graphile-worker"])
    found = plan.steps(known, [SCENARIOS["one"]], rounds=2, full=False)
    assert [(step.peer.name, step.turn) for step in found] == [
        ("pgqueue", 1),
        ("graphile-worker", 1),
        ("graphile-worker", 2),
        ("pgqueue", 2),
    ]


def _about(name: str, **more: Any) -> dict[str, Any]:
    fields = {"title": name.title(), "language": "node", "server": "postgresql", "settings": {"a": 1}, "reason": None}
    texts = {name: "text | with a bar" for name in ("done", "history", "durability", "more", "less")}
    return {**fields, **texts, "versions": {name: "1.2"}, **more}


def _plain_about(rounds: int = 1) -> dict[str, Any]:
    return {"rounds": rounds, "quick": False, "full": False, "scale": 1.0}


def _record() -> Record:
    """pgqueue 100, 300, 200; alpha 200, 100, 100 (its ratios 0.5, 3, 2); beta fails; gamma cannot run."""
    found = Record(about={"rounds": 3, "machine": "2 CPUs"})
    found.peers = {
        "pgqueue": _about("pgqueue", language="python"),
        "alpha": _about("alpha"),
        "beta": _about("beta <&>"),
        "gamma": _about("gamma", reason="it is not in the folder"),
    }
    for turn, (ours, other) in enumerate([(100, 200), (300, 100), (200, 100)], 1):
        found.add("drain-1", "pgqueue", turn, {"jobs_s": ours, "wal_bytes": 850.0})
        found.add("drain-1", "alpha", turn, {"jobs_s": other, "wal_bytes": 500.0})
        found.add("drain-1", "beta", turn, {"error": "Died: worker ended\n    with a traceback"})
        found.add("application", "pgqueue", turn, {"jobs_s": 10.0 * turn, "enqueued_s": 5.0})
        found.add("start", "pgqueue", turn, {"p50_ms": 1.5, "p95_ms": 2.0, "p99_ms": 3.0})
        found.add("start", "alpha", turn, {"p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0})
    return found


def test_a_ratio_is_the_median_of_the_rounds_own() -> None:
    found = _record()
    assert found.ratio("drain-1", "jobs_s", "pgqueue", "alpha") == 2
    assert found.ratio("drain-1", "jobs_s", "pgqueue", "beta") is None
    assert found.medians("pgqueue")["drain-1.jobs_s"] == 200


def test_the_page_leads_with_the_row_like_an_application() -> None:
    page = report.markdown(_record())
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[0].startswith("## Like an application") and headings[1].startswith("## Drain of no-op jobs")
    assert "| Pgqueue | 200 | 850 |  |" in page and "| Alpha | 100 | 500 | 2 |" in page
    assert "Beta <&> has no figure here: Died: worker ended with a traceback" in page
    assert "Starting its processes" not in page
    found = _record()
    found.add("drain-1", "alpha", 4, {"jobs_s": 1.0, WITH_START: 1.0})
    assert "Starting its processes is in the figure of Alpha" in report.markdown(found)
    assert "- Gamma: it is not in the folder" in page
    assert "text / with a bar" in page, "a bar would end the cell"


def test_a_quick_run_says_that_its_figures_mean_nothing() -> None:
    found = _record()
    assert "mean nothing" not in report.markdown(found)
    found.about["quick"] = True
    assert "mean nothing" in report.markdown(found)


def test_a_chart_has_a_bar_for_each_peer_with_a_figure_the_best_on_top() -> None:
    found = _record()
    found.add("drain-1", "beta", 4, {"jobs_s": 50.0})
    root = ElementTree.fromstring(chart.bars(found, SCENARIOS["drain-1"]))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")][1:]
    assert texts == ["Pgqueue", "200", "Alpha", "100", "Beta <&>", "50"]
    started = ElementTree.fromstring(chart.bars(found, SCENARIOS["start"]))
    assert [text.text for text in started.iter("{http://www.w3.org/2000/svg}text")][1::2] == ["Alpha", "Pgqueue"]


def test_a_chart_is_readable_in_light_and_dark_and_has_a_line_for_each_peer_of_a_curve() -> None:
    found = _record()
    for name, low in (("pgqueue", 50.0), ("alpha", 10.0), ("beta", 51.0)):
        found.add("depth", name, 1, {"flat": 1.0, **{f"jobs_s@{deep}": low * deep**0.1 for deep in DEPTHS[:3]}})
    found.add("depth", "gamma", 1, {"flat": 1.0, "jobs_s@1000": 5.0})
    drawn = chart.charts(found, [SCENARIOS["depth"], SCENARIOS["drain-1"]])
    assert drawn.keys() == {"depth.svg", "depth-jobs_s.svg", "drain-1.svg"}
    for text in drawn.values():
        assert "prefers-color-scheme: dark" in text and "<rect width" not in text, "its ground is the page's"
    root = ElementTree.fromstring(drawn["depth-jobs_s.svg"])
    drawn_lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert [len(line.attrib["points"].split()) for line in drawn_lines] == [3, 3, 3]
    assert [line.attrib.get("class") for line in drawn_lines] == [None, "mine", None]
    ends = [text for text in root.iter("{http://www.w3.org/2000/svg}text") if "text-anchor" not in text.attrib][1:]
    assert [text.text for text in ends] == ["Beta <&>", "Pgqueue", "Alpha"]
    heights = [float(text.attrib["y"]) for text in ends]
    assert all(below - above >= 15 for above, below in pairwise(heights)), "no name lies on another"


def test_a_missed_bar_has_a_sentence_why() -> None:
    assert all(bar.why.endswith(".") for bar in BARS)
    found = _record()
    assert "| missed: A claim moves" in report.markdown(_among_graphile(found))
    missed = next(verdict for verdict in judge(_among_graphile(found)) if verdict.word == "missed")
    assert missed.sentence.endswith(missed.bar.why)
    kept = next(verdict for verdict in judge(found) if verdict.word == "kept")
    assert not kept.sentence.endswith(kept.bar.why)


def _among_graphile(found: Record) -> Record:
    """The same with alpha as graphile-worker."""
    renamed = json.loads(json.dumps([found.peers, found.samples]).replace('"alpha"', '"graphile-worker"'))
    return Record(found.about, *renamed)


@pytest.mark.promise("F258")
def test_the_pages_quote_the_last_full_run_and_the_list_of_peers() -> None:
    for page in quotes.PAGES:
        text = page.read_text(encoding="utf-8")
        assert "python -m bench report --write -->" in text, page
        assert quotes.filled(text, quotes.texts(quotes.last())) == text, f"{page}: run `python -m bench report --write`"


@pytest.mark.promise("F258")
def test_a_page_without_a_full_run_has_no_figure_and_with_one_has_its_own() -> None:
    page = "a\n<!-- figures: python -m bench report --write -->\nold 123\n<!-- end of figures -->\nb\n"
    empty = quotes.filled(page, quotes.texts(None))
    assert "no whole run" in empty and "123" not in empty and not any(letter.isdigit() for letter in empty)
    full = quotes.filled(empty, quotes.texts(_record()))
    assert "| Drain of no-op jobs, one worker process, jobs/s | 200 | 100 (Alpha) | 2 |" in full
    assert "- kept: WAL bytes a plain job, claim to end at most 900, and it was 850." in full
    assert full.startswith("a\n<!-- figures") and full.endswith("<!-- end of figures -->\nb\n")
    with pytest.raises(quotes.NoPlace, match="figures"):
        quotes.filled(page.partition("<!-- end")[0], quotes.texts(None))
    assert "one worker process, jobs/s: 200 beside 100 (Alpha), 2 x" in quotes.texts(_record())["headline"]


@pytest.mark.promise("F258")
def test_only_a_whole_run_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, file = tmp_path / "page.md", tmp_path / "run.json"
    page.write_text("<!-- headline: python -m bench report --write -->\n<!-- end of headline -->\n", encoding="utf-8")
    monkeypatch.setattr(quotes, "PAGES", (page,))
    monkeypatch.setattr(quotes, "RESULTS", tmp_path / "results")
    found = _whole()
    lost = found.samples["start"].pop("rq")
    found.write(file)
    refused = CliRunner().invoke(write_report, [str(file), "--write"])
    assert refused.exit_code == 2 and "it lacks start of rq" in " ".join(refused.output.split())
    found.samples["start"]["rq"] = lost
    found.about["quick"] = True
    found.write(file)
    refused = CliRunner().invoke(write_report, [str(file), "--write"])
    assert refused.exit_code == 2 and "--quick" in refused.output
    assert not (tmp_path / "results").exists()

    found.about["quick"] = False
    found.write(file)
    done = CliRunner().invoke(write_report, [str(file), "--write"])
    assert done.exit_code == 0, done.output
    assert "one worker process, jobs/s: 5 beside 5" in page.read_text(encoding="utf-8")
    assert {"peers.md", "peers.json", "drain-1.svg"} <= {path.name for path in (tmp_path / "results").iterdir()}


def _whole() -> Record:
    """One round of every peer in every scenario that does not take long."""
    known = peer.read().peers
    found = Record(_plain_about(), {name: _about(name, reason=this.reason) for name, this in known.items()})
    for scenario in SCENARIOS.values():
        for name, this in known.items():
            if this.reason is None and not scenario.full_only and not scenario.once:
                found.add(scenario.name, name, 1, {measure.key: 5.0 for measure in scenario.measures})
    return found


def test_bars_are_judged_beside_the_peer_that_is_best() -> None:
    verdicts = {(verdict.bar.scenario, verdict.bar.measure): verdict for verdict in judge(_record())}
    assert (verdicts["drain-1", "wal_bytes"].figure, verdicts["drain-1", "wal_bytes"].word) == (850, "kept")
    assert verdicts["bulk", "jobs_s"].word == "not measured"
    best = judge(_record(), [Bar("t", "drain-1", "jobs_s", 2.5, lambda name, about: True, "Why.")])[0]
    assert (best.figure, best.beside, best.word) == (2, "alpha", "missed")
    slow = judge(_record(), [Bar("t", "start", "p50_ms", 1.05, lambda name, about: True, "Why.", at_most=True)])[0]
    assert (slow.figure, slow.word) == (1.5, "missed")


def test_every_bar_is_of_a_measure_that_there_is() -> None:
    for bar in BARS:
        assert bar.measure in {measure.key for measure in SCENARIOS[bar.scenario].measures}, bar


def test_the_report_writes_a_page_its_charts_and_the_record(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    _record().write(file)

    done = CliRunner().invoke(write_report, [str(file), "--to", str(tmp_path / "to")])

    assert done.exit_code == 0, done.output
    written = {path.name for path in (tmp_path / "to").iterdir()}
    assert written == {"peers.md", "peers.json", "application.svg", "drain-1.svg", "start.svg"}
    page = (tmp_path / "to" / "peers.md").read_text(encoding="utf-8")
    assert all(f"({name})" in page for name in written if name.endswith(".svg"))
    assert json.loads(file.read_text()) == json.loads((tmp_path / "to" / "peers.json").read_text())


def test_a_run_is_not_gone_on_with_when_it_was_made_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    about: dict[str, object] = {
        "server": "PostgreSQL 18",
        "settings": {},
        "python": "3",
        "pgqueue": "1",
        "commit": "a",
        "machine": "m",
    }
    about |= {"rounds": 3, "quick": False, "full": False}
    Record(about=about).write(file)
    gone_on = command._begin(file, about, resume=True).about
    assert {key: gone_on[key] for key in about} == about and len(gone_on[PIECES]) == 1
    assert command._begin(file, {**about, "commit": "b"}, resume=False).samples == {}
    with pytest.raises(Exception, match="begin a new run"):
        command._begin(file, {**about, "commit": "b"}, resume=True)


def test_the_table_has_no_address_and_no_path_of_a_machine() -> None:
    text = peer.TABLE.read_text(encoding="utf-8")
    assert tomllib.loads(text)
    assert "://" not in text and "/home" not in text and "/root" not in text
