"""What a handler sets on its connection, in this process: it is there for no other job, and never for pgqueue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from accounts import accounts
from handler_pools import whole
from psycopg.types.json import set_json_dumps, set_json_loads
from psycopg.types.string import StrDumper, TextLoader
from transactional_tasks import BOTH, SOON, declared, enqueued, outcomes
from workers import Eyes, until, work

import pgqueue
from pgqueue import Fail, Job, Retry
from pgqueue.client.tasks import task
from pgqueue.worker.transactions.as_lent import VALUES
from pgqueue.worker.transactions.handler_connection import AsyncHandlerConnection, HandlerConnection

__all__ = ["accounts"]

TYPES = ("text", "varchar", "int8", "int4", "int2", "bool", "jsonb")
FOUND = """SELECT 7::int8, 'x'::text, '{"a": 1}'::jsonb, %s::text"""
HELLO = "DO $$ BEGIN RAISE NOTICE 'hello'; END $$"


class Shout(TextLoader):
    """What it reads is never what was sent."""

    def load(self, data: Any) -> str:
        return "X" + bytes(data).decode()


class Loud(StrDumper):
    """What it writes is never what was said."""

    def dump(self, obj: str) -> bytes:
        return b"X" + obj.encode()


def adapt(conn: Any) -> None:
    """Register what an application may, and stranger things."""
    for name in TYPES:
        conn.adapters.register_loader(name, Shout)
    conn.adapters.register_dumper(str, Loud)
    set_json_loads(lambda text: "loaded", conn)
    set_json_dumps(lambda value: '"dumped"', conn)
    conn.adapters.types.add(psycopg.types.TypeInfo("strange", 999_999, 999_998))


def set_all(conn: Any, heard: list[str]) -> None:
    """Set all there is to set on the client's side."""
    adapt(conn)
    is_async = isinstance(conn, psycopg.AsyncConnection)
    conn.row_factory = psycopg.rows.dict_row
    conn.cursor_factory = psycopg.AsyncClientCursor if is_async else psycopg.ClientCursor
    conn.server_cursor_factory = psycopg.AsyncRawServerCursor if is_async else psycopg.RawServerCursor
    conn.prepare_threshold, conn.prepared_max = 0, 3
    conn.add_notice_handler(lambda said: heard.append("a notice"))
    conn.add_notify_handler(lambda said: heard.append("a notification"))
    heard_by_psycopg = conn.pgconn.notice_handler

    def hear(said: Any) -> None:
        heard.append("a raw notice")
        heard_by_psycopg(said)

    conn.pgconn.notice_handler = hear
    conn.tenant = "alice"
    conn.xid = lambda *_: "mine"


def state(conn: Any) -> dict[str, Any]:
    """What a handler finds there."""
    names = ("row_factory", "cursor_factory", "server_cursor_factory", "prepare_threshold", "prepared_max")
    found = {name: getattr(conn, name) for name in (*names, "isolation_level", "read_only", "deferrable", "autocommit")}
    found["handlers"] = [[*conn._notice_handlers], [*conn._notify_handlers], [*conn._notifies_backlog]]
    found["own"] = (hasattr(conn, "tenant"), conn.xid.__name__, conn.adapters.types.get("strange"))
    return found


@pytest.mark.promise("F480")
@pytest.mark.parametrize("ends", ["returns", "raises"])
@BOTH
async def test_nothing_that_a_handler_has_set_is_left_to_the_next_job(
    dsn: str, accounts: Eyes, ends: str, on_loop: bool
) -> None:
    """Naive: the connection goes back with its adapters and its lists."""
    found: list[Any] = []
    heard: list[str] = []

    def looks(job: Job) -> None:
        conn = job.connection
        found.append([state(conn), conn.execute(FOUND, ["x"]).fetchone(), conn.info.backend_pid])
        conn.execute(HELLO)

    async def alooks(job: Job) -> None:
        conn = await job.aconnection()
        row = await (await conn.execute(FOUND, ["x"])).fetchone()
        found.append([state(conn), row, conn.info.backend_pid])
        await conn.execute(HELLO)

    def leaves(job: Job) -> None:
        set_all(job.connection, heard)
        job.connection.execute(HELLO)
        if ends == "raises":
            raise Fail("as it wants")

    async def aleaves(job: Job) -> None:
        conn = await job.aconnection()
        set_all(conn, heard)
        await conn.execute(HELLO)
        if ends == "raises":
            raise Fail("as it wants")

    looking, leaving = declared(alooks if on_loop else looks), declared(aleaves if on_loop else leaves)
    left = "failed" if ends == "raises" else "completed"
    async with work(dsn, looking, leaving, concurrency=1) as worker:
        for asked, ended in ((looking, "completed"), (leaving, left), (looking, "completed"), (leaving, left)):
            await until(accounts.is_in(enqueued(dsn, asked), ended))
            await until(lambda: whole(worker))
    before, after = found
    assert before[1] == (7, "x", {"a": 1}, "x")
    assert after == before
    assert heard == ["a raw notice", "a notice"] * 2  # each of those that set it heard its own, once


@pytest.mark.promise("F480")
@BOTH
async def test_each_batch_of_an_iteration_has_a_connection_as_psycopg_opens_it(
    dsn: str, accounts: Eyes, on_loop: bool
) -> None:
    found: list[Any] = []

    def goes(job: Job) -> None:
        for _ in job.iterate(lambda after: ((n, n) for n in range(3)), 1):
            found.append(state(job.connection))
            set_all(job.connection, [])

    async def agoes(job: Job) -> None:
        async for _ in job.aiterate(lambda after: ((n, n) for n in range(3)), 1):
            found.append(state(await job.aconnection()))
            set_all(await job.aconnection(), [])

    asked = task(name="lent.goes", retry=1)(agoes if on_loop else goes)
    async with work(dsn, asked):
        await until(accounts.is_in(enqueued(dsn, asked), "completed"))
    assert found == found[:1] * 3


@pytest.mark.promise("F480")
@pytest.mark.parametrize("kind", [HandlerConnection, AsyncHandlerConnection])
async def test_each_attribute_of_a_connection_of_psycopg_is_restored_or_stays_for_a_reason(dsn: str, kind: Any) -> None:
    """A new one of psycopg's must be put in one of these lists."""
    new = {"_adapters", "_notice_handlers", "_notify_handlers", "_notifies_backlog"}
    inside = {"_num_transactions", "_pipeline", "_tpc"}  # else it is closed
    stay = {"pgconn", "lock", "_closed", "_prepared"}  # what it is, and what is prepared in its session
    opened = kind.connect(dsn)
    conn = await opened if kind is AsyncHandlerConnection else opened
    try:
        assert vars(conn).keys() <= new | inside | stay | {*VALUES}
    finally:
        closed = conn.close()
        if kind is AsyncHandlerConnection:
            await closed


@pytest.mark.promise("F481")
@BOTH
async def test_a_block_that_a_generator_has_open_ends_in_no_other_jobs_transaction(
    dsn: str, accounts: Eyes, on_loop: bool
) -> None:
    """Naive: it ends in the next job's, which fails."""
    left: list[Any] = []

    def block(conn: Any) -> Iterator[None]:
        with conn.transaction():
            yield

    async def ablock(conn: Any) -> Any:
        async with conn.transaction():
            yield

    def leaves(job: Job) -> None:
        left.append(block(job.connection))
        next(left[0])

    async def aleaves(job: Job) -> None:
        left.append(ablock(await job.aconnection()))
        await anext(left[0])

    def writes(job: Job) -> None:
        job.connection.execute("INSERT INTO effect VALUES (%s, 'written')", [job.id])
        left[0].close()

    async def awrites(job: Job) -> None:
        conn = await job.aconnection()
        await conn.execute("INSERT INTO effect VALUES (%s, 'written')", [job.id])
        await left[0].aclose()

    leaving, writing = declared(aleaves if on_loop else leaves), declared(awrites if on_loop else writes)
    async with work(dsn, leaving, writing, concurrency=1):
        for asked in (leaving, writing):
            await until(accounts.is_in(enqueued(dsn, asked), "completed"))
    assert accounts.one("SELECT count(*) FROM effect") == 1
    assert outcomes(accounts) == []


# During the same handler ---------------------------------------------------------------------------------------------


@pytest.mark.promise("F482")
@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
@BOTH
async def test_a_step_that_adapts_its_connection_is_done_once(
    dsn: str, accounts: Eyes, transactional: bool, on_loop: bool
) -> None:
    """Naive: its name is written with the handler's dumper, so the next attempt does not find it."""
    calls: list[str] = []
    got: list[Any] = []

    def charge(job: Job) -> dict[str, int]:
        calls.append("charge")
        adapt(job.connection)
        return {"cents": 7}

    async def acharge(job: Job) -> dict[str, int]:
        calls.append("charge")
        adapt(await job.aconnection())
        return {"cents": 7}

    def order(job: Job) -> str:
        got.append(job.step("charge", charge, job))
        job.step("mail", calls.append, "mail")
        if job.attempt == 1:
            raise ValueError("again")
        return "sent"

    async def aorder(job: Job) -> str:
        got.append(await job.astep("charge", acharge, job))
        await job.astep("mail", calls.append, "mail")
        if job.attempt == 1:
            raise ValueError("again")
        return "sent"

    asked = task(name="lent.order", transactional=transactional, retry=SOON)(aorder if on_loop else order)
    async with work(dsn, asked):
        await until(accounts.is_in(enqueued(dsn, asked), "completed"))
    assert calls == ["charge", "mail"]
    assert got == [{"cents": 7}] * 2
    assert accounts.all("SELECT name, result FROM pgqueue.job_step ORDER BY name DESC") == [
        ("mail", None),
        ("charge", {"cents": 7}),
    ]


@pytest.mark.promise("F482")
@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
@BOTH
async def test_an_iteration_that_adapts_its_connection_goes_on_where_it_was(
    dsn: str, accounts: Eyes, transactional: bool, on_loop: bool
) -> None:
    """With steps in its batches, and successors that these enqueue. Naive: the cursor that is written is no JSON."""
    seen: list[str] = []

    @task(name="lent.told")
    def told(name: str) -> None: ...

    def source(after: str | None) -> Iterator[tuple[str, str]]:
        return ((name, name) for name in "abc" if name > (after or ""))

    def goes(job: Job) -> None:
        for [name] in job.iterate(source, 1):
            adapt(job.connection)
            job.enqueue(told, name=name)
            seen.append(name)
            if name == "b" and job.attempt == 1:
                raise ValueError("again")

    async def agoes(job: Job) -> None:
        async for [name] in job.aiterate(source, 1):
            adapt(await job.aconnection())
            job.enqueue(told, name=name)
            seen.append(name)
            if name == "b" and job.attempt == 1:
                raise ValueError("again")

    asked = task(name="lent.goes", transactional=transactional, retry=SOON)(agoes if on_loop else goes)
    async with work(dsn, asked, told):
        await until(accounts.is_in(enqueued(dsn, asked), "completed"))
    assert seen == ["a", "b", "b", "c"]
    sent = "SELECT args FROM pgqueue.job WHERE task = 'lent.told' ORDER BY id"
    assert [json.loads(args) if isinstance(args, str) else args for (args,) in accounts.all(sent)] == [
        {"name": name} for name in "abc"
    ]


@pytest.mark.promise("F482")
@pytest.mark.parametrize("end", ["a result", "a retry"])
@BOTH
async def test_the_end_of_a_job_is_written_and_read_with_adapters_of_pgqueues_own(
    dsn: str, accounts: Eyes, end: str, on_loop: bool
) -> None:
    """Naive: the result is no JSON; the answer to a retry is another id, so the job counts as another worker's."""
    answer: Any = {"said": "ü"} if end == "a result" else None

    def ends(job: Job) -> Any:
        adapt(job.connection)
        job.connection.row_factory = psycopg.rows.dict_row
        return Retry(0.01) if end == "a retry" and job.attempt == 1 else answer

    async def aends(job: Job) -> Any:
        conn = await job.aconnection()
        adapt(conn)
        conn.row_factory = psycopg.rows.dict_row
        return Retry(0.01) if end == "a retry" and job.attempt == 1 else answer

    asked = declared(aends if on_loop else ends)
    async with work(dsn, asked):
        await until(accounts.is_in(id := enqueued(dsn, asked), "completed"))
    assert outcomes(accounts) == (["retried"] if end == "a retry" else [])
    with psycopg.connect(dsn) as conn:
        assert pgqueue.get(conn, id).result == answer


@pytest.mark.promise("F482")
@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_handler_may_use_another_encoding(dsn: str, accounts: Eyes, encoding: str) -> None:
    def ends(job: Job) -> Any:
        job.connection.execute(f"SET client_encoding = '{encoding}'".encode())
        return Retry(0.01) if job.attempt == 1 else {"said": "ü"}

    asked = declared(ends)
    async with work(dsn, asked):
        await until(accounts.is_in(id := enqueued(dsn, asked), "completed"))
    with psycopg.connect(dsn) as conn:
        assert pgqueue.get(conn, id).result == {"said": "ü"}
