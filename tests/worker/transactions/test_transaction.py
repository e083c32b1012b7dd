"""The transaction of one attempt, where it is hard: many hands at once, lost answers, reruns, SQL that ends it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bodies
import psycopg
import pytest
from accounts import accounts, balances
from handler_pools import whole
from transactional_tasks import BOTH, declared, enqueued, outcomes
from workers import Eyes, until, wait_until, work

import pgqueue
from pgqueue import Job, Snooze
from pgqueue.worker.transactions.commit import Commit
from pgqueue.worker.transactions.handler_pool import Side

__all__ = ["accounts"]
pytestmark = pytest.mark.each_value


# Many hands ----------------------------------------------------------------------------------------------------------


@BOTH
async def test_all_the_tasks_of_a_handler_get_the_same_connection(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    """They ask at once: two connections would be two transactions, of which one would be committed by nobody."""
    same: list[int] = []

    def gathers(job: Job) -> None:
        at_once = threading.Barrier(3)

        def step(number: int) -> int:
            at_once.wait(30)
            conn = job.connection
            conn.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, str(number)])
            return id(conn)

        with ThreadPoolExecutor(3) as threads:
            same.append(len(set(threads.map(step, range(3)))))

    async def agathers(job: Job) -> None:
        async def step(number: int) -> int:
            conn = await job.aconnection()
            await conn.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, str(number)])
            return id(conn)

        same.append(len(set(await asyncio.gather(*map(step, range(3))))))

    gathering = declared(agathers if on_loop else gathers)
    async with work(dsn, gathering, concurrency=4) as worker:
        await until(accounts.is_in(enqueued(dsn, gathering), "completed"))
        await until(lambda: whole(worker))
    assert same == [1]
    assert accounts.one("SELECT count(*) FROM effect") == 3


@BOTH
async def test_who_asks_while_the_run_ends_gets_no_connection(
    dsn: str, accounts: Eyes, on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread or a task that the handler does not wait for: its transaction would be ended by nobody."""
    taken, go_on = threading.Event(), threading.Event()
    said: list[BaseException | None] = []
    take, atake = bodies.real(Side, "acquire")

    def slow_take(lender: Side[Any], **how: Any) -> Any:
        conn = take(lender, **how)
        taken.set()
        assert go_on.wait(20)
        return conn

    async def slow_atake(lender: Side[Any], **how: bool) -> Any:
        conn = await atake(lender, **how)
        taken.set()
        assert await asyncio.to_thread(go_on.wait, 20)
        return conn

    def asks(job: Job) -> None:
        try:
            _ = job.connection
        except BaseException as error:
            said.append(error)

    def leaves(job: Job) -> None:
        threading.Thread(target=asks, args=(job,)).start()
        assert taken.wait(20)

    async def aleaves(job: Job) -> None:
        asking = asyncio.create_task(job.aconnection())
        asking.add_done_callback(lambda asked: said.append(asked.exception()))
        assert await asyncio.to_thread(taken.wait, 20)

    bodies.replace(monkeypatch, Side, "acquire", slow_take, slow_atake)
    leaving = declared(aleaves if on_loop else leaves)
    async with work(dsn, leaving) as worker:
        await until(accounts.is_in(enqueued(dsn, leaving), "completed"))
        go_on.set()
        await until(lambda: said)
        assert "its run is over" in str(said[0])
        await until(lambda: whole(worker))
    assert accounts.one("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in%%'") == 0


@BOTH
@pytest.mark.promise("F198")
async def test_what_outlives_a_failed_attempt_writes_nowhere(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    """Neither into the next attempt's transaction nor into another job's: its connection is closed.

    The session goes on. Naive: the connection is lent again. Or a cursor of before still has the session.
    """
    over = threading.Event()
    said: list[str] = []
    siblings: list[Any] = []
    pids = set[int]()
    write = "INSERT INTO effect VALUES (1, 'late')"

    def late(conn: Any, *cursors: Any) -> None:
        assert over.wait(30)
        for each in (conn, *cursors):
            with pytest.raises(psycopg.OperationalError) as refused:
                each.execute(write)
            said.append(str(refused.value))

    async def alate(conn: Any, *cursors: Any) -> None:
        assert await asyncio.to_thread(over.wait, 30)
        for each in (conn, *cursors):
            with pytest.raises(psycopg.OperationalError) as refused:
                await each.execute(write)
            said.append(str(refused.value))

    def fails(job: Job) -> None:
        conn = job.connection
        pids.add(conn.info.backend_pid)
        conn.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, f"attempt {job.attempt}"])
        if job.attempt == 1:
            siblings.append(threading.Thread(target=late, args=(conn, conn.cursor(), psycopg.ClientCursor(conn))))
            siblings[0].start()
            raise ValueError

    async def afails(job: Job) -> None:
        conn = await job.aconnection()
        pids.add(conn.info.backend_pid)
        await conn.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, f"attempt {job.attempt}"])
        if job.attempt == 1:
            siblings.append(asyncio.ensure_future(alate(conn, conn.cursor(), psycopg.AsyncClientCursor(conn))))
            raise ValueError

    failing = declared(afails if on_loop else fails)
    async with work(dsn, failing, concurrency=1) as worker:
        await until(accounts.is_in(enqueued(dsn, failing), "completed"))
        over.set()
        await (siblings[0] if on_loop else asyncio.to_thread(siblings[0].join, 30))
        await until(lambda: whole(worker))
    assert said == ["the connection is closed"] * 3
    assert len(pids) == 1
    assert accounts.all("SELECT note FROM effect") == [("attempt 2",)]


# Lost answers --------------------------------------------------------------------------------------------------------


class Cut:
    """Ends the sessions of the first so many transactions, all at once, right before their COMMIT or right after."""

    def __init__(self, eyes: Eyes, number: int, committed: bool, patch: pytest.MonkeyPatch) -> None:
        self._eyes = eyes
        self._numbers = iter(range(number))
        self._all = threading.Barrier(number, self._end)
        commit, acommit = bodies.real(Commit, "_commit_end")

        def cutting(work: Commit, conn: Any, outcome: Any) -> None:
            first = next(self._numbers, None) is not None
            if committed or not first:
                commit(work, conn, outcome)
            if first:
                self._all.wait(30)
                conn.execute("SELECT 1")

        async def acutting(work: Commit, conn: Any, outcome: Any) -> None:
            first = next(self._numbers, None) is not None
            if committed or not first:
                await acommit(work, conn, outcome)
            if first:
                await asyncio.to_thread(self._all.wait, 30)
                await conn.execute("SELECT 1")

        bodies.replace(patch, Commit, "_commit_end", cutting, acutting)

    def _end(self) -> None:
        sql = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'pgqueue job'"
        self._eyes.all(sql + " AND datname = current_database()")


@pytest.mark.promise("T15")
@pytest.mark.parametrize("committed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("slots", [1, 4])
@BOTH
async def test_lost_commits_are_settled_with_all_slots_at_once(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch, slots: int, committed: bool, on_loop: bool
) -> None:
    """Each asks on a new connection; if it kept its own place in the pool meanwhile, all would wait for each other."""
    monkeypatch.setattr("pgqueue.worker.transactions.handler_pool.GET_SECONDS", 20.0)
    Cut(accounts, slots, committed, monkeypatch)

    def effect(job: Job) -> None:
        job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])

    async def aeffect(job: Job) -> None:
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s)", [job.id])

    effecting = declared(aeffect if on_loop else effect)
    async with work(dsn, effecting, concurrency=slots) as worker:
        with psycopg.connect(dsn) as conn:
            effecting.enqueue_many(conn, [()] * (slots + 2))
        await until(accounts.done(slots + 2), 30)
        await until(lambda: whole(worker) and not worker.state.held)
        assert worker.services.completer.fenced == 0
    assert accounts.one("SELECT count(*) FROM effect") == slots + 2
    assert outcomes(accounts) == [] if committed else ["failed"] * slots


@pytest.mark.promise("T15")
@pytest.mark.parametrize("state", ["completed", "scheduled"])
@BOTH
async def test_a_commit_is_found_though_its_worker_was_taken_for_dead_before_it_asked(
    dsn: str,
    accounts: Eyes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    state: str,
    on_loop: bool,
) -> None:
    """The answer to its COMMIT is lost; when it asks, its worker has another id. It was committed under the first."""
    ids: list[int] = []
    commit, acommit = bodies.real(Commit, "_commit_end")

    def dies(conn: Any) -> None:
        accounts.do("UPDATE pgqueue.worker SET dead_at = now() WHERE id = %s", ids[0])
        wait_until(lambda: worker.worker_id != ids[0])
        accounts.do("SELECT pg_terminate_backend(%s, 5000)", conn.info.backend_pid)

    def losing(work: Commit, conn: Any, outcome: Any) -> None:
        commit(work, conn, outcome)
        ids.append(worker.worker_id)
        dies(conn)
        conn.execute("SELECT 1")

    async def alosing(work: Commit, conn: Any, outcome: Any) -> None:
        await acommit(work, conn, outcome)
        ids.append(worker.worker_id)
        await asyncio.to_thread(dies, conn)
        await conn.execute("SELECT 1")

    bodies.replace(monkeypatch, Commit, "_commit_end", losing, alosing)
    ends = Snooze(3600) if state == "scheduled" else None

    def effect(job: Job) -> Snooze | None:
        job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])
        return ends

    async def aeffect(job: Job) -> Snooze | None:
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s)", [job.id])
        return ends

    effecting = declared(aeffect if on_loop else effect)
    async with work(dsn, effecting, lease=1.0) as worker:
        job_id = enqueued(dsn, effecting)
        await until(lambda: ids and worker.worker_id != ids[0] and not worker.state.held)
        assert worker.services.completer.fenced == 0
        await until(lambda: whole(worker))
    assert accounts.state(job_id) == state
    assert accounts.one("SELECT count(*) FROM effect") == len(ids) == 1
    assert "given to another worker" not in caplog.text


# Runs again in place -------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("T07")
@pytest.mark.parametrize("how", ["timeout", "cancel"])
@BOTH
async def test_a_rerun_after_a_failed_commit_can_be_stopped(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch, how: str, on_loop: bool
) -> None:
    """The first run was sealed for its commit; the second is not."""
    tried: list[object] = []
    commit, acommit = bodies.real(Commit, "_commit_end")

    def conflicting(work: Commit, conn: Any, outcome: Any) -> None:
        if not tried:
            tried.append(outcome)
            raise psycopg.errors.SerializationFailure
        commit(work, conn, outcome)

    async def aconflicting(work: Commit, conn: Any, outcome: Any) -> None:
        if not tried:
            tried.append(outcome)
            raise psycopg.errors.SerializationFailure
        await acommit(work, conn, outcome)

    bodies.replace(monkeypatch, Commit, "_commit_end", conflicting, aconflicting)
    again, go_on = threading.Event(), threading.Event()

    def hangs(job: Job) -> None:
        job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])
        if tried:
            again.set()
            while not go_on.wait(0.01):
                pass

    async def ahangs(job: Job) -> None:
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s)", [job.id])
        if tried:
            again.set()
            await asyncio.sleep(3600)

    hanging = declared(ahangs if on_loop else hangs, **({"timeout": 2.0} if how == "timeout" else {}))
    async with work(dsn, hanging) as worker:
        job_id = enqueued(dsn, hanging.using(retry=1))
        await until(again.is_set)
        if how == "cancel":
            with psycopg.connect(dsn) as conn:
                pgqueue.cancel(conn, job_id)
        await until(accounts.is_in(job_id, "failed" if how == "timeout" else "cancelled"))
        await until(lambda: whole(worker))
        assert worker.services.executor._running.lost == 0
        go_on.set()
    assert accounts.one("SELECT count(*) FROM effect") == 0
    assert outcomes(accounts) == ["aborted", "timeout" if how == "timeout" else "cancelled"]


# SQL of a handler's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@BOTH
async def test_who_ends_the_transaction_in_sql_is_not_run_again(
    dsn: str, accounts: Eyes, how: str, raises: bool, on_loop: bool
) -> None:
    """What it wrote may have been committed, so a second run could do it twice; and its neighbours feel nothing."""

    def ends(job: Job) -> None:
        job.connection.execute("UPDATE account SET balance = balance - 10 WHERE id = 1")
        job.connection.execute(how)
        if raises:
            raise ValueError

    async def aends(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute("UPDATE account SET balance = balance - 10 WHERE id = 1")
        await conn.execute(how)
        if raises:
            raise ValueError

    def neighbour(job: Job, fails: bool) -> None:
        for note in ("one", "two"):
            job.connection.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, note])
        if fails:
            raise LookupError

    async def aneighbour(job: Job, fails: bool) -> None:
        for note in ("one", "two"):
            await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s, %s)", [job.id, note])
        if fails:
            raise LookupError

    ending, beside = declared(aends if on_loop else ends), declared(aneighbour if on_loop else neighbour)
    async with work(dsn, ending, beside, concurrency=1) as worker:
        with psycopg.connect(dsn) as conn:
            first, fine = ending.enqueue(conn).id, beside.enqueue(conn, False).id
            second, failed = ending.enqueue(conn).id, beside.using(retry=1).enqueue(conn, True).id
        await until(lambda: {accounts.state(job) for job in (first, second, failed)} == {"failed"})
        await until(accounts.is_in(fine, "completed"))
        await until(lambda: whole(worker))
    assert accounts.all("SELECT DISTINCT job FROM effect") == [(fine,)]
    assert accounts.one("SELECT count(*) FROM effect") == 2
    told = accounts.all("SELECT error_type, message FROM pgqueue.attempt WHERE job_id IN (%s, %s)", first, second)
    assert [error for error, _ in told] == ["Fail", "Fail"]
    assert "ended the transaction by itself" in told[0][1]
    assert balances(accounts)[0] == (80 if how == "COMMIT" else 100)


@BOTH
async def test_an_ask_waits_for_whoever_has_the_row_for_a_moment(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    """The end of a snoozed job leaves locked rows out; taken for lost, the attempt would fail."""
    wrote, held = threading.Event(), threading.Event()

    def snoozes(job: Job) -> Snooze:
        job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])
        wrote.set()
        assert held.wait(30)
        return Snooze(3600)

    async def asnoozes(job: Job) -> Snooze:
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s)", [job.id])
        wrote.set()
        assert await asyncio.to_thread(held.wait, 30)
        return Snooze(3600)

    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgqueue job' AND wait_event_type = 'Lock' "
        "AND datname = current_database()"
    )
    snoozing = declared(asnoozes if on_loop else snoozes)
    async with work(dsn, snoozing) as worker:
        job_id = enqueued(dsn, snoozing)
        await until(wrote.is_set)
        with psycopg.connect(dsn) as stranger:
            stranger.execute("SELECT FROM pgqueue.job_running FOR UPDATE")
            held.set()
            await until(lambda: accounts.one(waiting))
        await until(accounts.is_in(job_id, "scheduled"))
        assert worker.services.completer.fenced == 0
    assert outcomes(accounts) == ["snoozed"]
    assert accounts.one("SELECT count(*) FROM effect") == 1
