"""Fewer connections than slots: who asks waits for a place, in line, until its job is to stop; nothing hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import bodies
import psycopg
import pytest
from accounts import accounts
from transactional_tasks import BOTH, declared, enqueued, laster, together, writer
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job
from pgqueue.database.sessions import Link
from pgqueue.jobs.outcomes import Cancelled
from pgqueue.worker.transactions.commit import Commit
from pgqueue.worker.transactions.handler_pool import HandlerPool, Side
from pgqueue.worker.transactions.permits import Permits
from pgqueue.worker.transactions.steps import run
from pgqueue.worker.worker import Worker

__all__ = ["accounts"]

SESSIONS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'pgqueue job'"
INSERT = "INSERT INTO effect VALUES (%s, %s)"


def free(worker: Worker) -> bool:
    """Whether nobody has a place, or waits for one."""
    both = [worker.services.handler_pool.threads.permits, worker.services.handler_pool.on_loop.permits]
    return all(places is not None and not places.taken and not places._waiting for places in both)


# The line ------------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """What ends a wait."""


async def test_places_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    for on_loop in (False, True):
        places, order = Permits(1), list[int]()
        first = places.acquire(lambda: None)

        async def asks(number: int, places: Permits = places, on_loop: bool = on_loop, order: Any = order) -> None:
            place = await (places.aacquire() if on_loop else asyncio.to_thread(places.acquire, lambda: None))
            order.append(number)
            places.release(place)

        asking = []
        for number in range(5):
            asking.append(asyncio.create_task(asks(number)))
            await until(lambda places=places, number=number: len(places._waiting) == number + 1)  # type: ignore[misc]
        places.release(first)
        places.release(first)  # once only
        await asyncio.gather(*asking)
        assert (order, places.taken) == ([0, 1, 2, 3, 4], 0)


async def test_who_waits_no_more_leaves_the_line_and_what_was_given_at_that_moment_goes_on() -> None:
    places, stop = Permits(1), threading.Event()

    def look() -> None:
        if stop.is_set():
            raise Stop

    first = places.acquire(look)
    in_thread = asyncio.create_task(asyncio.to_thread(places.acquire, look))
    await until(lambda: len(places._waiting) == 1)
    on_loop, last = asyncio.create_task(places.aacquire()), asyncio.create_task(places.aacquire())
    await until(lambda: len(places._waiting) == 3)
    stop.set()
    with pytest.raises(Stop):
        await in_thread
    assert len(places._waiting) == 2
    places.release(first)  # it is the second's, which is cancelled before it hears of it
    on_loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await on_loop
    places.release(await last)
    assert places.taken == 0


@pytest.mark.promise("I11")
@pytest.mark.parametrize("on_loop", [True, False])
async def test_who_takes_a_connection_that_is_only_just_back_has_a_place_of_his_own(
    dsn: str, on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gave it back has not left his own place by then, and must not leave the other's in its stead."""

    async def listed() -> None: ...

    lender = HandlerPool(Link(dsn, "pgqueue"), 4, listed, size=2)
    conn: Any = await (lender.on_loop.acquire() if on_loop else asyncio.to_thread(run, lender.threads.acquire()))
    pool: Any = lender.on_loop.pool if on_loop else lender.threads.pool
    places = lender.on_loop.permits if on_loop else lender.threads.permits
    assert places is not None
    put, meanwhile = pool.putconn, list[object]()

    async def aputs(back: Any) -> None:
        await put(back)
        meanwhile.append(await lender.on_loop.acquire())

    def puts(back: Any) -> None:
        put(back)
        meanwhile.append(run(lender.threads.acquire()))

    async def give(back: Any) -> None:
        await (lender.on_loop.release(back) if on_loop else asyncio.to_thread(run, lender.threads.release(back)))

    with monkeypatch.context() as patch:
        patch.setattr(pool, "putconn", aputs if on_loop else puts)
        await give(conn)
    assert meanwhile == [conn]
    assert (places.taken, conn.permit is not None) == (1, True)
    await give(conn)
    assert places.taken == 0
    await lender.close()


# A worker ------------------------------------------------------------------------------------------------------------


def plain(job: Job) -> None:
    job.connection.execute(INSERT, [job.id, "plain"])


async def aplain(job: Job) -> None:
    await (await job.aconnection()).execute(INSERT, [job.id, "plain"])


def batches(job: Job) -> None:
    for batch in job.iterate(lambda cursor: ((n, n) for n in range(cursor or 1, 4)), size=1):
        job.connection.execute(INSERT, [job.id, str(batch[0])])


async def abatches(job: Job) -> None:
    async for batch in job.aiterate(lambda cursor: ((n, n) for n in range(cursor or 1, 4)), size=1):
        await (await job.aconnection()).execute(INSERT, [job.id, str(batch[0])])


def both(job: Job) -> None:
    batches(job)
    plain(job)


async def aboth(job: Job) -> None:
    await abatches(job)
    await aplain(job)


def fails(job: Job) -> None:
    plain(job)
    if job.attempt == 1:
        raise ValueError


KINDS: dict[str, list[Any]] = {
    "thread": [plain],
    "loop": [aplain],
    "batches": [batches],
    "abatches": [abatches],
    "mixed": [plain, aplain, batches, abatches, both, aboth, fails],
}


@pytest.mark.second
@pytest.mark.promise("I11")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_ten_slots_share_few_connections_and_nothing_hangs(
    dsn: str, accounts: Eyes, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pgqueue.worker.transactions.handler_pool.GET_SECONDS", 5.0
    )  # who hangs in the pool fails the attempt
    most, lent = [0, 0], [0, 0]
    take, give = Side._take, Side.release

    def count(on_loop: bool, by: int) -> None:
        lent[on_loop] += by
        most[on_loop] = max(most[on_loop], lent[on_loop])

    async def counting_take(side: Side[Any], begun: bool) -> Any:
        conn = await take(side, begun)
        count(side.is_async, 1)
        return conn

    async def counting_give(side: Side[Any], conn: Any) -> None:
        count(side.is_async, -(conn.permit is not None))
        await give(side, conn)

    monkeypatch.setattr(Side, "_take", counting_take)
    monkeypatch.setattr(Side, "release", counting_give)
    tasks = [declared(fn) for fn in KINDS[kind]]
    jobs = [task.new() for _ in range(210 // len(tasks)) for task in tasks]
    seen, ended = 0, asyncio.Event()

    async def watch() -> None:
        nonlocal seen
        while not ended.is_set():
            sessions = await asyncio.to_thread(accounts.one, f"SELECT count(*) {SESSIONS}")
            seen = max(seen, sessions)
            await asyncio.sleep(0.005)

    async with work(dsn, *tasks, concurrency=10, pool_size=size) as worker:
        watching = asyncio.create_task(watch())
        with psycopg.connect(dsn) as conn:
            pgqueue.enqueue_many(conn, jobs)
        await until(lambda: worker.state.ended_jobs >= len(jobs) + (len(jobs) // 7 if fails in KINDS[kind] else 0), 60)
        await until(lambda: free(worker))
        ended.set()
        await watching
    assert accounts.states() == {"completed": len(jobs)}
    assert set(accounts.all("SELECT outcome, error_type FROM pgqueue.attempt")) <= {("failed", "ValueError")}
    assert max(most) == size
    pools = 2 if kind == "mixed" else 1
    assert seen <= pools * (size + (fails in KINDS[kind]))  # in each a closed one may linger in the server
    per_job = {plain: 1, aplain: 1, batches: 3, abatches: 3, both: 4, aboth: 4, fails: 1}
    expected = sum(per_job[fn] for fn in KINDS[kind]) * (210 // len(tasks))
    assert accounts.one("SELECT count(*) FROM effect") == expected


@BOTH
@pytest.mark.each_value
@pytest.mark.parametrize("how", ["timeout", "cancel", "stop", "lease"])
async def test_a_handler_that_waits_for_a_connection_can_be_stopped(
    dsn: str, accounts: Eyes, on_loop: bool, how: str
) -> None:
    has, go_on, left = threading.Event(), threading.Event(), list[str]()

    def asks(job: Job, keeps: bool) -> None:
        try:
            _ = job.connection
            has.set()
            while keeps and not go_on.is_set():
                time.sleep(0.01)
        finally:
            left.append("keeps" if keeps else "waits")

    async def aasks(job: Job, keeps: bool) -> None:
        try:
            await job.aconnection()
            has.set()
            if keeps:
                await until(go_on.is_set)
        finally:
            left.append("keeps" if keeps else "waits")

    asking = declared(aasks if on_loop else asks)
    async with work(dsn, asking, concurrency=4, pool_size=1) as worker:
        enqueued(dsn, asking, True)
        await until(has.is_set)
        places = (
            worker.services.handler_pool.on_loop.permits if on_loop else worker.services.handler_pool.threads.permits
        )
        assert places is not None
        waits = enqueued(dsn, asking.using(timeout=0.3, retry=1) if how == "timeout" else asking, False)
        if how == "timeout":
            await until(accounts.is_in(waits, "failed"), 4)
        else:
            await until(lambda: len(places._waiting) == 1)
        if how == "cancel":
            assert worker.services.executor.interrupt(waits, Cancelled("by the test"))
            await until(accounts.is_in(waits, "cancelled"), 4)
        elif how == "lease":
            run = worker.services.executor._running.runs[waits]
            assert run.job is not None
            worker.services.executor.interrupt_run(run.job, Cancelled("by the test"))
            await until(accounts.is_in(waits, "cancelled"), 4)
        elif how == "stop":
            began = time.monotonic()
            assert await worker.stop(0.1) == 2
            assert time.monotonic() - began < 5
        assert left == (["waits"] if how != "stop" else left)
        assert worker.services.executor._running.lost == 0
        go_on.set()
        await until(lambda: len(left) == 2)
        if how != "stop":
            await until(accounts.done(1))
            await until(lambda: free(worker))
    assert sorted(left) == ["keeps", "waits"]


async def test_a_handler_can_be_stopped_while_a_thread_of_its_own_waits(dsn: str, accounts: Eyes) -> None:
    has, go_on = threading.Event(), threading.Event()
    said: list[BaseException] = []

    def keeps(job: Job) -> None:
        _ = job.connection
        has.set()
        go_on.wait(30)

    def threads(job: Job) -> None:
        def asks() -> None:
            try:
                _ = job.connection
            except BaseException as error:
                said.append(error)

        threading.Thread(target=asks).start()
        while True:
            time.sleep(0.001)

    keeping, threading_ = declared(keeps), declared(threads)
    async with work(dsn, keeping, threading_, concurrency=4, pool_size=1) as worker:
        enqueued(dsn, keeping)
        await until(has.is_set)
        stopped = enqueued(dsn, threading_.using(timeout=0.3, retry=1))
        await until(accounts.is_in(stopped, "failed"), 4)
        assert worker.services.executor._running.lost == 0
        await until(lambda: said)
        go_on.set()
        await until(lambda: free(worker))


@BOTH
async def test_a_handler_that_hangs_with_a_connection_keeps_no_place(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    """Its job was taken away, but it may hang for ever: else no other job would get a connection any more."""
    go_on, hung = threading.Event(), list[Job]()

    def hangs(job: Job) -> None:
        _ = job.connection
        hung.append(job)
        while not go_on.is_set():
            try:
                go_on.wait(30)
            except BaseException:
                continue

    async def ahangs(job: Job) -> None:
        await job.aconnection()
        hung.append(job)
        while not go_on.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    hanging, writing = declared(ahangs if on_loop else hangs), writer(on_loop)
    async with work(dsn, hanging, writing, concurrency=6, pool_size=1) as worker:
        for number in (1, 2):
            enqueued(dsn, hanging.using(retry=1))
            await until(lambda number=number: len(hung) == number)  # type: ignore[misc]
            # What the timekeeper does, in two steps: when its grace is over, the job is taken away.
            assert worker.services.executor.interrupt(hung[-1].id, Cancelled("it hangs"))
            worker.services.executor.abandon(hung[-1])
            assert worker.services.executor._running.lost == number
            await until(accounts.is_in(enqueued(dsn, writing), "completed"))
        go_on.set()
        await until(lambda: worker.services.executor._running.lost == 0)
        await until(accounts.is_in(enqueued(dsn, writing), "completed"))
        await until(lambda: free(worker))
        assert accounts.one(f"SELECT count(*) {SESSIONS}") <= 1
    assert len(hung) == 2


@BOTH
async def test_a_transaction_begun_ahead_that_nobody_wants_is_in_nobodys_way(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    """It is out of the pool, which has no other, and who begins a second transaction of a job does not get it."""
    monkeypatch.setattr(HandlerPool, "_undo_stale", lambda lender: None)
    monkeypatch.setattr("pgqueue.worker.transactions.handler_pool.GET_SECONDS", 5.0)
    begun, going = threading.Event(), threading.Event()
    writing, lasting = writer(on_loop), laster(on_loop, begun, going)
    async with work(dsn, writing, lasting, queues=["default:1", "other:1"], pool_size=1) as worker:
        together(dsn, worker, writing, lasting)
        await until(begun.is_set)
        assert (
            len(worker.services.handler_pool.on_loop.early if on_loop else worker.services.handler_pool.threads.early)
            == 1
        )
        lender = worker.services.handler_pool
        if on_loop:
            await lender.on_loop.release(await lender.on_loop.acquire())
        else:
            await asyncio.to_thread(lambda: run(lender.threads.release(run(lender.threads.acquire()))))
        assert not (lender.on_loop.early if on_loop else lender.threads.early)
        assert accounts.one(f"SELECT count(*) {SESSIONS}") == 1
        going.set()
        await until(lambda: free(worker))
    assert accounts.one("SELECT count(*) FROM pgqueue.attempt") == 0


@BOTH
async def test_who_settles_a_commit_does_not_wait_for_those_in_line(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    """Nobody can stop it meanwhile; and the one before it may have its connection for hours."""
    (commit, acommit), cuts = bodies.real(Commit, "_commit_end"), list[int]()
    waits, has = threading.Event(), threading.Event()

    def lost(work: Commit, conn: Any, outcome: Any) -> None:
        commit(work, conn, outcome)
        if not cuts:
            cuts.append(1)
            assert waits.wait(30)
            conn.close()
            raise psycopg.OperationalError("the answer did not come")

    async def alost(work: Commit, conn: Any, outcome: Any) -> None:
        await acommit(work, conn, outcome)
        if not cuts:
            cuts.append(1)
            await until(waits.is_set)
            await conn.close()
            raise psycopg.OperationalError("the answer did not come")

    bodies.replace(monkeypatch, Commit, "_commit_end", lost, alost)

    (take, atake), got = bodies.real(Side, "acquire"), threading.Event()

    def slow_take(lender: Side[Any], **how: Any) -> Any:
        if how.get("settles"):
            got.wait(0.5)  # time enough for who is next in line, if it were let in
        return take(lender, **how)

    async def slow_atake(lender: Side[Any], **how: Any) -> Any:
        if how.get("settles"):
            await asyncio.to_thread(got.wait, 0.5)
        return await atake(lender, **how)

    bodies.replace(monkeypatch, Side, "acquire", slow_take, slow_atake)

    def keeps(job: Job) -> None:
        _ = job.connection
        got.set()
        has.wait(30)

    async def akeeps(job: Job) -> None:
        await job.aconnection()
        got.set()
        await until(has.is_set)

    writing, keeping = writer(on_loop), declared(akeeps if on_loop else keeps)
    async with work(dsn, writing, keeping, concurrency=4, pool_size=1) as worker:
        first = enqueued(dsn, writing)
        await until(lambda: cuts)
        enqueued(dsn, keeping)
        places = (
            worker.services.handler_pool.on_loop.permits if on_loop else worker.services.handler_pool.threads.permits
        )
        await until(lambda: places is not None and len(places._waiting) == 1)
        waits.set()
        await until(lambda: worker.state.ended_jobs == 1, 5)
        has.set()
        await until(accounts.done(2))
        assert accounts.state(first) == "completed"
        await until(lambda: free(worker))


async def test_the_size_is_for_each_pool_and_no_more_than_there_are_slots(dsn: str) -> None:
    async def listed() -> None: ...

    assert HandlerPool(Link(dsn, "pgqueue"), 4, listed, size=2).size == 2
    for lender in (HandlerPool(Link(dsn, "pgqueue"), 4, listed, size=9), HandlerPool(Link(dsn, "pgqueue"), 4, listed)):
        assert (lender.size, lender.threads.permits, lender.on_loop.permits) == (4, None, None)
