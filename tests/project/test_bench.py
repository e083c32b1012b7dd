"""The bench runs, counts right and says what it measured. No speed is asserted: that is for a quiet machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from click.testing import CliRunner

from bench import web
from bench.__main__ import SCENARIOS, SECONDS, main
from bench.figures import Figure, Goal, figures_of, table
from bench.history import finish
from bench.holders import HOLDERS, holding
from bench.load import backlog
from bench.run import Run
from bench.samples import Sample, Side, alternate, percentile, ratio
from bench.server import code
from pgqueue.web.routes import ROUTES, match


@pytest.mark.second
def test_quick_run_measures_both_sides_and_writes_them_down(tmp_path: Path) -> None:
    to = tmp_path / "bench.json"

    done = CliRunner().invoke(main, ["drain-uvloop", "enqueue-many", "--quick", "--json", str(to)])

    assert done.exit_code == 0, done.output
    assert "fsync=on, synchronous_commit=on" in done.output
    assert "minutes   " not in done.output and "jobs      " not in done.output, "there is nothing to say of them yet"
    found = json.loads(to.read_text(encoding="utf-8"))
    assert {figure["scenario"] for figure in found["figures"]} == {"drain-uvloop", "enqueue-many"}
    drained = found["figures"][0]
    for side in (drained["ours"], drained["other"]):
        [sample] = side["samples"]
        assert sample["jobs"] == 2_000
        assert sample["seconds"] > 0 and sample["client"] >= 0 and sample["server"] >= 0
    if found["about"]["server"].startswith("PostgreSQL 18"):
        assert drained["ours"]["samples"][0]["more"]["buffers"] > 1


@pytest.mark.promise("F442")
def test_a_bench_that_was_interrupted_goes_on_with_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, taken = tmp_path / "bench.json", []
    goes = [True]
    side = Side("pgqueue", (Sample(100, 1.0, 0.1, 0.2, {"buffers": 2.0}),))

    def scenario(name: str) -> Callable[[Run], list[Figure]]:
        def take(run: Run) -> list[Figure]:
            """A row."""
            if name == "latency" and not goes[0]:
                raise KeyboardInterrupt
            taken.append(name)
            return [Figure(name, "of it", 0.9, "x", Goal(0.8), side, side)]

        return take

    for name in ("drain-uvloop", "latency", "idle"):
        monkeypatch.setitem(SCENARIOS, name, scenario(name))
    monkeypatch.setattr("bench.__main__.Lab", NoLab)
    arguments = ["drain-uvloop", "latency", "idle", "--json", str(to)]
    goes[0] = False
    assert CliRunner().invoke(main, arguments).exit_code == 1
    assert taken == ["drain-uvloop"], "written down before the next one"
    goes[0] = True

    done = CliRunner().invoke(main, [*arguments, "--resume"])

    assert done.exit_code == 0, done.output
    assert taken == ["drain-uvloop", "latency", "idle"], "none is measured twice"
    assert "[2/2, " in done.output and "min left] idle" in done.output
    found = json.loads(to.read_text(encoding="utf-8"))
    assert [figure["scenario"] for figure in found["figures"]] == taken
    assert figures_of(found)[0] == Figure("drain-uvloop", "of it", 0.9, "x", Goal(0.8), side, side)
    other = CliRunner().invoke(main, [*arguments, "--resume", "--scale", "0.5"])
    assert other.exit_code == 2 and "begin a new file" in other.output
    assert CliRunner().invoke(main, ["idle", "--resume"]).exit_code == 2, "no file to go on with"


@pytest.mark.promise("F442")
@pytest.mark.parametrize("changed", ["code", "psycopg", "uvloop", "server", "python"])
def test_figures_of_other_code_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Naive: the version is the same, and the file has figures of both."""
    monkeypatch.setattr("bench.__main__.Lab", NoLab)
    monkeypatch.setitem(SCENARIOS, "idle", lambda run: [])
    arguments = ["idle", "--json", str(tmp_path / "bench.json")]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert CliRunner().invoke(main, [*arguments, "--resume"]).exit_code == 0
    about = NoLab().about() | {changed: "other"}
    monkeypatch.setattr(NoLab, "about", lambda self: dict(about))
    refused = CliRunner().invoke(main, [*arguments, "--resume"])
    assert refused.exit_code == 2 and f"made with {changed} '-'" in " ".join(refused.output.split())


@pytest.mark.promise("F442")
def test_the_code_is_another_when_a_file_of_it_is(tmp_path: Path) -> None:
    package, sql = tmp_path / "package", tmp_path / "sql"
    for folder in (package, sql):
        (folder / "inner").mkdir(parents=True)
    (package / "inner/a.py").write_text("a = 1")
    before = code(package, sql)
    (package / "__pycache__").mkdir()
    (package / "__pycache__/a.pyc").write_text("made of it")
    assert code(package, sql) == before
    (sql / "inner/a.sql").write_text("SELECT 1")
    with_sql = code(package, sql)
    (package / "inner/a.py").write_text("a = 2")
    changed = code(package, sql)
    (package / "inner/a.py").rename(package / "inner/b.py")
    assert len({before, with_sql, changed, code(package, sql)}) == 4


class NoLab:
    """In place of a server: nothing here measures."""

    def __init__(self, *_: object) -> None: ...

    def about(self) -> dict[str, Any]:
        plain = {key: "-" for key in ("server", "python", "psycopg", "uvloop", "pgqueue", "code", "machine")}
        return {**plain, "settings": {}, "load": [0.0]}

    def close(self) -> None: ...


def test_every_scenario_has_a_share_of_the_time() -> None:
    assert SECONDS.keys() == SCENARIOS.keys()
    assert all(seconds > 0 for seconds in SECONDS.values())


@pytest.mark.second
def test_pages_of_the_dashboard_are_measured(tmp_path: Path) -> None:
    """A real process answers each of them, also one of a search that finds nothing."""
    to = tmp_path / "bench.json"
    done = CliRunner().invoke(main, ["web", "--quick", "--json", str(to)])
    assert done.exit_code == 0, done.output
    values = {each["name"]: each["value"] for each in json.loads(to.read_text(encoding="utf-8"))["figures"]}
    assert values["answers that failed"] == 0, done.output
    assert 1 < values["overview, size"] <= web.MOST_KB and 1 < values["style, size"] <= web.MOST_STYLE_KB
    assert values["memory, after all"] > 10 and values["jobs, no worker, p95"] >= values["jobs, no worker, p50"] > 0


def test_every_page_of_the_dashboard_is_measured() -> None:
    pages = web._pages(*range(1, 13)).values()
    found = {route.name for path in pages if (route := match("GET", urlsplit(path).path)[0]) is not None}
    no_pages = {"login", "events"}  # without a login there is none; a stream lasts as long as it may
    assert found == {route.name for route in ROUTES if route.method == "GET"} - no_pages


@pytest.mark.second
def test_lock_time_is_bracketed_by_the_servers_clock_and_the_clients(tmp_path: Path) -> None:
    to = tmp_path / "bench.json"

    done = CliRunner().invoke(main, ["claims", "--quick", "--json", str(to)])

    assert done.exit_code == 0, done.output
    found = {figure["name"]: figure["value"] for figure in json.loads(to.read_text(encoding="utf-8"))["figures"]}
    for k in (1, 10, 100):
        assert 0 < found[f"k={k}, locked at least"] < found[f"k={k}, locked at most"]


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_runs(name: str) -> None:
    done = CliRunner().invoke(main, [name, "--quick"])

    assert done.exit_code == 0, done.output


def test_unknown_scenario_is_a_usage_error_that_names_those_there_are() -> None:
    done = CliRunner().invoke(main, ["drian"])

    assert done.exit_code == 2
    assert "drain-uvloop" in done.output


def test_list_has_a_line_for_every_scenario() -> None:
    lines = CliRunner().invoke(main, ["--list"]).output.splitlines()

    assert [line.split()[0] for line in lines] == list(SCENARIOS)
    assert all(len(line.split()) > 4 for line in lines)


def test_table_fits_a_hundred_columns() -> None:
    side = Side("pgqueue", (Sample(1_000_000, 1.0, 123.4, 1234.5),))
    wide = Figure("a-long-scenario", "with an even longer figure", 12_345.0, "MiB", Goal(10_000, 5_000), side, side)

    assert max(map(len, table([wide]).splitlines())) <= 100


def test_sides_take_turns_in_changing_order(capsys: pytest.CaptureFixture[str]) -> None:
    turns: list[str] = []

    def side(name: str) -> Sample:
        turns.append(name)
        return Sample(1, 1.0, 0.0, 0.0)

    alternate(3, {"a": lambda: side("a"), "b": lambda: side("b")})

    assert "".join(turns) == "abbaab"


def test_ratio_is_taken_within_each_round() -> None:
    """The machine becomes ten times slower on the way: medians of each side alone would not compare like with like."""
    ours = Side("ours", tuple(Sample(jobs, 1.0, 0.0, 0.0) for jobs in (100, 100, 10)))
    other = Side("other", tuple(Sample(jobs, 1.0, 0.0, 0.0) for jobs in (200, 20, 20)))

    assert ratio(ours, other) == 0.5


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (99, 99), (100, 100), (0.5, 1)])
def test_percentile_is_the_nearest_rank(percent: float, value: int) -> None:
    assert percentile(range(100, 0, -1), percent) == value


def test_backlog_is_the_most_that_waited_at_one_time() -> None:
    assert backlog([(0.0, 3.0), (1.0, 2.0), (1.5, 2.5), (4.0, 4.1)]) == 3
    assert backlog([(0.0, 1.0), (1.0, 2.0)]) == 1
    assert backlog([(1.0, 0.9)]) == 0, "a job that began before its client had the answer never waited"


@pytest.mark.parametrize(("figure", "at_least", "at_most"), [(0.9, "pass", "FAIL"), (0.5, "FAIL", "pass")])
def test_verdict(figure: float, at_least: str, at_most: str) -> None:
    assert Figure("s", "n", figure, "x", Goal(0.8)).verdict == at_least
    assert Figure("s", "n", figure, "x", Goal(0.8, at_most=True)).verdict == at_most
    assert Figure("s", "n", figure, "x").verdict == "-"


def test_a_history_is_what_workers_leave_behind(dsn: str) -> None:
    """Seven leaves of each ring in the order of time, none of them due to be thrown away, ids in that order, too."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        finish(conn, 7_000)

        states = "SELECT state, count(*) FROM pgqueue.job GROUP BY state ORDER BY state"
        assert conn.execute(states).fetchall() == [
            ("cancelled", 14),
            ("completed", 6_790),
            ("failed", 56),
            ("skipped", 140),
        ]
        leaves = "SELECT bin, count(*) FROM pgqueue.job GROUP BY bin ORDER BY bin"
        assert conn.execute(leaves).fetchall() == [(bin, 1_000) for bin in range(7)]
        order = "SELECT id, finished_at FROM pgqueue.job ORDER BY finished_at"
        assert (found := conn.execute(order).fetchall()) == sorted(found)
        assert conn.execute("SELECT pgqueue.advance_ring('done'), pgqueue.advance_ring('dead')").fetchone() == (
            False,
            False,
        )


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_holder_keeps_what_dies_after_its_beginning(holder: str, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("CREATE TABLE bench_effect (job bigint NOT NULL)")

        def removed() -> bool:
            """Whether a row that dies now is gone after a vacuum."""
            conn.execute("INSERT INTO pgqueue.queue (name) VALUES ('gone')")
            conn.execute("DELETE FROM pgqueue.queue")
            conn.execute("VACUUM (TRUNCATE) pgqueue.queue")
            return conn.execute("SELECT pg_relation_size('pgqueue.queue')").fetchone() == (0,)

        with holding(dsn, holder):
            assert not removed()
        assert removed()
