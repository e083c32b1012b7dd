"""Schedules as rows: added, changed, paused, run, removed; declared by code; what people see of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import pgqueue as command
from commands import working
from psycopg import errors
from workers import Eyes, until, wait_until, work

import pgqueue
from pgqueue import Cron, Every, InvalidArguments, InvalidOption, Job, ScheduleDeclared, ScheduleNotFound
from pgqueue.client import schedules, tasks
from pgqueue.client.tasks import Task
from pgqueue.testing import Clock, aenqueued, drain, enqueued

Declare = Callable[..., Task[..., Any]]
NEVER = Cron("0 0 29 2 *")


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
    """`task` that declares for this test only: what is declared here would tick under the clocks of other tests."""
    monkeypatch.setattr(tasks, "registry", {})
    yield pgqueue.task


def plain(conn: psycopg.Connection, name: str) -> schedules.ScheduleInfo:
    return next(each for each in schedules.schedules(conn) if each.name == name)


# Declarations --------------------------------------------------------------------------------------------------------


def test_a_task_with_a_schedule_can_be_called_without_arguments(declare: Declare) -> None:
    @declare(schedule=Every(60), name="fits")
    def fits(job: Job, user: int = 1) -> None: ...

    with pytest.raises(InvalidOption, match=r"task 'misses': schedule.*user"):

        @declare(schedule=Every(60), name="misses")
        def misses(user: int) -> None: ...

    for given, meant in (("* * * * *", "Cron('* * * * *')"), ("every 5m", "Every('5m')"), ("5m", "Every('5m')")):
        with pytest.raises(InvalidOption, match=re.escape(f"did you mean {meant}?")):

            @declare(schedule=given, name="text")
            def text() -> None: ...

    with pytest.raises(InvalidOption, match="leave out run_at, delay"):
        schedules.spec(Every(60), fits.using(delay=5).new(), "schedule 'x'")


def test_an_invalid_line_fails_at_the_start_of_a_worker_with_the_field_and_the_value(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(
        "import pgqueue\n@pgqueue.task(schedule=pgqueue.Cron('0 25 * * *'))\ndef nightly(): ...\n"
    )
    done = command("work", "tasks", dsn=dsn, cwd=tmp_path)
    assert done.returncode == 2
    assert "hour '25': use 0 to 23" in done.stderr
    assert "line 2" in done.stderr


async def test_what_a_worker_declares_is_a_row_when_it_has_started(dsn: str, eyes: Eyes, declare: Declare) -> None:
    @declare(
        name="report", queue="slow", priority=2, lock="report", deadline=60, schedule=Cron("0 3 * * *", "Europe/Berlin")
    )
    def report() -> None: ...

    async with work(dsn, report):
        await until(lambda: eyes.one("SELECT next_at FROM pgqueue.schedule"))
        found = plain(eyes.conn, "report")
    assert (found.line, found.tz, found.task, found.queue, found.priority) == (
        "0 3 * * *", "Europe/Berlin", "report", "slow", 2,
    )  # fmt: skip
    assert found.options == {"deadline": 60.0, "lock_key": "report", "lock_limit": 1, "on_locked": "wait"}
    assert found.next_at == Cron("0 3 * * *", "Europe/Berlin").next(datetime.now(UTC))
    assert found.state == "active" and found.declared_at is not None


async def test_of_two_deployments_the_one_that_was_started_last_is_right_as_long_as_it_lives(
    dsn: str, eyes: Eyes, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> Any:
        return eyes.one("SELECT line FROM pgqueue.schedule")

    def version(when: Any) -> Any:
        tasks.registry.clear()

        @declare(name="both", schedule=when)
        def both() -> None: ...

        return both

    async with work(dsn, version(Every(3600))) as old:
        await until(lambda: lines() == "every 3600")
        async with work(dsn, version(Every(7200))):
            await until(lambda: lines() == "every 7200")
            # a worker of the old code that settles again changes nothing
            old.services.ticks._settle_at = 0.0
            old.services.ticks.wake()
            assert await until(lambda: old.services.ticks._settle_at > 0)
            assert lines() == "every 7200"

        # The new one has left: whoever leads then finds what lives, when it settles next.
        def settled() -> bool:
            old.services.ticks._settle_at = 0.0
            old.services.ticks.wake()
            return bool(lines() == "every 3600")

        await until(settled)


async def test_a_declaration_that_has_not_changed_writes_nothing(dsn: str, eyes: Eyes, declare: Declare) -> None:
    @declare(name="same", schedule=Every(3600))
    def same() -> None: ...

    async with work(dsn, same):
        await until(lambda: eyes.one("SELECT next_at FROM pgqueue.schedule"))
    before = eyes.all("SELECT xmin::text, ctid::text FROM pgqueue.schedule")
    async with work(dsn, same) as worker:
        await until(lambda: worker.services.ticks._declared_by == worker.worker_id)
        assert eyes.all("SELECT xmin::text, ctid::text FROM pgqueue.schedule") == before


async def test_a_new_line_begins_anew_and_other_changes_keep_the_next_time(
    dsn: str, eyes: Eyes, declare: Declare, conn: psycopg.Connection
) -> None:
    with Clock(conn, datetime(2026, 3, 1, 10, 1, tzinfo=UTC)) as clock:

        @declare(name="t", schedule=Every(900))
        def first() -> None: ...

        clock.advance(1)
        assert plain(conn, "t").next_at == datetime(2026, 3, 1, 10, 15, tzinfo=UTC)
        tasks.registry.clear()

        @declare(name="t", schedule=Every(900), priority=1)
        def second() -> None: ...

        clock.advance(1)
        assert (plain(conn, "t").next_at, plain(conn, "t").priority) == (datetime(2026, 3, 1, 10, 15, tzinfo=UTC), 1)
        tasks.registry.clear()

        @declare(name="t", schedule=Every(600))
        def third() -> None: ...

        clock.advance(1)
        assert plain(conn, "t").next_at == datetime(2026, 3, 1, 10, 10, tzinfo=UTC)


# Rows ----------------------------------------------------------------------------------------------------------------


def test_adding_says_whether_it_is_new_and_checks_the_arguments(conn: psycopg.Connection, declare: Declare) -> None:
    @declare(name="feed.poll", queue="feeds")
    def poll(feed: int) -> None: ...

    assert schedules.add(conn, "poll:7", Every(300), poll, feed=7)
    assert not schedules.add(conn, "poll:7", Every(600), poll.using(priority=1), 8)
    found = plain(conn, "poll:7")
    assert (found.line, found.args, found.priority, found.queue) == ("every 600", {"feed": 8}, 1, "feeds")
    assert (found.declared_at, found.state, found.last_at) == (None, "active", None)
    with pytest.raises(InvalidArguments, match="feed"):
        schedules.add(conn, "poll:8", Every(300), poll)
    with pytest.raises(InvalidOption, match=r"give Cron\(…\) or Every\(…\)"):
        schedules.add(conn, "poll:8", "* * * * *", poll, feed=7)  # type: ignore[call-overload]
    with pytest.raises(InvalidOption, match="leave out"):
        schedules.add(conn, "poll:8", Every(300), poll.using(delay=60), feed=7)
    with pytest.raises(InvalidArguments, match="not a task"):
        schedules.add(conn, "poll:8", Every(300), print)  # type: ignore[call-overload]
    assert schedules.add(conn, "elsewhere", NEVER, "billing.close", month=3)
    for name in ("", "x" * 201, "é" * 101, "a\nb", 7):
        with pytest.raises(InvalidOption, match="schedule name"):
            schedules.add(conn, name, Every(300), "x")  # type: ignore[arg-type]


def test_a_schedule_exists_when_its_transaction_commits(conn: psycopg.Connection, eyes: Eyes) -> None:
    schedules.add(conn, "a", Every(300), "x")
    assert schedules.schedules(eyes.conn) == []
    conn.rollback()
    assert schedules.schedules(conn) == []


def test_what_is_not_there_is_not_found(conn: psycopg.Connection) -> None:
    for act in (schedules.pause, schedules.resume, schedules.run, schedules.remove):
        with pytest.raises(ScheduleNotFound, match="'nobody'"):
            act(conn, "nobody")


async def test_the_async_twins_do_the_same(aconn: psycopg.AsyncConnection) -> None:
    assert await schedules.aadd(aconn, "a", Every(300), "x", n=1)
    assert await schedules.apause(aconn, "a") and not await schedules.apause(aconn, "a")
    [found] = await schedules.aschedules(aconn)
    assert found.state == "paused"
    assert await schedules.aresume(aconn, "a")
    job = await schedules.arun(aconn, "a")
    [waiting] = await aenqueued(aconn)
    assert (waiting.id, waiting.args) == (job.id, {"n": 1})
    await schedules.aremove(aconn, "a")
    assert await schedules.aschedules(aconn) == []


def test_a_job_run_by_hand_has_this_moment_for_its_tick_and_changes_nothing(
    conn: psycopg.Connection, declare: Declare
) -> None:
    seen: list[Any] = []

    @declare(name="t", retry=3)
    def t(job: Job, n: int) -> None:
        seen.append((job.tick, job.headers["pgqueue:schedule"], job.headers["mine"], n))

    start = datetime(2026, 3, 1, 10, 1, 0, 250_000, tzinfo=UTC)
    with Clock(conn, start) as clock:
        schedules.add(conn, "hand", Every(900), t.using(headers={"mine": True}), n=5)
        clock.advance(0)
        schedules.pause(conn, "hand")
        before = plain(conn, "hand")
        schedules.run(conn, "hand")
        assert drain(conn).check().completed == 1
        assert plain(conn, "hand") == before
    assert seen == [(start, "hand", True, 5)]


def test_a_job_of_no_schedule_has_no_tick(conn: psycopg.Connection, declare: Declare) -> None:
    seen: list[Any] = []

    @declare(name="t")
    def t(job: Job) -> None:
        seen.append(job.tick)

    t.enqueue(conn)
    drain(conn).check()
    assert seen == [None]


@pytest.mark.parametrize(
    ("catch_up", "made"), [("latest", ["11:00"]), ("all", ["10:15", "10:30", "10:45", "11:00"]), ("none", [])]
)
def test_a_pause_makes_no_ticks_and_the_end_of_it_those_that_catch_up_says(
    catch_up: Any, made: list[str], conn: psycopg.Connection
) -> None:
    with Clock(conn, datetime(2026, 3, 1, 10, 1, tzinfo=UTC)) as clock:
        schedules.add(conn, "q", Every(900, catch_up), "x")
        clock.advance(0)
        assert schedules.pause(conn, "q")
        clock.advance(hours=1, minutes=2)
        assert enqueued(conn) == []
        assert schedules.resume(conn, "q")
        clock.advance(0)
        found = [job.headers["pgqueue:tick"][11:16] for job in enqueued(conn) if job.headers]
        assert found == made
        clock.set(datetime(2026, 3, 1, 11, 15, tzinfo=UTC))
        assert len(enqueued(conn)) == len(made) + 1
        assert conn.execute("SELECT count(*) FROM pgqueue.tick").fetchone() == (len(made) + 1,)


@pytest.mark.second
async def test_one_that_nobody_declares_any_more_is_orphaned_after_ten_minutes_shown_and_not_ticked(
    dsn: str, eyes: Eyes, declare: Declare
) -> None:
    @declare(name="gone", schedule=Every(3600))
    def gone() -> None: ...

    async with work(dsn, gone):
        await until(lambda: eyes.one("SELECT next_at FROM pgqueue.schedule"))
        with pytest.raises(ScheduleDeclared, match="workers that live"):
            schedules.remove(eyes.conn, "gone")
    eyes.do("UPDATE pgqueue.schedule SET declared_at = declared_at - interval '9 minutes 50 seconds'")
    assert plain(eyes.conn, "gone").state == "active"
    eyes.do(
        "UPDATE pgqueue.schedule "
        "SET declared_at = declared_at - interval '1 minute', next_at = now() - interval '1 hour'"
    )
    assert plain(eyes.conn, "gone").state == "orphaned"
    schedules.add(eyes.conn, "other", Every(1), "x")
    async with work(dsn, queues=["none"]) as other:
        await until(lambda: other.services.ticks.made >= 2)
        assert eyes.all("SELECT DISTINCT schedule FROM pgqueue.tick") == [("other",)]
        schedules.remove(eyes.conn, "gone")
        assert [each.name for each in schedules.schedules(eyes.conn)] == ["other"]


async def test_one_that_is_declared_again_goes_on_with_what_it_missed(dsn: str, eyes: Eyes, declare: Declare) -> None:
    @declare(name="back", schedule=Every(3600))
    def back() -> None: ...

    async with work(dsn, back):
        await until(lambda: eyes.one("SELECT next_at FROM pgqueue.schedule"))
    eyes.do(
        "UPDATE pgqueue.schedule SET declared_at = now() - interval '3 hours', next_at = next_at - interval '3 hours'"
    )
    async with work(dsn, back):
        await until(eyes.done(1))
    assert eyes.one("SELECT count(*) FROM pgqueue.tick") == 1
    assert eyes.one("SELECT next_at > now() AND declared_at > now() - interval '1 minute' FROM pgqueue.schedule")


async def test_code_takes_over_a_name_that_was_added_by_hand(dsn: str, eyes: Eyes, declare: Declare) -> None:
    schedules.add(eyes.conn, "mine", Every(60), "x")

    @declare(name="mine", schedule=Every(3600))
    def mine() -> None: ...

    async with work(dsn, mine):
        await until(lambda: eyes.one("SELECT declared_at FROM pgqueue.schedule"))
        assert plain(eyes.conn, "mine").line == "every 3600"
        with pytest.raises(ScheduleDeclared, match="declared by code"):
            schedules.add(eyes.conn, "mine", Every(60), "x")


@pytest.mark.parametrize("row", [("x", "{}", "sometimes"), ("", "{}", "latest"), ("x", "[]", "latest")])
def test_the_table_refuses_what_cannot_be(row: tuple[str, ...], conn: psycopg.Connection) -> None:
    insert = "INSERT INTO pgqueue.schedule (name, line, task, args, catch_up) VALUES (%s, '* * * * *', 'x', %s, %s)"
    with pytest.raises(errors.CheckViolation):
        conn.execute(insert, row)


# Commands ------------------------------------------------------------------------------------------------------------


@pytest.mark.second
def test_the_commands(dsn: str, eyes: Eyes) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        done = command("schedules", *arguments, dsn=dsn)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    assert run() == "There is no schedule.\n"
    nightly = ["nightly", "report", '{"day": 1}', "--cron", "0 3 * * *", "--tz", "Europe/Berlin", "--lock", "report"]
    assert run("add", *nightly) == "schedule nightly added\n"
    assert run("add", *nightly, "--queue", "slow", "--priority", "1") == "schedule nightly changed\n"
    assert run("add", "often", "poll", "--every", "5m", "--catch-up", "none") == "schedule often added\n"
    found = {each["name"]: each for each in json.loads(run("list", "--json"))["items"]}
    assert found.keys() == {"nightly", "often"}
    assert (found["nightly"]["options"]["lock_key"], found["nightly"]["queue"]) == ("report", "slow")
    assert (found["often"]["line"], found["often"]["catch_up"]) == ("every 300", "none")
    assert run("pause", "often") == "schedule often is paused\n"
    assert run("pause", "often") == "schedule often was paused already\n"
    assert "paused" in run() and "0 3 * * * Europe/Berlin" in run("list")
    assert run("resume", "often") == "schedule often ticks again\n"
    assert run("resume", "often") == "schedule often was not paused\n"
    assert eyes.state(int(run("run", "nightly"))) == "available"
    assert run("remove", "often") == "schedule often removed\n"
    assert "no schedule 'often'" in run("remove", "often", code=1)
    assert "no schedule 'often'" in run("run", "often", code=1)
    assert "hour '25'" in run("add", "x", "t", "--cron", "0 25 * * *", code=2)
    assert "--cron or --every" in run("add", "x", "t", code=2)
    assert "--cron or --every" in run("add", "x", "t", "--cron", "* * * * *", "--every", "1m", code=2)
    assert "belongs to --cron" in run("add", "x", "t", "--every", "1m", "--tz", "UTC", code=2)
    assert "is not JSON" in run("add", "x", "t", "{", "--every", "1m", code=2)
    eyes.do("INSERT INTO pgqueue.schedule (name, line, task, refused) VALUES ('bad', '7', 'x', 'because\x07')")
    assert "bad: because?" in run()


def test_what_live_workers_declare_is_not_removed_by_the_command(dsn: str, tmp_path: Path, eyes: Eyes) -> None:
    (tmp_path / "tasks.py").write_text(
        "import pgqueue\n@pgqueue.task(schedule=pgqueue.Every(3600))\ndef hourly(): ...\n"
    )
    with working("tasks", dsn=dsn, cwd=tmp_path) as worker:
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.schedule"))
        done = command("schedules", "remove", "tasks.hourly", dsn=dsn)
        assert (done.returncode, "pgqueue schedules pause tasks.hourly" in done.stderr) == (1, True)
        worker.process.terminate()
        worker.ends()
    assert command("schedules", "remove", "tasks.hourly", dsn=dsn).returncode == 0


# In tests of applications --------------------------------------------------------------------------------------------


def test_a_clock_that_is_turned_ticks_what_is_declared_and_what_was_added(
    conn: psycopg.Connection, declare: Declare
) -> None:
    seen: list[Any] = []

    @declare(name="hourly", schedule=Cron("0 * * * *"))
    def hourly(job: Job) -> None:
        seen.append(job.tick)

    start = datetime(2026, 3, 1, 10, 30, tzinfo=UTC)
    with Clock(conn, start) as clock:
        schedules.add(conn, "rows", Every(1800, "all"), "elsewhere")
        clock.advance(minutes=29)
        assert enqueued(conn) == []
        clock.advance(minutes=1)
        assert len(enqueued(conn, hourly)) == 1
        clock.advance(hours=3)
        assert len(enqueued(conn, hourly)) == 2  # the latest of three
        assert len(enqueued(conn, "elsewhere")) == 7
        clock.set(start + timedelta(days=1))
        drain(conn)
    assert [tick.isoformat()[8:16] for tick in seen] == ["01T11:00", "01T14:00", "02T10:00"]
    conn.rollback()
    assert schedules.schedules(conn) == []


def test_a_drain_that_turns_the_clock_to_a_retry_makes_no_ticks(conn: psycopg.Connection, declare: Declare) -> None:
    @declare(name="minutely", schedule=Every(60))
    def minutely() -> None: ...

    @declare(name="fails", retry=2)
    def fails(job: Job) -> None:
        if job.attempt == 1:
            raise ValueError("once")

    with Clock(conn) as clock:
        clock.advance(0)
        fails.enqueue(conn)
        assert drain(conn, clock).completed == 1
        assert enqueued(conn) == []


# Rights --------------------------------------------------------------------------------------------------------------


def test_rights(dsn: str) -> None:
    from psycopg.conninfo import make_conninfo
    from roles import create_role, drop_role

    from pgqueue.database import grants

    names = {kind: create_role(dsn) for kind in grants.KINDS}
    with psycopg.connect(dsn) as conn:
        for kind, name in names.items():
            grants.grant(conn, name, kind, "pgqueue")
    as_role = {kind: make_conninfo(dsn, user=name, password="secret") for kind, name in names.items()}
    for kind in ("operate", "work"):
        with psycopg.connect(as_role[kind]) as conn:
            assert schedules.add(conn, kind, Every(60), "x")
            assert schedules.pause(conn, kind) and schedules.resume(conn, kind)
            assert schedules.run(conn, kind).id
            assert len(schedules.schedules(conn)) >= 1
            schedules.remove(conn, kind)
            schedules.add(conn, kind, Every(60), "x")
    with psycopg.connect(as_role["read"]) as conn:
        assert len(schedules.schedules(conn)) == 2
    for kind, act in (("read", schedules.pause), ("read", schedules.run), ("enqueue", schedules.pause)):
        with psycopg.connect(as_role[kind]) as conn, pytest.raises(errors.InsufficientPrivilege):
            act(conn, "work")
    with psycopg.connect(as_role["enqueue"]) as conn, pytest.raises(errors.InsufficientPrivilege):
        schedules.add(conn, "mine", Every(60), "x")
    with psycopg.connect(dsn, autocommit=True) as conn:
        for name in names.values():
            drop_role(conn, name)
