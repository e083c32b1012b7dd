"""The adapter for the public harness keeps the contract of its CONTRIBUTING_ADAPTERS.md."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from workers import until

FOLDER = Path(__file__).parents[2] / "bench" / "adapters" / "public_harness"
COMPLETED = "SELECT count(*) FROM pgqueue.job WHERE state = 'completed'"
REQUIRED = {"claim_p50_ms", "claim_p95_ms", "claim_p99_ms", "enqueue_rate", "completion_rate", "queue_depth"}


@pytest.mark.promise("F259")
@pytest.mark.parametrize(("replica", "observed"), [(0, True), (1, False)])
async def test_it_enqueues_what_it_is_told_runs_it_and_says_so_until_sigterm(
    dsn: str, replica: int, observed: bool
) -> None:
    environment = {
        **os.environ,
        "DATABASE_URL": dsn,
        "PRODUCER_PACING": "harness",
        "SAMPLE_EVERY_S": "1",
        "JOB_PAYLOAD_BYTES": "10",
        "BENCH_INSTANCE_ID": str(replica),
    }
    pipe = asyncio.subprocess.PIPE
    adapter = await asyncio.create_subprocess_exec(
        sys.executable, str(FOLDER / "main.py"), env=environment, stdin=pipe, stdout=pipe
    )
    assert adapter.stdin is not None and adapter.stdout is not None
    lines = adapter.stdout

    async def heard() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await asyncio.wait_for(lines.readline(), 60))
        return found

    manifest = json.loads((FOLDER / "adapter.json").read_text(encoding="utf-8"))
    descriptor = await heard()
    assert descriptor["kind"] == "descriptor" and descriptor["system"] == manifest["system"]
    assert set(descriptor["event_tables"]) >= set(manifest["event_tables"])
    adapter.stdin.write(b"ENQUEUE 30\nENQUEUE many\nRESTART 7\nENQUEUE 12\n")

    metrics: dict[str, Any] = {}
    rates: dict[str, list[float]] = {"enqueue_rate": [], "completion_rate": []}
    seen = rates["completion_rate"]
    while len(seen) < 3 or (not sum(seen) and len(seen) < 30):
        said = await heard()
        assert said["instance_id"] == replica and said["subject_kind"] == "adapter"
        metrics[said["metric"]] = said
        if said["metric"] in rates:
            rates[said["metric"]].append(said["value"])
    assert sum(rates["enqueue_rate"]) and sum(rates["completion_rate"]), "no interval is left out"
    with psycopg.connect(dsn, autocommit=True) as conn:
        await until(lambda: conn.execute(COMPLETED).fetchone() == (42,))
    adapter.send_signal(signal.SIGTERM)

    assert await asyncio.wait_for(adapter.wait(), 30) == 0
    assert metrics.keys() >= (REQUIRED if observed else REQUIRED - {"queue_depth"})
    assert ("queue_depth" in metrics) is observed
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (42,), "what is no number is no order"
        for table in manifest["event_tables"]:
            assert conn.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone() == (True,)
