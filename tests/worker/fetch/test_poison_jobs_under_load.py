"""A suspect that must run alone is run although nobody is ever idle, and the flow goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from workers import Eyes, until, work

from pgqueue.client.tasks import task
from pgqueue.database import sessions, statements
from pgqueue.jobs.job import Job
from pgqueue.worker.fetch import poison_jobs as poison_module
from pgqueue.worker.fetch.poison_jobs import CLOSED_SECONDS, OPEN_TIMES, SpareSlot
from pgqueue.worker.worker import Worker

together: set[int] = set()
beside_it: list[int] = []


@task(name="isolation.flows")
async def flows(job: Job) -> None:
    together.add(job.id)
    await asyncio.sleep(0.004)
    together.discard(job.id)


@task(name="isolation.suspect")
async def suspect(job: Job) -> None:
    together.add(job.id)
    for _ in range(5):
        beside_it.append(len(together) - 1)
        await asyncio.sleep(0.004)
    together.discard(job.id)


FLOW = "INSERT INTO pgqueue.job (task, queue) SELECT 'isolation.flows', %s FROM generate_series(1, 100)"
SUSPECT = "INSERT INTO pgqueue.job (task, queue, rank, crashes) VALUES ('isolation.suspect', %s, -1, 2) RETURNING id"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    together.clear()
    beside_it.clear()
    monkeypatch.setattr(poison_module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(poison_module, "PATIENCE_SECONDS", 0.5)


async def flow(eyes: Eyes, *queues: str) -> None:
    """Keep every queue full: nobody is ever idle."""
    while True:
        for queue in queues:
            if eyes.one("SELECT count(*) FROM pgqueue.job_available WHERE queue = %s", queue) < 100:
                eyes.do(FLOW, queue)
        await asyncio.sleep(0.01)


async def busy(worker: Worker) -> None:
    await until(lambda: len(worker.state.held) >= 4)


@pytest.mark.second
@pytest.mark.promise("F04")
@pytest.mark.parametrize("queues", [["a"], ["a:3", "b:2"], ["a", "b", "c:1"]], ids=str)
@pytest.mark.parametrize("leads", [True, False])
async def test_under_steady_flow_a_suspect_of_two_crashes_runs_alone_and_the_flow_goes_on(
    queues: list[str], leads: bool, dsn: str, eyes: Eyes
) -> None:
    names = [name[0] for name in queues]
    async with work(dsn, flows, suspect, queues=queues, concurrency=4, poll=60.0) as worker:
        worker.services.poison_drain._leads = lambda: leads
        flowing = asyncio.ensure_future(flow(eyes, *names))
        await busy(worker)
        asked = worker.services.poison_jobs.asked
        [job] = [id for (id,) in eyes.all(SUSPECT, names[-1])]
        await until(eyes.is_in(job, "completed"), 30.0)
        assert worker.services.poison_jobs.asked > asked
        assert not worker.services.poison_jobs.draining
        done = eyes.one("SELECT count(*) FROM pgqueue.job_done")
        await until(eyes.done(done + 200))
        flowing.cancel()
    assert set(beside_it) == {0}
    assert eyes.one("SELECT attempt FROM pgqueue.job WHERE id = %s", job) == 1


async def test_way_is_made_in_vain_if_another_worker_was_quicker_and_the_flow_goes_on(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, flows, suspect, queues=["a"], concurrency=4, poll=60.0) as worker:
        flowing = asyncio.ensure_future(flow(eyes, "a"))
        for _ in range(3):
            await busy(worker)
            fetches = worker.services.fetcher.fetches
            worker.services.capacity.drain(True, None)
            await until(lambda: not worker.services.poison_jobs.draining)
            await until(lambda fetches=fetches: worker.services.fetcher.fetches >= fetches + 3)  # type: ignore[misc]
        flowing.cancel()


@pytest.mark.second
@pytest.mark.promise("F09")
async def test_a_worker_that_is_idle_now_and_then_sends_nothing_for_it(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    real = sessions.send

    async def counted(conn: Any, link: Any, *messages: Any, **options: Any) -> list[Any]:
        sent.append(messages[-1].sql)
        return await real(conn, link, *messages, **options)

    monkeypatch.setattr(sessions, "send", counted)
    looks = statements.text("poison_jobs_waiting", "pgqueue")
    passed: list[bool] = []
    monkeypatch.setattr(poison_module.SpareSlot, "taken", lambda turn: passed.append(True))
    # Fifty polls to a look: a poll that is slow, on a machine that is busy, does not leave it without any.
    monkeypatch.setattr(poison_module, "LOOK_SECONDS", 0.5)
    async with work(dsn, flows, queues=["a"], concurrency=4, poll=0.01) as worker:
        asked = worker.services.poison_jobs.asked
        await until(lambda: worker.services.poison_jobs.asked > asked + 20)
        sent.clear()
        passed.clear()
        await until(lambda: len(passed) >= 4)
        assert looks not in sent
        flowing = asyncio.ensure_future(flow(eyes, "a"))
        await until(lambda: looks in sent)
        flowing.cancel()


def test_it_waits_for_its_patience_then_makes_way_for_a_tenth_of_the_time_at_most_and_longer_each_time() -> None:
    turn, closed = SpareSlot(), []
    for second in range(20_000):
        closed.append(turn.drains(7, 30.0, float(second)))
    assert closed.index(True) == 30
    assert closed[30 : 30 + int(CLOSED_SECONDS)] == [True] * int(CLOSED_SECONDS)
    spans = "".join("x" if one else " " for one in closed).split()
    assert [len(span) for span in spans[:4]] == [CLOSED_SECONDS * 2**n for n in range(4)]
    assert sum(closed) <= len(closed) / OPEN_TIMES + CLOSED_SECONDS


def test_another_that_waits_or_one_that_was_taken_begins_anew() -> None:
    turn = SpareSlot()
    assert not turn.drains(7, 30.0, 0.0)
    assert not turn.drains(8, 30.0, 29.0)
    assert not turn.drains(8, 30.0, 58.0)
    assert turn.drains(8, 30.0, 59.0)
    assert not turn.drains(None, 30.0, 60.0)
    assert not turn.drains(8, 30.0, 61.0)
    assert turn.drains(8, 30.0, 91.0)
    turn.taken()
    assert not turn.drains(8, 30.0, 92.0)


async def test_way_is_made_for_one_that_waits_for_a_rate_only_if_that_lets_it_in_soon(dsn: str, eyes: Eyes) -> None:
    session = sessions.Session(sessions.Link(dsn, "pgqueue"), "isolation")

    async def waiting() -> int | None:
        look = session.link.statement("poison_jobs_waiting", queues=["a"], tasks=["x"], seconds=60.0)
        [rows] = await session.run(look)
        return rows[0][0] if rows else None

    eyes.do(
        "INSERT INTO pgqueue.job_blocked (state, key, task, queue, rank, rate_key, crashes) "
        "SELECT 'blocked', 'rate:' || k, 'x', 'a', -1, k, 2 FROM unnest('{never,slow,quick}'::text[]) k"
    )
    _, slow, quick = [id for (id,) in eyes.all("SELECT id FROM pgqueue.job_blocked ORDER BY id")]
    rate = "INSERT INTO pgqueue.key_rate (name, count, period, set_at) VALUES (%s, 1, %s, now())"
    try:
        assert await waiting() is None  # nobody has declared them
        eyes.do(rate, "slow", 3600)
        eyes.do(rate, "quick", 30)
        assert await waiting() == slow
        closed = "INSERT INTO pgqueue.limiter VALUES (%s, now() + make_interval(secs => %s), 1)"
        eyes.do(closed, "slow", 3600)
        eyes.do(closed, "quick", 30)
        assert await waiting() == quick
        eyes.do("UPDATE pgqueue.limiter SET next_at = now() + interval '2 min'")
        assert await waiting() is None
    finally:
        await session.close()
