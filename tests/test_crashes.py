"""Processes that die at every statement boundary lose nothing and double nothing; the harness that says so can fail."""

from __future__ import annotations

import random

import pytest
from crash_books import Report
from crashes import series


def printed(report: Report) -> Report:
    print(report.text())
    return report


FAMILIES = (
    "start: COMMIT heartbeat_register sent",
    "fetch: fetch_reading before",
    "fetch: fetch_claim before",
    "fetch: COMMIT fetch_claim sent",
    "handler: INSERT INTO effect before",
    "handler: INSERT INTO effect after",
    "handler: COMMIT complete_within sent",
    "job: UPDATE account SET before",
    "job: INSERT INTO effect before",
    "job: complete_within before",
    "job: COMMIT complete_within before",
    "job: COMMIT complete_within sent",
    "job: COMMIT complete_within after",
    *(
        f"complete: COMMIT complete_{kind} sent"
        for kind in ("plain", "result", "successors", "retry", "fail", "missing", "settled")
    ),
    "shutdown, complete: COMMIT complete_release sent",
    "shutdown, fetch: COMMIT heartbeat_abandon after",
    "shutdown, Worker.quiet after",
    "rescue: COMMIT rescue_jobs sent",
    "app: COMMIT INSERT INTO ledger after",
)
"""What at least must be among the points, so that the list cannot dry up unseen."""


@pytest.mark.promise("T01", "T03", "T15", "L15", "S10", "E05", "F21")
async def test_two_hundred_kills_at_every_boundary_lose_and_double_nothing(dsn: str) -> None:
    report = printed(await series(dsn, 200, random.randrange(1 << 31)))
    assert report.wrongs() == {}
    assert report.kills >= 200
    assert report.missed == []
    assert [family for family in FAMILIES if family not in report.at] == []


@pytest.mark.long
@pytest.mark.promise("T01", "T03", "T15", "L15", "S10", "E05", "F21")
async def test_ten_thousand_random_kills_lose_and_double_nothing(dsn: str) -> None:
    report = printed(await series(dsn, 10_000, random.randrange(1 << 31)))
    assert report.wrongs() == {}
    assert report.kills >= 10_000


# The harness can fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("naive", "only", "wrong"),
    [
        ("delete_then_insert", "fetch: INSERT INTO pgqueue.job_available before", "lost"),
        ("completed_when_claimed", "handler: *before", "lost"),
        ("enqueue_by_itself", "app: COMMIT*", "ghosts"),
        ("complete_afterwards", "handler: COMMIT INSERT INTO effect after", "doubled"),
        ("commit_each", "handler: UPDATE account SET before", "totals"),
    ],
)
async def test_what_everybody_writes_first_is_found_out(naive: str, only: str, wrong: str, dsn: str) -> None:
    report = printed(await series(dsn, 10, 1, naive=naive, only=only))
    assert getattr(report, wrong) > 0
