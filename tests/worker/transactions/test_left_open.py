"""A handler that leaves something open on its connection: its attempt fails, and its slot comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from accounts import accounts
from handler_pools import whole
from psycopg.pq import TransactionStatus
from transactional_tasks import BOTH, declared, enqueued
from workers import Eyes, until, wait_until, work

from pgqueue import Job
from pgqueue.worker.transactions import handler_connection

__all__ = ["accounts"]

ACTIVE = TransactionStatus.ACTIVE
KINDS = ["a COPY in", "a COPY out", "a stream"]
ROWS = "SELECT generate_series(1, 100000)"
WRITES = "INSERT INTO effect VALUES (7)"


def opens(conn: Any, what: str) -> Any:
    """What is to be left open, not begun."""
    match what:
        case "a COPY in":
            return conn.cursor().copy("COPY effect FROM STDIN")
        case "a COPY out":
            return conn.cursor().copy(f"COPY ({ROWS}) TO STDOUT")
        case _:
            return conn.cursor().stream(ROWS)


def numbers(after: int | None) -> Iterator[tuple[int, int]]:
    return ((number, number) for number in range((after or 0) + 1, 4))


@pytest.mark.each_value
@pytest.mark.promise("F237")
@pytest.mark.parametrize("leaves", ["returns", "raises"])
@pytest.mark.parametrize("what", KINDS)
@BOTH
async def test_what_a_handler_leaves_open_on_its_connection_fails_its_attempt_only(
    dsn: str, accounts: Eyes, what: str, leaves: str, on_loop: bool
) -> None:
    """The driver holds the connection's lock until its block or iterator has ended, which may be never."""
    kept, pids = list[Any](), list[int]()

    def leaving(job: Job) -> None:
        if job.attempt > 1:
            return
        conn = job.connection
        pids.append(conn.info.backend_pid)
        conn.execute(WRITES)
        kept.append(opens(conn, what))
        kept[0].__enter__() if "COPY" in what else next(kept[0])
        if leaves == "raises":
            raise ValueError("as it wants")

    async def aleaving(job: Job) -> None:
        if job.attempt > 1:
            return
        conn = await job.aconnection()
        pids.append(conn.info.backend_pid)
        await conn.execute(WRITES)
        kept.append(opens(conn, what))
        await (kept[0].__aenter__() if "COPY" in what else anext(kept[0]))
        if leaves == "raises":
            raise ValueError("as it wants")

    def looks(job: Job) -> None:
        pids.append(job.connection.info.backend_pid)

    async def alooks(job: Job) -> None:
        pids.append((await job.aconnection()).info.backend_pid)

    leave, look = declared(aleaving if on_loop else leaving), declared(alooks if on_loop else looks)
    async with work(dsn, leave, look, concurrency=1) as worker:
        await until(accounts.is_in(enqueued(dsn, leave), "completed"), 10)
        await until(accounts.is_in(enqueued(dsn, look), "completed"), 10)
        await until(lambda: whole(worker), 10)
    if "COPY" in what and not on_loop:
        with suppress(psycopg.Error):  # an older psycopg raises here, else in the garbage collector
            kept[0].__exit__(None, None, None)
    said = accounts.one("SELECT message FROM pgqueue.attempt")
    assert ("as it wants" if leaves == "raises" else "left a COPY, a stream or notifies() open") in said
    assert accounts.one("SELECT count(*) FROM effect") == 0
    assert len(set(pids)) == 2


@pytest.mark.promise("F237")
@BOTH
async def test_a_batch_of_an_iteration_that_leaves_something_open_is_not_kept(
    dsn: str, accounts: Eyes, on_loop: bool
) -> None:
    kept = list[Any]()

    def leaving(job: Job) -> None:
        for batch in job.iterate(numbers, 1):
            job.connection.execute("INSERT INTO effect VALUES (%s)", [*batch])
            if [*batch] == [2] and job.attempt == 1:
                kept.append(opens(job.connection, "a stream"))
                next(kept[0])

    async def aleaving(job: Job) -> None:
        async for batch in job.aiterate(numbers, 1):
            conn = await job.aconnection()
            await conn.execute("INSERT INTO effect VALUES (%s)", [*batch])
            if [*batch] == [2] and job.attempt == 1:
                kept.append(opens(conn, "a stream"))
                await anext(kept[0])

    leave = declared(aleaving if on_loop else leaving)
    async with work(dsn, leave, concurrency=1) as worker:
        await until(accounts.is_in(enqueued(dsn, leave), "completed"), 10)
        await until(lambda: whole(worker), 10)
    assert "left a COPY, a stream or notifies() open" in accounts.one("SELECT message FROM pgqueue.attempt")
    assert accounts.all("SELECT job FROM effect ORDER BY 1") == [(1,), (2,), (3,)]


@pytest.mark.promise("F237")
@BOTH
async def test_a_statement_that_is_under_way_when_the_handler_returns_is_no_such_thing(
    dsn: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    """It ends, and what it wrote is committed. Here it lasts for longer than what is left open is looked at."""
    monkeypatch.setattr(handler_connection, "LOOK_SECONDS", 0.02)
    kept = list[Any]()
    writes = "INSERT INTO effect SELECT 7 FROM pg_sleep(0.3)"

    def leaving(job: Job) -> None:
        conn = job.connection
        kept.append(threading.Thread(target=conn.execute, args=(writes,)))
        kept[0].start()
        wait_until(lambda: conn.pgconn.transaction_status == ACTIVE)

    async def aleaving(job: Job) -> None:
        conn = await job.aconnection()
        kept.append(asyncio.ensure_future(conn.execute(writes)))
        await until(lambda: conn.pgconn.transaction_status == ACTIVE)

    leave = declared(aleaving if on_loop else leaving)
    async with work(dsn, leave, concurrency=1) as worker:
        await until(accounts.is_in(enqueued(dsn, leave), "completed"), 10)
        await until(lambda: whole(worker), 10)
        assert len(worker.services.handler_pool.identities()) == 1
    await kept[0] if on_loop else kept[0].join()
    assert accounts.all("SELECT job FROM effect") == [(7,)]
    assert accounts.one("SELECT count(*) FROM pgqueue.attempt") == 0
