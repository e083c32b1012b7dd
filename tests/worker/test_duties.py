"""The duties of a worker: none holds up a job or another duty, each says how it goes, and when each is due."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from duty_loops import duties
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from roles import Role, role
from workers import Eyes, Stalls, until, work

import pgqueue
from pgqueue.admin import doctor
from pgqueue.client.tasks import task
from pgqueue.database import steps
from pgqueue.database.sessions import Link, Session
from pgqueue.telemetry.gauges import gauges
from pgqueue.worker import duties as duties_module
from pgqueue.worker.duties import Duty, DutyLoop, Report
from pgqueue.worker.leader import bulks, depth, history_fold, pruner, unknown_tasks
from pgqueue.worker.worker import Worker

__all__ = ["role"]

HOUSEKEEPING = (
    "audit bulk bulk_job depth unknown_task unique_key discarded_key limiter job_progress job_cursor error_group "
    "history_writer history_part history_minute history_hour"
)
"""Tables that jobs without a key need not, to be claimed or promoted."""
LEAVES = {"job_done_1": "done", "job_dead_1": "dead", "attempt_1": "attempt", "history_minute_1": "minute"}
"""The leaves that the rings turn to next."""
EVERY_DAY = ("audit", "depth", "job_done_1")

late: list[float] = []


@task(name="duties.started")
async def started(due: float) -> None:
    late.append(time.time() - due)


def often(patch: pytest.MonkeyPatch) -> None:
    """Housekeeping is done again and again."""
    patch.setattr(pruner, "ROUND_SECONDS", 0.05)
    patch.setattr(pruner, "READ_SECONDS", 0.05)
    patch.setattr(pruner, "TIDY_SECONDS", 0.01)
    patch.setattr(history_fold, "ROUND_SECONDS", 0.05)
    patch.setattr(bulks, "LOOK_SECONDS", 0.05)
    patch.setattr(unknown_tasks, "DEAR_SHARE", 0)
    patch.setattr(depth, "FIRST_SECONDS", 0.01)
    patch.setattr(depth, "PAUSE_LEAST", 0.05)


def housekeeping(worker: Worker) -> list[DutyLoop]:
    return [loop for loop in worker.services.duties.loops if loop.duty.housekeeping]


def reports(worker: Worker) -> dict[str, Report]:
    return {loop.duty.name: loop.report for loop in worker.services.duties.loops}


# Jobs do not wait for housekeeping ------------------------------------------------------------------------------------


@pytest.mark.promise("F182")
@pytest.mark.parametrize(
    "table",
    [
        pytest.param(table, marks=[] if table in EVERY_DAY else pytest.mark.second)
        for table in (*HOUSEKEEPING.split(), *LEAVES)
    ],
)
async def test_a_locked_table_of_housekeeping_holds_up_no_job(
    table: str, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As VACUUM FULL locks it. On the session that claims, plain and due jobs waited 2 s, again and again."""
    often(monkeypatch)
    late.clear()
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"
    async with work(dsn, started) as worker:
        await until(lambda: all(loop.report.ran_at for loop in housekeeping(worker) if loop.duty.others is not None))
        with psycopg.connect(dsn) as locker, Stalls() as stalls:
            locker.execute(sql.SQL("LOCK TABLE pgqueue.{} IN ACCESS EXCLUSIVE MODE").format(sql.Identifier(table)))
            if table in LEAVES:
                eyes.do("UPDATE pgqueue.ring SET since = now() - 2 * retention WHERE kind = %s", LEAVES[table])
            await until(lambda: eyes.one(waits, f"pgqueue.{table}"))
            for round in range(1, 9):
                now = time.time()
                started.enqueue(eyes.conn, now)
                started.using(delay=0.3).enqueue(eyes.conn, now + 0.3)
                await until(lambda: len(late) == 2 * round)  # noqa: B023
            assert eyes.one(waits, f"pgqueue.{table}") or table in LEAVES or "lock" in str(reports(worker))
        print(f"{table}: the latest start came {max(late):.3f} s late")
        assert max(late) - stalls.seconds < 1.0


# A failure is its own duty's ------------------------------------------------------------------------------------------


class Desk:
    """Two duties of one worker, in their loops. Each of `wrong` fails with its error."""

    def __init__(self, dsn: str, *, leads: bool = True, **options: Any) -> None:
        self.session = Session(Link(dsn, "pgqueue"), "housekeeping")
        self.leads = leads
        self.rounds: Counter[str] = Counter()
        self.wrong: dict[str, Exception] = {}
        self.pause = 0.01
        options = {"housekeeping": True, **options}
        table = [Duty(name, self._rounds(name), **options) for name in ("one", "other")]
        self.duties = duties(*table, session=self.session, leads=lambda: self.leads)
        self.tasks: list[asyncio.Task[None]] = []

    def _rounds(self, name: str) -> Callable[[], Any]:
        async def round() -> float:
            self.rounds[name] += 1
            if error := self.wrong.get(name):
                raise error
            await self.session.run()
            return self.pause

        return round

    async def __aenter__(self) -> Desk:
        self.tasks = [asyncio.create_task(loop.run()) for loop in self.duties.loops]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for loop in self.tasks:
            loop.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.session.close()

    def report(self, name: str) -> Report:
        return next(loop.report for loop in self.duties.loops if loop.duty.name == name)


@pytest.mark.promise("F183")
@pytest.mark.parametrize(
    "error",
    [
        psycopg.errors.LockNotAvailable("locked"),
        psycopg.errors.CheckViolation("a row that fits nowhere"),
        psycopg.errors.UndefinedTable("no such table"),
        KeyError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_duty_that_fails_pauses_alone(error: Exception, dsn: str) -> None:
    async with Desk(dsn) as desk:
        await until(lambda: desk.rounds["one"] >= 3)
        desk.wrong["one"] = error
        await until(lambda: desk.report("one").failing_since is not None)
        ran = desk.report("one").ran_at
        failed, went_on = desk.rounds["one"], desk.rounds["other"]
        await until(lambda: desk.rounds["other"] >= went_on + 20)
        assert desk.rounds["one"] - failed < 10 and desk.report("one").ran_at == ran
        assert desk.report("other").failing_since is None and desk.report("other").error is None
        assert "locked" in str(desk.report("one").error) or type(error) is not psycopg.errors.LockNotAvailable
    assert all(loop.cancelled() for loop in desk.tasks)


@pytest.mark.promise("F183")
async def test_a_round_that_was_asked_for_and_failed_is_tried_again_soon(dsn: str) -> None:
    """Naive is to leave the time of the next round as it was: this would wait for an hour."""
    async with Desk(dsn, others=None) as desk:
        desk.pause = 3_600.0
        await until(lambda: desk.report("one").ran_at is not None)
        desk.wrong["one"] = psycopg.errors.LockNotAvailable("locked")
        desk.duties.loops[0].duty.woken.set()
        await until(lambda: desk.rounds["one"] >= 4)
        desk.wrong.clear()
        await until(lambda: desk.report("one").failing_since is None)


@pytest.mark.promise("F183")
async def test_what_jobs_wait_for_ends_the_worker_if_it_cannot_go_on(dsn: str) -> None:
    """A worker that looks alive and promotes nothing is worse than none: its supervisor starts another one."""
    async with Desk(dsn, housekeeping=False) as desk:
        desk.wrong["one"] = KeyError("a bug")
        with pytest.raises(KeyError):
            await asyncio.wait_for(desk.tasks[0], 30)


@pytest.mark.promise("F183")
async def test_a_duty_that_went_wrong_says_its_last_error_and_that_it_goes_well_now(dsn: str) -> None:
    async with Desk(dsn) as desk:
        desk.wrong["one"] = psycopg.errors.CheckViolation("a row that fits nowhere")
        await until(lambda: desk.report("one").failing_since is not None)
        [told] = [each for each in json.loads(desk.duties.said() or "") if each[0] == "one"] or [None]
        assert told is not None and told[1] is None and told[3] == "a row that fits nowhere" and told[5] is not None
        desk.wrong.clear()
        await until(lambda: desk.report("one").ran_at is not None)
        told = json.loads(desk.duties.said() or "")[0]
        assert told[:1] + told[3:4] == ["one", "a row that fits nowhere"] and told[5] is None and 0 <= told[1] < 30


@pytest.mark.promise("F184")
@pytest.mark.parametrize(("others", "told"), [(None, {"one"}), (300.0, set())], ids=["each worker's", "the leader's"])
async def test_a_worker_that_does_not_lead_tells_what_fails_of_its_own(
    others: float | None, told: set[str], dsn: str, eyes: Eyes
) -> None:
    """What a leader's duty has met here once, minutes ago, says nothing of how it goes where it is done. And whatever
    the error is made of, the server can store it: else the heartbeat would fail."""
    async with Desk(dsn, others=others) as desk:
        desk.wrong["one"] = KeyError("\0 \ud800 " + 1_000 * "x")
        await until(lambda: desk.report("one").failing_since is not None and desk.report("other").ran_at)
        assert len(eyes.one("SELECT %s::text::jsonb", desk.duties.said())) == 2
        desk.leads = False
        assert {each[0] for each in json.loads(desk.duties.said() or "[]")} == told


@pytest.mark.promise("F183")
async def test_a_duty_that_lacks_a_right_is_not_tried_whenever_it_is_told(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try closes the connection, which may be the one that claims."""
    async with Desk(dsn) as desk:
        desk.wrong["one"] = psycopg.errors.InsufficientPrivilege("no")
        await until(lambda: desk.report("one").failing_since is not None)
        tried, went_on = desk.rounds["one"], desk.rounds["other"]

        def told() -> bool:
            desk.duties.loops[0].duty.woken.set()
            return desk.rounds["other"] >= went_on + 20

        await until(told)
        assert desk.rounds["one"] == tried


@pytest.mark.promise("F183")
@pytest.mark.parametrize("housekeeping", [True, False])
async def test_a_missing_right_is_said_once_with_the_grant_and_tried_again(
    housekeeping: bool, role: Role, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A duty that jobs wait for does not end the worker by it: plain jobs run."""
    monkeypatch.setattr(duties_module, "REFUSED_SECONDS", 0.02)
    often(monkeypatch)
    dsn = role("work")
    name = conninfo_to_dict(dsn)["user"]
    table, duty = ("audit", "record") if housekeeping else ("schedule", "ticks")
    eyes.do(f"REVOKE ALL ON pgqueue.{table} FROM {name}")
    with caplog.at_level(logging.ERROR):
        async with work(dsn, started) as worker:
            tries: Counter[float] = Counter()

            def tried() -> bool:
                tries[reports(worker)[duty].failed_at] += 1
                return len(tries) >= 5

            await until(tried)
            said = [record.getMessage() for record in caplog.records]
            grant = f"as the schema's owner run `pgqueue grants {name} --for work`"
            assert [line for line in said if table in line] == [
                f"{duty}: role '{name}' may not do this (permission denied for table {table}); {grant}"
            ]
            assert grant in str(reports(worker)[duty].error)
            done = len(late)
            started.enqueue(eyes.conn, time.time())
            await until(lambda: len(late) > done)
            eyes.do(f"GRANT ALL ON pgqueue.{table} TO {name}")
            await until(lambda: reports(worker)[duty].failing_since is None)
    assert len([line for line in said if table in line]) == 1


# When a duty is due ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("F183")
async def test_a_worker_that_does_not_lead_does_it_seldom_whatever_it_is_told(dsn: str) -> None:
    """The leader may not do its duty although it lives."""
    async with Desk(dsn, leads=False, others=0.1) as desk:
        one, _ = desk.duties.loops

        def told() -> bool:
            one.duty.woken.set()
            return desk.rounds["one"] >= 3

        began = time.monotonic()
        await until(told)
        assert time.monotonic() - began >= 0.3
    async with Desk(dsn, leads=False) as desk:
        for loop in desk.duties.loops:
            loop.duty.woken.set()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not desk.rounds
        desk.leads = True
        desk.duties.led()
        await until(lambda: desk.rounds["one"] and desk.rounds["other"])


async def test_a_new_leader_waits_with_what_has_time(dsn: str) -> None:
    async with Desk(dsn, leads=False, first=0.3) as desk:
        desk.pause = 3_600.0  # no round is under way when the lead comes
        for ahead in (3_600.0, -60.0):  # as after a round when it led before; as when it would have been due meanwhile
            desk.leads = False
            for loop in desk.duties.loops:
                loop._at = time.monotonic() + ahead
            desk.leads, began = True, time.monotonic()
            desk.duties.led()
            await until(lambda began=began: all((loop.report.ran_at or 0) > began for loop in desk.duties.loops))  # type: ignore[misc]
            assert min(loop.report.ran_at or 0 for loop in desk.duties.loops) - began >= 0.3


@pytest.mark.promise("F09")
async def test_all_housekeeping_of_a_worker_that_does_not_lead_comes_at_one_time(dsn: str) -> None:
    """Naive is a time for each: each opens the connection, and closes it again."""
    async with Desk(dsn, leads=False) as desk:
        one, other = desk.duties.loops
        await asyncio.sleep(0)
        assert one._others_at == other._others_at
        period = one._others_at - desk.duties._began
        assert 300.0 <= period <= 600.0
        assert desk.duties.seldom(one.duty, one._others_at + 1.0) == pytest.approx(one._others_at + period)
    async with Desk(dsn, leads=False, housekeeping=False) as desk:
        one, other = desk.duties.loops
        assert one._others_at != other._others_at


async def test_what_is_told_during_a_round_is_looked_for_in_another_one(dsn: str) -> None:
    """Naive is to clear the event after the round: this would wait for an hour."""
    async with Desk(dsn) as desk:
        desk.pause = 3_600.0
        one, _ = desk.duties.loops
        real, during = one.duty.round, asyncio.Event()

        async def told() -> float | None:
            if not during.is_set():
                during.set()
                one.duty.woken.set()
            return await real()

        one.duty = replace(one.duty, round=told)  # before its first round
        await until(lambda: desk.rounds["one"] >= 2)


# The session ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F09", "F182")
async def test_housekeeping_has_one_connection_of_the_leader_and_none_of_others_for_long(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    often(monkeypatch)
    names = ["beat", "fetch", "listen"]
    async with work(dsn, started) as first:
        await until(lambda: all(loop.report.ran_at for loop in housekeeping(first)))
        assert [name.split()[1] for _, name in eyes.backends()] == sorted([*names, "housekeeping"])
        monkeypatch.setattr(duties_module, "OTHERS_SECONDS", 0.1)
        async with work(dsn, started) as second:
            for loop in housekeeping(second):
                loop._others_at = 0.0
                loop.duty.woken.set()
            await until(lambda: second.services.housekeeping_session.generation >= 1)
            await until(lambda: eyes.backends("pgqueue housekeeping")[1:] == [])
            assert not second.services.election.leads()


# Who is told ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F184")
async def test_doctor_and_the_metrics_say_how_the_duties_of_the_leader_go(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    often(monkeypatch)
    async with work(dsn, started) as worker, work(dsn, started) as other:
        await until(lambda: all(loop.report.ran_at for loop in housekeeping(worker)))
        with psycopg.connect(dsn) as locker:
            locker.execute("LOCK TABLE pgqueue.audit IN ACCESS EXCLUSIVE MODE")
            await until(lambda: reports(worker)["record"].failing_since is not None)
            beat = "UPDATE pgqueue.worker SET duties = duties WHERE id = %s AND duties IS NOT NULL"
            assert not eyes.do(beat, other.worker_id)
            monkeypatch.setattr(doctor, "DUTY_SECONDS", 0.0)
            found = await until(lambda: [each for each in said(eyes) if each.name == "record" and each.error])
            [finding] = [each for each in pgqueue.doctor(eyes.conn).findings if each.name == "duty"]
        assert {each.name for each in said(eyes)} == {
            loop.duty.name for loop in worker.services.duties.loops if loop.report.ran_at is not None
        }
        [record] = found
        assert record.ran is not None and 0 <= record.ran < 60 and record.took > 0
        assert record.error == "canceling statement due to lock timeout"
        assert record.failing is not None and record.failed is not None and 0 <= record.failed < 30
        assert "the workers' duty record fails each time: canceling statement due to lock timeout" in finding.what
        shown = {
            (name, labels["duty"]): value
            for name, labels, value in steps.drive(eyes.conn, gauges("pgqueue"), {})
            if "duty" in labels
        }
        assert shown["pgqueue_duty_failing_seconds", "record"] >= 0 == shown["pgqueue_duty_failing_seconds", "rings"]
        assert 0 <= shown["pgqueue_duty_age_seconds", "rings"] < 60 and shown["pgqueue_duty_seconds", "rings"] > 0


def said(eyes: Eyes) -> tuple[doctor.DutyInfo, ...]:
    return pgqueue.doctor(eyes.conn).duties


@pytest.mark.promise("F184")
def test_of_several_workers_the_last_run_and_the_longest_failure_count(eyes: Eyes) -> None:
    def worker(duties: list[Any], silent: str = "0 s") -> None:
        eyes.do(
            "INSERT INTO pgqueue.worker "
            "(lease, pid, concurrency, host, version_tag, queues, state, tasks, beat_at, duties) "
            "VALUES ('1 h', 1, 1, 'h', '1', '{q}', 'running', '{t}', now() - %s::interval, %s::jsonb)",
            silent,
            json.dumps(duties),
        )

    worker([["rings", 40.0, 0.5], ["depth", 7.0, 0.25, "no", 3.0, None]])
    worker([["rings", 5.0, 0.125, "old", 300.0, None]], silent="10 s")
    worker([["depth", None, 0.0, "later", 1.0, 90.0]])
    worker([["rings", 1.0, 9.0]], silent="4 h")  # dead
    depth_, rings = said(eyes)
    assert (rings.name, round(rings.ran or 0), rings.took, rings.error, rings.failing) == (
        "rings",
        15,
        0.125,
        "old",
        None,
    )
    assert (depth_.name, round(depth_.ran or 0), depth_.error, round(depth_.failing or 0)) == ("depth", 7, "later", 90)
