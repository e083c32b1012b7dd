"""The dashboard on links that fall silent: nothing comes any more, and nothing is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
import pytest
from dashboards import dashboard_of, reading
from faults import Wire
from workers import until

from pgqueue.databases import Database
from pgqueue.web import connections, metrics, question
from pgqueue.web.connections import Connections
from pgqueue.web.source import Source

JSON = {"accept": "application/json"}
NAME = "pgqueue web"
Look = Callable[[], bool | Awaitable[bool]]

pytestmark = pytest.mark.promise("F446")


@pytest.fixture
def wire(dsn: str) -> Iterator[Wire]:
    with Wire(dsn) as made:
        yield made


@pytest.fixture
def falls_silent(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it: the link of the next read dies within its transaction."""
    read, next_one = Connections.read, list[bool]()

    async def watched(self: Connections, ask: Any) -> Any:
        async def asked(conn: Any) -> Any:
            if next_one:
                next_one.clear()
                assert wire.kill(NAME)
            return await ask(conn)

        return await read(self, asked)

    monkeypatch.setattr(Connections, "read", watched)
    return lambda: next_one.append(True)


@pytest.mark.parametrize("path", ["/metrics", "/queues"])
async def test_a_link_that_falls_silent_costs_one_answer(
    wire: Wire, falls_silent: Callable[[], None], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: what was asked waits for the kernel, and every later scrape waits for the same answer."""
    monkeypatch.setattr(question, "SAME_SECONDS", 0.0)
    async with reading(wire.dsn) as browser:

        async def there() -> bool:
            return (await browser.get(path)).status_code == 200

        is_there: Look = there
        async with asyncio.timeout(120):
            await until(is_there)
            monkeypatch.setattr(connections, "TRANSACTION_SECONDS", 0.5)
            falls_silent()
            lost = await browser.get(path, headers=JSON)
            assert lost.status_code == 503 and "has not answered within" in lost.json()["error"]["message"]
            monkeypatch.setattr(connections, "TRANSACTION_SECONDS", 30.0)
            await until(is_there)


async def test_an_idle_link_that_falls_silent_costs_no_answer(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CHECK_SECONDS", 0.3)
    monkeypatch.setattr(connections, "WAIT_SECONDS", 60.0)
    async with reading(wire.dsn) as browser, asyncio.timeout(120):
        assert (await browser.get("/queues")).status_code == 200
        assert wire.kill(NAME)
        assert (await browser.get("/queues")).status_code == 200


async def test_a_scrape_of_one_database_waits_no_longer_than_prometheus(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = asyncio.Event()

    async def hangs(self: Connections, ask: Any) -> Any:
        await may_end.wait()

    monkeypatch.setattr(Connections, "read", hangs)
    async with reading(dsn) as browser, asyncio.timeout(60):
        answer = await browser.get("/metrics", headers={metrics.SCRAPE_TIMEOUT: "0.6"})
        assert answer.status_code == 503 and "does not answer" in answer.text


@pytest.mark.parametrize(
    ("said", "seconds"), [("", 8.0), ("x", 8.0), ("5", 4.5), ("60", 8.0), ("0.1", 0.5), ("-inf", 0.5), ("nan", 0.5)]
)
def test_the_timeout_of_a_scrape_bounds_its_answer(said: str, seconds: float) -> None:
    assert metrics._patience(said) == seconds


async def test_the_row_of_a_database_is_back_after_its_link_fell_silent(
    dsn: str, wire: Wire, falls_silent: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(question, "SAME_SECONDS", 0.0)
    monkeypatch.setattr("pgqueue.web.source.ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(connections, "TRANSACTION_SECONDS", 30.0)
    source = Source(Database("a", wire.dsn), "a")

    async def answers() -> bool:
        return (await source.standing()).standing is not None

    is_answered: Look = answers
    async with asyncio.timeout(120):
        await until(is_answered)
        monkeypatch.setattr(connections, "TRANSACTION_SECONDS", 0.5)
        falls_silent()
        assert not await answers()
        monkeypatch.setattr(connections, "TRANSACTION_SECONDS", 30.0)
        await until(is_answered)
        await source.close()


async def test_the_end_of_the_dashboard_waits_for_no_silent_server(
    wire: Wire, falls_silent: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: one cancel. psycopg asks the server to cancel, on a new connection, which never answers here."""
    cancels = asyncio.Event()

    async def no_answer(self: object, **options: object) -> None:
        cancels.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(psycopg.AsyncConnection, "cancel_safe", no_answer)
    monkeypatch.setattr(connections, "TRANSACTION_SECONDS", 3_600.0)
    async with dashboard_of(wire.dsn) as made, asyncio.timeout(60):
        source = made.sources[None]
        falls_silent()
        asked = asyncio.create_task(source.metrics.samples(50))
        await until(lambda: any(not line.answers.is_set() for line in wire._lines))
        await made.close()
        assert cancels.is_set()
        await asyncio.wait({asked})
