"""How long a connection may take: one rule for each that pgqueue opens, and a frozen first host that it is for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from standby import frozen_first

import pgqueue
from pgqueue.cli import database as cli_database
from pgqueue.client import wait
from pgqueue.database import conninfo, embedded, migrations, primary
from pgqueue.database.conninfo import CONNECT_SECONDS, connect_timeout, connect_timeout_at_most
from pgqueue.database.primary import SEARCH_SECONDS
from pgqueue.steady_clock import monotonic
from pgqueue.web.connections import Connections


async def by_connect(_: pgqueue.JobHandle[Any]) -> None:
    await asyncio.to_thread(lambda: pgqueue.connect().close())


async def by_aconnect(_: pgqueue.JobHandle[Any]) -> None:
    await (await pgqueue.aconnect()).close()


async def by_migrate(_: pgqueue.JobHandle[Any]) -> None:
    assert await asyncio.to_thread(migrations.migrate, pgqueue.config.config().require_dsn()) == []


async def by_state(job: pgqueue.JobHandle[Any]) -> None:
    assert await asyncio.to_thread(lambda: job.state) == "cancelled"


async def by_result(job: pgqueue.JobHandle[Any]) -> None:
    with pytest.raises(pgqueue.JobCancelled):
        await asyncio.to_thread(job.result)


async def by_aresult(job: pgqueue.JobHandle[Any]) -> None:
    with pytest.raises(pgqueue.JobCancelled):
        await job.aresult()


async def by_the_dashboard(_: pgqueue.JobHandle[Any]) -> None:
    """A page is not kept waiting: it says that the database does not answer. The next ones find it."""

    async def ask(conn: Any) -> None:
        await conn.execute("SELECT 1")

    connections = Connections()
    try:
        while True:
            try:
                return await connections.read(ask)
            except psycopg.OperationalError:
                await asyncio.sleep(0.1)
    finally:
        await connections.close()


WAYS: list[Callable[[pgqueue.JobHandle[Any]], Awaitable[None]]] = [
    by_connect, by_aconnect, by_migrate, by_state, by_result, by_aresult, by_the_dashboard,
]  # fmt: skip


@pytest.mark.promise("F467")
async def test_a_frozen_first_host_costs_a_connection_its_time_and_no_more(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: two minutes, as psycopg waits by itself. The limit is wide, because the machine may be busy."""
    monkeypatch.setattr(conninfo, "CONNECT_SECONDS", 2)
    monkeypatch.setattr(wait, "ANSWER_SECONDS", 2.0)
    with psycopg.connect(dsn) as conn:
        job = pgqueue.enqueue(conn, "shop.mail")
        pgqueue.cancel(conn, job.id)
    took = dict[str, float]()

    async def timed(way: Callable[[pgqueue.JobHandle[Any]], Awaitable[None]]) -> None:
        began = monotonic()
        await way(job)
        took[way.__name__] = monotonic() - began

    with frozen_first(dsn) as address:
        monkeypatch.setenv("PGQUEUE_DSN", address)
        await asyncio.gather(*map(timed, WAYS))
    assert len(took) == len(WAYS) and max(took.values()) < 60, took


@pytest.mark.promise("F467")
def test_what_the_address_or_the_environment_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect_timeout("host=a,b") == {"connect_timeout": CONNECT_SECONDS}
    assert connect_timeout("host=a,b connect_timeout=60") == connect_timeout("host=a connect_timeout=0") == {}
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "60")
    assert connect_timeout("host=a,b") == {}


@pytest.mark.promise("F467")
@pytest.mark.parametrize(
    ("named", "seconds", "taken"),
    [
        (None, 5.9, 5),
        (None, -1.0, 2),  # libpq takes no less
        ("2", 5.0, 2),
        ("60", 5.0, 5),
        ("0", 5.0, 5),  # for ever
        ("-1", 5.0, 5),
        ("soon", 5.0, None),  # the driver refuses it
    ],
)
def test_where_time_is_short_the_shorter_one_counts(
    named: str | None, seconds: float, taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: a wait for a result takes its own time, and each frozen host costs 10 s, whatever the address says."""
    expected = {} if taken is None else {"connect_timeout": taken}
    said = "" if named is None else f" connect_timeout={named}"
    assert connect_timeout_at_most(f"host=a,b{said}", seconds) == expected
    if named is not None:
        monkeypatch.setenv("PGCONNECT_TIMEOUT", named)
        assert connect_timeout_at_most("host=a,b", seconds) == expected


@pytest.mark.promise("F467")
def test_a_wait_takes_the_time_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for dsn, timeout, taken in (
        ("host=a,b connect_timeout=3", None, 3),
        ("host=a,b", None, 10),
        ("host=a", 4.9, 5),  # not less: the time of the wait would not be over
        ("host=a,b", 11.0, 6),
        ("host=a,b,c", 4.9, 2),
        ("host=a,b connect_timeout=3", 11.0, 3),
        ("host=a", 0.0, 2),
    ):
        found = wait.Wait(1, wait.ending(timeout), pgqueue.config.config(dsn=dsn)).options(dsn)
        assert found["connect_timeout"] == taken


@pytest.mark.promise("F467", "F337")
def test_a_command_looks_for_the_primary_as_quickly_as_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: a command writes its 10 s into the address. Then they look like an order for the search, too."""
    seen = list[dict[str, Any]]()

    def noted(_: object, dsn: str, **options: Any) -> None:
        seen.append(options | primary._searching(dsn, options))
        raise psycopg.OperationalError

    monkeypatch.setattr(primary, "connect", noted)
    for dsn in ("host=a,b", "host=a,b connect_timeout=7"):
        monkeypatch.setenv("PGQUEUE_DSN", dsn)
        with pytest.raises(psycopg.OperationalError), cli_database.connected("status"):
            pass
    assert [each.get("connect_timeout") for each in seen] == [SEARCH_SECONDS, None]


@pytest.mark.promise("F469", "F495")
async def test_a_wait_ends_while_a_name_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: each host has its time, but no time counts while its name is looked for."""

    async def slow(*_: object, **__: object) -> None:
        await asyncio.sleep(80)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", slow)
    monkeypatch.setenv("PGQUEUE_DSN", "host=slow.example")
    job: pgqueue.JobHandle[Any] = pgqueue.JobHandle(1)
    began = monotonic()
    with pytest.raises(pgqueue.ResultTimeout, match="job 1 was not seen to end in time: connection timeout expired"):
        await job.aresult(0.2)
    assert monotonic() - began < 60
    [resolving] = asyncio.all_tasks() - {asyncio.current_task()}
    resolving.cancel()  # the test need not wait for its end


@pytest.mark.promise("F467")
async def test_an_address_takes_no_thread_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: names of servers that do not resolve have all threads, and a wait for another server waits for them."""

    async def refused(*_: object) -> None:
        raise AssertionError

    async def connected(*_: object, **options: Any) -> None:
        raise psycopg.OperationalError("connected")

    monkeypatch.setattr(asyncio, "to_thread", refused)
    monkeypatch.setattr(psycopg.AsyncConnection, "connect", connected)
    assert await embedded.aresolve("host=a") == "host=a"
    monkeypatch.setenv("PGQUEUE_DSN", "host=a")
    job: pgqueue.JobHandle[Any] = pgqueue.JobHandle(1)
    for ask in (pgqueue.aconnect, job.aresult):
        with pytest.raises(psycopg.OperationalError, match="connected"):
            await ask()
