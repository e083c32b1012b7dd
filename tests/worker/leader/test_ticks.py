"""Ticks: each time of each schedule is one job, whoever makes ticks, however many do, and whatever the clock does."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from clocks import set_clock
from duty_loops import looping
from worker_states import worker_state
from workers import Eyes, least, until, work

from pgqueue import Cron, Every
from pgqueue.client import schedules
from pgqueue.client.tasks import task
from pgqueue.database import statements
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement
from pgqueue.jobs.cron import CatchUp
from pgqueue.jobs.job import Job
from pgqueue.worker.leader import ticks
from pgqueue.worker.leader.ticks import BATCH, Ticks

START = datetime(2026, 3, 1, 10, 0, tzinfo=UTC)
late: list[float] = []


@task(name="ticks.reports")
async def reports(job: Job) -> None:
    assert job.tick is not None
    late.append((datetime.now(UTC) - job.tick).total_seconds())


class Bench:
    """A maker of ticks on its own, and what it sends."""

    def __init__(self, dsn: str, leads: bool = True) -> None:
        self.leads = leads
        self.session = Session(Link(dsn, "pgqueue"), "ticks")
        self.sent: list[str] = []
        self._run, self.session.run = self.session.run, self._noted  # type: ignore[method-assign]
        self.ticks = Ticks(self.session, worker_state(self.session.link), declared={}, leads=lambda: self.leads)

    async def _noted(self, *messages: Statement[Any], **options: Any) -> list[Any]:
        self.sent += [message.sql for message in messages]
        return await self._run(*messages, **options)

    def count(self, name: str) -> int:
        return self.sent.count(statements.text(name, "pgqueue"))

    async def again(self) -> None:
        """Look, and make what is due."""
        self.ticks._look_at = 0.0
        await self.ticks.round()


@asynccontextmanager
async def makers(dsn: str, number: int = 1) -> AsyncIterator[list[Bench]]:
    """Some, none of which runs by itself."""
    made = [Bench(dsn) for _ in range(number)]
    try:
        yield made
    finally:
        for each in made:
            await each.session.close()


@asynccontextmanager
async def running(dsn: str, leads: bool = True) -> AsyncIterator[Bench]:
    bench = Bench(dsn, leads)
    runs = looping(bench.ticks.round, bench.session, others=None, woken=bench.ticks.woken)
    try:
        yield bench
    finally:
        runs.cancel()
        await asyncio.gather(runs, return_exceptions=True)
        await bench.session.close()


def made(eyes: Eyes, schedule: str | None = None) -> list[datetime]:
    """The ticks of all jobs there are (of this schedule), in order."""
    return [
        datetime.fromisoformat(tick)
        for (tick,) in eyes.all(
            "SELECT headers ->> 'pgqueue:tick' FROM pgqueue.job "
            "WHERE %s::text IS NULL OR headers ->> 'pgqueue:schedule' = %s ORDER BY 1",
            schedule,
            schedule,
        )
    ]


def minutes(*numbers: int) -> list[datetime]:
    return [START + timedelta(minutes=number) for number in numbers]


async def naive(self: Ticks, batch: Sequence[ticks.Move]) -> bool:
    """What is due becomes jobs, then the rows are moved: nothing is compared."""
    for each in batch:
        for tick in each.ticks:
            said = json.dumps({"pgqueue:tick": tick.isoformat(), "pgqueue:schedule": each.due.name})
            sql = "INSERT INTO pgqueue.job (task, headers) VALUES ('x', %(said)s::text::jsonb) RETURNING id"
            await self._session.run(Statement(sql, {"said": said}, list))
        sql = "UPDATE pgqueue.schedule SET next_at = %(next)s::timestamptz WHERE name = %(name)s::text RETURNING name"
        await self._session.run(Statement(sql, {"next": str(each.next_at), "name": each.due.name}, list))
        each.due.next_at = each.next_at
    return True


# One each ------------------------------------------------------------------------------------------------------------


async def many(dsn: str, eyes: Eyes, number: int, rounds: int) -> Counter[tuple[Any, ...]]:
    """So many makers at the same 40 schedules, at the same moments; how often each (schedule, time) is a job."""
    set_clock(eyes, START)
    for each in range(40):
        schedules.add(eyes.conn, f"s{each}", Every(60), "x")
    async with makers(dsn, number) as benches:
        await asyncio.gather(*[bench.again() for bench in benches])
        for minute in range(1, rounds + 1):
            set_clock(eyes, START + timedelta(minutes=minute))
            await asyncio.gather(*[bench.again() for bench in benches])
        await benches[0].again()
    return Counter(eyes.all("SELECT headers ->> 'pgqueue:schedule', headers ->> 'pgqueue:tick' FROM pgqueue.job"))


@pytest.mark.promise("F10")
async def test_makers_at_the_same_moment_make_each_time_of_each_schedule_once(dsn: str, eyes: Eyes) -> None:
    found = await many(dsn, eyes, 4, 25)
    assert len(found) == 40 * 25
    assert set(found.values()) == {1}


async def test_without_the_comparison_they_would_not(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticks, "_send", naive)
    found = await many(dsn, eyes, 4, 3)
    assert max(found.values()) > 1


@pytest.mark.second
@pytest.mark.promise("F10", "L11")
async def test_a_day_of_quarters_by_four_schedulers_is_96_ticks_each_slot_once(dsn: str, eyes: Eyes) -> None:
    set_clock(eyes, START)
    schedules.add(eyes.conn, "stream", Cron("0,15,30,45 * * * *"), "x")
    async with makers(dsn, 4) as benches:
        await benches[0].again()
        for minute in range(5, 24 * 60 + 5, 5):
            set_clock(eyes, START + timedelta(minutes=minute))
            await asyncio.gather(*[bench.again() for bench in benches])
    assert made(eyes) == minutes(*range(15, 24 * 60 + 1, 15))


@pytest.mark.second
async def test_a_thousand_at_once_are_made_in_batches_and_in_order(dsn: str, eyes: Eyes) -> None:
    set_clock(eyes, START)
    for each in range(1_000):
        schedules.add(eyes.conn, f"s{each:04}", Every(60), "x")
    async with makers(dsn) as [bench]:
        await bench.again()
        set_clock(eyes, START + timedelta(minutes=1))
        began = monotonic()
        await bench.again()
        print(f"1,000 ticks in {1000 * (monotonic() - began):.0f} ms")
        assert bench.count("ticks_make") == 1_000 // BATCH
    assert Counter(made(eyes)) == {START + timedelta(minutes=1): 1_000}
    assert eyes.one("SELECT count(*) FROM pgqueue.job j JOIN pgqueue.tick t ON t.job_id = j.id") == 1_000


@pytest.mark.second
async def test_a_row_that_somebody_holds_waits_alone_and_nobody_spins(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    schedules.add(eyes.conn, "free", Every(1), "x")
    schedules.add(eyes.conn, "held", Every(1), "x")
    async with running(dsn) as bench:
        await until(lambda: len(made(eyes, "held")) >= 1)
        conn.execute("SELECT FROM pgqueue.schedule WHERE name = 'held' FOR UPDATE")
        before = len(made(eyes, "free"))
        number, sent = len(made(eyes, "held")), bench.count("ticks_make")
        await until(lambda: len(made(eyes, "free")) >= before + 3)
        assert len(made(eyes, "held")) <= number + 1
        assert bench.count("ticks_make") - sent < 30
        conn.rollback()
        await until(lambda: len(made(eyes, "held")) > number + 1, 30.0)
    assert max(Counter(made(eyes, "held")).values()) == 1


@pytest.mark.promise("F18")
async def test_a_row_that_cannot_be_harms_only_itself_and_says_why(dsn: str, eyes: Eyes) -> None:
    set_clock(eyes, START)
    schedules.add(eyes.conn, "good", Every(60), "x")
    insert = "INSERT INTO pgqueue.schedule (name, line, tz, task, options, next_at) VALUES (%s, %s, %s, 'x', %s, %s)"
    minute = START + timedelta(minutes=1)
    for name, line, tz, options, next_at in (
        ("line", "7 * *", "UTC", "{}", None),
        ("due line", "nonsense", "UTC", "{}", START),
        ("zone", "* * * * *", "Mars/Olympus", "{}", None),
        ("key", "* * * * *", "UTC", '{"lock_key": ""}', minute),
        ("number", "* * * * *", "UTC", '{"max_attempts": "many"}', minute),
    ):
        eyes.do(insert, name, line, tz, options, next_at)
    async with makers(dsn) as [bench]:
        await bench.again()
        set_clock(eyes, minute)
        await bench.again()
        await bench.again()
    assert made(eyes) == [minute]
    refused = {each.name: each.refused for each in schedules.schedules(eyes.conn) if each.state == "refused"}
    assert refused.keys() == {"line", "due line", "zone", "key", "number"}
    assert "3 fields" in str(refused["line"]) and "Mars/Olympus" in str(refused["zone"])
    schedules.add(eyes.conn, "line", Every(60), "x")  # put right
    assert next(each for each in schedules.schedules(eyes.conn) if each.name == "line").state == "active"


FAR = {
    "a next time after the year 9999": ("next_at", "20000-01-01 00:00:00+00", []),
    "at the end of 9999": ("next_at", "9999-12-31 23:59:59+00", []),
    "before the year 1": ("next_at", "4000-01-01 00:00:00+00 BC", []),
    "that never ended": ("next_at", "-infinity", []),
    "since the beginning": ("since", "-infinity", [1]),
    "since a year to come": ("since", "20000-01-01 00:00:00+00", [1]),
    "last at no time": ("last_at", "infinity", [1]),
    "last before the year 1": ("last_at", "4000-01-01 00:00:00+00 BC", [1]),
}


@pytest.mark.promise("F18")
@pytest.mark.parametrize("why", FAR)
async def test_a_row_with_a_time_that_python_does_not_know_harms_no_other(why: str, dsn: str, eyes: Eyes) -> None:
    """Written by hand, as for "never". A leader that cannot read it would end, and each one after it."""
    column, value, ticks = FAR[why]
    eyes.do("ALTER TABLE pgqueue.schedule DROP CONSTRAINT schedule_times_are_from_1970_to_9000")  # else it is refused
    set_clock(eyes, START)
    schedules.add(eyes.conn, "good", Every(60), "x")
    schedules.add(eyes.conn, "far", Every(60), "x")
    minute = START + timedelta(minutes=1)
    async with makers(dsn) as [bench]:
        await bench.again()
        eyes.do(f"UPDATE pgqueue.schedule SET {column} = %s WHERE name = 'far'", value)  # noqa: S608
        await bench.again()
        set_clock(eyes, minute)
        await bench.again()
        await bench.again()
    assert made(eyes, "good") == [minute]
    assert made(eyes, "far") == [minute for _ in ticks]
    assert not eyes.one(
        statements.text("ticks_overdue", "pgqueue")
    )  # else workers that do not lead would look for ever


@pytest.mark.promise("F28")
@pytest.mark.parametrize("error", ["PERFORM 1 / 0", "INSERT INTO public.only VALUES (-1)", "an id that is there"])
async def test_an_error_that_is_not_about_a_schedule_stops_no_schedule(dsn: str, eyes: Eyes, error: str) -> None:
    """A trigger of the application; or an id that is drawn again, after the table was restored without its sequence."""
    set_clock(eyes, START)
    schedules.add(eyes.conn, "good", Every(60), "x")
    minute = START + timedelta(minutes=1)
    async with makers(dsn) as [bench]:
        await bench.again()
        if error == "an id that is there":
            eyes.do("SELECT pgqueue.enqueue('y', queue => 'other') FROM generate_series(1, 3)")
            eyes.do("SELECT setval('pgqueue.job_id_seq', 1, false)")
        else:
            eyes.do("CREATE TABLE public.only (one int CHECK (one > 0))")
            eyes.do(
                "CREATE FUNCTION public.refuses() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN {error}; RETURN NULL; END $$"
            )
            eyes.do(
                "CREATE TRIGGER refuses AFTER INSERT ON pgqueue.job_available "
                "FOR EACH ROW EXECUTE FUNCTION public.refuses()"
            )
        set_clock(eyes, minute)
        await bench.again()
        assert [each.state for each in schedules.schedules(eyes.conn)] == ["active"]
        eyes.do("DROP FUNCTION IF EXISTS public.refuses CASCADE")
        await bench.again()
        await bench.again()
    eyes.do("DELETE FROM pgqueue.job_available WHERE task = 'y'")
    assert made(eyes) == [minute]


@pytest.mark.second
async def test_rows_from_plain_sql_tick(dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.schedule (name, line, task, args) VALUES ('sql', 'every 1', 'x', '{\"n\": 1}')")
    async with running(dsn):
        await until(lambda: len(made(eyes, "sql")) >= 2)
    assert eyes.all("SELECT DISTINCT args FROM pgqueue.job") == [({"n": 1},)]


async def test_a_cron_line_with_no_time_to_come_is_over(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(eyes, START)
    schedules.add(eyes.conn, "last", Every(60), "x")
    async with makers(dsn) as [bench]:
        await bench.again()
        set_clock(eyes, START + timedelta(minutes=1))
        monkeypatch.setattr(Every, "next", lambda self, after: None)
        await bench.again()
        await bench.again()
    assert made(eyes) == minutes(1)
    assert [each.state for each in schedules.schedules(eyes.conn)] == ["over"]


# What was missed -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("F10")
@pytest.mark.parametrize(("catch_up", "expected"), [("latest", [180]), ("all", list(range(15, 181, 15))), ("none", [])])
async def test_an_outage_is_made_good_as_catch_up_says(
    catch_up: CatchUp, expected: list[int], dsn: str, eyes: Eyes
) -> None:
    set_clock(eyes, START)
    schedules.add(eyes.conn, "s", Every(900, catch_up), "x")
    async with makers(dsn, 2) as benches:
        await benches[0].again()
        set_clock(eyes, START + timedelta(minutes=187))
        await asyncio.gather(*[bench.again() for bench in benches])
        assert made(eyes) == minutes(*expected)
        set_clock(eyes, START + timedelta(minutes=195))
        await asyncio.gather(*[bench.again() for bench in benches])
    assert made(eyes) == minutes(*expected, 195)


async def test_all_of_a_long_outage_comes_in_batches_and_holds_up_nobody(dsn: str, eyes: Eyes) -> None:
    set_clock(eyes, START)
    schedules.add(eyes.conn, "a long list", Every(60, "all"), "x")
    schedules.add(eyes.conn, "other", Every(60), "x")
    async with makers(dsn) as [bench]:
        await bench.again()
        set_clock(eyes, START + timedelta(minutes=3_000))
        await bench.again()
        assert bench.count("ticks_make") >= 3_000 // BATCH
    sizes = [n for (n,) in eyes.all("SELECT count(*) FROM pgqueue.job GROUP BY xmin::text")]
    assert max(sizes) <= BATCH
    assert made(eyes, "a long list") == minutes(*range(1, 3_001))
    assert eyes.one(
        "SELECT (SELECT id FROM pgqueue.job WHERE headers ->> 'pgqueue:schedule' = 'other') < min(id) + %s "
        "FROM pgqueue.job",
        BATCH,
    )


# Clocks --------------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("F10")
@pytest.mark.parametrize("catch_up", ["latest", "all", "none"])
async def test_a_clock_that_steps_forward_and_back_doubles_nothing_and_ticks_go_on_at_once(
    catch_up: CatchUp, dsn: str, eyes: Eyes
) -> None:
    set_clock(eyes, START)
    schedules.add(eyes.conn, "s", Every(900, catch_up), "x")
    async with makers(dsn, 3) as benches:

        async def at(minute: float) -> None:
            set_clock(eyes, START + timedelta(minutes=minute))
            await asyncio.gather(*[bench.again() for bench in benches])
            await benches[0].again()

        for minute in (0, 15, 30.5):
            await at(minute)
        assert made(eyes) == minutes(15, 30)
        await at(400 * 24 * 60)  # more than a year ahead, then right again
        before = len(made(eyes))
        for minute in (31, 40, 45, 60.2, 50, 60.5, 75, 75, 90):
            await at(minute)
    found = made(eyes)
    assert max(Counter(found).values()) == 1
    assert minutes(15, 30, 45, 60, 75, 90) == [tick for tick in found if tick <= START + timedelta(minutes=90)][:6]
    assert len(found) >= before


async def test_without_the_second_belt_a_clock_that_steps_back_would_double(dsn: str, eyes: Eyes) -> None:
    set_clock(eyes, START)
    schedules.add(eyes.conn, "s", Every(900), "x")
    async with makers(dsn) as [bench]:
        for minute, wipe in ((0, False), (60, False), (15, True), (30, True), (45, True), (60, True)):
            if wipe:
                eyes.do("DELETE FROM pgqueue.tick")
            set_clock(eyes, START + timedelta(minutes=minute))
            await bench.again()
    assert Counter(made(eyes))[START + timedelta(minutes=60)] == 2


async def test_a_schedule_that_is_removed_and_added_anew_does_not_tick_twice_at_a_time(dsn: str, eyes: Eyes) -> None:
    set_clock(eyes, START)
    schedules.add(eyes.conn, "s", Every(900), "x")
    async with makers(dsn) as [bench]:
        await bench.again()
        set_clock(eyes, START + timedelta(minutes=15))
        await bench.again()
        schedules.remove(eyes.conn, "s")
        set_clock(eyes, START + timedelta(minutes=14))
        schedules.add(eyes.conn, "s", Every(900), "x")
        await bench.again()
        set_clock(eyes, START + timedelta(minutes=15))
        await bench.again()
    assert made(eyes) == minutes(15)


# On time, and no more than that --------------------------------------------------------------------------------------


@pytest.mark.second
async def test_ticks_are_made_on_time(dsn: str, eyes: Eyes) -> None:
    late.clear()
    async with work(dsn, reports) as worker:
        await until(worker.services.election.leads)
        for number in range(20):
            schedules.add(eyes.conn, f"s{number}", Every(1), reports)
        # Most of them; a moment in which the machine does something else makes the ticks of one second late.
        await until(lambda: len(late) >= 60 and sorted(late)[len(late) // 2] < 0.2)
    ordered = sorted(late)
    print(f"lateness of {len(late)} ticks: p50 {1000 * ordered[30]:.1f} ms, max {1000 * ordered[-1]:.1f} ms")
    assert ordered[0] >= 0
    assert ordered[len(ordered) // 2] < 0.2


async def test_a_change_is_heard_at_once(dsn: str, eyes: Eyes) -> None:
    schedules.add(eyes.conn, "later", Every(86_400), reports)
    async with work(dsn, reports) as worker:
        await until(worker.services.election.leads)
        await until(lambda: eyes.one("SELECT next_at FROM pgqueue.schedule"))

        async def once() -> float:
            began, name = monotonic(), f"soon {monotonic()}"
            schedules.add(eyes.conn, name, Every(1), reports)
            await until(lambda: made(eyes, name))
            return monotonic() - began

        assert await least(once, 2.5) < 2.5
        await until(lambda: worker.services.ticks.made >= 1)


async def test_a_change_that_is_told_while_a_look_is_under_way_is_looked_for_once_more(dsn: str, eyes: Eyes) -> None:
    async with makers(dsn) as [bench]:
        run = bench.session.run

        async def late(*messages: Any, **options: Any) -> list[Any]:
            answers = await run(*messages, **options)
            if not made_known:  # it has been read, its answer is on its way
                made_known.append(1)
                schedules.add(eyes.conn, "soon", Every(86_400), "x")
                bench.ticks.wake()
            return answers

        made_known: list[int] = []
        bench.session.run = late  # type: ignore[method-assign]
        assert await bench.ticks.round() == 0.0
        assert not bench.ticks._schedules
        await bench.ticks.round()
        assert list(bench.ticks._schedules) == ["soon"]
        reads = bench.count("ticks_read")
        await bench.ticks.round()
        assert bench.count("ticks_read") == reads  # once


async def test_one_that_does_not_lead_sends_nothing_until_told_that_ticks_are_overdue(dsn: str, eyes: Eyes) -> None:
    schedules.add(eyes.conn, "s", Every(86_400), "x")
    async with running(dsn, leads=False) as bench:
        bench.ticks.wake()
        await asyncio.sleep(0)
        assert bench.sent == []
        eyes.do("UPDATE pgqueue.schedule SET next_at = now() - interval '10 s'")
        bench.ticks.overdue()
        await until(lambda: made(eyes))
        sent = len(bench.sent)
        eyes.do("UPDATE pgqueue.schedule SET next_at = now() - interval '10 s'")
        bench.ticks.wake()
        await asyncio.sleep(0)
        assert len(bench.sent) == sent


async def test_overdue_ticks_whose_making_fails_are_made_at_the_next_round(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive is to forget before the round that they are asked for: a worker that does not lead asks no second time."""
    schedules.add(eyes.conn, "s", Every(86_400), "x")
    eyes.do("UPDATE pgqueue.schedule SET next_at = now() - interval '10 s'")
    async with makers(dsn) as [bench]:
        bench.leads = False
        bench.ticks.overdue()
        with monkeypatch.context() as away:
            away.setattr(bench.ticks, "make", _fails(psycopg.OperationalError("away")))
            with pytest.raises(psycopg.OperationalError):
                await bench.ticks.round()
        assert not made(eyes)
        await bench.ticks.round()
        assert len(made(eyes)) == 1


@pytest.mark.promise("F133")
async def test_a_schedule_whose_stored_parts_are_damaged_harms_only_itself(dsn: str, eyes: Eyes) -> None:
    """Naive is to take damage for a fault of the database: no schedule makes a tick any more."""
    for name in ("a", "damaged", "z"):
        schedules.add(eyes.conn, name, Every(86_400), "x")
    eyes.do("UPDATE pgqueue.schedule SET next_at = now() - interval '10 s'")
    async with makers(dsn) as [bench]:
        run = bench.session.run

        async def broken(*messages: Statement[Any], **options: Any) -> list[Any]:
            for message in messages:
                made_now = message.sql == statements.text("ticks_make", "pgqueue")
                read = message.sql == statements.text("ticks_readable", "pgqueue")
                if (made_now or read) and "damaged" in json.dumps(message.params):
                    raise psycopg.errors.DataCorrupted("missing chunk number 0 for toast value 1")
            return await run(*messages, **options)

        bench.session.run = broken  # type: ignore[method-assign]
        await bench.ticks.round()
    assert len(made(eyes, "a")) == len(made(eyes, "z")) == 1 and not made(eyes, "damaged")
    assert eyes.all("SELECT name FROM pgqueue.schedule WHERE refused IS NOT NULL") == [("damaged",)]


def _fails(error: Exception) -> Any:
    async def fails(*_: object) -> None:
        raise error

    return fails


async def test_a_leader_whose_loop_hangs_is_helped(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session keeps the lead, and its heartbeat goes on."""
    from pgqueue.worker.leader import scheduler

    schedules.add(eyes.conn, "s", Every(86_400), "x")
    with psycopg.connect(dsn, autocommit=True, application_name="pgqueue listen") as leader:
        leader.execute(statements.text("election_try", "pgqueue").encode())
        eyes.do("UPDATE pgqueue.schedule SET next_at = now() - interval '1 minute'")
        monkeypatch.setattr(scheduler, "LOOK_SECONDS", 0.1)
        async with work(dsn, reports) as worker:
            await until(lambda: made(eyes))
            assert not worker.services.election.leads()


async def test_a_leader_with_nothing_due_looks_now_and_then_and_no_more(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticks, "LOOK_SECONDS", 0.2)
    for number in range(20):
        schedules.add(eyes.conn, f"s{number}", Every(86_400), "x")
    async with running(dsn) as bench:
        began = monotonic()
        await until(lambda: bench.count("ticks_read") >= 5)
        assert monotonic() - began >= 0.8
    assert bench.count("ticks_make") == 0
    assert ticks.LOOK_SECONDS == 0.2 and bench.count("ticks_place") == 1


def test_old_ticks_are_forgotten_after_a_day(eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.tick SELECT 's', now() - make_interval(hours => n), n FROM generate_series(1, 48) AS n"
    )
    eyes.conn.execute(statements.text("pruner_ticks", "pgqueue"), {"n": 100})
    assert eyes.one("SELECT count(*) FROM pgqueue.tick") == 23


@pytest.mark.second
@pytest.mark.promise("E14")
async def test_a_held_snapshot_does_not_make_a_tick_dear(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    """A tick is a HOT update: its dead versions stand in no index."""
    set_clock(eyes, START)
    schedules.add(eyes.conn, "s", Every(1), "x")
    conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    conn.execute("SELECT count(*) FROM pgqueue.job")
    async with makers(dsn) as [bench]:
        for second in range(300):
            set_clock(eyes, START + timedelta(seconds=second))
            await bench.again()
    assert len(made(eyes)) == 299
    eyes.do("SELECT pg_stat_force_next_flush()")
    hot, all_ = eyes.all(
        "SELECT n_tup_hot_upd, n_tup_upd FROM pg_stat_user_tables WHERE relname = 'schedule' AND schemaname = 'pgqueue'"
    )[0]
    print(f"{hot} of {all_} updates were HOT")
    assert hot >= 0.9 * all_
