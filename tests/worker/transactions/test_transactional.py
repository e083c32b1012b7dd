"""Transactional tasks: a handler's writes and its job's completion are one commit, whatever dies, fails or asks."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import bodies
import pages
import psycopg
import pytest
from accounts import accounts, balances, move
from faults import Wire
from transactional_tasks import SOON, declared, outcomes
from workers import Eyes, until, work

import pgqueue
from pgqueue import Cancel, Fail, Job, Retry, Snooze
from pgqueue.client.tasks import task
from pgqueue.worker.transactions.commit import Commit

__all__ = ["accounts"]
pytestmark = pytest.mark.each_value


@pytest.mark.promise("T15")
@pytest.mark.promise("T16")
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_writes_and_completion_are_one_commit(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    seen: list[tuple[list[int], str | None]] = []

    def transfer(job: Job, giver: int, taker: int, amount: int) -> str:
        move(job.connection, giver, taker, amount)
        with psycopg.connect(dsn) as other:
            rows = other.execute("SELECT balance FROM account ORDER BY id").fetchall()
            seen.append(([balance for (balance,) in rows], accounts.state(job.id)))
        return "moved"

    async def atransfer(job: Job, giver: int, taker: int, amount: int) -> str:
        conn = await job.aconnection()
        await conn.execute("UPDATE account SET balance = balance - %s WHERE id = %s", [amount, giver])
        await conn.execute("UPDATE account SET balance = balance + %s WHERE id = %s", [amount, taker])
        seen.append((balances(accounts), accounts.state(job.id)))
        return "moved"

    moving = declared(atransfer if on_loop else transfer)
    async with work(dsn, moving) as worker:
        with psycopg.connect(dsn) as conn:
            handle = moving.enqueue(conn, 1, 2, 50)
        await until(accounts.is_in(handle.id, "completed"))
        await until(lambda: not worker.state.held)
    assert seen == [([100, 200, 50], "running")]
    assert balances(accounts) == [50, 250, 50]
    assert accounts.one("SELECT result FROM pgqueue.job_done") == "moved"
    # The one commit: the same transaction wrote both rows.
    assert accounts.one("SELECT (SELECT xmin FROM pgqueue.job_done) = (SELECT xmin FROM account WHERE id = 1)")
    assert worker.services.completer.fenced == 0


@pytest.mark.promise("T02")
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_an_error_in_the_second_write_undoes_the_first(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    def overdraw(job: Job) -> None:
        job.connection.execute("UPDATE account SET balance = balance + 500 WHERE id = 2")
        job.connection.execute("UPDATE account SET balance = balance - 500 WHERE id = 1")

    async def aoverdraw(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute("UPDATE account SET balance = balance + 500 WHERE id = 2")
        await conn.execute("UPDATE account SET balance = balance - 500 WHERE id = 1")

    over = declared(aoverdraw if on_loop else overdraw)
    async with work(dsn, over):
        with psycopg.connect(dsn) as conn:
            handle = over.using(retry=2).enqueue(conn)
        await until(accounts.is_in(handle.id, "failed"))
    assert balances(accounts) == [100, 200, 50]
    assert outcomes(accounts) == ["failed", "failed"]
    assert accounts.one("SELECT error_type FROM pgqueue.attempt LIMIT 1") == "CheckViolation"


@pytest.mark.promise("T14")
async def test_a_refusal_is_an_early_success(dsn: str, accounts: Eyes) -> None:
    def transfer(job: Job, giver: int, taker: int, amount: int) -> str:
        row = job.connection.execute("SELECT balance FROM account WHERE id = %s FOR UPDATE", [giver]).fetchone()
        if row[0] < amount:
            return "insufficient"
        move(job.connection, giver, taker, amount)
        return "moved"

    refusing = declared(transfer)
    async with work(dsn, refusing):
        with psycopg.connect(dsn) as conn:
            handle = refusing.enqueue(conn, 3, 1, 60)
        await until(accounts.is_in(handle.id, "completed"))
    assert accounts.all("SELECT attempt, result FROM pgqueue.job_done") == [(1, "insufficient")]
    assert balances(accounts) == [100, 200, 50]


@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize(
    ("ask", "state", "outcome"),
    [
        (Snooze(3600), "scheduled", "snoozed"),
        (Retry(3600), "scheduled", "retried"),
        (Cancel("not wanted"), "cancelled", "cancelled"),
        (Fail("no such card"), "failed", "failed"),
    ],
    ids=["snooze", "retry", "cancel", "fail"],
)
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_asks_commit_when_returned_and_roll_back_when_raised(
    dsn: str, accounts: Eyes, ask: Exception, state: str, outcome: str, raised: bool, on_loop: bool
) -> None:
    def asking(job: Job) -> Exception:
        job.connection.execute("INSERT INTO effect VALUES (%s, 'before')", [job.id])
        if raised:
            raise ask
        return ask

    async def aasking(job: Job) -> Exception:
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s, 'before')", [job.id])
        if raised:
            raise ask
        return ask

    asked = declared(aasking if on_loop else asking)
    async with work(dsn, asked):
        with psycopg.connect(dsn) as conn:
            handle = asked.enqueue(conn)
        await until(accounts.is_in(handle.id, state))
    assert accounts.one("SELECT count(*) FROM effect") == (0 if raised else 1)
    assert outcomes(accounts) == [outcome]


@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_the_worker_alone_ends_the_transaction(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    said: list[str] = []

    def ending(job: Job) -> None:
        conn = job.connection
        conn.execute("INSERT INTO effect VALUES (%s, 'kept')", [job.id])
        for end in (conn.commit, conn.rollback):
            with pytest.raises(psycopg.ProgrammingError, match="forbidden"):
                end()
        with pytest.raises(psycopg.ProgrammingError):
            conn.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        try:
            with conn.transaction():
                conn.execute("INSERT INTO effect VALUES (%s, 'undone')", [job.id])
                raise LookupError
        except LookupError:
            said.append("savepoint")

    async def aending(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute("INSERT INTO effect VALUES (%s, 'kept')", [job.id])
        for end in (conn.commit, conn.rollback):
            with pytest.raises(psycopg.ProgrammingError, match="forbidden"):
                await end()
        with pytest.raises(psycopg.ProgrammingError):
            await conn.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE)
        try:
            async with conn.transaction():
                await conn.execute("INSERT INTO effect VALUES (%s, 'undone')", [job.id])
                raise LookupError
        except LookupError:
            said.append("savepoint")

    ends = declared(aending if on_loop else ending)
    async with work(dsn, ends):
        with psycopg.connect(dsn) as conn:
            handle = ends.enqueue(conn)
        await until(accounts.is_in(handle.id, "completed"))
    assert said == ["savepoint"]
    assert accounts.all("SELECT note FROM effect") == [("kept",)]


@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_a_deferred_constraint_fails_the_attempt_and_nothing_is_kept(
    dsn: str, accounts: Eyes, on_loop: bool
) -> None:
    accounts.do("ALTER TABLE effect ADD CONSTRAINT once UNIQUE (job) DEFERRABLE INITIALLY DEFERRED")

    def twice(job: Job) -> None:
        for note in ("first", "second"):
            job.connection.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, note])

    async def atwice(job: Job) -> None:
        for note in ("first", "second"):
            await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s, %s)", [job.id, note])

    twofold = declared(atwice if on_loop else twice)
    async with work(dsn, twofold):
        with psycopg.connect(dsn) as conn:
            handle = twofold.using(retry=1).enqueue(conn)
        await until(accounts.is_in(handle.id, "failed"))
    assert accounts.one("SELECT count(*) FROM effect") == 0
    assert accounts.one("SELECT error_type FROM pgqueue.attempt") == "UniqueViolation"


@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_an_sql_error_that_was_swallowed_is_no_success(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    def swallow(job: Job) -> None:
        job.connection.execute("INSERT INTO effect VALUES (%s, 'before')", [job.id])
        with pytest.raises(psycopg.errors.DivisionByZero):
            job.connection.execute("SELECT 1 / 0")

    async def aswallow(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute("INSERT INTO effect VALUES (%s, 'before')", [job.id])
        with pytest.raises(psycopg.errors.DivisionByZero):
            await conn.execute("SELECT 1 / 0")

    swallowing = declared(aswallow if on_loop else swallow)
    async with work(dsn, swallowing):
        with psycopg.connect(dsn) as conn:
            handle = swallowing.using(retry=1).enqueue(conn)
        await until(accounts.is_in(handle.id, "failed"))
    assert accounts.one("SELECT count(*) FROM effect") == 0
    assert accounts.one("SELECT error_type FROM pgqueue.attempt") == "InFailedSqlTransaction"
    assert "the handler caught an error of its SQL" in accounts.one("SELECT traceback FROM pgqueue.attempt")


@pytest.mark.promise("L06")
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_a_run_whose_job_was_given_away_cannot_commit(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    began, go_on = threading.Event(), threading.Event()

    def effect(job: Job) -> None:
        job.connection.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, str(job.claim)])
        if job.attempt == 1:
            began.set()
            assert go_on.wait(30)

    async def aeffect(job: Job) -> None:
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s, %s)", [job.id, str(job.claim)])
        if job.attempt == 1:
            began.set()
            assert await asyncio.to_thread(go_on.wait, 30)

    effecting = declared(aeffect if on_loop else effect)
    async with work(dsn, effecting) as late:
        with psycopg.connect(dsn) as conn:
            handle = effecting.enqueue(conn)
        await until(began.is_set)
        accounts.do(
            "WITH gone AS (DELETE FROM pgqueue.job_running RETURNING *) "
            "INSERT INTO pgqueue.job_available (id, task, args, queue, attempt) "
            "SELECT id, task, args, 'elsewhere', attempt FROM gone"
        )
        async with work(dsn, effecting, queues=["elsewhere"]):
            await until(accounts.is_in(handle.id, "completed"))
        go_on.set()
        await until(lambda: late.services.completer.fenced == 1)
    assert accounts.one("SELECT count(*) FROM effect") == 1
    assert accounts.all("SELECT state, attempt FROM pgqueue.job") == [("completed", 2)]


class Cut:
    """Ends the session of a transaction at a point of its COMMIT, the first time it comes there."""

    def __init__(self, eyes: Eyes) -> None:
        self.eyes = eyes
        self.cut = 0

    def session(self, conn: Any) -> None:
        if not self.cut:
            self.cut += 1
            self.eyes.do("SELECT pg_terminate_backend(%s, 5000)", conn.info.backend_pid)


@pytest.mark.promise("T15")
@pytest.mark.promise("T03")
@pytest.mark.parametrize("committed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_a_commit_whose_answer_is_lost_is_settled(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch, committed: bool, on_loop: bool
) -> None:
    """The session ends right before the COMMIT, or right after it: the transfer happens once either way."""
    cut = Cut(accounts)

    def transfer(job: Job) -> None:
        move(job.connection, 1, 2, 50)

    async def atransfer(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute("UPDATE account SET balance = balance - 50 WHERE id = 1")
        await conn.execute("UPDATE account SET balance = balance + 50 WHERE id = 2")

    class Lost(psycopg.OperationalError):
        pass

    commit, acommit = bodies.real(Commit, "_commit_end")

    def cutting(work: Commit, conn: Any, outcome: Any) -> None:
        if committed:
            commit(work, conn, outcome)
        cut.session(conn)
        if committed and cut.cut == 1:
            cut.cut += 1
            conn.close()
            raise Lost("the answer did not come")
        if not committed:
            commit(work, conn, outcome)

    async def acutting(work: Commit, conn: Any, outcome: Any) -> None:
        if committed:
            await acommit(work, conn, outcome)
        cut.session(conn)
        if committed and cut.cut == 1:
            cut.cut += 1
            await conn.close()
            raise Lost("the answer did not come")
        if not committed:
            await acommit(work, conn, outcome)

    bodies.replace(monkeypatch, Commit, "_commit_end", cutting, acutting)
    moving = declared(atransfer if on_loop else transfer)
    async with work(dsn, moving) as worker:
        with psycopg.connect(dsn) as conn:
            handle = moving.enqueue(conn)
        await until(accounts.is_in(handle.id, "completed"))
        await until(lambda: not worker.state.held)
        assert worker.services.completer.fenced == 0
    assert balances(accounts) == [50, 250, 50]
    assert outcomes(accounts) == ([] if committed else ["aborted"])


@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_whoever_is_stopped_before_the_commit_commits_nothing(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(job: Job) -> None:
        job.connection.execute("INSERT INTO effect VALUES (%s, 'before')", [job.id])
        began.set()
        while not go_on.wait(0.01):
            pass

    async def aslow(job: Job) -> None:
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s, 'before')", [job.id])
        began.set()
        await asyncio.sleep(3600)

    slowly = declared(aslow if on_loop else slow)
    async with work(dsn, slowly):
        with psycopg.connect(dsn) as conn:
            handle = slowly.enqueue(conn)
        await until(began.is_set)
        with psycopg.connect(dsn) as conn:
            pgqueue.cancel(conn, handle.id)
        await until(accounts.is_in(handle.id, "cancelled"))
        go_on.set()
    assert accounts.one("SELECT count(*) FROM effect") == 0


@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_a_connection_is_taken_only_when_asked_for_and_used_again(
    dsn: str, accounts: Eyes, on_loop: bool
) -> None:
    pids: set[int] = set()

    def asks(job: Job, wanted: bool) -> None:
        if wanted:
            assert job.connection is job.connection
            pids.add(job.connection.info.backend_pid)

    async def aasks(job: Job, wanted: bool) -> None:
        if wanted:
            assert await job.aconnection() is await job.aconnection()
            pids.add((await job.aconnection()).info.backend_pid)

    asking = declared(aasks if on_loop else asks)
    async with work(dsn, asking, concurrency=1):
        with psycopg.connect(dsn) as conn:
            asking.enqueue_many(conn, [(False,)] * 3)
        await until(accounts.done(3))
        assert accounts.backends("pgqueue job") == []
        with psycopg.connect(dsn) as conn:
            asking.enqueue_many(conn, [(True,)] * 5)
        await until(accounts.done(8))
        assert len(accounts.backends("pgqueue job")) == 1
    assert len(pids) == 1
    await until(lambda: accounts.backends("pgqueue job") == [])


@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_a_session_that_died_in_the_pool_costs_nobody_an_attempt(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    def effect(job: Job) -> None:
        job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])

    async def aeffect(job: Job) -> None:
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s)", [job.id])

    effecting = declared(aeffect if on_loop else effect)
    async with work(dsn, effecting, concurrency=1):
        for number in (1, 2):
            with psycopg.connect(dsn) as conn:
                effecting.enqueue(conn)
            await until(accounts.done(number))
            accounts.terminate("pgqueue job")
    assert accounts.one("SELECT count(*) FROM effect") == 2
    assert outcomes(accounts) == []


@pytest.mark.promise("F24")
async def test_the_sessions_of_handlers_are_known_to_whoever_rescues(dsn: str, accounts: Eyes) -> None:
    listed: list[Any] = []
    known = "SELECT sessions @> jsonb_build_array(jsonb_build_object('pid', %s::int)) FROM pgqueue.worker"

    def effect(job: Job) -> None:
        listed.append(accounts.one(known, job.connection.info.backend_pid))

    async def aeffect(job: Job) -> None:
        listed.append(accounts.one(known, (await job.aconnection()).info.backend_pid))

    both = [declared(effect), declared(aeffect)]
    async with work(dsn, *both):
        with psycopg.connect(dsn) as conn:
            for each in both:
                each.enqueue(conn)
        await until(accounts.done(2))
    assert listed == [True, True]


@pytest.mark.promise("I12")
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_no_handler_waits_for_a_lock_for_ever(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    timeouts: list[str] = []

    def looks(job: Job) -> None:
        timeouts.append(job.connection.execute("SHOW lock_timeout").fetchone()[0])

    async def alooks(job: Job) -> None:
        timeouts.append((await (await (await job.aconnection()).execute("SHOW lock_timeout")).fetchone())[0])

    looking = declared(alooks if on_loop else looks)
    async with work(dsn, looking):
        with psycopg.connect(dsn) as conn:
            looking.enqueue(conn)
        await until(accounts.done(1))
    assert timeouts == ["10s"]


async def test_it_says_who_may_ask_and_how(dsn: str, accounts: Eyes) -> None:
    said: list[str] = []

    async def asked(get: Callable[[], Any]) -> None:
        try:
            found = get()
            if isinstance(found, Awaitable):
                await found
        except pgqueue.Error as error:
            said.append(str(error))

    @task(name="tx.plain")
    async def plain(job: Job) -> None:
        await asked(lambda: job.connection)

    @task(name="tx.onloop", transactional=True)
    async def on_loop(job: Job) -> None:
        await asked(lambda: job.connection)

    @task(name="tx.inthread", transactional=True)
    def in_thread(job: Job) -> None:
        asyncio.run(asked(job.aconnection))
        asyncio.run(asked(lambda: job.complete(job.connection)))

    for each in (plain, on_loop, in_thread):
        async with work(dsn, each):
            with psycopg.connect(dsn) as conn:
                handle = each.enqueue(conn)
            await until(accounts.is_in(handle.id, "completed"))
    assert ["transactional=True" in said[0], "await job.aconnection()" in said[1], "job.connection" in said[2]] == [
        True
    ] * 3
    assert "the worker completes it" in said[3]


@pytest.mark.promise("I11")
async def test_a_transaction_that_was_open_for_long_is_named(
    dsn: str, accounts: Eyes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.transactions.commit.LONG_SECONDS", 0.0)

    def holds(job: Job) -> None:
        job.connection.execute("SELECT FROM account WHERE id = 1 FOR UPDATE")

    holding = declared(holds)
    with caplog.at_level(logging.WARNING, "pgqueue"):
        async with work(dsn, holding):
            with psycopg.connect(dsn) as conn:
                holding.enqueue(conn)
            await until(accounts.done(1))
    assert re.search(r"\.holds\) had its transaction open for \d+\.\d s", caplog.text)


async def test_a_session_of_sqlalchemy_shares_the_transaction(dsn: str, accounts: Eyes) -> None:
    orm = pytest.importorskip("sqlalchemy.orm")
    import sqlalchemy as sa

    class Base(orm.DeclarativeBase):  # type: ignore[misc, name-defined]
        pass

    class Account(Base):
        __tablename__ = "account"
        id = orm.mapped_column(sa.Integer, primary_key=True)
        balance = orm.mapped_column(sa.Integer)

    def transfer(job: Job, fails: bool) -> None:
        session = job.session()
        assert session is job.session()
        giver, taker = session.get_one(Account, 1), session.get_one(Account, 2)
        giver.balance -= 50
        taker.balance += 50
        for end in (session.commit, session.rollback):
            with pytest.raises(pgqueue.Error, match="the worker"):
                end()
        with session.begin_nested() as nested:
            session.execute(sa.text("INSERT INTO effect VALUES (:job, 'undone')"), {"job": job.id})
            nested.rollback()
        job.connection.execute("INSERT INTO effect VALUES (%s, 'kept')", [job.id])
        if fails and job.attempt == 1:
            session.flush()
            raise LookupError

    transferring = declared(transfer)
    async with work(dsn, transferring):
        for number, fails in enumerate((False, True), 1):
            with psycopg.connect(dsn) as conn:
                transferring.enqueue(conn, fails)
            await until(accounts.done(number))
    assert balances(accounts) == [0, 300, 50]
    assert accounts.all("SELECT note FROM effect") == [("kept",), ("kept",)]


async def test_what_is_returned_is_not_kept_where_nobody_wants_it(dsn: str, eyes: Eyes) -> None:
    @task(name="tx.unstored", store_result=False)
    async def unstored(again: bool) -> str | Snooze:
        return Snooze(3600) if again else "nobody's"

    async with work(dsn, unstored):
        with psycopg.connect(dsn) as conn:
            asked = unstored.enqueue(conn, True)
            unstored.enqueue(conn, False)
        await until(eyes.done(1))
        await until(eyes.is_in(asked.id, "scheduled"))
    assert eyes.one("SELECT result FROM pgqueue.job_done") is None


@pytest.mark.promise("T18")
@pytest.mark.promise("T09")
async def test_the_ten_lines_of_the_readme_move_money_once(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run twice (its session is cut before the first COMMIT, the answer to the second is lost), in effect once."""
    eyes.do("CREATE TABLE account (id int PRIMARY KEY, cents int NOT NULL)")
    eyes.do("INSERT INTO account VALUES (1, 100), (2, 200)")
    [block] = [block for block in pages.blocks(pages.ROOT / "README.md") if block.text.startswith("# transfer.py")]
    lines = [line for line in block.text.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10
    module: dict[str, Any] = {"__name__": "transfer"}
    exec(block.text, module)
    (commit, _), runs = bodies.real(Commit, "_commit_end"), []

    def cutting(work: Commit, conn: Any, outcome: Any) -> None:
        runs.append(outcome)
        if len(runs) == 2:
            commit(work, conn, outcome)
        eyes.do("SELECT pg_terminate_backend(%s, 5000)", conn.info.backend_pid)
        if len(runs) == 1:
            commit(work, conn, outcome)
        else:
            conn.execute("SELECT 1")

    bodies.replace(monkeypatch, Commit, "_commit_end", cutting, None)
    quick = dataclasses.replace(module["transfer"], retry=SOON)
    async with work(dsn, quick):
        with psycopg.connect(dsn) as conn:
            handle = quick.enqueue(conn, 1, 2, 30)
        await until(eyes.is_in(handle.id, "completed"))
    assert len(runs) == 2
    assert eyes.all("SELECT cents FROM account ORDER BY id") == [(70,), (230,)]


@pytest.mark.promise("T08")
@pytest.mark.promise("T16")
@pytest.mark.parametrize("times", [2, 5, pytest.param(20, marks=pytest.mark.long)])
async def test_a_job_that_is_delivered_many_times_has_one_effect(dsn: str, accounts: Eyes, times: int) -> None:
    """Each run is released by force while it is in its transaction, and delivered again; then all try to commit.

    Each runs in a worker of its own: in one worker it would wait for the run before.
    """
    runs: list[str] = []
    all_there = asyncio.Event()

    async def transfer(job: Job) -> None:
        conn = await job.aconnection()
        run = str(len(runs))
        await conn.execute("INSERT INTO effect VALUES (%s, %s)", [job.id, run])
        runs.append(run)
        await all_there.wait()

    moving = declared(transfer)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(work(dsn, moving, concurrency=1, poll=0.05)) for _ in range(times)]
        with psycopg.connect(dsn) as conn:
            handle = moving.enqueue(conn)
        for number in range(1, times + 1):
            await until(lambda number=number: len(runs) == number)  # type: ignore[misc]
            if number < times:
                accounts.do(
                    "WITH gone AS (DELETE FROM pgqueue.job_running RETURNING *), "
                    "again AS (INSERT INTO pgqueue.job_available (id, task, args, attempt) "
                    "SELECT id, task, args, attempt FROM gone RETURNING queue) "
                    "SELECT pg_notify('pgqueue.' || queue, '') FROM again"
                )
        all_there.set()
        await until(accounts.is_in(handle.id, "completed"))
        await until(lambda: sum(worker.services.completer.fenced for worker in workers) == times - 1)
    assert accounts.all("SELECT note FROM effect") == [(runs[-1],)]
    assert len(set(runs)) == times


@pytest.mark.second
@pytest.mark.promise("F06")
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_a_commit_over_a_dead_wire_is_given_up_and_settled(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    monkeypatch.setattr("pgqueue.worker.transactions.commit.ROUND_TRIP_SECONDS", 1.0)
    runs: list[int] = []
    with Wire(dsn) as wire:

        def effect(job: Job) -> None:
            job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])
            runs.append(job.attempt)
            if len(runs) == 1:
                assert wire.kill("pgqueue job") == 1

        async def aeffect(job: Job) -> None:
            await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s)", [job.id])
            runs.append(job.attempt)
            if len(runs) == 1:
                assert await asyncio.to_thread(wire.kill, "pgqueue job") == 1

        effecting = declared(aeffect if on_loop else effect)
        async with work(wire.dsn, effecting, lease=3.0) as worker:
            with psycopg.connect(dsn) as conn:
                handle = effecting.enqueue(conn)
            await until(accounts.is_in(handle.id, "completed"), 30)
            await until(lambda: not worker.state.held)
    assert accounts.one("SELECT count(*) FROM effect") == 1
    assert (runs, outcomes(accounts)) == ([1, 1], ["aborted"])
    left = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    assert accounts.one(left) == 0


@pytest.mark.promise("F48")
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize("how", ["elsewhere", "asks", "asks to end"])
@pytest.mark.parametrize("transactional", [True, "required"])
async def test_a_handler_that_did_not_ask_for_its_connection_is_named_or_failed(
    dsn: str, accounts: Eyes, caplog: pytest.LogCaptureFixture, transactional: Any, how: str, on_loop: bool
) -> None:
    """What it wrote through another session is committed, whatever becomes of its job."""

    def elsewhere(job: Job) -> Any:
        if how == "asks":
            job.connection.execute("SELECT 1")
        return Cancel("nothing to do") if how == "asks to end" else None

    async def aelsewhere(job: Job) -> Any:
        if how == "asks":
            await (await job.aconnection()).execute("SELECT 1")
        return Cancel("nothing to do") if how == "asks to end" else None

    writes = dataclasses.replace(declared(aelsewhere if on_loop else elsewhere), transactional=transactional)
    async with work(dsn, writes):
        with psycopg.connect(dsn) as conn:
            jobs = [writes.enqueue(conn).id for _ in range(3)]
        await until(lambda: not accounts.one("SELECT count(*) FROM pgqueue.job WHERE finished_at IS NULL"))
    named = caplog.text.count("did not ask for the connection of its transaction")
    match how, transactional:
        case "asks to end", _:
            assert accounts.states() == {"cancelled": 3} and not named
        case "elsewhere", "required":
            assert accounts.states() == {"failed": 3}
            assert outcomes(accounts) == ["failed"] * 3
            assert "job.connection" in str(accounts.one("SELECT message FROM pgqueue.attempt LIMIT 1"))
        case _:
            assert accounts.states() == {"completed": 3} and named == (how == "elsewhere")
    assert len(jobs) == 3


def test_transactional_is_a_flag_or_required() -> None:
    assert task(name="says.so", transactional="required")(lambda: None).transactional == "required"
    for wrong in ("always", 1, None):
        with pytest.raises(pgqueue.InvalidOption, match="neither True, False nor 'required'"):
            task(name="says.so", transactional=wrong)(lambda: None)  # type: ignore[call-overload]
