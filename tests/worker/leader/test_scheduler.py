"""Due jobs become available at their time: in order, in batches, soon after late commits, never spinning."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from random import Random
from time import monotonic
from typing import Any

import psycopg
import pytest
from duty_loops import looping
from worker_states import worker_state
from workers import Eyes, least, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database import sessions, statements
from pgqueue.database.sessions import Link, Session
from pgqueue.jobs.job import Job
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.fetch import notifier
from pgqueue.worker.leader import scheduler
from pgqueue.worker.leader.scheduler import BATCH, Scheduler
from pgqueue.worker.worker import Worker

LATER = """
    INSERT INTO pgqueue.job (state, task, run_at, priority)
    SELECT 'scheduled', 'x', pgqueue.now() + make_interval(secs => %s), %s FROM generate_series(1, %s)
"""
late: list[float] = []


@task(name="scheduler.reports")
async def reports(job: Job) -> None:
    assert job.run_at is not None
    late.append((datetime.now(UTC) - job.run_at).total_seconds())


may_end = asyncio.Event()


@task(name="schedule.holds")
async def holds() -> None:
    await may_end.wait()


class Bench:
    """A scheduler at work on its own, and what it sends."""

    def __init__(self, dsn: str, leads: bool = True) -> None:
        self.leads = leads
        self.session = Session(Link(dsn, "pgqueue"), "schedule")
        self.rounds = 0
        self._run, self.session.run = self.session.run, self._counted  # type: ignore[method-assign]
        self.scheduler = Scheduler(self.session, worker_state(self.session.link), leads=lambda: self.leads)

    async def _counted(self, *messages: Any, **options: Any) -> list[Any]:
        self.rounds += 1
        return await self._run(*messages, **options)


@asynccontextmanager
async def scheduling(dsn: str, leads: bool = True) -> AsyncIterator[Bench]:
    bench = Bench(dsn, leads)
    running = looping(
        bench.scheduler.round,
        bench.session,
        leads=lambda: bench.leads,
        others=2 * scheduler.LOOK_SECONDS,
        woken=bench.scheduler.woken,
    )
    try:
        yield bench
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bench.session.close()


def available(eyes: Eyes, number: int) -> Any:
    return lambda: eyes.one("SELECT count(*) FROM pgqueue.job_available") == number


@pytest.mark.second
async def test_two_hundred_jobs_at_spread_times_start_on_time(dsn: str, eyes: Eyes) -> None:
    random, done = Random(7), 0
    async with work(dsn, reports) as worker:
        await until(worker.services.election.leads)

        async def once() -> float:
            nonlocal done
            late.clear()
            done += 200
            with psycopg.connect(dsn) as conn:
                jobs = [reports.using(delay=0.3 + 2.5 * random.random()).new() for _ in range(200)]
                pgqueue.enqueue_many(conn, jobs)
            await until(eyes.done(done))
            late.sort()
            p50, p99, most = (late[place] * 1000 for place in (100, 197, 199))
            print(f"lateness of 200 jobs: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {most:.1f} ms")
            assert late[0] >= 0
            return late[197]

        assert await least(once, 0.1, rounds=5) < 0.1


async def test_an_earlier_time_is_told_and_what_is_due_at_once_never_waits_here(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, reports) as worker:
        await until(worker.services.election.leads)
        with psycopg.connect(dsn, autocommit=True) as conn:
            reports.using(delay=3600).enqueue(conn)
            done = 0

            async def once() -> float:
                nonlocal done
                began, done = monotonic(), done + 1
                reports.using(delay=0.2).enqueue(conn)
                await until(eyes.done(done))
                return monotonic() - began

            assert await least(once, 1.0) < 1.0
            reports.using(delay=0).enqueue(conn)
            await until(eyes.done(done + 1))
    assert eyes.states() == {"scheduled": 1, "completed": done + 1}


async def test_jobs_keep_their_order_and_their_lane(dsn: str, eyes: Eyes) -> None:
    for seconds, priority in ((-1, 5), (-3, 5), (-2, 0), (-4, 9)):
        eyes.do(LATER, seconds, priority, 1)
    eyes.do("INSERT INTO pgqueue.job (state, task, run_at, crashes) VALUES ('scheduled', 'x', now(), 1)")
    async with scheduling(dsn):
        await until(available(eyes, 5))
    rows = eyes.all("SELECT rank, round(extract(epoch FROM pgqueue.now() - run_at))::int FROM pgqueue.job ORDER BY pos")
    assert [rank for rank, _ in rows] == [19, 11, 1, 11, -2]


async def test_more_than_a_batch_is_promoted_at_once(dsn: str, eyes: Eyes) -> None:
    eyes.do(LATER, -1, 5, 2 * BATCH + 1)
    async with scheduling(dsn) as bench:
        await until(available(eyes, 2 * BATCH + 1), 30.0)
        assert bench.rounds == 3


async def test_one_that_does_not_lead_promotes_nothing_until_it_does(dsn: str, eyes: Eyes) -> None:
    eyes.do(LATER, -1, 5, 1)
    async with scheduling(dsn, leads=False) as bench:
        bench.scheduler.wake()
        await asyncio.sleep(0)
        assert bench.rounds == 0
        bench.leads = True
        bench.scheduler.wake()
        await until(available(eyes, 1))


@pytest.mark.second
@pytest.mark.promise("F23")
async def test_a_due_row_locked_by_a_stranger_is_no_reason_to_spin_and_delays_no_other(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do(LATER, -1, 5, 1)
    conn.execute("SELECT FROM pgqueue.job_scheduled FOR UPDATE")
    async with scheduling(dsn) as bench:
        await until(lambda: bench.rounds >= 5)  # its patience has grown by now
        others, rounds = 0, list[int]()

        async def once() -> float:
            nonlocal others
            before, began, others = bench.rounds, monotonic(), others + 1
            eyes.do(LATER, 1.0, 5, 1)
            eyes.do('NOTIFY "pgqueue.:scheduled"')
            bench.scheduler.wake()
            await until(available(eyes, others))
            rounds.append(bench.rounds - before)
            return monotonic() - began

        assert await least(once, 1.2) < 1.2  # the other one, at its time
        assert min(rounds) < 15
        conn.rollback()
        await until(available(eyes, others + 1))


@pytest.mark.promise("F21")
async def test_a_time_that_had_long_passed_when_its_transaction_committed_is_found_soon(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk starts a minute back, and the transaction was open longer; only the start at zero finds its row."""
    monkeypatch.setattr(scheduler, "ZERO_SECONDS", 0.5)
    conn.execute(LATER.encode(), [-3600, 5, 1])
    async with scheduling(dsn) as bench:
        await until(lambda: bench.rounds >= 1)
        conn.commit()
        bench.scheduler.wake()
        await until(available(eyes, 1), 30.0)


def test_a_start_at_zero_comes_as_often_as_the_watermarks() -> None:
    assert scheduler.ZERO_SECONDS <= 5.0


async def test_a_wait_for_the_connection_does_not_put_off_the_next_start_at_zero(dsn: str) -> None:
    session = Session(Link(dsn, "pgqueue"), "schedule")
    waits = Scheduler(session, worker_state(session.link), leads=lambda: True)
    async with session._turn:  # somebody else's message hangs
        promoting = asyncio.ensure_future(waits._promote())
        await asyncio.sleep(0.5)
    await promoting
    await session.close()
    assert waits._zero_at - monotonic() < scheduler.ZERO_SECONDS + 0.5 * scheduler.ZERO_SHARE / 2


async def test_one_slow_answer_does_not_put_off_the_starts_at_zero_for_hours(dsn: str) -> None:
    session = Session(Link(dsn, "pgqueue"), "schedule")
    slow = Scheduler(session, worker_state(session.link), leads=lambda: True)
    run = session.run

    async def hangs(*messages: Any, **options: Any) -> list[Any]:
        answers = await run(*messages, **options)
        session.took = 45.0
        return answers

    session.run = hangs  # type: ignore[method-assign]
    await slow._promote()
    await session.close()
    assert slow._zero_at - monotonic() <= 300.0


def reads(dsn: str, name: str, after: str) -> int:
    """The buffers one of the scheduler's statements touches; rolled back."""
    with psycopg.connect(dsn) as looking:
        looking.execute("SET plan_cache_mode = force_generic_plan")
        params = {"after": after, "passed": "{}", "n": BATCH, "notify": False}
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statements.text(name, 'pgqueue')}"
        rows = looking.execute(explain.encode(), params).fetchall()
        looking.rollback()
    return int(rows[0][0][0]["Plan"]["Shared Hit Blocks"])


@pytest.mark.promise("F07")
@pytest.mark.each_value
@pytest.mark.parametrize("name", ["scheduler_promote", "scheduler_next", "scheduler_due"])
@pytest.mark.parametrize("analysed", [False, True])
def test_what_is_not_due_costs_nothing(name: str, analysed: bool, dsn: str, eyes: Eyes) -> None:
    reads(dsn, name, scheduler.EVER)
    before = reads(dsn, name, scheduler.EVER)
    eyes.do(LATER, 86_400, 5, 30_000)
    if analysed:
        eyes.do("VACUUM ANALYZE pgqueue.job_scheduled")
    assert reads(dsn, name, scheduler.EVER) <= before + 10


@pytest.mark.promise("E14", "F08")
async def test_a_held_snapshot_does_not_make_each_walk_dearer(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    async with scheduling(dsn) as bench:
        await until(lambda: bench.scheduler._after != scheduler.EVER)
        before = reads(dsn, "scheduler_promote", bench.scheduler._after)
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT count(*) FROM pgqueue.job")
        eyes.do(LATER, -120, 5, 20_000)  # older than where a walk starts: found at zero, and dead since
        bench.scheduler._zero_at = 0.0
        bench.scheduler.wake()
        await until(available(eyes, 20_000), 30.0)
        await until(lambda: bench.scheduler._after != scheduler.EVER)
        assert reads(dsn, "scheduler_promote", bench.scheduler._after) <= before + 10


@pytest.mark.promise("F21")
@pytest.mark.parametrize("seconds", [-1, 0.3])
async def test_one_that_does_not_lead_promotes_what_is_overdue_for_the_leaders_loop_may_hang(
    seconds: float, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "LOOK_SECONDS", 0.1)
    eyes.do(LATER, seconds, 5, BATCH + 1)
    async with scheduling(dsn, leads=False):
        await until(available(eyes, BATCH + 1), 30.0)


async def test_news_for_the_leader_do_not_put_off_the_look_of_the_others(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every retry notifies: on a busy system there is always news."""
    monkeypatch.setattr(scheduler, "LOOK_SECONDS", 0.1)
    eyes.do(LATER, -1, 5, 1)
    async with scheduling(dsn, leads=False) as bench:

        def found() -> bool:
            bench.scheduler.wake()
            return bool(available(eyes, 1)())

        await until(found, 30.0)


async def test_one_that_does_not_lead_looks_now_and_then_and_no_more(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "LOOK_SECONDS", 0.1)
    eyes.do(LATER, 3600, 5, 10)
    async with scheduling(dsn, leads=False) as bench:
        began = monotonic()
        await until(lambda: bench.rounds >= 3)
        assert monotonic() - began >= 0.3
    assert eyes.states() == {"scheduled": 10}


# Many at once ---------------------------------------------------------------------------------------------------------


@task(name="schedule.storm", retry=RetryPolicy(first=5.2, factor=1))
async def storm(job: Job) -> None:
    if job.attempt == 1:
        raise OSError("the other side is down")
    again.append(monotonic())


again: list[float] = []


@pytest.mark.second
@pytest.mark.promise("F255")
async def test_jobs_that_fail_together_start_again_spread_and_in_batches(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive is to promote, claim and complete each at its own time: a transaction of each kind for a job or two."""
    number, sent, real = 400, Counter[str](), sessions.send
    steps = ("scheduler_promote", "fetch_claim", "complete_plain")
    texts = {statements.text(name, "pgqueue"): name for name in steps}
    again.clear()

    async def counted(conn: Any, link: Any, *messages: Any, **options: Any) -> list[Any]:
        sent.update(name for each in messages if (name := texts.get(each.sql)))
        return await real(conn, link, *messages, **options)

    async with work(dsn, storm, concurrency=50):
        with psycopg.connect(dsn) as conn:
            pgqueue.enqueue_many(conn, [storm.new() for _ in range(number)])
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_scheduled") == number)
        [waits] = eyes.all(
            "SELECT min(wait), max(wait) FROM (SELECT extract(epoch FROM j.run_at - a.finished_at)::float8 AS wait "
            "FROM pgqueue.job_scheduled j JOIN pgqueue.attempt a ON a.job_id = j.id) AS waits"
        )
        assert waits[0] >= 2.6 - 0.05 and waits[1] <= 5.2 + 0.25 + 0.05
        monkeypatch.setattr(sessions, "send", counted)
        await until(lambda: len(again) == number)
    print(f"{number} jobs start again within {max(again) - min(again):.1f} s; {dict(sent)}")
    assert max(again) - min(again) > 1.0
    assert all(sent[name] < number / 3 for name in steps)


@pytest.mark.promise("F255")
async def test_a_stream_of_notifications_leads_to_twenty_walks_a_second(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "GATHER_TIMES", 1e9)
    async with scheduling(dsn) as bench:
        await until(lambda: bench.rounds)
        before, until_then = bench.rounds, monotonic() + 0.5
        while monotonic() < until_then:
            bench.scheduler.wake()
            await asyncio.sleep(0.001)
        assert 2 <= bench.rounds - before <= 12


# Without a notification ----------------------------------------------------------------------------------------------

UNTOLD = """
    INSERT INTO pgqueue.job (state, task, args, run_at)
    SELECT 'scheduled', %s, '{}', pgqueue.now() + make_interval(secs => 0.3) FROM generate_series(1, %s)
"""
FEW = 5.0
"""Far less than the 15 s that a leader slept before, and than the 30 s of the others."""


async def untold(eyes: Eyes, before: int, *workers: Worker) -> float:
    """How long it takes from an enqueue without NOTIFY, of a job due in 0.3 s, to its end."""
    for worker in workers:  # the scheduler sleeps for as long as it may
        fetches = worker.services.fetch_session.answers()
        await until(lambda: worker.services.fetch_session.answers() >= fetches + 4)  # noqa: B023
    began = monotonic()
    eyes.do(UNTOLD, reports.name, 1)
    await until(eyes.done(before + 1))
    return monotonic() - began


@pytest.mark.promise("F31")
@pytest.mark.parametrize("listen", ["off", "deaf", None])
async def test_a_delayed_job_without_a_notification_starts_within_its_polls(
    listen: str | None, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LISTEN is off; nothing answers where it should go; or the enqueuer has sent no NOTIFY."""
    monkeypatch.setattr(notifier, "DISPENSE_SECONDS", 0.2)
    listen_dsn = "postgresql://postgres@127.0.0.1:1/none" if listen == "deaf" else listen
    async with work(dsn, reports, listen_dsn=listen_dsn, poll=0.2) as worker:
        await until(worker.services.election.leads)
        assert worker.services.election.elected is (listen is None)
        assert await untold(eyes, 0, worker) < FEW


@pytest.mark.promise("F31")
async def test_a_leader_without_room_finds_a_job_without_a_notification_for_the_others(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with work(dsn, holds, poll=0.2, concurrency=1) as leader:
        await until(leader.services.election.leads)
        with psycopg.connect(dsn) as conn:
            holds.enqueue(conn)
        await until(lambda: leader.services.running.runs)
        async with work(dsn, reports, poll=0.2) as other:
            assert await untold(eyes, 0, other) < FEW
            assert not other.services.election.leads()
        may_end.set()
        await until(eyes.done(2))


async def test_a_clock_that_steps_back_keeps_nothing_from_being_promoted(dsn: str, eyes: Eyes) -> None:
    """Within the statement: between the look at what is due and the table's own check."""
    eyes.do(LATER, -1, 5, 3)
    eyes.do("CREATE SEQUENCE public.looks")
    eyes.do(
        "CREATE OR REPLACE FUNCTION pgqueue.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE RETURN "
        "clock_timestamp() - CASE WHEN nextval('public.looks') > 1 THEN interval '1 hour' ELSE interval '0' END"
    )
    async with scheduling(dsn):
        await until(available(eyes, 3), 30.0)


@pytest.mark.promise("F07")
@pytest.mark.parametrize("name", ["scheduler_promote", "scheduler_next", "scheduler_due"])
def test_a_hundred_thousand_future_jobs_in_a_table_never_analysed_are_not_read(name: str, dsn: str, eyes: Eyes) -> None:
    eyes.do(LATER, 86_400, 5, 100_000)
    assert eyes.all("SELECT reltuples::int FROM pg_class WHERE relname = 'job_scheduled'") == [(-1,)]
    assert reads(dsn, name, scheduler.EVER) < 20


REFUSES = """
    CREATE FUNCTION public.refuses() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.task LIKE 'bad%' THEN
            RAISE EXCEPTION 'no' USING ERRCODE = '{0}';
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER refuses BEFORE INSERT ON pgqueue.job_available FOR EACH ROW EXECUTE FUNCTION public.refuses();
    INSERT INTO pgqueue.job (state, task, run_at, rank)
    SELECT 'scheduled', 'bad', pgqueue.now() - interval '1 hour', 11 FROM generate_series(1, {1});
    INSERT INTO pgqueue.job (state, task, run_at, rank)
    SELECT 'scheduled', 'good', pgqueue.now(), 11 FROM generate_series(1, 700);
"""


@pytest.mark.promise("F45")
@pytest.mark.parametrize(
    ("state", "bad"),
    [
        ("P0001", 2),
        *(pytest.param(*each, marks=pytest.mark.second) for each in [("23505", 1), ("42P01", 30), ("22003", 1)]),
    ],
)
async def test_jobs_that_a_trigger_refuses_hold_up_no_others(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, state: str, bad: int
) -> None:
    eyes.do(REFUSES.format(state, bad))
    async with scheduling(dsn):
        await until(available(eyes, 700), 20.0)
        assert eyes.all("SELECT DISTINCT task FROM pgqueue.job_available") == [("good",)]
        assert "refuses, in a trigger, has raised: no" in caplog.text
        assert caplog.text.count("cannot be made available") == 1
        eyes.do("DROP FUNCTION public.refuses CASCADE")
        await until(available(eyes, 700 + bad), 20.0)


@pytest.mark.promise("F28")
async def test_a_unique_key_of_another_table_is_tried_now_and_then(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Due jobs have no double to put aside, so the same promotion at once would fail for ever, as fast as it can."""
    monkeypatch.setattr(scheduler, "LEFT_SECONDS", 1.5)
    eyes.do("CREATE TABLE public.only (one int UNIQUE)")
    eyes.do("INSERT INTO public.only VALUES (1)")
    eyes.do(
        "CREATE FUNCTION public.refuses() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO public.only VALUES (1); RETURN NULL; END'"
    )
    eyes.do(
        "CREATE TRIGGER refuses AFTER INSERT ON pgqueue.job_available FOR EACH ROW EXECUTE FUNCTION public.refuses()"
    )
    eyes.do("INSERT INTO pgqueue.job (state, task, run_at, rank) VALUES ('scheduled', 'x', pgqueue.now(), 11)")
    async with scheduling(dsn) as bench:
        await until(lambda: bench.rounds >= 10)
        before, began = bench.rounds, monotonic()
        await asyncio.sleep(1.0)  # the time is what is measured
        assert bench.rounds - before <= 4 * (monotonic() - began)
        eyes.do("DROP FUNCTION public.refuses CASCADE")
        await until(available(eyes, 1), 5.0)
