"""Processes that die at every statement boundary lose nothing and double nothing; the harness that says so can fail."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from crashes.books import Report
from crashes.lives import rescue_all
from crashes.nursery import Life, Nursery, lived
from crashes.series import fault, series
from crashes.tasks import EXACTLY_ONCE, TABLES, enter
from fault_work import EVENTS, notes, overlaps
from servers import Server
from workers import Eyes, until

from pgqueue.database import migrations
from pgqueue.database.embedded import Cluster
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


# The server, not the process ------------------------------------------------------------------------------------------

ITS_QUEUES = ["default", "after"]
"""The queues of the worker that crashes the server. No other worker has the second one."""
OF_A_JOB = ("fetch_claim", "keyed_claim_move", "unblock_", "complete_", "reconciler_held sent")
"""Statements of a worker, by how they begin, that move a job."""
OF_A_CONNECTION = "sessions_"
"""How the statements of a new connection begin. The server crashes at one of them, before its COMMIT is answered."""
MUST = {"plain": "fetch_claim", "holds": "keyed_claim_move", "transfer": "complete_within", "own": "complete_within"}
"""Kinds of jobs, each with a statement at which the server must have crashed, on every side of its COMMIT."""
TRIES = 5
"""Which statement is the last one before a COMMIT is luck: the scheduler's goes with a claim now and then."""


def crash_points(life: Life) -> list[str]:
    """The points of this life at which the server is to crash: commits of the worker, and all that a handler sends."""

    def wanted(point: str) -> bool:
        session, _, statement = point.partition(": ")
        name = statement.removeprefix("COMMIT ")
        if session not in ("fetch", "unblock", "complete", "job", "handler"):
            return False
        if name.startswith(OF_A_CONNECTION):
            return statement == "COMMIT sessions_keep sent"
        return session in ("job", "handler") or (name != statement and name.startswith(OF_A_JOB))

    return [point for point in life.seen if wanted(point)]


@dataclass(frozen=True, slots=True)
class CrashingServer:
    """A server that a worker crashes, which then is `away` for some seconds; jobs of one kind; the handlers' notes."""

    server: Server
    events: Path
    kind: str
    lease: float = 15.0
    away: float = 0.0
    naive: str = ""

    def prepare(self) -> CrashingServer:
        """Make the tables."""
        migrations.migrate(self.dsn)
        with psycopg.connect(self.dsn) as conn:
            conn.execute(TABLES.encode())
        return self

    @property
    def dsn(self) -> str:
        return self.server.dsn("postgres")

    @property
    def cluster(self) -> Cluster:
        assert self.server.cluster is not None
        return self.server.cluster

    def look(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            return conn.execute(sql.encode(), values).fetchall()

    def enqueue(self) -> list[int]:
        """One job, or two of one key; their tokens."""
        with psycopg.connect(self.dsn) as conn:
            return enter(conn, [self.kind] * (2 if self.kind == "holds" else 1))

    def enqueue_after(self) -> list[int]:
        """A job for the worker that has crashed the server."""
        with psycopg.connect(self.dsn) as conn:
            return enter(conn, ["plain"], "after")

    def done(self, tokens: list[int]) -> bool:
        """Whether these jobs are completed; False while there is no server."""
        sql = "SELECT state FROM ledger JOIN pgqueue.job ON id = job_id WHERE token = ANY (%s)"
        try:
            return self.look(sql, tokens) == [("completed",)] * len(tokens)
        except psycopg.OperationalError:
            return False

    async def crash_at(self, nursery: Nursery, point: str, *, at_rest: bool = False) -> bool:
        """Have a worker crash the server at this point, start the server, and wait until its jobs have ended. False if
        the worker did not come there. If it is `at_rest`, its jobs are enqueued when it is, until it comes there.

        The worker lives on, and must do a job that no other worker takes. Another worker begins when the server is
        back: it may take what the server has forgotten.
        """
        plan: dict[str, Any] = {"dsn": self.dsn, "kind": "work", "jobs": 1 << 40, "grace": 10.0, "seconds": 60.0}
        plan |= {"lease": self.lease, "naive": self.naive}
        tokens = [] if at_rest else self.enqueue()
        crash = fault(f"*{point}", server=self.cluster.postmaster() or 0)
        first, ends = await nursery.begin(faults=[crash], queues=ITS_QUEUES, **plan)
        workers = {first.pid: ends}
        try:
            while at_rest and not (first.crashed or ends.done()):
                tokens.extend(self.enqueue())
                await until(lambda: first.crashed or ends.done() or self.done(tokens))
            await until(lambda: first.crashed or ends.done() or self.done(tokens))
            stops = not first.crashed
            if stops:  # it comes there just now, or as it stops, or never
                os.kill(first.pid, signal.SIGTERM)
                await until(lambda: first.crashed or ends.done())
            if first.crashed:
                await until(lambda: self.cluster.postmaster() is None)
                await asyncio.sleep(self.away)
                await asyncio.to_thread(self.cluster.start)
                second, its_end = await nursery.begin(queues=ITS_QUEUES if stops else ["default"], **plan)
                workers[second.pid] = its_end
                after = self.enqueue_after()
                await until(lambda: self.done(tokens + after))
        except AssertionError as error:
            stands = [await nursery.stands(pid) for pid, ends in workers.items() if not ends.done()]
            raise AssertionError("\n".join([f"{self.kind}, {point}: {error}", *stands])) from error
        for pid, ends in workers.items():
            told = stops and pid == first.pid  # it may have ended just now
            if not (told or ends.done()):
                os.kill(pid, signal.SIGTERM)
            await ends
        self.judge(point, tokens)
        return bool(first.crashed)

    def judge(self, point: str, tokens: list[int]) -> None:
        """Each job has had its effect, a transactional one once."""
        unanswered = Counter(note["key"] for note in notes(self.events) if note["event"] == "unanswered")
        for token in tokens:
            [(effects,)] = self.look("SELECT count(*) FROM effect WHERE token = %s", token)
            told = f"{self.kind}, {point}: {effects} effects, {unanswered[token]} writes without an answer"
            if self.kind in EXACTLY_ONCE:
                balances = self.look("SELECT array_agg(balance ORDER BY name) FROM account WHERE token = %s", token)
                assert (effects, balances) == (1, [([50, 250, 50],)]), told
            elif self.away < self.lease:
                # The handler's own COMMIT was durable, and so was the claim before it. So the job may only run again
                # because its handler has failed, and that is because its write was not answered.
                assert 1 <= effects <= 1 + unanswered[token], told
            else:
                assert effects >= 1, told


@pytest.mark.promise("T01", "T03", "F06", "F27")
@pytest.mark.parametrize("kind", MUST)
@pytest.mark.parametrize(
    ("lease", "away"),
    [pytest.param(15.0, 0.0, marks=pytest.mark.second), pytest.param(2.0, 3.0, marks=pytest.mark.long)],
    ids=["soon", "past-the-lease"],
)
async def test_a_server_that_crashes_at_any_point_of_a_job_loses_and_doubles_nothing(
    kind: str, lease: float, away: float, own_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker lives on, and goes on when the server is back. Jobs of one key do not run at once."""
    events = tmp_path / "events"
    monkeypatch.setenv(EVENTS, str(events))
    crashing = CrashingServer(own_server, events, kind, lease, away).prepare()
    crashed: list[str] = []
    async with Nursery.open() as nursery:
        jobs = crashing.enqueue()
        points = crash_points(await lived(nursery, lambda: crashing.done(jobs), dsn=crashing.dsn))
        for point in points:
            for _ in range(TRIES if MUST[kind] in point else 1):
                if await crashing.crash_at(nursery, point):
                    crashed.append(point)
                    break
    print(f"{kind}: crashed at {len(crashed)} of {len(points)} points", *crashed, sep="\n")
    missed = [point for point in points if MUST[kind] in point and point not in crashed]
    assert missed == []
    assert {f"COMMIT {MUST[kind]} {side}" for side in ("before", "sent", "after")} <= {
        point.partition(": ")[2] for point in crashed
    }
    assert overlaps(notes(events)) == []
    assert [note["event"] for note in notes(events)].count("began") > 0 or kind != "holds"


GLANCE = tuple(f"COMMIT fetch_glance {side}" for side in ("before", "sent", "after"))


@pytest.mark.second
@pytest.mark.promise("F262")
async def test_a_server_that_crashes_in_a_glance_loses_nothing(own_server: Server, tmp_path: Path) -> None:
    crashing = CrashingServer(own_server, tmp_path / "events", "plain").prepare()
    async with Nursery.open() as nursery:
        for point in GLANCE:
            assert await crashing.crash_at(nursery, point, at_rest=True), point


@pytest.mark.second
@pytest.mark.promise("F262")
async def test_a_worker_that_is_killed_in_a_glance_loses_nothing(dsn: str, eyes: Eyes) -> None:
    """Jobs come one by one, so each worker dies in a glance; a worker that is not killed does what they have left."""
    eyes.conn.execute(TABLES.encode())
    plan: dict[str, Any] = {"dsn": dsn, "kind": "work", "grace": 10.0, "seconds": 60.0}
    tokens: list[int] = []

    def done() -> bool:
        return eyes.one("SELECT bool_and(state = 'completed') FROM ledger JOIN pgqueue.job ON id = job_id") is True

    async with Nursery.open() as nursery:
        for point in GLANCE:
            life, ends = await nursery.begin(faults=[fault(f"*{point}")], **plan)
            while not ends.done():
                with psycopg.connect(dsn) as conn:
                    tokens += enter(conn, ["plain"])
                await until(lambda ends=ends: ends.done() or done())  # type: ignore[misc]
            assert life.killed.endswith(point)
        last, ends = await nursery.begin(**plan)
        await until(done)
        os.kill(last.pid, signal.SIGTERM)
        await ends
    assert eyes.all("SELECT token FROM effect GROUP BY token ORDER BY token") == [(token,) for token in sorted(tokens)]


@pytest.mark.second
async def test_a_crash_of_the_server_finds_out_what_is_completed_before_it_ran(
    own_server: Server, tmp_path: Path
) -> None:
    crashing = CrashingServer(own_server, tmp_path / "events", "plain", naive="completed_when_claimed").prepare()
    async with Nursery.open() as nursery:
        with pytest.raises(AssertionError, match=r"plain, .*: 0 effects"):
            await crashing.crash_at(nursery, "handler: INSERT INTO effect before")


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
