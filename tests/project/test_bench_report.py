"""The report of a comparison says what was measured, and the pages quote it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from peer_records import about, plain_about

from bench.peers import chart, peer, quotes, report
from bench.peers.bars import BARS, Bar, judge
from bench.peers.command import write_report
from bench.peers.curves import DEPTHS
from bench.peers.drain import WITH_START
from bench.peers.install import ROOT
from bench.peers.record import Record
from bench.peers.scenarios import SCENARIOS


def _record() -> Record:
    """pgqueue 100, 300, 200; alpha 200, 100, 100 (its ratios 0.5, 3, 2); beta fails; gamma cannot run."""
    found = Record(about={"rounds": 3, "machine": "2 CPUs"})
    found.peers = {
        "pgqueue": about("pgqueue", language="python"),
        "alpha": about("alpha"),
        "beta": about("beta <&>"),
        "gamma": about("gamma", reason="it is not in the folder"),
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
    assert "one worker process, jobs/s | 200 | 100 (Alpha) | 2 |" in quotes.texts(_record())["headline"]


@pytest.mark.promise("F258")
def test_the_readme_leads_with_the_shape_of_an_application() -> None:
    """A drain of jobs that do nothing says what the queue costs, not what an application gets."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    speed = readme.partition("## Speed")[2].partition("\n## ")[0]
    places = [speed.find(text) for text in ("| Like an application", "| Drain of no-op jobs", "application.svg")]
    assert -1 not in places and places == sorted(places)


@pytest.mark.promise("F258")
def test_a_peer_whose_jobs_begin_before_their_enqueue_returns_is_not_the_best_other() -> None:
    """Naive is the least time: a ratio to nothing says nothing."""
    found = _record()
    for turn in (1, 2, 3):
        found.add("start", "alpha", turn, {"p50_ms": 3.0, "p95_ms": 3.0, "p99_ms": 3.0})
        found.add("start", "beta", turn, {"p50_ms": 0.0, "p95_ms": 0.0, "p99_ms": 0.0})
    assert "at rest, p50 ms | 1.5 | 3 (Alpha) | 0.5 |" in quotes.texts(found)["headline"]


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
    assert "one worker process, jobs/s | 5 | 5" in page.read_text(encoding="utf-8")
    assert {"peers.md", "peers.json", "drain-1.svg"} <= {path.name for path in (tmp_path / "results").iterdir()}


@pytest.mark.promise("F445")
def test_a_run_on_a_machine_that_lacks_a_peer_is_quoted_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, file = tmp_path / "page.md", tmp_path / "run.json"
    page.write_text("<!-- figures: python -m bench report --write -->\n<!-- end of figures -->\n", encoding="utf-8")
    monkeypatch.setattr(quotes, "PAGES", (page,))
    monkeypatch.setattr(quotes, "RESULTS", tmp_path / "results")
    found = _whole()
    found.peers["celery-rabbitmq"]["reason"] = "it needs rabbitmq-server,\nwhich is not on this machine"
    for peers in found.samples.values():
        peers.pop("celery-rabbitmq", None)
    found.write(file)

    done = CliRunner().invoke(write_report, [str(file), "--write"])

    assert done.exit_code == 0, done.output
    said = "- Celery-Rabbitmq: it needs rabbitmq-server, which is not on this machine."
    assert f"Not run:\n\n{said}\n\n" in page.read_text(encoding="utf-8")
    assert said in (tmp_path / "results" / "peers.md").read_text(encoding="utf-8")


def _whole() -> Record:
    """One round of every peer in every scenario that does not take long."""
    known = peer.read().peers
    found = Record(plain_about(), {name: about(name, reason=this.reason) for name, this in known.items()})
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
