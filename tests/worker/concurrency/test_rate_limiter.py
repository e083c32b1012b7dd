"""Rates: never more starts in a period than were promised, in order, changed at run time, and nobody forgotten."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from commands import items
from commands import pgqueue as command
from rate_desk import RATED, FreeOfCharge, Pacer, SlowOutlook, SlowSearch, Unlocked, bound, line, most, race, rated
from workers import Eyes, until, wait_until, work, workers

import pgqueue
from pgqueue import Job, Lock, Rate, Retry, Snooze, testing
from pgqueue.admin import queues as queue_switch
from pgqueue.admin.limits import RateInfo, change_rate, rates
from pgqueue.client.tasks import limitings, task
from pgqueue.database import sessions, statements
from pgqueue.database.sessions import Link
from pgqueue.errors import InvalidOption, LimitNotFound
from pgqueue.jobs.concurrency import rates_of
from pgqueue.jobs.fields import claimed
from pgqueue.worker.concurrency.rate_limiter import LOOK_SECONDS
from pgqueue.worker.run.slots import SlotGroup
from pgqueue.worker.worker import Worker

Pacers = Callable[..., Pacer]
FAST, SLOW = (1_000_000, 1.0, 1), (1, 3600.0, 1)  # all at once; one and no more


@pytest.fixture
async def pacers(dsn: str) -> AsyncIterator[Pacers]:
    """Makes pacers; closed at the end."""
    made: list[Pacer] = []

    def make(*queues: str, **options: Any) -> Pacer:
        made.append(Pacer(dsn, queues or ("default",), **options))
        return made[-1]

    yield make
    for pacer in made:
        await pacer.close()


# Never more than the rate --------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("L18")
@pytest.mark.parametrize("rate", [Rate("50/s"), Rate("20/s", burst=15)])
async def test_however_many_ask_no_more_start_in_a_period_than_were_promised(dsn: str, eyes: Eyes, rate: Rate) -> None:
    assert await race(dsn, eyes, rate, askers=4, seconds=2.5) <= bound(rate)


@pytest.mark.second
@pytest.mark.parametrize("link", [Unlocked, FreeOfCharge])
async def test_without_the_lock_or_the_charge_there_are_too_many(dsn: str, eyes: Eyes, link: type[Link]) -> None:
    rate = Rate("50/s", burst=10)
    assert await race(dsn, eyes, rate, askers=6, seconds=1.5, link=link) > bound(rate)


API = """
import random

@pgqueue.task(name="rates.call", rate=pgqueue.Rate("20/s", key="{customer}", burst=3), retry=1)
async def call(customer: str) -> None:
    say("call", customer=customer)
    await asyncio.sleep(0.02)
    say("over", customer=customer)

@pgqueue.task(name="rates.block", retry=1)
async def block() -> None:
    time.sleep(random.choice([0.03, 0.1, 0.3]))
"""


@pytest.mark.second
@pytest.mark.promise("L18")
def test_an_api_never_sees_more_calls_than_its_rate_though_its_callers_stumble(
    tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    each = 36
    with workers(tmp_path, dsn, API) as made:
        processes = made.ready(3, concurrency=4)
        for customer in ("a", "b"):
            rated(eyes, each, f"rates.call:{customer}", task="rates.call", args=f'{{"customer": "{customer}"}}')
        rated(eyes, each // 2, "rates.call:c", task="rates.call", args='{"customer": "c"}', lock_key="c")
        for _ in range(each // 2):
            eyes.do("SELECT pgqueue.enqueue('rates.block')")
        wait_until(eyes.done(3 * each), 60.0)
        calls = [event for process in processes for event in process.all("call")]
        over = [event["at"] for process in processes for event in process.all("over") if event["customer"] == "c"]
        assert len(over) == each // 2
        starts = sorted(event["at"] for event in calls if event["customer"] == "c")
        assert all(end < start for end, start in zip(sorted(over), starts[1:], strict=False))  # one at a time
        assert most(starts, 1.0) <= 20 + 3 - 1
        for customer in ("a", "b"):
            times = [event["at"] for event in calls if event["customer"] == customer]
            assert len(times) == each
            assert most(times, 1.0) <= 20 + 3 - 1
        for process in processes:
            assert process.stop() == 0
    assert eyes.all("SELECT DISTINCT attempt, crashes FROM pgqueue.job_done") == [(1, 0)]


async def test_who_is_let_in_and_does_not_start_in_time_goes_back_unspent_and_is_charged_again(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[tuple[int, int]] = []

    @task(name="rates.late", rate="10/s", retry=1)
    def late(job: Job) -> None:
        starts.append((job.id, job.attempt))

    with psycopg.connect(dsn) as conn:
        late.enqueue(conn)
    async with work(dsn, late) as worker:
        deliver = worker.services.rate_limiter._deliver

        def stumbling(jobs: list[Job]) -> None:
            if worker.services.rate_limiter.started < 3:
                time.sleep(0.4)  # nobody looks at the answer for so long
            deliver(jobs)

        monkeypatch.setattr(worker.services.rate_limiter, "_deliver", stumbling)
        await until(eyes.done(1), 20.0)
        assert worker.services.rate_limiter.started == 3
    assert starts == [(1, 1)]
    assert eyes.all("SELECT attempt, crashes, snoozes FROM pgqueue.job") == [(1, 0, 0)]
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") == 0


async def test_a_moments_standstill_does_not_cost_a_job_the_hour_of_its_rate(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    @task(name="rates.hourly", rate="1/h")
    def hourly() -> None: ...

    with psycopg.connect(dsn) as conn:
        hourly.enqueue(conn)
    async with work(dsn, hourly) as worker:
        deliver = worker.services.rate_limiter._deliver

        def stumbling(jobs: list[Job]) -> None:
            time.sleep(0.6)  # the process stands still
            deliver(jobs)

        monkeypatch.setattr(worker.services.rate_limiter, "_deliver", stumbling)
        await until(eyes.done(1), 20.0)
        assert worker.services.rate_limiter.started == 1


@pytest.mark.parametrize(
    ("count", "period", "late"),
    [(1, 86400.0, 5.0), (1, 3600.0, 5.0), (1, 60.0, 0.6), (100, 3600.0, 0.36), (60, 60.0, 0.2), (1, 1.0, 0.05)],
)
async def test_the_slower_a_rate_the_later_a_job_may_start(
    pacers: Pacers, eyes: Eyes, count: int, period: float, late: float
) -> None:
    eyes.do(RATED, "k", count, period, 1)
    [job] = rated(eyes, 1)
    pacer = pacers()
    await pacer.park()
    before = monotonic()
    assert await pacer.ask("k") == [job]
    after = monotonic()
    [let_in] = pacer.jobs
    assert let_in.start_by is not None
    assert before + late <= let_in.start_by <= after + late
    left = eyes.one("SELECT extract(epoch FROM next_at - now())::float8 FROM pgqueue.limiter")
    gap = (period + late + min(0.05, period / 40)) / count
    assert gap - (monotonic() - before) <= left <= gap


async def test_who_waits_for_a_slot_that_stays_busy_goes_back_in_time(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, ran = asyncio.Event(), asyncio.Event()

    @task(name="rates.holds")
    async def holds() -> None:
        await gate.wait()

    @task(name="rates.waits", rate="10/s")
    async def waits() -> None:
        ran.set()

    async with work(dsn, holds, waits, concurrency=1) as worker:
        with psycopg.connect(dsn) as conn:
            holds.enqueue(conn)
        await until(lambda: worker.services.executor._running.runs)
        worker.services.executor._running.groups[0].prefetch = 5  # as after many quick jobs
        slots, worker.services.executor._running.groups[0].slots = worker.services.executor._running.groups[0].slots, 2
        with psycopg.connect(dsn) as conn:
            waits.enqueue(conn)
        let_in = worker.services.rate_limiter._deliver

        def taken_meanwhile(jobs: list[Job]) -> None:
            worker.services.executor._running.groups[0].slots = slots
            let_in(jobs)

        monkeypatch.setattr(worker.services.rate_limiter, "_deliver", taken_meanwhile)
        await until(lambda: worker.services.rate_limiter.started)
        back = "SELECT state, attempt FROM pgqueue.job WHERE task = 'rates.waits' AND state <> 'running'"
        await until(lambda: eyes.all(back) in ([("available", 0)], [("blocked", 0)]))
        gate.set()
        await asyncio.wait_for(ran.wait(), 30)


@pytest.mark.second
@pytest.mark.promise("L18")
async def test_what_waits_at_hand_too_long_goes_back_unspent_and_is_charged_again(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    starts: list[float] = []

    @task(name="rates.timed", rate=Rate("600/s", burst=100), retry=1)
    async def timed(number: int) -> None:
        starts.append(monotonic())
        if number % 50 == 0:
            time.sleep(0.1)  # noqa: ASYNC251  # no job starts meanwhile

    async with work(dsn, timed, concurrency=50) as worker:
        timed.enqueue_many(conn, [(number,) for number in range(1200)])
        conn.commit()
        await until(eyes.done(1200), 120.0)
        assert worker.services.rate_limiter.started > 1200
    assert most(starts, 1.0) <= 699
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job_done") == [(1,)]


def test_a_job_that_must_start_in_time_waits_before_others_and_behind_those_that_came_before_it() -> None:
    def job(number: int, start_by: float | None = None) -> tuple[Job, Any]:
        made = Job(claimed(id=number, task="x", max_attempts=1, run_at=0), 1)
        made.start_by = start_by
        return made, None

    pool = SlotGroup(["default"], 10)
    pool.put([job(1), job(2)])
    pool.put([job(3, 5.0), job(4, 5.0)], first=True)
    pool.put([job(5, 5.0)], first=True)
    assert [entry[0].id for entry in pool.waiting] == [3, 4, 5, 1, 2]


@pytest.mark.second
def test_a_handler_is_not_run_again_in_place_for_that_is_a_second_start(
    tmp_path: Path, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    runs: list[float] = []

    @task(name="rates.aborts", rate="2/s", transactional=True)
    def aborts(job: Job) -> None:
        runs.append(monotonic())
        if len(runs) < 3:
            raise psycopg.errors.SerializationFailure

    aborts.enqueue(conn)
    conn.commit()

    async def main() -> None:
        async with work(dsn, aborts):
            await until(eyes.done(1), 20.0)

    asyncio.run(main())
    assert len(runs) == 3
    assert most(runs, 1.0) <= 2
    assert eyes.one("SELECT attempt FROM pgqueue.job") == 1


# In order ------------------------------------------------------------------------------------------------------------


async def test_urgent_jobs_come_first_and_paused_queues_are_passed_over(pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *SLOW)
    pacer = pacers("default", "other")
    first, second = rated(eyes, 2)
    [elsewhere] = rated(eyes, 1, queue="other", priority=0, rank=1)
    [urgent] = rated(eyes, 1, priority=1, rank=3)
    await pacer.park()
    assert line(eyes) == [elsewhere, urgent, first, second]
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('other', now())")
    for expected in (urgent, first, second, None):
        assert await pacer.ask("k") == ([expected] if expected else [])
        eyes.do("DELETE FROM pgqueue.limiter")
    assert line(eyes) == [elsewhere]
    eyes.do("DELETE FROM pgqueue.queue")
    assert await pacer.ask("k") == [elsewhere]


async def test_as_many_come_as_rate_and_slots_allow(pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", 10, 10.0, 4)
    ids = rated(eyes, 8)
    pacer = pacers()
    await pacer.park()
    pacer.slots = 3
    assert await pacer.ask("k") == ids[:3]
    assert "k" in pacer.rates._waiters
    pacer.slots = 1000
    assert await pacer.ask("k") == ids[3:4]
    assert 0.5 < pacer.rates._waiters["k"].at - monotonic() < 1.03
    assert await pacer.ask("k") == []


async def test_each_key_has_its_own_rate_and_of_several_the_urgent_come_first(pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *SLOW)
    keys = [f"k:{number}" for number in range(60)]
    ids = [rated(eyes, 1, key, priority=number % 3, rank=2 * (number % 3) + 1)[0] for number, key in enumerate(keys)]
    pacer = pacers()
    await pacer.park()
    pacer.slots = 20
    assert await pacer.ask(*keys) == ids[::3]
    pacer.slots = 1000
    assert sorted(await pacer.ask()) == sorted(set(ids) - set(ids[::3]))


async def test_a_rate_that_nobody_has_declared_lets_nobody_in_until_somebody_does(pacers: Pacers, eyes: Eyes) -> None:
    [job] = rated(eyes, 1)
    pacer = pacers()
    await pacer.park()
    assert await pacer.ask("k") == []
    assert not pacer.rates._waiters
    eyes.do(RATED, "k", *SLOW)
    pacer.rates.swept(["rate:k"])
    assert await pacer.ask() == [job]


async def test_suspects_come_one_at_a_time_and_the_worse_alone(pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *FAST)
    plain = rated(eyes, 2)
    once = rated(eyes, 2, crashes=1, rank=-2)
    twice = rated(eyes, 1, crashes=2, rank=-1)
    pacer = pacers()
    await pacer.park()
    await pacer.park()  # one of a lane of suspects at a time
    pacer.poison = ()
    assert await pacer.ask("k") == plain
    assert 0.5 < pacer.rates._waiters["k"].at - monotonic() <= LOOK_SECONDS  # until we may take the jobs that are left
    pacer.poison = (-2,)
    assert await pacer.ask("k") == once[:1]
    pacer.poison, pacer.ordinary = (-1,), False
    assert await pacer.ask("k") == twice
    assert line(eyes) == once[1:]


async def test_of_a_suspect_that_nobody_took_others_are_told(pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *SLOW)
    [plain] = rated(eyes, 1)
    rated(eyes, 1, crashes=1, rank=-2)
    pacer = pacers()
    await pacer.park()
    pacer.poison = ()
    pacer.rates._handed_on = monotonic() + 60.0  # what it would tell stays there to be seen
    pacer.rates._waiters.clear()
    pacer.rates.swept(["rate:k"])
    assert await pacer.ask() == [plain]
    assert list(pacer.rates._others) == ["k"]


async def test_however_fast_its_rate_a_claim_lets_no_job_start(pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *FAST)
    ids = rated(eyes, 5)
    [granted] = rated(eyes, 1, lock_key="a", holds=True, rank=10)
    pacer = pacers()
    await pacer.park()
    await pacer.park()
    assert line(eyes) == [granted, *ids]
    assert eyes.all("SELECT holds FROM pgqueue.job_blocked WHERE id = %s", granted) == [(True,)]
    began = monotonic()
    assert sorted(await pacer.ask()) == [*ids, granted]  # the claim has told of the line
    assert all(job.start_by is not None and began < job.start_by <= monotonic() + 0.05 for job in pacer.jobs)
    attempts = eyes.all("SELECT DISTINCT attempt, holds, worker_id FROM pgqueue.job_running")
    assert attempts == [(1, True, pacer.worker_id)]
    assert eyes.all("SELECT key, worker_id FROM pgqueue.limiter") == [("k", pacer.worker_id)]


async def test_a_drain_under_a_rate_that_it_is_far_below_runs_each_job_once(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    ran: list[int] = []

    @task(name="rates.far", rate=Rate("1000000/s"))
    async def far(number: int) -> None:
        ran.append(number)

    async with work(dsn, far) as worker:
        far.enqueue_many(conn, [(number,) for number in range(3000)])
        conn.commit()
        await until(eyes.done(3000), 60.0)
        assert sorted(ran) == list(range(3000))
        assert worker.services.rate_limiter.started >= 3000
        assert worker.services.rate_limiter.asks < 600  # many at a time
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job_done") == [(1,)]


async def test_a_second_row_of_a_running_job_in_a_line_is_refused_and_harms_only_itself(
    pacers: Pacers, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    eyes.do(RATED, "k", *FAST)
    [first] = rated(eyes, 1)
    pacer = pacers()
    await pacer.park()
    assert await pacer.ask("k") == [first]
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (id, enqueued_at, state, key, task, rate_key) "
        "SELECT id, enqueued_at, 'blocked', 'rate:k', 'double', 'k' FROM pgqueue.job_running"
    )
    waiting = rated(eyes, 3)
    await pacer.park()
    assert await pacer.ask("k") == waiting  # the first try met the double, which was put aside
    assert eyes.all("SELECT id, task, state, reason FROM pgqueue.job_dead") == [(first, "double", "failed", "refused")]
    assert eyes.all("SELECT id, task FROM pgqueue.job_running WHERE id = %s", first) == [(first, "x")]
    assert f"job {first} (double) had a second row" in caplog.text


async def test_what_a_lost_answer_let_in_is_known_by_its_claim_and_charged(
    pacers: Pacers, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    eyes.do(RATED, "k", 600, 1.0, 10)
    rated(eyes, 4)
    pacer = pacers()
    await pacer.park()
    run = pacer.pace.run_then

    async def losing(*messages: Any, **how: Any) -> list[Any]:
        await run(*messages, **how)
        raise psycopg.OperationalError("lost")

    monkeypatch.setattr(pacer.pace, "run_then", losing)
    with pytest.raises(psycopg.OperationalError):
        await pacer.ask("k")
    assert pacer.doubts == 1
    held = eyes.all("SELECT worker_id, claim FROM pgqueue.job_running")
    assert held == [(pacer.worker_id, pacer.fetcher._state.claims.settled)] * 4
    assert eyes.one("SELECT count(*) FROM pgqueue.limiter") == 1


# Many workers --------------------------------------------------------------------------------------------------------


@pytest.mark.second
async def test_a_full_worker_does_not_ask_and_another_takes_over(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    gate, calls = asyncio.Event(), []

    @task(name="rates.long", queue="long")
    async def long() -> None:
        await gate.wait()

    @task(name="rates.short", rate=Rate("5/s"))
    async def short() -> None:
        calls.append(monotonic())

    async with work(dsn, long, short, concurrency=1) as full:
        short.enqueue_many(conn, [()] * 30)
        conn.commit()
        await until(lambda: len(calls) > 1)
        long.enqueue(conn)
        conn.commit()
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_running WHERE task = 'rates.long'"), 30.0)
        await asyncio.sleep(0.3)  # an answer that was on its way
        asks = full.services.rate_limiter.asks
        async with work(dsn, short):
            seen = len(calls)
            await until(lambda: len(calls) > seen, 3.0)
            await until(eyes.done(30), 30.0)
        assert full.services.rate_limiter.asks == asks
        gate.set()
    assert most(calls, 1.0) <= 5


async def test_beside_a_steady_flow_of_quick_jobs_a_line_moves_on(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    rated_ran: list[int] = []
    plain_ran: list[int] = []

    @task(name="rates.quick")
    async def quick() -> None:
        plain_ran.append(len(rated_ran))
        await asyncio.sleep(0.005)

    @task(name="rates.beside", rate="50/s")
    async def beside() -> None:
        rated_ran.append(len(plain_ran))

    pgqueue.enqueue_many(conn, [quick.new()] * 20 + [beside.new()] * 20 + [quick.new()] * 3000)
    conn.commit()
    async with work(dsn, quick, beside, concurrency=2) as worker:
        await until(lambda: len(rated_ran) == 20, 30.0)
        assert worker.services.executor._running.groups[0].prefetch > 0
        assert rated_ran[-1] < 1500
        await until(lambda: len(plain_ran) > rated_ran[-1] + 100, 30.0)  # no slot is kept for nobody


@pytest.mark.second
async def test_beside_a_long_line_other_jobs_have_their_turn(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    rated_ran: list[int] = []
    plain_ran: list[int] = []

    @task(name="rates.line", rate=Rate("1000/s", burst=1000))
    async def line_up() -> None:
        rated_ran.append(1)
        await asyncio.sleep(0.06)

    @task(name="rates.other")
    async def other() -> None:
        plain_ran.append(len(rated_ran))
        await asyncio.sleep(0.06)

    line_up.enqueue_many(conn, [()] * 100)
    conn.commit()
    async with work(dsn, line_up, other, concurrency=1):
        await until(lambda: len(rated_ran) > 2, 30.0)
        eyes.do(
            "WITH gone AS (DELETE FROM pgqueue.job_available RETURNING id) "
            "INSERT INTO pgqueue.job_blocked (state, key, task, queue, priority, rank, rate_key) "
            "SELECT 'blocked', 'rate:rates.line', 'rates.line', 'default', 5, 11, 'rates.line' FROM gone"
        )
        other.enqueue_many(conn, [()] * 5)
        conn.commit()
        since = len(rated_ran)
        await until(lambda: len(plain_ran) == 5, 30.0)
        assert plain_ran[-1] - since < 20


async def test_a_line_that_nobody_remembers_is_found(dsn: str, eyes: Eyes) -> None:
    ran = asyncio.Event()

    @task(name="rates.lost", rate="10/s")
    async def lost() -> None:
        ran.set()

    async with work(dsn, lost) as worker:
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.key_rate"))
        eyes.do(
            "INSERT INTO pgqueue.job_blocked (state, key, task, queue, priority, rank, rate_key) "
            "VALUES ('blocked', 'rate:rates.lost', 'rates.lost', 'default', 5, 11, 'rates.lost')"
        )
        assert not worker.services.rate_limiter._waiters
        worker.services.sweep.keys_in_use()
        await asyncio.wait_for(ran.wait(), 7.0)


async def test_a_worker_that_was_faster_is_left_alone(pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", 2, 1.0, 1)
    rated(eyes, 30)
    mine, other = pacers(), pacers()
    await mine.park()
    assert len(await other.ask("k")) == 1
    assert await mine.ask("k") == []
    assert mine.rates._waiters["k"].pushed == 0.0  # it does not know yet whether anybody else asks
    await until(lambda: monotonic() > mine.rates._waiters["k"].at)
    assert len(await other.ask("k")) == 1
    await mine.rates._step()
    pushed = mine.rates._waiters["k"].pushed
    assert pushed > 0.1
    mine.rates.handed_on('["k"]')
    assert mine.rates._waiters["k"].pushed == 0.0


async def test_one_who_comes_while_the_last_of_a_line_is_let_in_is_not_forgotten(
    pacers: Pacers, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    eyes.do(RATED, "k", *FAST)
    [first] = rated(eyes, 1)
    pacer = pacers()
    await pacer.park()
    answer, late = pacer.pace.run_then, list[int]()

    async def answered(*messages: Any, then: Any) -> list[Any]:
        found = await answer(*messages, then=then)
        if not late:
            late.extend(rated(eyes, 1))
            await pacer.park()
        return found

    monkeypatch.setattr(pacer.pace, "run_then", answered)
    pacer.rates.wanted(["k"])
    await pacer.rates._step()
    assert [job.id for job in pacer.jobs] == [first, *late]


@pytest.mark.parametrize("said", ['["\\u0000", "k"]', '["k", "a\\u0000b"]', '["", "k", "' + 9_000 * "x" + '"]'])
async def test_a_notification_that_names_what_is_no_key_stops_no_rate(pacers: Pacers, eyes: Eyes, said: str) -> None:
    """Any role may notify."""
    eyes.do(RATED, "k", *FAST)
    [job] = rated(eyes, 1)
    pacer = pacers()
    await pacer.park()
    pacer.rates.handed_on(said)
    async with asyncio.timeout(30):
        while [each.id for each in pacer.jobs] != [job]:
            await pacer.rates._step()


async def test_a_line_that_is_handed_on_is_looked_at_whatever_was_known_of_its_rate(pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *SLOW)
    ids = rated(eyes, 2)
    pacer = pacers()
    await pacer.park()
    assert await pacer.ask("k") == ids[:1]
    assert pacer.rates._waiters["k"].at > monotonic() + 3_000
    eyes.do("UPDATE pgqueue.key_rate SET count = 1000000")
    pacer.rates.handed_on('["k"]')
    pacer.jobs.clear()
    async with asyncio.timeout(30):
        while [job.id for job in pacer.jobs] != ids[1:]:
            await pacer.rates._step()


async def test_of_many_lines_all_are_handed_on(pacers: Pacers, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = pacers()
    full.slots = 0
    keys = [f"k:{number:0490}" for number in range(40)]
    told: list[str] = []
    ask = full.pace.run

    async def tell(*messages: Any, **how: Any) -> list[Any]:
        told.extend(json.loads(messages[0].params["keys"]))
        return await ask(*messages, **how)

    monkeypatch.setattr(full.pace, "run", tell)
    full.rates.wanted(keys)
    full.rates._ripen()
    for key in keys:
        full.rates._due[key] -= 1.0
    for _ in range(5):
        full.rates._handed_on = 0.0
        await full.rates._hand_on()
    assert set(told) == set(keys)


async def test_where_nobody_is_told_nothing_is_kept_for_others(pacers: Pacers) -> None:
    pacer = pacers()
    pacer.state.settings = replace(pacer.state.settings, notify=False)
    pacer.rates._others["k"] = None
    await pacer.rates._hand_on()
    assert not pacer.rates._others


async def test_a_full_pool_does_not_keep_the_slots_of_another(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    """The fetcher wants a slot of the one, and has its turn there; not here."""
    go = asyncio.Event()
    starts: list[float] = []

    @task(name="rates.blocks", queue="mail")
    async def blocks() -> None:
        await go.wait()

    @task(name="rates.paced", queue="crm", rate="20/s")
    async def paced() -> None:
        starts.append(monotonic())

    async with Worker(queues=["crm:1", "mail:1"], tasks=[blocks, paced], dsn=dsn):
        blocks.enqueue_many(conn, [()] * 5)
        conn.commit()
        await until(lambda: eyes.states().get("running") == 1)
        paced.enqueue_many(conn, [()] * 12)
        conn.commit()
        await until(lambda: len(starts) == 12)
        go.set()
    assert max(later - one for one, later in pairwise(starts)) < 0.9


@pytest.mark.promise("L18")
async def test_with_one_slot_the_jobs_at_hand_get_it_and_none_is_kept_free_for_more(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """A slot that is kept free for a rate while enough of its jobs are at hand would be kept from those."""

    @task(name="rates.quick", rate="1000000/s")
    async def quick() -> None:
        pass

    quick.enqueue_many(conn, [()] * 600)
    conn.commit()
    async with Worker(concurrency=1, tasks=[quick], dsn=dsn) as worker:
        await until(eyes.done(600))
        assert worker.services.rate_limiter.started < 2 * 600, "most came in once"


async def test_rates_that_are_said_again_wait_for_nobody(pacers: Pacers, eyes: Eyes, dsn: str) -> None:
    declare = {"names": ["k"], "counts": [5], "periods": [60.0], "bursts": [1], "notify": True}
    pacer = pacers()
    await pacer.pace.run(pacer.link.statement("declared_limits_put_rates", **declare))
    with psycopg.connect(dsn) as someone:
        someone.execute("UPDATE pgqueue.key_rate SET count = 7, set_at = now() WHERE name = 'k'")
        async with asyncio.timeout(1.5):
            assert await pacer.pace.run(pacer.link.statement("declared_limits_put_rates", **declare)) == [
                [(None, None)]
            ]


@pytest.mark.second
async def test_a_worker_that_was_faster_with_another_queue_is_no_reason_to_come_later(
    pacers: Pacers, eyes: Eyes
) -> None:
    eyes.do(RATED, "k", 2, 1.0, 1)
    rated(eyes, 10)
    [urgent] = rated(eyes, 1, queue="mine", priority=1, rank=3)
    mine, other = pacers("mine"), pacers("default")
    await mine.park()
    await other.park()
    assert len(await other.ask("k")) == 1
    assert await mine.ask("k") == []
    await until(lambda: monotonic() > mine.rates._waiters["k"].at)
    assert len(await other.ask("k")) == 1
    await mine.rates._step()  # asks as it would by itself
    assert mine.rates._waiters["k"].pushed == 0.0
    await until(lambda: monotonic() > mine.rates._waiters["k"].at)
    await mine.rates._step()
    assert [job.id for job in mine.jobs] == [urgent]


@pytest.mark.parametrize("swept", [True, False])
async def test_where_the_first_is_of_another_queue_ours_go_on_and_others_are_told(
    pacers: Pacers, eyes: Eyes, swept: bool
) -> None:
    eyes.do(RATED, "k", *SLOW)
    mine, other = pacers("mine"), pacers()
    [urgent] = rated(eyes, 1, priority=1, rank=3)
    first, second = rated(eyes, 2, queue="mine")
    await mine.park()
    await other.park()
    mine.rates._waiters.clear()
    mine.rates._handed_on = monotonic() + 60.0  # what it would tell stays there to be seen
    if swept:
        mine.rates.swept(["rate:k"])
    assert await mine.ask(*([] if swept else ["k"])) == [first]
    assert list(mine.rates._others) == ["k"]
    assert "k" in mine.rates._waiters
    assert line(eyes) == [urgent, second]


async def test_who_has_nobody_in_a_line_and_is_told_of_it_tells_nobody(pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *SLOW)
    rated(eyes, 1)
    stranger, other = pacers("mine"), pacers()
    await other.park()
    stranger.rates._handed_on = monotonic() + 60.0
    stranger.rates.handed_on('["k"]')
    assert await stranger.ask() == []
    assert stranger.rates.asks == 1
    assert not stranger.rates._others
    assert not stranger.rates._waiters


WAITING = (
    "INSERT INTO pgqueue.job_blocked (state, key, task, queue, priority, rank, crashes, rate_key) "
    "SELECT 'blocked', 'rate:k', 'x', %s, 5, %s, %s, 'k' FROM generate_series(1, %s)"
)


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


@pytest.mark.second
@pytest.mark.parametrize("statement", ["rates_move", "rates_outlook"])
@pytest.mark.parametrize("remain", [0, 3])
async def test_an_ask_costs_the_same_however_many_wait_ahead_who_cannot_go(
    pacers: Pacers, eyes: Eyes, conn: psycopg.Connection, remain: int, statement: str
) -> None:
    eyes.do(RATED, "k", 1, 1.0, 1)
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('paused', now())")
    pacer = pacers("default", "paused")
    params = {
        "keys": ["k"], "queues": ["default", "paused"], "pools": [1, 1], "slots": [1], "spare": [0], "most": 1,
        "poison": [], "ordinary": True, "worker_id": pacer.worker_id, "claim": 1,
        "tasks": ["x"],
    }  # fmt: skip
    eyes.do(WAITING, "default", 11, 0, remain)
    pages = []
    for number in (100, 20_000):
        for row in (("paused", 1, 0), ("nobody's", 1, 0), ("default", -2, 1), ("default", -1, 2)):
            eyes.do(WAITING, *row, number)
        eyes.do("ANALYZE pgqueue.job_blocked")
        sql = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statements.text(statement, 'pgqueue')}"
        [(plan,)] = conn.execute(sql.encode(), params).fetchall()
        conn.rollback()
        pages.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
    assert pages[1] <= 2 * pages[0], pages


@pytest.mark.parametrize("statement", ["rates_move", "rates_outlook", "rates_overdue"])
def test_a_planner_that_knows_nothing_looks_for_those_who_can_go_by_queue(
    conn: psycopg.Connection, statement: str
) -> None:
    sql = statements.text(statement, "pgqueue")
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", sql)))
    numbered = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", sql)
    conn.execute(f"PREPARE one AS {numbered}".encode())
    for setting in ("enable_seqscan = off", "enable_bitmapscan = off", "plan_cache_mode = force_generic_plan"):
        conn.execute(f"SET {setting}".encode())
    values = ", ".join(["NULL"] * len(names))
    [(plan,)] = conn.execute(f"EXPLAIN (FORMAT JSON) EXECUTE one ({values})".encode()).fetchall()
    found = [node for node in nodes(plan[0]["Plan"]) if node.get("Relation Name") == "job_blocked"]
    scans = [node for node in found if node["Node Type"] not in ("ModifyTable", "Tid Scan")]
    assert {node.get("Index Name") for node in scans} == {"job_blocked_rate_line"}
    assert [node["Index Cond"] for node in scans if not re.search(r"\bqueue\S* = ", node["Index Cond"])] == []


async def test_who_was_long_looked_for_is_not_late(dsn: str, pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", 2, 3600.0, 1)  # 5 s to start
    [job, _] = rated(eyes, 2)
    pacer = pacers(link=SlowSearch(dsn, "pgqueue"))
    await pacer.park()
    began = monotonic()
    assert await pacer.ask("k") == [job]
    [let_in] = pacer.jobs
    assert let_in.start_by is not None
    assert let_in.start_by > began + SlowSearch.SECONDS + 5.0
    assert eyes.one("SELECT extract(epoch FROM next_at - now())::float8 FROM pgqueue.limiter") > 1795.0


async def test_no_key_is_locked_while_it_is_looked_what_is_left(dsn: str, pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(RATED, "k", 1, 3600.0, 1)
    job, _ = rated(eyes, 2)
    pacer = pacers(link=SlowOutlook(dsn, "pgqueue"))
    await pacer.park()
    asked = asyncio.create_task(pacer.ask("k"))
    await until(lambda: eyes.one("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')"))
    here = "(SELECT oid FROM pg_database WHERE datname = current_database())"
    assert eyes.one(f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = {here}") == 0  # noqa: S608
    assert eyes.state(job) == "running"
    assert await asked == [job]


@pytest.mark.second
async def test_thousands_of_keys_cost_nothing_when_nobody_waits(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    @task(name="rates.many", rate=Rate("1/h", key="{number}"))
    async def many(number: int) -> None: ...

    many.enqueue_many(conn, [(number,) for number in range(2000)])
    conn.commit()
    async with work(dsn, many, concurrency=50) as worker:
        await until(eyes.done(2000), 60.0)
        await until(lambda: not worker.services.rate_limiter._waiters)

        async def sweep() -> None:
            swept = worker.services.sweep.sweeps
            eyes.do("SELECT pg_notify('pgqueue.:control', 'sweep')")
            await until(lambda: worker.services.sweep.sweeps > swept)
            await asyncio.sleep(0.5)

        await sweep()  # one before may have seen lines, and told of them now
        asks, trips = worker.services.rate_limiter.asks, worker.services.rates_session.ended
        await sweep()
        assert (worker.services.rate_limiter.asks, worker.services.rates_session.ended) == (asks, trips)
        assert not worker.services.rate_limiter._times
    assert asks < 2000


async def test_rows_of_keys_at_rest_are_forgotten(pacers: Pacers, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.limiter SELECT 'k:' || n, now() - n * interval '1 min', 1 FROM generate_series(-5, 100) n"
    )
    pacer = pacers()
    forget = pacer.link.statement("pruner_rates", seconds=3600.0, n=1000)
    assert await pacer.session.run(forget) == [[(41, 0, None, None)]]
    assert eyes.one("SELECT count(*) FROM pgqueue.limiter") == 65


# By hand, and beside other features ----------------------------------------------------------------------------------


@pytest.mark.second
async def test_pause_cancel_and_urgent_jobs_work_on_those_that_wait(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    calls: list[int] = []

    @task(name="rates.operated", rate=Rate("5/s"))
    async def operated(number: int) -> None:
        calls.append(number)

    async with work(dsn, operated):
        handles = operated.enqueue_many(conn, [(number,) for number in range(40)])
        conn.commit()
        await until(lambda: len(calls) >= 2)
        queue_switch.pause(conn, "default")
        conn.commit()
        await asyncio.sleep(0.5)
        seen = len(calls)
        await asyncio.sleep(0.7)
        assert len(calls) == seen
        for handle in handles[seen:-3]:
            assert pgqueue.cancel(conn, handle.id)
        operated.using(priority=0).enqueue(conn, 100)
        conn.commit()
        queue_switch.resume(conn, "default")
        conn.commit()
        await until(lambda: len(calls) == seen + 4, 20.0)
    assert calls == [*range(seen), 100, 37, 38, 39]


@pytest.mark.second
@pytest.mark.parametrize(("before", "after"), [("1/h", "50/s"), ("50/s", "1/h")])
async def test_a_changed_rate_holds_within_a_second(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, before: str, after: str
) -> None:
    calls: list[float] = []

    @task(name="rates.changed", rate=before)
    async def changed() -> None:
        calls.append(monotonic())

    rate = Rate(after)
    async with work(dsn, changed):
        changed.enqueue_many(conn, [()] * 400)
        conn.commit()
        await until(lambda: calls)
        await asyncio.sleep(0.2)
        eyes.do("UPDATE pgqueue.key_rate SET count = %s, period = %s, set_at = now()", rate.count, rate.period)
        eyes.do("SELECT pg_notify('pgqueue.:control', 'sweep')")
        since = monotonic()
        if after == "50/s":
            await until(lambda: len(calls) > 10, 10.0)
            assert calls[1] - since <= 1.0
        else:
            await asyncio.sleep(2.0)
            assert len([call for call in calls if call > since + 1.0]) == 0


@pytest.mark.second
async def test_retries_snoozes_and_rescued_jobs_are_charged_again_and_waiting_spends_nothing(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    calls: list[tuple[float, int]] = []

    @task(name="rates.retried", rate="2/s", retry=pgqueue.RetryPolicy(attempts=3, first=0.01, most=0.01))
    async def retried(job: Job) -> Any:
        calls.append((monotonic(), job.attempt))
        match len(calls):
            case 1:
                raise RuntimeError("once")
            case 2:
                return Snooze(0.01)
            case 3:
                return Retry(0.01)
        return None

    retried.enqueue(conn)
    conn.commit()
    async with work(dsn, retried):
        await until(eyes.done(1), 30.0)
    assert [attempt for _, attempt in calls] == [1, 2, 2, 3]
    assert most([at for at, _ in calls], 1.0) <= 2


@pytest.mark.second
async def test_a_rate_beside_a_lock_and_a_limit(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    running: list[int] = []
    most_at_once = 0
    calls: list[float] = []

    @task(name="rates.all", rate="30/s", limit=2, lock=Lock("{key}"), timeout=10)
    async def everything(key: int) -> None:
        nonlocal most_at_once
        assert key not in running
        calls.append(monotonic())
        running.append(key)
        most_at_once = max(most_at_once, len(running))
        await asyncio.sleep(0.1)
        running.remove(key)

    everything.enqueue_many(conn, [(number % 3,) for number in range(20)])
    conn.commit()
    async with work(dsn, everything), work(dsn, everything):
        await until(eyes.done(20), 30.0)
    assert most_at_once == 2
    assert most(calls, 1.0) <= 30


CRASH = """
@pgqueue.task(name="rates.crash", rate="5/s")
async def crash() -> None:
    say("call", pid=os.getpid())
    await asyncio.sleep(float(os.environ.get("NAP", "0")))
"""


@pytest.mark.second
def test_after_a_crash_the_job_and_the_line_move_on(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with workers(tmp_path, dsn, CRASH) as made:
        first = made.start({"NAP": "60"}, concurrency=1, lease=2.0)
        first.event("ready")
        rated(eyes, 5, "rates.crash", task="rates.crash")
        eyes.do("SELECT pg_notify('pgqueue.default', '')")
        first.event("call")
        first.kill()
        [second] = made.ready(1, concurrency=4, lease=2.0)
        wait_until(eyes.done(5), 30.0)
        assert most([event["at"] for event in second.all("call")], 1.0) <= 5
    assert eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE crashes = 1") == 1


@pytest.mark.second
async def test_a_suspect_under_a_rate_runs_although_the_worker_is_busy(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.fetch.poison_jobs.LOOK_SECONDS", 0.2)
    monkeypatch.setattr("pgqueue.worker.fetch.poison_jobs.PATIENCE_SECONDS", 0.5)
    alone: list[bool] = []

    @task(name="rates.flow")
    async def flow() -> None:
        await asyncio.sleep(0.05)

    @task(name="rates.suspect", rate="10/s")
    async def suspect() -> None:
        alone.append(len(worker.state.held) == 1)

    async with work(dsn, flow, suspect, concurrency=3) as worker:
        eyes.do("INSERT INTO pgqueue.job (task) SELECT 'rates.flow' FROM generate_series(1, 2000)")
        await until(lambda: len(worker.state.held) >= 3)
        eyes.do(
            "INSERT INTO pgqueue.job_blocked (state, key, task, queue, priority, rank, rate_key, crashes) "
            "VALUES ('blocked', 'rate:rates.suspect', 'rates.suspect', 'default', 5, -1, 'rates.suspect', 2)"
        )
        await until(lambda: alone, 30.0)
        flowing = eyes.one("SELECT count(*) FROM pgqueue.job_done")
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_done") > flowing + 10, 30.0)
    assert alone == [True]


def test_in_a_drain_rates_hold_nobody_up(conn: psycopg.Connection) -> None:
    @task(name="rates.drained", rate="1/h")
    def drained() -> None: ...

    drained.enqueue_many(conn, [()] * 5)
    assert testing.drain(conn).completed == 5


# Declared ------------------------------------------------------------------------------------------------------------


async def test_a_worker_declares_its_rates_when_it_is_told_to_work_and_leaves_what_was_set_by_hand(
    dsn: str, eyes: Eyes
) -> None:
    declared = (
        "SELECT name, count, period, burst, declared_count, set_at IS NOT NULL FROM pgqueue.key_rate ORDER BY name"
    )

    @task(name="rates.one", rate=Rate("5/10s", burst=2, name="api"))
    def one() -> None: ...

    worker = Worker(dsn=dsn, tasks=[one])
    await worker.prepare()
    assert eyes.all(declared) == []
    worker.begin()
    await until(lambda: eyes.all(declared) == [("api", 5, 10.0, 2, 5, False)])
    await worker.stop(1.0)
    eyes.do("UPDATE pgqueue.key_rate SET count = 7, period = 60, set_at = now()")

    @task(name="rates.two", rate=Rate("6/s", name="api"))
    def again() -> None: ...

    async with work(dsn, again):
        await until(lambda: eyes.all(declared) == [("api", 7, 60.0, 1, 6, True)])


def test_tasks_that_share_a_rate_give_the_same() -> None:
    @task(name="rates.left", rate=Rate("5/s", name="api"))
    def left() -> None: ...

    @task(name="rates.right", rate=Rate("6/s", name="api"))
    def right() -> None: ...

    with pytest.raises(InvalidOption, match="rate 'api' is 6/s here"):
        rates_of(limitings([left, right]))


@pytest.mark.parametrize("columns", [{"count": 0}, {"period": 0.5}, {"burst": 0}, {"name": "a:b"}, {"set_at": None}])
def test_the_table_refuses_a_rate_that_cannot_be(eyes: Eyes, columns: dict[str, Any]) -> None:
    row = {"name": "k", "count": 1, "period": 1.0, "burst": 1, "set_at": "now"} | columns
    with pytest.raises(psycopg.errors.CheckViolation):
        eyes.do(
            "INSERT INTO pgqueue.key_rate (name, count, period, burst, set_at) VALUES (%s, %s, %s, %s, %s)",
            *row.values(),
        )


# People --------------------------------------------------------------------------------------------------------------


def test_people_see_rates_and_set_them(dsn: str, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.key_rate (name, count, period, burst, declared_count, declared_period, declared_at) "
        "VALUES ('mail', 100, 60, 5, 100, 60, now())"
    )
    for key in ("mail:a", "mail:b", "later"):
        eyes.do(
            "INSERT INTO pgqueue.job_blocked (state, task, key, rate_key) VALUES ('blocked', 'x', 'rate:' || %s, %s)",
            key,
            key,
        )
    later, mail = rates(eyes.conn)
    assert mail == RateInfo("mail", "100/minute", 5, "100/minute", False, 2, 2, mail.waited)
    assert later == RateInfo("later", None, None, None, False, 1, 1, later.waited, undeclared=True)
    assert mail.waited is not None and mail.waited >= 0
    done = command("limits", "set", "mail", "5/10s", "--dsn", dsn)
    assert (done.returncode, done.stdout) == (0, "mail: 5/10s (set by hand; the code says 100/minute)\n")
    shown = command("limits", "--dsn", dsn).stdout.splitlines()
    assert [line.split() for line in shown][1:] == [
        ["later", "undeclared", "-", "1", "1", *shown[1].split()[5:]],
        ["mail", "5/10s", "(code:", "100/minute)", "5", "2", "2", *shown[2].split()[7:]],
    ]
    assert [each["name"] for each in items(command("limits", "--json", "--dsn", dsn))] == ["later", "mail"]
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, declared, declared_at) VALUES ('mail', 5, 5, now())")
    assert command("limits", "set", "mail", "default", "--dsn", dsn).stdout == (
        "mail: 5 at once (as the code says)\nmail: 100/minute (as the code says)\n"
    )
    for value, code, why in (("5/week", 2, "write COUNT/PERIOD"), ("often", 2, "neither a whole number")):
        refused = command("limits", "set", "mail", value, "--dsn", dsn)
        assert (refused.returncode, why in refused.stderr) == (code, True), refused.stderr
    with pytest.raises(LimitNotFound, match="no worker has declared it"):
        change_rate(eyes.conn, "later", "5/s")


# A slot that is kept free --------------------------------------------------------------------------------------------


@pytest.mark.promise("F179")
@pytest.mark.parametrize("gone", ["cancelled", "taken"])
@pytest.mark.parametrize("slots", [1, 2])
async def test_a_slot_that_was_kept_in_vain_is_filled_by_what_waits(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, gone: str, slots: int
) -> None:
    """The job under a rate is cancelled, or another worker takes it. A second slot has a job that does not end."""
    ran: list[str] = []
    go = asyncio.Event()

    @task(name="kept.rated", rate="1/2s")
    async def rated() -> None:
        ran.append("rated")

    @task(name="kept.long")
    async def long(free: bool) -> None:
        await (go if free else asyncio.Event()).wait()

    @task(name="kept.plain")
    async def plain() -> None:
        ran.append("plain")

    async with work(dsn, rated, long, plain, concurrency=slots) as worker:
        [group] = worker.services.running.groups
        jobs = [handle.id for handle in rated.enqueue_many(eyes.conn, [()] * 2)]
        await until(lambda: ran == ["rated"] and eyes.states().get("blocked") == 1)
        long.enqueue_many(eyes.conn, [(True,), (False,)][:slots])
        await until(lambda: group.running == slots)
        plain.enqueue_many(eyes.conn, [()] * 20)
        await until(lambda: group.reserved == 1)
        if gone == "cancelled":
            [left] = [job for job in jobs if eyes.is_in(job, "blocked")()]
            assert pgqueue.cancel(conn, left)
            conn.commit()
        else:
            async with work(dsn, rated, concurrency=1):
                await until(lambda: ran == ["rated"] * 2)
                await until(eyes.done(2))
        go.set()
        await until(lambda: ran.count("plain") == 20, 5.0)


@pytest.mark.promise("F179")
@pytest.mark.parametrize("slots", [1, 2])
async def test_a_slot_is_kept_no_longer_if_rates_cannot_be_asked(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    ran: list[str] = []
    go, end = asyncio.Event(), asyncio.Event()

    @task(name="kept.rated", rate="1/2s")
    async def rated() -> None:
        ran.append("rated")

    @task(name="kept.long")
    async def long() -> None:
        await go.wait()

    @task(name="kept.plain")
    async def plain() -> None:
        ran.append("plain")
        await end.wait()

    connect = sessions.connect

    async def refuses(link: Link, application_name: str) -> Any:
        if application_name == "pgqueue rates":
            raise psycopg.errors.TooManyConnections("sorry, too many clients already")
        return await connect(link, application_name)

    async with work(dsn, rated, long, plain, concurrency=slots) as worker:
        [group] = worker.services.running.groups
        rated.enqueue_many(eyes.conn, [()] * 2)
        await until(lambda: ran == ["rated"] and eyes.states().get("blocked") == 1)
        long.enqueue_many(eyes.conn, [()] * slots)
        await until(lambda: group.running == slots)
        await until(lambda: group.reserved == 1)
        monkeypatch.setattr(sessions, "connect", refuses)
        await worker.services.rates_session.close()  # as if its connection were lost
        go.set()
        await until(lambda: group.running == 0)
        plain.enqueue_many(eyes.conn, [()] * slots)
        await until(lambda: ran.count("plain") == slots, 10.0)
        end.set()


@pytest.mark.second
@pytest.mark.promise("F179")
@pytest.mark.parametrize("off", ["notify", "listen"])
async def test_a_worker_that_cannot_be_told_finds_the_rates_of_a_full_one(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    """The full worker leads and sweeps; the other one gets its free slot when it has looked already."""
    began: list[int] = []
    go, other_go = asyncio.Event(), asyncio.Event()

    @task(name="untold.rated", rate="20/s")
    async def rated(job: Job) -> None:
        began.append(job.id)
        await go.wait()

    @task(name="untold.busy", queue="other")
    async def busy() -> None:
        await other_go.wait()

    if off == "notify":
        monkeypatch.setenv("PGQUEUE_NOTIFY", "off")
    options: dict[str, Any] = {"concurrency": 1} | ({"listen_dsn": "off"} if off == "listen" else {})
    async with work(dsn, rated, busy, queues=["default"], **options) as full:
        await until(full.services.election.leads)
        async with work(dsn, rated, busy, queues=["default", "other"], **options) as other:
            busy.enqueue(eyes.conn)
            await until(lambda: len(other.state.held) == 1)
            rated.enqueue_many(eyes.conn, [()] * 2)
            await until(lambda: len(began) == 1 and eyes.states() == {"running": 2, "blocked": 1})
            swept = full.services.sweep.sweeps
            await until(lambda: full.services.sweep.sweeps > swept)
            other_go.set()
            await until(lambda: len(began) == 2, 20.0)
            go.set()
            await until(eyes.done(3))
