"""A handler whose SQL ends the transaction of its job: whatever comes then, what it committed is not done again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from time import sleep
from typing import Any

import psycopg
import pytest
from accounts import accounts
from psycopg.sql import SQL
from transactional_tasks import BOTH, SOON, declared, enqueued, outcomes, together
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job, Snooze
from pgqueue.client.tasks import Task
from pgqueue.worker.run import serialization_retries
from pgqueue.worker.transactions.handler_cursor import ends_transaction

__all__ = ["accounts"]

pytestmark = [pytest.mark.promise("T07"), pytest.mark.each_value]

TAKE = "UPDATE account SET balance = balance - 10 WHERE id = 1"
SESSION = "SELECT pg_terminate_backend(%s, 5000)"
BALANCE = "SELECT balance FROM account WHERE id = 1"
SAID = "ended the transaction by itself"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization_retries, "PAUSE_MOST", 0.06)


def say(*texts: str) -> Callable[[Any], object]:
    """Send these one after another. An error of the server is caught: the handler goes on."""

    def send(conn: Any) -> object:
        if isinstance(conn, psycopg.AsyncConnection):
            return asend(conn)
        for text in texts:
            try:
                conn.execute(text)
            except psycopg.Error as error:
                caught.append(error)
        return None

    async def asend(conn: psycopg.AsyncConnection[Any]) -> None:
        for text in texts:
            try:
                await conn.execute(text.encode())
            except psycopg.Error as error:
                caught.append(error)

    caught: list[psycopg.Error] = []
    return send


def ends(eyes: Eyes, how: str) -> Callable[[Any], object]:
    """What the handler does after it has ended the transaction."""

    def end(conn: Any) -> object:
        match how:
            case "its session is lost":
                eyes.do(SESSION, conn.info.backend_pid)
                return conn.execute("SELECT 1")
            case "its session is lost, unseen":
                eyes.do(SESSION, conn.info.backend_pid)
            case "a deadlock":
                raise psycopg.errors.DeadlockDetected("as if")
            case "an error":
                raise ValueError("of its own")
            case "a snooze":
                raise Snooze(0.01)
            case "it closes":
                return conn.close()
        return None

    return end


def handler(on_loop: bool, runs: list[int], *steps: Callable[[Any], object]) -> Any:
    def fn(job: Job) -> None:
        runs.append(job.attempt)
        for step in steps:
            step(job.connection)

    async def afn(job: Job) -> None:
        runs.append(job.attempt)
        for step in steps:
            answer = step(await job.aconnection())
            if answer is not None:
                await answer  # type: ignore[misc]

    return afn if on_loop else fn


@BOTH
@pytest.mark.parametrize(
    "texts",
    [
        ("COMMIT", "BEGIN"),
        ("COMMIT",),
        ("COMMIT; SELECT 1 / 0",),
        ("PREPARE TRANSACTION 'own'",),
        ("COMMIT AND CHAIN",),
        ("END; BEGIN",),
        (f"COMMIT; {SESSION % 'pg_backend_pid()'}",),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "then",
    [
        "its session is lost", "its session is lost, unseen", "a deadlock", "an error", "a snooze", "it closes",
        "it returns",
    ],
)  # fmt: skip
async def test_what_a_handler_committed_is_not_done_again(
    dsn: str, accounts: Eyes, texts: tuple[str, ...], then: str, on_loop: bool
) -> None:
    """Naive: only the transaction that is open at the end is looked at. The one that it began itself looks right."""
    runs: list[int] = []
    ending = declared(handler(on_loop, runs, say(TAKE, *texts), ends(accounts, then)))
    async with work(dsn, ending, poll=0.05):
        job = enqueued(dsn, ending)
        await until(lambda: accounts.state(job) in ("failed", "completed") or len(runs) > 1)
        await until(accounts.is_in(job, "failed"))
    assert (runs, outcomes(accounts)) == ([1], ["failed"])
    assert SAID in accounts.one("SELECT message FROM pgqueue.attempt")
    if texts[0].startswith("PREPARE"):
        accounts.do("COMMIT PREPARED 'own'")
    assert accounts.one(BALANCE) == 90


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("COMMIT", True), (b" commit;", True), ("/* web:1 */ -- so\n end", True), ("COMMIT AND CHAIN", True),
        (";COMMIT WORK", True), ("prepare\ttransaction 'x'", True), (b"/* a */commit and no chain", True),
        ("COMMIT PREPARED 'x'", False), ("committed", False), ("SELECT 'COMMIT'", False), ("-- COMMIT", False),
        ("/* COMMIT */ SELECT 1", False), ("PREPARE p AS SELECT 1", False), ("ending", False), (b"ROLLBACK", False),
        ("DO $$ BEGIN NULL; END $$", False), ("", False), (None, False),
        (SQL("commit"), True), (SQL("SELECT 1"), False),
        ("/* a */ " * 50_000 + "END", True), ("/* a */ " * 50_000 + "/* COMMIT", False),
    ],
)  # fmt: skip
def test_the_first_word_of_a_text_says_whether_it_ends_the_transaction(text: object, ends: bool) -> None:
    """Also behind many comments. A pattern that goes back tries each way to divide them, and never ends."""
    assert ends_transaction(text) is ends


@BOTH
async def test_what_a_handler_rolled_back_and_chained_is_made_anew(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    """Nothing of it was kept, and a transaction is open: the run is lost with it, and made again."""
    runs: list[int] = []
    acts = [say(TAKE, "ROLLBACK AND CHAIN", TAKE), ends(accounts, "its session is lost")]
    once = [lambda conn, act=act: act(conn) if len(runs) == 1 else None for act in acts]
    again = lambda conn: say(TAKE)(conn) if len(runs) == 2 else None  # noqa: E731
    chaining = declared(handler(on_loop, runs, *once, again))
    async with work(dsn, chaining):
        await until(accounts.is_in(enqueued(dsn, chaining), "completed"))
    assert (runs, outcomes(accounts)) == ([1, 1], ["aborted"])
    assert accounts.one(BALANCE) == 90


RETURNS: dict[str, Any] = {"nothing": None, "a result": 7, "a snooze": Snooze(0.01), "successors": None}
"""By what its job ends: each of them is committed in another way."""


@pytest.mark.promise("F196")
@BOTH
@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize(
    ("text", "balance"),
    [
        ("ROLLBACK AND CHAIN", 100),
        ("ROLLBACK AND CHAIN; RESET ALL", 100),
        ("SELECT 1; ROLLBACK; BEGIN", 100),
        ("SELECT 1; COMMIT AND CHAIN", 90),
        ("SAVEPOINT s; ROLLBACK TO s; SELECT 1; ROLLBACK AND CHAIN; SET LOCAL lock_timeout = 7", 100),
    ],
    ids=str,
)
async def test_a_transaction_that_was_ended_unseen_is_no_success(
    dsn: str, accounts: Eyes, text: str, balance: int, returned: str, on_loop: bool
) -> None:
    """Naive: a transaction is open, so it is committed, and the job completed. What it wrote is gone."""
    runs: list[int] = []

    def ends(job: Job) -> Any:
        runs.append(job.attempt)
        job.connection.execute(TAKE)
        job.connection.execute(text)
        job.connection.execute("INSERT INTO effect VALUES (1)")
        if returned == "successors":
            job.enqueue(asked)
        return RETURNS[returned]

    async def aends(job: Job) -> Any:
        runs.append(job.attempt)
        conn = await job.aconnection()
        await conn.execute(TAKE)
        await conn.execute(text.encode())
        await conn.execute("INSERT INTO effect VALUES (1)")
        if returned == "successors":
            job.enqueue(asked)
        return RETURNS[returned]

    asked: Any = declared(aends if on_loop else ends)
    async with work(dsn, asked, poll=0.05):
        job = enqueued(dsn, asked)
        await until(lambda: accounts.state(job) in ("failed", "completed") or len(runs) > 1)
        await until(accounts.is_in(job, "failed"))
    assert (runs, outcomes(accounts), accounts.one(BALANCE)) == ([1], ["failed"], balance)
    assert accounts.one("SELECT count(*) FROM effect") == 0
    assert accounts.one("SELECT count(*) FROM pgqueue.job") == 1
    assert SAID in accounts.one("SELECT message FROM pgqueue.attempt")


@pytest.mark.promise("F196")
@BOTH
async def test_a_transaction_that_the_worker_has_begun_is_taken_for_no_other(
    dsn: str, accounts: Eyes, on_loop: bool
) -> None:
    """Savepoints, blocks that were rolled back, settings, and a RESET ALL leave it what it is. Also the next one of the
    same session, which has another mark."""
    texts = [
        "SAVEPOINT s", "SET LOCAL lock_timeout = 7", TAKE, "ROLLBACK TO s", "RELEASE s", "RESET lock_timeout",
        "/* all */ reset all", "SET app.tenant = 'a'", "RESET ALL;", TAKE,
    ]  # fmt: skip

    def goes(job: Job) -> int:
        with pytest.raises(psycopg.errors.DivisionByZero), job.connection.transaction():
            job.connection.execute("SELECT 1 / 0")
        say(*texts)(job.connection)
        return int(job.connection.info.backend_pid)

    async def agoes(job: Job) -> int:
        conn = await job.aconnection()
        with pytest.raises(psycopg.errors.DivisionByZero):
            async with conn.transaction():
                await conn.execute("SELECT 1 / 0")
        await say(*texts)(conn)  # type: ignore[misc]
        return int(conn.info.backend_pid)

    going = declared(agoes if on_loop else goes)
    async with work(dsn, going, concurrency=1, poll=0.05) as worker:
        await until(accounts.is_in(together(dsn, worker, *[going] * 5), "completed"))
    assert (outcomes(accounts), accounts.one(BALANCE)) == ([], 50)
    assert accounts.one("SELECT count(DISTINCT result::text) FROM pgqueue.job_done") == 1


@BOTH
@pytest.mark.parametrize("how", ["timeout", "cancel", "shutdown"])
async def test_a_job_that_is_stopped_after_a_commit_of_its_own_is_not_given_back(
    dsn: str, accounts: Eyes, how: str, on_loop: bool
) -> None:
    runs, committed = list[int](), threading.Event()

    def hangs(job: Job) -> None:
        runs.append(job.attempt)
        say(TAKE, "COMMIT")(job.connection)
        committed.set()
        while True:
            sleep(0.01)

    async def ahangs(job: Job) -> None:
        runs.append(job.attempt)
        await say(TAKE, "COMMIT")(await job.aconnection())  # type: ignore[misc]
        committed.set()
        await asyncio.sleep(3600)

    hanging = declared(ahangs if on_loop else hangs, **({"timeout": 0.5} if how == "timeout" else {}))
    async with work(dsn, hanging, poll=0.05) as worker:
        job = enqueued(dsn, hanging)
        await until(committed.is_set)
        if how == "cancel":
            with psycopg.connect(dsn) as conn:
                pgqueue.cancel(conn, job)
        elif how == "shutdown":
            await worker.stop(0)
        await until(lambda: accounts.state(job) != "running")
    assert (accounts.state(job), runs, accounts.one(BALANCE)) == ("failed", [1], 90)
    assert SAID in accounts.one("SELECT message FROM pgqueue.attempt")


# In a batch of an iteration -------------------------------------------------------------------------------------------


LEAVES = object()
"""An act that answers this leaves the loop."""


def iterating(
    on_loop: bool, transactional: bool, runs: list[int], seen: list[int], act: Callable[..., object], kept: bool = False
) -> Any:
    """A task that goes through 1 to 4 in batches of one, and writes each into `effect`.

    If the iteration is `kept`, its loop is not closed before the error comes to the end of the handler.
    """

    def numbers(cursor: int | None) -> list[tuple[int, int]]:
        return [(n, n) for n in range((cursor or 0) + 1, 5)]

    def goes(job: Job) -> None:
        runs.append(job.attempt)
        batches = [job.iterate(numbers, 1)]
        for batch in batches[0] if kept else batches.pop():
            seen.append(batch[0])
            job.connection.execute("INSERT INTO effect VALUES (%s)", batch)
            if batch[0] == 3 and len(runs) == 1 and act(job.connection) is LEAVES:
                break

    async def agoes(job: Job) -> None:
        runs.append(job.attempt)
        batches = [job.aiterate(numbers, 1)]
        async for batch in batches[0] if kept else batches.pop():
            seen.append(batch[0])
            conn = await job.aconnection()
            await conn.execute("INSERT INTO effect VALUES (%s)", batch)
            if batch[0] == 3 and len(runs) == 1:
                answer = act(conn)
                if answer is not None and await answer is LEAVES:  # type: ignore[misc]
                    break

    made: Task[..., Any] = pgqueue.task(name="own_end.iterates", transactional=transactional, retry=SOON)(
        agoes if on_loop else goes
    )
    return made


@pytest.mark.promise("F196")
@BOTH
async def test_a_batch_that_was_ended_unseen_is_no_batch(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    """Naive: its cursor is written into the transaction behind it, and its writes are left out."""
    runs, seen = list[int](), list[int]()
    goes = iterating(on_loop, True, runs, seen, say("ROLLBACK AND CHAIN"))
    async with work(dsn, goes, poll=0.05):
        job = enqueued(dsn, goes)
        await until(lambda: accounts.state(job) in ("failed", "completed") or len(runs) > 1)
        await until(accounts.is_in(job, "failed"))
    assert (runs, seen, outcomes(accounts)) == ([1], [1, 2, 3], ["failed"])
    assert accounts.all("SELECT job FROM effect ORDER BY job") == [(1,), (2,)]
    assert SAID in accounts.one("SELECT message FROM pgqueue.attempt")


KINDS = pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])


@BOTH
@KINDS
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("then", ["its session is lost", "a deadlock", "an error", "it leaves the loop"])
async def test_a_batch_that_a_handler_committed_is_not_done_again(
    dsn: str, accounts: Eyes, then: str, kept: bool, transactional: bool, on_loop: bool
) -> None:
    """Its transaction is gone when the error comes to the end of the handler. Naive: the next run does it again."""
    runs, seen = list[int](), list[int]()

    def act(conn: Any) -> object:
        if on_loop:
            return aact(conn)
        say("COMMIT")(conn)
        ends(accounts, then)(conn)
        return LEAVES

    async def aact(conn: Any) -> object:
        await say("COMMIT")(conn)  # type: ignore[misc]
        answer = ends(accounts, then)(conn)
        if answer is not None:
            await answer  # type: ignore[misc]
        return LEAVES

    goes = iterating(on_loop, transactional, runs, seen, act, kept)
    async with work(dsn, goes, poll=0.05):
        job = enqueued(dsn, goes)
        await until(lambda: accounts.state(job) == "failed" or len(runs) > 1)
        await until(accounts.is_in(job, "failed"))
    assert (runs, seen, outcomes(accounts)) == ([1], [1, 2, 3], ["failed"])
    assert accounts.all("SELECT job FROM effect ORDER BY job") == [(1,), (2,), (3,)]
    assert SAID in accounts.one("SELECT message FROM pgqueue.attempt")


@BOTH
@pytest.mark.parametrize("seen_by", ["the batch", "its COMMIT"])
async def test_a_batch_whose_session_is_lost_spends_no_attempt_and_no_batch_is_repeated(
    dsn: str, accounts: Eyes, seen_by: str, on_loop: bool
) -> None:
    runs, seen = list[int](), list[int]()
    lose = ends(accounts, "its session is lost" + (", unseen" if seen_by == "its COMMIT" else ""))
    goes = iterating(on_loop, True, runs, seen, lose)
    async with work(dsn, goes, poll=0.05):
        await until(accounts.is_in(enqueued(dsn, goes), "completed"))
    assert (runs, seen, outcomes(accounts)) == ([1, 1], [1, 2, 3, 3, 4], ["aborted"])
    assert accounts.all("SELECT job FROM effect ORDER BY job") == [(n,) for n in range(1, 5)]
