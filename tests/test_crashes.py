"""Processes that die at every statement boundary lose nothing and double nothing; the harness that says so can fail."""

from __future__ import annotations

import random

import pytest
from crash_books import Report
from crashes import series


def printed(report: Report) -> Report:
    print(report.text())
    return report


@pytest.mark.promise("S10", "E05")
async def test_two_hundred_kills_at_every_boundary_lose_and_double_nothing(dsn: str) -> None:
    report = printed(await series(dsn, 200, random.randrange(1 << 31)))
    assert report.wrongs() == {}
    assert report.kills >= 200
    assert report.seconds < 60
    reached = " ".join(report.at)
    for family in FAMILIES:
        assert family in reached


FAMILIES = (
    "start: COMMIT heartbeat_register sent",
    "fetch: fetch_reading before",
    "fetch: COMMIT fetch_claim sent",
    "handler: INSERT INTO effect before",
    "handler: INSERT INTO effect after",
    *(f"complete: COMMIT complete_{kind} sent" for kind in ("plain", "result", "retry", "fail", "missing", "settled")),
    "shutdown, complete: COMMIT complete_release sent",
    "shutdown, fetch: COMMIT heartbeat_abandon after",
    "shutdown, Worker.quiet after",
    "rescue: COMMIT rescue_jobs sent",
    "app: COMMIT INSERT INTO ledger after",
)


@pytest.mark.long
@pytest.mark.promise("S10", "E05")
async def test_ten_thousand_random_kills_lose_and_double_nothing(dsn: str) -> None:
    report = printed(await series(dsn, 10_000, random.randrange(1 << 31)))
    assert report.wrongs() == {}
    assert report.kills >= 10_000
    assert report.seconds < 1800
