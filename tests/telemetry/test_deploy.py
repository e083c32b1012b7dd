"""The board of Grafana and the alert rules: they name what is exported, promtool takes them, and the rules fire."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from promtools import promtool

from pgqueue.telemetry.metrics import HISTOGRAM, METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus-rules.yaml"
EXPORTED = {metric.name for metric in METRICS if metric.kind != HISTOGRAM} | {
    f"{metric.name}_{part}" for metric in METRICS if metric.kind == HISTOGRAM for part in ("bucket", "sum", "count")
}


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana-board.json").read_text(encoding="utf-8"))
    return found


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def queries() -> Iterator[str]:
    """What the panels ask, as Prometheus is asked."""
    for panel in board()["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "5m").replace("$queue", ".*").replace("$database", ".*")


def names(queries: Iterator[str]) -> set[str]:
    return {name for query in queries for name in re.findall(r"pgqueue_\w+", query)}


@pytest.mark.promise("F170")
def test_the_board_shows_each_metric_and_no_other() -> None:
    shown = names(queries())
    assert shown <= EXPORTED
    assert {re.sub(r"_bucket$", "", name) for name in shown} == {metric.name for metric in METRICS}
    [variable] = [each for each in board()["templating"]["list"] if each["name"] == "queue"]
    assert names(iter([variable["query"]])) <= EXPORTED


@pytest.mark.promise("F414")
def test_each_panel_shows_each_database_by_itself() -> None:
    """Naive is the sum or the maximum over all: one without workers hides behind another one."""
    variables = {each["name"]: each for each in board()["templating"]["list"]}
    assert variables["database"]["allValue"] == ".*", "also where there is no such label"
    assert 'database=~"$database"' in variables["queue"]["query"]
    for panel in board()["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            aggregates = re.findall(r"\b(?:sum|max|min|avg|count)\b( by \(database\b)?", query)
            assert aggregates and all(aggregates), query
            selectors = re.findall(r"pgqueue_\w+(\{database=~\"\$database\")?", query)
            assert selectors and all(selectors), query
            assert "{{database}}" in target["legendFormat"], query


@pytest.mark.promise("F170")
def test_panels_do_not_overlap() -> None:
    fields: list[tuple[int, int]] = []
    for panel in board()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        fields += [(x, y) for x in columns for y in lines]
    assert len(fields) == len(set(fields))
    assert len({panel["id"] for panel in board()["panels"]}) == len(board()["panels"])


@pytest.mark.promise("F170")
def test_the_rules_name_what_is_exported_and_labels_that_are_there() -> None:
    assert names(rule["expr"] for rule in rules()) <= EXPORTED
    expressions = [rule["expr"] for rule in rules()]
    assert "max by (database) (pgqueue_workers_alive) == 0" in expressions
    labels = {label for metric in METRICS for label in metric.labels} | {"instance", "database"}
    for text in [*expressions, *queries()]:
        for listed in re.findall(r"\bby \(([^)]*)\)", text):
            assert set(listed.split(", ")) <= labels | {"le"}, text
    for rule in rules():
        told = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels


@pytest.mark.second
@pytest.mark.promise("F170")
def test_promtool_takes_the_rules_and_what_the_panels_ask(tmp_path: Path) -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(RULES))
    recorded = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(queries())]
    panels = tmp_path / "panels.yaml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in promtool("check", "rules", str(panels))


@pytest.mark.second
@pytest.mark.promise("F170")
@pytest.mark.promise("F408")
def test_the_rules_fire_when_they_should_and_not_otherwise(tmp_path: Path) -> None:
    for path in (RULES, Path(__file__).with_name("alerts.yaml")):
        shutil.copy(path, tmp_path)
    promtool("test", "rules", "alerts.yaml", cwd=tmp_path)
    fired = set(
        re.findall(r"alertname=\"(\w+)\"|alertname: (\w+)", Path(__file__).with_name("alerts.yaml").read_text())
    )
    assert {"".join(each) for each in fired} == {rule["alert"] for rule in rules()}
