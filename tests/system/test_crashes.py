"""Processes that die at every statement boundary lose nothing and double nothing; the harness that says so can fail."""

from __future__ import annotations

import random

import psycopg
import pytest
from crashes.books import Report
from crashes.lives import rescue_all
from crashes.nursery import Nursery, lived
from crashes.series import fault, series
from crashes.tasks import TABLES, enter
from workers import Eyes

from pgqueue.database.sessions import Link, Session
from pgqueue.worker.liveness.rescue import Rescue


def printed(report: Report) -> Report:
    print(report.text())
    return report


TRANSFER = (
    "debit before",
    "credit before",
    "note before",
    "complete_within before",
    "COMMIT complete_within before",
    "COMMIT complete_within sent",
    "COMMIT complete_within after",
)
FAMILIES = (
    "start: COMMIT registration_register sent",
    "fetch: fetch_reading before",
    "fetch: fetch_claim before",
    "fetch: COMMIT fetch_claim sent",
    "unblock: unblock_lock before",
    "unblock: COMMIT unblock_next sent",
    "unblock: COMMIT unblock_next after",
    "unblock: COMMIT unblock_read sent",
    "handler: INSERT INTO effect before",
    "handler: INSERT INTO effect after",
    "handler: COMMIT complete_within sent",
    *(f"job: {boundary}" for boundary in TRANSFER),
    *(
        f"complete: COMMIT complete_{kind} sent"
        for kind in ("plain", "result", "successors", "retry", "fail", "missing", "settled")
    ),
    "shutdown, complete: COMMIT complete_release sent",
    "shutdown, fetch: COMMIT registration_abandon after",
    "shutdown, Worker.quiet after",
    "rescue: COMMIT rescue_jobs sent",
    "app: COMMIT INSERT INTO ledger after",
)
"""What at least must be among the points, so that the list cannot dry up unseen."""


@pytest.mark.second
@pytest.mark.promise("T01", "T03", "T15", "L15", "S10", "E05", "F21")
async def test_two_hundred_kills_at_every_boundary_lose_and_double_nothing(dsn: str) -> None:
    report = printed(await series(dsn, 200, 1, wanted=FAMILIES))
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


# One job, every boundary of its own ----------------------------------------------------------------------------------

BOOKED = """SELECT (SELECT array_agg(balance ORDER BY name) FROM account WHERE token = %(token)s),
                   (SELECT count(*)::int FROM effect WHERE token = %(token)s),
                   (SELECT state = 'completed' FROM pgqueue.job WHERE id = %(job)s)"""
NEITHER, BOTH = ([100, 200, 50], 0, False), ([50, 250, 50], 1, True)


@pytest.mark.second
@pytest.mark.promise("T01", "T03", "T15")
@pytest.mark.parametrize(("kind", "session"), [("transfer", "job"), ("atransfer", "job"), ("own", "handler")])
async def test_a_transfer_killed_at_any_boundary_is_whole_or_not_there_and_then_once(
    kind: str, session: str, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    for statement in TABLES.split(";"):
        eyes.do(statement)
    rescuing = Session(Link(dsn, "pgqueue"), "rescue")
    rescuer = Rescue(rescuing, notify=True, rescued=lambda: None)

    def entered() -> dict[str, int]:
        [token] = enter(conn, [kind])
        conn.commit()
        return {"token": token, "job": eyes.one("SELECT job_id FROM ledger WHERE token = %s", token)}

    async with Nursery.open() as nursery:
        entered()
        life = await lived(nursery, eyes.done(1), dsn=dsn)
        points = [point for point in life.seen if point.startswith(f"{session}: ")]
        for point in points:
            names = entered()
            dead = await nursery.live(dsn=dsn, kind="work", jobs=2, seconds=60.0, faults=[fault(point)])
            assert dead.killed == point
            await rescue_all(rescuer, rescuing, dead.pid)
            booked = eyes.conn.execute(BOOKED, names).fetchone()
            assert booked in (NEITHER, BOTH), point
            if not point.endswith("sent"):
                assert (booked == BOTH) is (point == f"{session}: COMMIT complete_within after"), point
            if booked == NEITHER:
                await nursery.live(dsn=dsn, kind="work", jobs=1, seconds=60.0, grace=60.0)
            assert eyes.conn.execute(BOOKED, names).fetchone() == BOTH, point
    await rescuing.close()
    print(f"{kind}: {len(points)} points", *points, sep="\n")
    assert {f"{session}: {boundary}" for boundary in TRANSFER} <= set(points)


# The harness can fail -------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.parametrize(
    ("naive", "only", "wrong", "kills"),
    [
        ("delete_then_insert", "fetch: INSERT INTO pgqueue.job_available before", "lost", 10),
        ("completed_when_claimed", "handler: *before", "lost", 10),
        ("enqueue_by_itself", "app: COMMIT*", "ghosts", 10),
        ("complete_afterwards", "handler: COMMIT note after", "doubled", 10),
        ("commit_whatever", "job: COMMIT complete_within after", "doubled", 20),
        ("commit_each", "handler: credit before", "totals", 10),
    ],
)
async def test_what_everybody_writes_first_is_found_out(
    naive: str, only: str, wrong: str, kills: int, dsn: str
) -> None:
    report = printed(await series(dsn, kills, 1, naive=naive, only=only))
    assert getattr(report, wrong) > 0
