"""A transaction that is begun for the next job with the end of the one before: as if that job had begun it itself."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import bodies
import psycopg
import pytest
import sqlalchemy
from accounts import accounts, balances
from handler_pools import FOUND, LEFT, SESSIONS
from transactional_tasks import BOTH, WRITE, declared, enqueued, laster, outcomes, together, writer
from workers import Eyes, until, work

from pgqueue import Job
from pgqueue.worker.run.slots import SlotGroup
from pgqueue.worker.services import Services
from pgqueue.worker.transactions import handler_connection
from pgqueue.worker.transactions.commit_message import ANEW, BEGIN
from pgqueue.worker.transactions.handler_connection import BegunEarly
from pgqueue.worker.transactions.handler_pool import Side

__all__ = ["accounts"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was said by itself to begin and end transactions. The next jobs are at hand always, and never too late."""
    commands: list[bytes] = []
    say = handler_connection._Both._say

    async def says(conn: handler_connection._Both, command: bytes) -> None:
        if not command.startswith(b"PREPARE"):
            commands.append(command.rstrip(b"0123456789"))  # without its mark
        await say(conn, command)

    def adapt(pool: SlotGroup, least: int = 0) -> None:
        pool.prefetch = 20

    monkeypatch.setattr(handler_connection._Both, "_say", says)
    monkeypatch.setattr(SlotGroup, "adapt", adapt)
    monkeypatch.setattr(handler_connection, "EARLY_SECONDS", 60.0)
    return commands


@BOTH
async def test_a_job_at_hand_has_its_transaction_already(
    dsn: str, accounts: Eyes, said: list[bytes], on_loop: bool
) -> None:
    """It is its own: another one for each job, as old as the job at most, of the isolation it asks for."""
    found: dict[int, Any] = {}
    look = "SELECT now(), pg_current_xact_id()::text, current_setting('transaction_isolation')"

    def writes(job: Job) -> None:
        conn = job.connection
        conn.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        conn.execute(WRITE)
        found[job.id] = conn.execute(look).fetchone()

    async def awrites(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        await conn.execute(WRITE)
        found[job.id] = await (await conn.execute(look)).fetchone()

    writing = declared(awrites if on_loop else writes)
    async with work(dsn, writing, concurrency=1) as worker:
        await until(accounts.is_in(together(dsn, worker, *[writing] * 6), "completed"))
    assert said == [BEGIN]
    assert balances(accounts)[0] == 106
    assert outcomes(accounts) == []
    assert len({xid for _, xid, _ in found.values()}) == 6
    assert {isolation for *_, isolation in found.values()} == {"serializable"}
    for job_id, started_at in accounts.all("SELECT id, started_at FROM pgqueue.job_done"):
        assert found[job_id][0] >= started_at


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["anew", "as it is"])
@BOTH
async def test_nothing_of_a_session_is_left_to_who_gets_its_next_transaction(
    dsn: str, accounts: Eyes, said: list[bytes], monkeypatch: pytest.MonkeyPatch, on_loop: bool, seconds: float
) -> None:
    """Nor does undoing that one, to begin it anew, undo what has cleared the session."""
    monkeypatch.setattr(handler_connection, "EARLY_SECONDS", seconds)
    found: list[Any] = []

    def looks(job: Job) -> None:
        found.append(job.connection.execute(FOUND).fetchone())

    async def alooks(job: Job) -> None:
        found.append(await (await (await job.aconnection()).execute(FOUND)).fetchone())

    def leaves(job: Job) -> None:
        for sql in LEFT:
            job.connection.execute(sql)

    async def aleaves(job: Job) -> None:
        for sql in LEFT:
            await (await job.aconnection()).execute(sql)

    looking, leaving = declared(alooks if on_loop else looks), declared(aleaves if on_loop else leaves)
    async with work(dsn, looking, leaving, concurrency=1) as worker:
        await until(accounts.is_in(together(dsn, worker, looking, leaving, looking), "completed"))
    before, after = found
    assert after == before
    assert said == ([BEGIN, ANEW, ANEW] if seconds == 0.0 else [BEGIN])


def test_nobody_gets_one_that_was_begun_before_he_was_claimed() -> None:
    """Its now() would lie before the commit that enqueued the job."""
    ahead = BegunEarly(settled=5)
    assert ahead.suits(5)
    assert not ahead.suits(6)


@BOTH
async def test_one_begun_before_the_claim_is_begun_anew(
    dsn: str, accounts: Eyes, said: list[bytes], monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    monkeypatch.setattr(Services, "_begin_early", lambda self, is_async: 0)
    nows: list[Any] = []

    def writes(job: Job) -> None:
        nows.append(job.connection.execute("SELECT now()").fetchone())
        job.connection.execute(WRITE)

    async def awrites(job: Job) -> None:
        conn = await job.aconnection()
        nows.append(await (await conn.execute("SELECT now()")).fetchone())
        await conn.execute(WRITE)

    writing = declared(awrites if on_loop else writes)
    async with work(dsn, writing, concurrency=1) as worker:
        await until(accounts.is_in(together(dsn, worker, *[writing] * 3), "completed"))
    assert said == [BEGIN, ANEW, ANEW]
    assert balances(accounts)[0] == 103
    assert len(set(nows)) == 3


@pytest.mark.second
@BOTH
async def test_one_that_nobody_wants_is_not_kept(
    dsn: str, accounts: Eyes, said: list[bytes], monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    """The next job does not ask for its connection, and lasts."""
    begun, going = threading.Event(), threading.Event()

    writing, lasting = writer(on_loop), laster(on_loop, begun, going)
    async with work(dsn, writing, lasting, concurrency=1) as worker:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(worker.services.handler_pool, "_undo_stale", lambda: None)
            last = together(dsn, worker, writing, lasting, writing)
            await until(begun.is_set)
            assert accounts.one(f"SELECT count(*) {SESSIONS} AND state = 'idle in transaction'") == 1
        await until(lambda: accounts.one(f"SELECT count(*) {SESSIONS} AND state = 'idle in transaction'") == 0, 30)
        going.set()
        await until(accounts.is_in(last, "completed"))
    assert balances(accounts)[0] == 102
    assert outcomes(accounts) == []
    await until(lambda: accounts.one(f"SELECT count(*) {SESSIONS}") == 0)


@BOTH
async def test_one_whose_session_is_gone_costs_no_attempt(
    dsn: str, accounts: Eyes, said: list[bytes], monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    """If it is found out while it is begun anew."""
    monkeypatch.setattr(handler_connection, "EARLY_SECONDS", 0.0)
    begun, going = threading.Event(), threading.Event()

    writing, lasting = writer(on_loop), laster(on_loop, begun, going)
    async with work(dsn, writing, lasting, concurrency=1) as worker:
        monkeypatch.setattr(worker.services.handler_pool, "_undo_stale", lambda: None)
        last = together(dsn, worker, writing, lasting, writing)
        await until(begun.is_set)
        assert accounts.one(f"SELECT count(*) {SESSIONS} AND state = 'idle in transaction'") == 1
        accounts.all(f"SELECT pg_terminate_backend(pid, 10000) {SESSIONS}")
        going.set()
        await until(accounts.is_in(last, "completed"))
        monkeypatch.undo()
    assert said == [BEGIN, ANEW, BEGIN]
    assert balances(accounts)[0] == 102
    assert outcomes(accounts) == []


@BOTH
async def test_a_connection_goes_back_to_its_pool_from_time_to_time(
    dsn: str, accounts: Eyes, said: list[bytes], monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    """Which makes new ones for old."""
    monkeypatch.setattr(handler_connection, "OUT_SECONDS", 0.0)

    writing = writer(on_loop)
    async with work(dsn, writing, concurrency=1) as worker:
        await until(accounts.is_in(together(dsn, worker, *[writing] * 3), "completed"))
        await until(accounts.is_in(enqueued(dsn, writing), "completed"))
    assert said == [BEGIN] * 4


async def test_a_session_of_sqlalchemy_leaves_the_next_transaction_alone(
    dsn: str, accounts: Eyes, said: list[bytes]
) -> None:
    """What it rolls back when it is closed is a savepoint of its own transaction, which is over by then."""

    def writes(job: Job) -> None:
        job.session().execute(sqlalchemy.text(WRITE))

    writing = declared(writes)
    async with work(dsn, writing, concurrency=1) as worker:
        await until(accounts.is_in(together(dsn, worker, *[writing] * 3), "completed"))
        assert worker.services.completer.fenced == 0
    assert said == [BEGIN]
    assert balances(accounts)[0] == 103
    assert outcomes(accounts) == []


async def test_a_commit_that_fails_says_why_though_the_next_transaction_has_begun(
    dsn: str, accounts: Eyes, said: list[bytes]
) -> None:
    """The job runs again in place, as after any abort."""
    accounts.do(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE serialization_failure; END $$"
    )
    accounts.do("CREATE TABLE once (id int)")
    accounts.do(
        "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON once DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    tries: list[int] = []

    def writes(job: Job) -> None:
        tries.append(job.id)
        session = job.session()
        session.execute(sqlalchemy.text(WRITE))
        if len(tries) == 1:
            session.execute(sqlalchemy.text("INSERT INTO once VALUES (1)"))

    writing = declared(writes)
    async with work(dsn, writing, concurrency=1) as worker:
        await until(accounts.is_in(together(dsn, worker, *[writing] * 3), "completed"))
    assert outcomes(accounts) == ["aborted"]
    assert balances(accounts)[0] == 103


@BOTH
async def test_who_asks_what_became_of_a_commit_does_so_in_nobodys_transaction(
    dsn: str, accounts: Eyes, said: list[bytes], monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    """Only an attempt's first transaction may be one that was begun ahead."""
    asked: list[bool] = []
    take, atake = bodies.real(Side, "acquire")

    def takes(lender: Side[Any], **how: Any) -> Any:
        asked.append(how.get("begun", False))
        return take(lender, **how)

    async def atakes(lender: Side[Any], **how: Any) -> Any:
        asked.append(how.get("begun", False))
        return await atake(lender, **how)

    bodies.replace(monkeypatch, Side, "acquire", takes, atakes)
    finish = handler_connection._Both._finish
    lost: list[int] = []

    async def finishes(conn: handler_connection._Both, message: bytes) -> None:
        await finish(conn, message)
        if len(lost) == 0:
            lost.append(1)
            conn.pgconn.finish()
            raise psycopg.OperationalError("the answer was lost")

    monkeypatch.setattr(handler_connection._Both, "_finish", finishes)

    writing = writer(on_loop)
    async with work(dsn, writing, concurrency=1) as worker:
        await until(accounts.is_in(together(dsn, worker, *[writing] * 3), "completed"))
    assert balances(accounts)[0] == 103
    assert outcomes(accounts) == []
    assert asked == [True, False, True, True]


@BOTH
async def test_nothing_is_prepared_in_a_transaction_that_was_begun_ahead(
    dsn: str, accounts: Eyes, said: list[bytes], on_loop: bool
) -> None:
    """It would have its snapshot, and a handler that asks for an isolation could not have it any more."""
    serializable = "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"
    refused = "UPDATE account SET balance = -1"

    def writes(job: Job, back: bool = False) -> None:
        conn = job.connection
        conn.execute(serializable)
        conn.execute(WRITE, prepare=True)
        if back:
            with pytest.raises(psycopg.errors.CheckViolation), conn.transaction():
                conn.execute(refused)

    async def awrites(job: Job, back: bool = False) -> None:
        conn = await job.aconnection()
        await conn.execute(serializable)
        await conn.execute(WRITE, prepare=True)
        if back:
            with pytest.raises(psycopg.errors.CheckViolation):
                async with conn.transaction():
                    await conn.execute(refused)

    writing = declared(awrites if on_loop else writes)
    async with work(dsn, writing, concurrency=1) as worker:
        for pool in worker.services.executor._running.groups:
            pool.prefetch = 20
        with psycopg.connect(dsn) as conn:
            last = [int(writing.enqueue(conn, back=number == 3).id) for number in range(14)][-1]
        await until(accounts.is_in(last, "completed"))
    assert outcomes(accounts) == []
    assert balances(accounts)[0] == 114


@BOTH
async def test_the_pools_close_though_a_connection_does_not_come_back(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    """Over a dead link it may take long to undo what was begun on it."""
    writing = writer(on_loop)
    async with asyncio.timeout(60):
        async with work(dsn, writing) as worker:
            await until(accounts.is_in(enqueued(dsn, writing), "completed"))
            hangs = asyncio.create_task(asyncio.Event().wait())
            worker.services.handler_pool._undoing.add(hangs)  # type: ignore[arg-type]
    pool = worker.services.handler_pool.on_loop.pool if on_loop else worker.services.handler_pool.threads.pool
    assert pool is not None and pool.closed
    hangs.cancel()
