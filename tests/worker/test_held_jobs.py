"""A job that this worker is given again does not start beside itself; one with a key and without a row is stopped.

A job that has waited at hand for too long goes back, for other workers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import psycopg
import pytest
from handlers import begins, begun
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job, task
from pgqueue.database.statements import text
from pgqueue.jobs.fields import claimed
from pgqueue.worker.worker import Worker

RELEASE = """
    SELECT array_agg(id), array_agg(claim), min(worker_id) FROM pgqueue.job_running WHERE task = %s
"""


def forget_claims(eyes: Eyes, name: str) -> None:
    """Take the claims of this task's jobs back, as a crash of the server does: the jobs are available again."""
    [(ids, claims, worker_id)] = eyes.all(RELEASE, name)
    fence = {"ids": ids, "claims": claims, "worker_id": worker_id, "notify": True}
    eyes.conn.execute(text("complete_release", "pgqueue").encode(), fence)


def enqueue(dsn: str, *jobs: Any) -> list[int]:
    with psycopg.connect(dsn) as conn:
        return [handle.id for handle in pgqueue.enqueue_many(conn, jobs)]


def claimed_again(eyes: Eyes, before: int | None) -> bool:
    """Whether the one running job has another claim than `before`."""
    return eyes.one("SELECT claim FROM pgqueue.job_running") not in (None, before)


@pytest.mark.promise("F27")
async def test_a_run_goes_on_under_the_new_claim(dsn: str, eyes: Eyes) -> None:
    calls: list[int] = []
    go = asyncio.Event()

    @task(name="held.waits")
    async def waits(job: Job) -> int:
        calls.append(job.id)
        await go.wait()
        return 7

    async with work(dsn, waits, concurrency=3) as worker:
        [job] = enqueue(dsn, waits.new())
        await until(lambda: calls)
        claim = eyes.one("SELECT claim FROM pgqueue.job_running")
        forget_claims(eyes, "held.waits")
        await until(lambda: claimed_again(eyes, claim))
        await until(lambda: worker.state.held[job].claim != claim)
        await compared(worker)  # the comparison takes the job for known
        go.set()
        await until(eyes.done(1))
        assert worker.services.completer.fenced == 0
    assert calls == [job]
    assert eyes.one("SELECT result::text FROM pgqueue.job_done WHERE id = %s", job) == "7"


@pytest.mark.promise("F27")
async def test_a_run_in_a_thread_goes_on_under_the_new_claim(dsn: str, eyes: Eyes) -> None:
    calls: list[int] = []
    go = threading.Event()

    @task(name="held.thread")
    def thread(job: Job) -> None:
        calls.append(job.id)
        go.wait(60)

    async with work(dsn, thread, concurrency=3) as worker:
        enqueue(dsn, thread.new())
        await until(lambda: calls)
        claim = eyes.one("SELECT claim FROM pgqueue.job_running")
        forget_claims(eyes, "held.thread")
        await until(lambda: claimed_again(eyes, claim))
        await until(lambda: next(iter(worker.state.held.values())).claim != claim)
        go.set()
        await until(eyes.done(1))
        assert worker.services.completer.fenced == 0
    assert len(calls) == 1


@pytest.mark.promise("F27")
async def test_a_transactional_job_starts_again_when_its_earlier_run_has_ended(dsn: str, eyes: Eyes) -> None:
    eyes.do("CREATE TABLE paid (job bigint)")
    running, calls, go = 0, 0, asyncio.Event()
    together: list[int] = []

    @task(name="held.pays", transactional=True)
    async def pays(job: Job) -> None:
        nonlocal running, calls
        running, calls = running + 1, calls + 1
        together.append(running)
        try:
            conn = await job.aconnection()
            await conn.execute("INSERT INTO paid VALUES (%s)", [job.id])
            if calls == 1:
                await go.wait()
        finally:
            running -= 1

    async with work(dsn, pays, concurrency=3) as worker:
        [job] = enqueue(dsn, pays.new())
        await until(lambda: calls)
        claim = eyes.one("SELECT claim FROM pgqueue.job_running")
        forget_claims(eyes, "held.pays")
        await until(lambda: claimed_again(eyes, claim))
        await until(lambda: worker.state.held[job].claim != claim)
        go.set()
        await until(eyes.done(1))
        assert not worker.services.held_jobs._later
    assert (together, calls) == ([1, 1], 2)
    assert eyes.all("SELECT job FROM paid") == [(job,)]


@pytest.mark.promise("F27")
@pytest.mark.parametrize("ends", ["cancelled", "the worker stops"])
async def test_a_job_that_waits_for_its_earlier_run_can_be_cancelled_and_is_given_back(
    dsn: str, eyes: Eyes, ends: str
) -> None:
    calls, go = 0, threading.Event()

    @task(name="held.stubborn", transactional=True)
    def stubborn(job: Job) -> None:
        nonlocal calls
        calls += 1
        begins(job)
        go.wait(60)

    async with work(dsn, stubborn, concurrency=3) as worker:
        [job] = enqueue(dsn, stubborn.new())
        await begun(job)
        claim = eyes.one("SELECT claim FROM pgqueue.job_running")
        forget_claims(eyes, "held.stubborn")
        await until(lambda: claimed_again(eyes, claim))
        await until(lambda: worker.state.held[job].claim != claim)
        if ends == "cancelled":
            with psycopg.connect(dsn) as conn:
                assert pgqueue.cancel(conn, job)
            await until(eyes.is_in(job, "cancelled"))
            go.set()
        else:
            leaving = asyncio.ensure_future(worker.stop(30.0))
            await until(eyes.is_in(job, "available"))
            go.set()
            await leaving
    assert calls == 1


@pytest.mark.promise("F27")
async def test_a_job_that_has_not_started_is_forgotten_for_its_new_claim(dsn: str, eyes: Eyes) -> None:
    calls: list[int] = []
    go = asyncio.Event()

    @task(name="held.gate")
    async def gate() -> None:
        await go.wait()

    @task(name="held.counts")
    async def counts(job: Job) -> None:
        calls.append(job.claim)

    def copy(claim: int) -> Job:
        return Job(claimed(id=999, task="held.counts"), claim)

    async with work(dsn, gate, counts, concurrency=1) as worker:
        enqueue(dsn, gate.new())
        await until(lambda: worker.services.running.runs)
        for claim in (5, 6):
            made = copy(claim)
            made.crashes = 0
            worker.services.held_jobs.deliver([made])
        go.set()
        await until(lambda: calls and not worker.state.held)
    assert calls == [6]


@pytest.mark.promise("F27")
@pytest.mark.parametrize("key", ["lock", "limit"])
async def test_a_job_with_a_key_that_has_no_row_any_more_is_stopped(dsn: str, eyes: Eyes, key: str) -> None:
    """A plain job goes on: it may run twice. So does a job whose row is there."""
    stopped: list[str] = []
    go = asyncio.Event()

    async def run(name: str) -> None:
        try:
            await go.wait()
        except asyncio.CancelledError:
            stopped.append(name)
            raise

    @task(name="held.keyed", **({"lock": "one"} if key == "lock" else {"limit": 1}))
    async def keyed() -> None:
        await run("keyed")

    @task(name="held.other", lock="two")
    async def other() -> None:
        await run("other")

    @task(name="held.plain")
    async def plain() -> None:
        await run("plain")

    async with work(dsn, keyed, other, plain) as worker:
        enqueue(dsn, keyed.new(), other.new(), plain.new())
        await until(lambda: len(worker.services.running.runs) == 3)
        eyes.do("DELETE FROM pgqueue.job_running WHERE task IN ('held.keyed', 'held.plain')")
        await compared(worker)
        await until(lambda: stopped)
        await compared(worker)
        assert stopped == ["keyed"]
        go.set()
        await until(eyes.done(1))


async def compared(worker: Worker) -> None:
    """Wait until the reconciler has compared once more."""
    ended = worker.services.fetch_session.ended
    worker.state.in_doubt()
    await until(lambda: not worker.state.doubt.is_set() and worker.services.fetch_session.ended > ended)


# Jobs that wait at hand ----------------------------------------------------------------------------------------------


@pytest.mark.promise("F178")
@pytest.mark.parametrize(
    "kind",
    ["async", "lock", *(pytest.param(kind, marks=pytest.mark.second) for kind in ("thread", "queue", "unnotified"))],
)
async def test_jobs_at_hand_behind_long_ones_go_back_to_workers_with_free_slots(
    kind: str, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick jobs have made one worker take more than it has slots for. Then long ones come; another worker gets free
    slots, and finds nothing at first."""
    began: list[int] = []
    go, other_go, go_in_thread = asyncio.Event(), asyncio.Event(), threading.Event()

    @task(name="hand.quick")
    async def quick() -> None: ...

    @task(name="hand.blocks")
    async def blocks() -> None:
        await other_go.wait()

    @task(name="hand.long")
    async def long(job: Job) -> None:
        began.append(job.id)
        await go.wait()

    @task(name="hand.thread")
    def in_thread(job: Job) -> None:
        began.append(job.id)
        go_in_thread.wait(60)

    queue = "own" if kind == "queue" else "default"

    def new(number: int) -> Any:
        if kind == "thread":
            return in_thread.new()
        return long.using(queue=queue, lock=f"customer {number}" if kind == "lock" else None).new()

    if kind == "unnotified":
        monkeypatch.setenv("PGQUEUE_NOTIFY", "off")
    tasks = quick, blocks, long, in_thread
    try:
        async with work(dsn, *tasks, concurrency=10, queues=["default", "own"]) as other:
            enqueue(dsn, *[blocks.new() for _ in range(10)])
            await until(lambda: len(other.state.held) == 10)
            mine = ["default", "own:2"] if kind == "queue" else ["default"]
            async with work(dsn, *tasks, concurrency=2, queues=mine) as busy:
                enqueue(dsn, *[quick.using(queue=queue).new() for _ in range(100)])
                await until(eyes.done(100))
                jobs = enqueue(dsn, *map(new, range(8)))
                await until(lambda: len(busy.state.held) == len(jobs) and len(began) == 2)
                other_go.set()
                await until(lambda: len(began) == len(jobs), 10.0)
                assert eyes.all("SELECT DISTINCT attempt, crashes FROM pgqueue.job_running") == [(1, 0)]
                go.set()
                go_in_thread.set()
                await until(eyes.done(118))
                await until(
                    lambda: busy.state.ended_jobs + other.state.ended_jobs == 118, 5.0
                )  # that went back: no run
    finally:
        go_in_thread.set()
    assert sorted(began) == jobs


@pytest.mark.promise("F178")
@pytest.mark.parametrize(
    "locked", [pytest.param(False, marks=pytest.mark.second), True], ids=["limit", "lock and limit"]
)
async def test_jobs_that_go_back_leave_their_places_in_a_limit_to_workers_with_free_slots(
    locked: bool, dsn: str, eyes: Eyes
) -> None:
    """A worker has let in jobs up to the limit, and has slots for two. Jobs of another queue get the other places."""
    began: list[str] = []
    go = asyncio.Event()

    @task(name="places.quick")
    async def quick() -> None: ...

    @task(name="places.long", limit=pgqueue.Limit(8, name="places"))
    async def long(job: Job) -> None:
        began.append(job.queue)
        await go.wait()

    def new(queue: str, number: int) -> Any:
        return long.using(queue=queue, lock=f"{queue} {number}" if locked else None).new()

    tasks = quick, long
    async with work(dsn, *tasks, queues=["b"]), work(dsn, *tasks, queues=["a"], concurrency=2) as busy:
        enqueue(dsn, *[quick.using(queue="a").new() for _ in range(100)])
        await until(eyes.done(100))
        enqueue(dsn, *[new("a", number) for number in range(8)])
        await until(lambda: len(busy.state.held) == 8)
        enqueue(dsn, *[new("b", number) for number in range(4)])
        await until(lambda: sorted(began) == ["a"] * 2 + ["b"] * 4, 15.0)
        go.set()
        await until(eyes.done(112))
    assert sorted(began) == ["a"] * 8 + ["b"] * 4
