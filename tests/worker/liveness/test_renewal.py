"""The numbers of claims end at 2^31: before that a worker gets another id, and its numbers begin anew."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.worker import claims
from pgqueue.worker.claims import LAST, Claims
from pgqueue.worker.liveness import renewal
from pgqueue.worker.worker import Worker

ran: list[int] = []
started: asyncio.Event
go: asyncio.Event


@task(name="renewal.counts", lock=lambda number, **_: f"key {number % 3}")
async def counts(number: int) -> None:
    ran.append(number)


@task(name="renewal.waits")
async def waits() -> None:
    started.set()
    await go.wait()


@task(name="renewal.writes", transactional=True)
def writes(number: int) -> None:
    ran.append(number)


ALL = counts, waits, writes


@pytest.fixture(autouse=True)
async def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    global started, go
    started, go = asyncio.Event(), asyncio.Event()
    ran.clear()
    monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(claims, "RESERVE", 20)


def put(dsn: str, *jobs: Any) -> None:
    with psycopg.connect(dsn) as conn:
        pgqueue.enqueue_many(conn, jobs)


def at(worker: Worker, number: int) -> None:
    """The next claim of this worker has this number."""
    worker.state.claims._last = number - 1


@pytest.mark.promise("F47")
async def test_a_worker_goes_on_past_the_last_number(dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture) -> None:
    """A job runs across it, uninterrupted; jobs with keys, plain and transactional ones come before it and after it."""
    async with work(dsn, *ALL, poll=0.1) as worker:
        first = worker.worker_id
        put(dsn, waits.new(), *[each.new(number) for number in range(10) for each in (counts, writes)])
        await until(eyes.done(20), 30.0)
        assert started.is_set()
        at(worker, LAST - 15)
        await until(lambda: worker.state.renewing)
        put(dsn, *[each.new(number) for number in range(10, 40) for each in (counts, writes)])
        await until(lambda: "takes no jobs until 1 job that it holds has ended" in caplog.text)
        assert worker.worker_id == first
        go.set()
        await until(eyes.done(81), 30.0)
        second = worker.worker_id
        assert second != first
        assert sorted(ran) == sorted([*range(40), *range(40)])
        assert eyes.all("SELECT id FROM pgqueue.worker") == [(second,)]
        assert eyes.one("SELECT max(claim) FROM pgqueue.job_done WHERE worker_id = %s", second) < 1000
        assert eyes.one("SELECT worker_id FROM pgqueue.job_done WHERE task = 'renewal.waits'") == first
        assert eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE attempt <> 1 OR crashes <> 0") == 0
    assert "taken for dead" not in caplog.text
    assert eyes.all("SELECT id FROM pgqueue.worker") == []


@pytest.mark.promise("F47")
async def test_past_the_last_number_a_claim_waits(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no look comes in time. The naive worker sends 2^31, and the server's error ends it."""
    async with work(dsn, *ALL, poll=0.1) as worker:
        first = worker.worker_id
        monkeypatch.setattr(claims, "RESERVE", -1)
        at(worker, LAST)
        put(dsn, counts.new(1), writes.new(2))
        await until(lambda: worker.state.claims._opened is not None)
        monkeypatch.setattr(claims, "RESERVE", 20)
        await until(eyes.done(2), 30.0)
        assert worker.worker_id != first


@pytest.mark.promise("F47")
async def test_the_rows_of_a_lost_answer_are_handed_back_before_the_id_is_given_up(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, *ALL, poll=0.1) as worker:
        first = worker.worker_id
        put(dsn, waits.new())
        await started.wait()
        at(worker, LAST - 15)
        await until(lambda: worker.state.renewing)
        with psycopg.connect(dsn) as conn:
            conn.execute("SET session_replication_role = replica")
            conn.execute(
                """INSERT INTO pgqueue.job_running (
                       state, worker_id, claim, started_at, task, args, queue, rank, priority, holds, attempt)
                   VALUES ('running', %s, 5, now(), 'renewal.writes', '{"number": 7}', 'default', 10, 5, false, 1)""",
                [first],
            )
        go.set()
        await until(lambda: ran == [7])
        await until(eyes.done(2))
        assert eyes.all("SELECT id FROM pgqueue.worker") == [(worker.worker_id,)]
        assert worker.worker_id != first
        assert eyes.one("SELECT max(attempt) FROM pgqueue.job_done") == 1


@pytest.mark.promise("F47")
async def test_a_worker_that_is_stopped_meanwhile_stops(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, *ALL, poll=0.1) as worker:
        put(dsn, waits.new())
        await started.wait()
        at(worker, LAST - 15)
        await until(lambda: worker.state.renewing)
        worker.quiet()
        go.set()
        await worker.run()
        assert eyes.states() == {"completed": 1}
    assert eyes.all("SELECT id FROM pgqueue.worker") == []


async def test_no_number_begins_while_they_begin_anew_and_none_while_one_is_open() -> None:
    numbers = Claims(LAST - 1)
    assert await numbers.begin() == LAST
    late = asyncio.ensure_future(numbers.begin())
    await asyncio.sleep(0)
    assert not late.done()
    assert not numbers.close()
    numbers.end(LAST)
    assert numbers.settled == LAST
    assert numbers.close()
    numbers.begin_anew()
    await asyncio.sleep(0)
    assert not late.done()
    numbers.open()
    assert await late == 1
    assert numbers.settled == 0
