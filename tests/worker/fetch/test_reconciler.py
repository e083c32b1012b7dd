"""Jobs that are ours in the database and unknown here go back: after every doubt, only those of settled claims."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from duty_loops import looping
from workers import Eyes, Taker, until

from pgqueue.jobs.job import Job
from pgqueue.worker.fetch import reconciler
from pgqueue.worker.fetch.reconciler import Reconciler


class Bench:
    """A worker that takes jobs, and its reconciler; `known` are the (id, claim) it holds."""

    def __init__(self, dsn: str, eyes: Eyes) -> None:
        self.taker, self.eyes = Taker(dsn), eyes
        self.known: set[tuple[int, int]] = set()
        self.taker.state.knows = lambda job_id, claim: (job_id, claim) in self.known  # type: ignore[method-assign]
        self.gone: list[Job] = []
        self.reconciler = Reconciler(self.taker.session, self.taker.state, gone=self.gone.extend)

    async def claim(self, *, known: bool) -> int:
        """A job of ours, one that we know of or one whose answer was lost; its id."""
        self.eyes.do("INSERT INTO pgqueue.job (task) VALUES ('x')")
        self.taker.fetcher.wake(zero=True)
        [job] = await self.taker.fetch(1)
        if known:
            self.known.add((job.id, job.claim))
        return job.id


@pytest.fixture
async def bench(dsn: str, eyes: Eyes) -> AsyncIterator[Bench]:
    made = Bench(dsn, eyes)
    yield made
    await made.taker.close()


@pytest.fixture
async def running(bench: Bench) -> AsyncIterator[asyncio.Future[None]]:
    taker = bench.taker
    loop = looping(bench.reconciler.round, taker.session, others=None, first=60.0, woken=taker.state.doubt)
    yield loop
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


@pytest.mark.promise("F06")
async def test_what_is_unknown_goes_back_unspent_and_what_is_known_stays(
    bench: Bench, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    known, lost = await bench.claim(known=True), await bench.claim(known=False)
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('not taken')")
    with caplog.at_level(logging.WARNING):
        await bench.reconciler.reconcile()
        await bench.reconciler.reconcile()
    assert eyes.all("SELECT id, attempt, rank FROM pgqueue.job_available WHERE task = 'x'") == [(lost, 0, 10)]
    assert eyes.all("SELECT id FROM pgqueue.job_running") == [(known,)]
    assert [record.getMessage() for record in caplog.records] == [
        "the answer to a claim was lost: 1 job is handed back"
    ]


@pytest.mark.promise("F06")
async def test_another_claim_of_a_known_job_is_unknown_and_one_under_way_is_left_alone(
    bench: Bench, eyes: Eyes
) -> None:
    job = await bench.claim(known=False)
    bench.known.add((job, 99))
    claims = bench.taker.fetcher._state.claims
    claims._open.add(claims.settled)  # its answer may still come
    await bench.reconciler.reconcile()
    assert eyes.states() == {"running": 1}
    claims.end(claims.settled + 1)
    await bench.reconciler.reconcile()
    assert eyes.states() == {"available": 1}


@pytest.mark.promise("F06")
async def test_a_doubt_raised_during_a_reconciliation_leads_to_another_one(
    bench: Bench, eyes: Eyes, running: asyncio.Future[None]
) -> None:
    """A claim stands behind `reconciler_held` in the line for the connection, is committed, and its answer is lost."""
    real = bench.taker.session.run

    async def claim_meanwhile(*messages: Any, **options: Any) -> list[Any]:
        answer = await real(*messages, **options)
        bench.taker.session.run = real  # type: ignore[method-assign]
        await bench.claim(known=False)
        bench.reconciler._state.in_doubt()
        return answer

    bench.taker.session.run = claim_meanwhile  # type: ignore[method-assign]
    bench.reconciler._state.in_doubt()
    await until(lambda: eyes.all("SELECT rank, attempt FROM pgqueue.job_available") == [(10, 0)], 30.0)


@pytest.mark.promise("F06")
@pytest.mark.parametrize("failures", [1, 3])
async def test_a_doubt_outlives_a_reconciliation_that_fails(
    failures: int, bench: Bench, eyes: Eyes, running: asyncio.Future[None]
) -> None:
    await bench.claim(known=False)
    real, left = bench.taker.session.run, failures

    async def away(*messages: Any, **options: Any) -> list[Any]:
        nonlocal left
        if left:
            left -= 1
            raise psycopg.OperationalError("the database is away")
        return await real(*messages, **options)

    bench.taker.session.run = away  # type: ignore[method-assign]
    bench.reconciler._state.in_doubt()
    await until(lambda: eyes.states() == {"available": 1}, 30.0)


@pytest.mark.second
@pytest.mark.promise("F06")
@pytest.mark.parametrize("why", ["a claim before it waits for its answer", "somebody has locked it"])
async def test_what_cannot_be_handed_back_at_once_is_soon(
    why: str, bench: Bench, dsn: str, eyes: Eyes, running: asyncio.Future[None]
) -> None:
    """One doubt, and nobody raises another when the reason is gone: less than the minute of `until`."""
    claims = bench.taker.fetcher._state.claims
    with psycopg.connect(dsn) as stranger:
        before = await claims.begin()
        job = await bench.claim(known=False)
        if why == "somebody has locked it":
            claims.end(before)
            stranger.execute("SELECT FROM pgqueue.job_running FOR UPDATE")
        real, asked = bench.taker.session.run, asyncio.Event()

        async def heard(*messages: Any, **options: Any) -> list[Any]:
            answer = await real(*messages, **options)
            asked.set()
            return answer

        bench.taker.session.run = heard  # type: ignore[method-assign]
        bench.reconciler._state.in_doubt()
        await asked.wait()
        assert eyes.state(job) == "running"
    claims.end(before)
    await until(eyes.is_in(job, "available"), 30.0)


async def test_without_a_doubt_it_asks_nothing(bench: Bench, running: asyncio.Future[None]) -> None:
    asked: list[Any] = []
    bench.taker.session.run = lambda *messages, **options: asked.append(messages)  # type: ignore
    for _ in range(50):
        await asyncio.sleep(0)
    assert asked == []


@pytest.mark.promise("E14")
async def test_where_a_look_is_dear_it_comes_less_often(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an old snapshot it walks dead rows, and claims wait for it."""
    real = bench.taker.session.run

    async def dear(*messages: Any, **options: Any) -> list[Any]:
        answers = await real(*messages, **options)
        bench.taker.session.took = 0.6
        return answers

    monkeypatch.setattr(bench.taker.session, "run", dear)
    assert await bench.reconciler.round() >= 400 * 0.6


@pytest.mark.promise("F29")
async def test_a_job_that_goes_back_finds_another_one_with_its_id(bench: Bench, eyes: Eyes, running: Any) -> None:
    """Before, the worker ended by it, and so did each worker that rescued its jobs."""
    lost = await bench.claim(known=False)
    eyes.do("INSERT INTO pgqueue.job (task, id) VALUES ('another', %s)", lost)
    bench.taker.state.in_doubt()
    await until(lambda: eyes.states() == {"available": 2})
    assert not running.done()
    assert eyes.one("SELECT id FROM pgqueue.job WHERE task = 'x'") == lost
    assert eyes.one("SELECT id FROM pgqueue.job WHERE task = 'another'") > lost


@pytest.mark.promise("F251")
async def test_an_idle_worker_that_is_sure_compares_seldom_and_after_a_doubt_at_once(bench: Bench, eyes: Eyes) -> None:
    asked, real = 0, bench.taker.session.run

    async def counted(*messages: Any, **options: Any) -> list[Any]:
        nonlocal asked
        asked += 1
        return await real(*messages, **options)

    bench.taker.session.run = counted  # type: ignore[method-assign]
    one = bench.reconciler
    await bench.taker.session.ready()
    await one.round()
    assert asked == 1
    one._due = 0.0
    await one.round()
    assert asked == 1, "nothing can have come since"
    await one.round()
    assert asked == 2, "it is not time yet, so it was woken: there is a doubt"
    one._due, one._sure_at = 0.0, one._sure_at - reconciler.SELDOM_SECONDS
    await one.round()
    assert asked == 3, "five minutes are over"
    one._due = 0.0
    await bench.taker.session.close()
    await one.round()
    assert asked > 3, "another connection: the server may have forgotten an end"
    asked, one._due = 0, 0.0
    await bench.claim(known=True)
    await one.round()
    assert asked > 0, "a job is held"


@pytest.mark.promise("F267")
async def test_a_doubt_that_comes_when_a_comparison_is_due_is_not_skipped(bench: Bench, eyes: Eyes) -> None:
    """Its loop clears the event before the round, and the connection of the claim that is in doubt is another one."""
    one, state = bench.reconciler, bench.taker.state
    lost = await bench.claim(known=False)
    bench.known.add((lost, 1))
    await one.round()
    bench.known.clear()
    one._due = 0.0
    type(state).in_doubt(state)
    state.doubt.clear()
    await one.round()
    assert eyes.state(lost) == "available"
