"""docs/metrics.md has each metric that is exported, as it is exported, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pgqueue.telemetry.metrics import METRICS

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


@pytest.mark.promise("F171")
def test_the_table_is_what_is_exported() -> None:
    rows = re.findall(r"^\| `(pgqueue_\w+)` \| (\w+) \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE)
    written = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, _, labels in rows}
    assert written == {metric.name: (metric.kind, metric.labels) for metric in METRICS}
    assert len(rows) == len(METRICS)
    units = {name: unit for name, _, unit, _ in rows}
    assert {name for name, unit in units.items() if unit == "seconds"} == {
        metric.name for metric in METRICS if metric.name.endswith("_seconds")
    }
