"""What a read of a page costs and promises: three round trips, settings of its own, no page lost with a connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from workers import Eyes, until

import pgqueue
from pgqueue.web.connections import Connections
from pgqueue.web.connections import _Pooled as Pooled

SETTINGS = (
    "SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only'), "
    "current_setting('statement_timeout'), current_setting('jit'), current_setting('row_security'), pg_backend_pid()"
)
LIMIT = 60.0


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Connections]:
    pgqueue.configure(dsn=dsn)
    made = Connections()
    try:
        yield made
    finally:
        await made.close()


async def settings(conn: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = await (await conn.execute(SETTINGS)).fetchone()
    return found


@pytest.mark.promise("F427")
async def test_a_read_costs_three_round_trips(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: the pool asks the connection, then BEGIN, SET TRANSACTION and the settings go one by one: six."""
    waits, wait = 0, Pooled.wait

    async def counted(conn: Pooled, *args: Any, **options: Any) -> Any:
        nonlocal waits
        waits += 1
        return await wait(conn, *args, **options)

    async with connected(dsn) as made:
        await made.read(settings)
        monkeypatch.setattr(Pooled, "wait", counted)
        for ask in (made.read, made.change):
            waits = 0
            await ask(settings)
            assert waits == 3


@pytest.mark.promise("F427")
async def test_its_settings_are_those_of_its_transaction_only(dsn: str, eyes: Eyes) -> None:
    eyes.do(
        "ALTER DATABASE {} SET default_transaction_isolation TO serializable".format(
            eyes.one("SELECT current_database()")
        )
    )
    async with connected(dsn) as made:
        assert (await made.read(settings))[:5] == ("read committed", "on", "2s", "off", "off")
        *told, pid = await made.change(settings)
        assert told == ["read committed", "off", "2s", "off", "off"]
        async with made._pool.connection() as conn:  # type: ignore[union-attr]
            *after, same = await settings(conn)
    assert (after, same) == (["serializable", "off", "0", "on", "on"], pid)


def none_is_left(eyes: Eyes) -> bool:
    """Whether no session of the dashboard is there. The pool may just have been making one."""
    eyes.terminate("pgqueue web")
    return eyes.backends("pgqueue web") == []


@pytest.mark.promise("F427")
async def test_a_connection_that_was_lost_while_idle_loses_no_page(dsn: str, eyes: Eyes) -> None:
    async with connected(dsn) as made:
        for ask in (made.read, made.change):
            pids = {found[5] for found in await asyncio.gather(*[made.read(settings) for _ in range(4)])}
            await until(lambda: none_is_left(eyes))
            assert (await ask(settings))[5] not in pids


@pytest.mark.promise("F427")
async def test_what_fails_or_is_given_up_is_rolled_back(dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture) -> None:
    """Naive: the pool ends the transaction, and warns of it each time."""
    caplog.set_level(logging.WARNING)
    written = asyncio.Event()

    async def fails(conn: Any) -> None:
        await pgqueue.aenqueue(conn, "web.failed")
        raise ValueError("not this one")

    async def stays(conn: Any) -> None:
        await pgqueue.aenqueue(conn, "web.given_up")
        written.set()
        await asyncio.Event().wait()

    async def refused(conn: Any) -> None:
        await conn.execute("SELECT 1 / 0")

    async with connected(dsn) as made:
        with pytest.raises(ValueError, match="not this one"):
            await made.change(fails)
        with pytest.raises(psycopg.errors.DivisionByZero):
            await made.read(refused)
        request = asyncio.create_task(made.change(stays))
        await asyncio.wait_for(written.wait(), LIMIT)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert (await made.read(settings))[1] == "on"
    assert eyes.states() == {}
    assert caplog.records == []
