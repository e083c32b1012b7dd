"""The connections of handlers after an outage: a try each second at most, not one after 1, 2, 4 … 30 s."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any, cast

import psycopg
import pytest

from pgqueue.database.sessions import Link
from pgqueue.worker.transactions import handler_pool, opening
from pgqueue.worker.transactions.handler_connection import AsyncHandlerConnection, HandlerConnection
from pgqueue.worker.transactions.handler_pool import HandlerPool
from pgqueue.worker.transactions.steps import run

TRIES = 40


class Pauses:
    """As the event that ends the tries: it is never set, and knows how long each wait for it was to be."""

    def __init__(self) -> None:
        self.seconds = list[float]()

    def wait(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        return False

    async def until(self, event: object, seconds: float) -> bool:
        """As `backoff.wait`; a connection is tried for in a task of psycopg's pool."""
        await asyncio.sleep(0)
        return self.wait(seconds)

    def set(self) -> None: ...


def refusing(connect: Any) -> Any:
    """A way to connect that is refused `TRIES` times, and then leads to the database."""
    tries = count(1)

    def refused(*args: Any, **options: Any) -> Any:
        if next(tries) <= TRIES:
            raise psycopg.OperationalError("connection refused")
        return connect(*args, **options)

    return refused


@pytest.mark.promise("F339")
@pytest.mark.parametrize("on_loop", [False, True])
async def test_a_try_follows_within_a_second_however_long_the_database_is_away(
    dsn: str, on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the pool waits between two tries, 1 s, 2 s, 4 s, and gives this job no connection in its time."""
    monkeypatch.setattr(handler_pool, "GET_SECONDS", 5.0)
    for kind in (HandlerConnection, AsyncHandlerConnection):
        monkeypatch.setattr(kind, "connect", refusing(kind.connect))
    pauses = Pauses()
    monkeypatch.setattr(opening, "wait", pauses.until)

    async def listed() -> None: ...

    link = Link(dsn, "pgqueue")
    pool = HandlerPool(link, 1, listed)
    cast(Any, pool.openings[0])._closed = pauses
    if on_loop:
        await pool.on_loop.release(await pool.on_loop.acquire())
    else:
        conn = await asyncio.to_thread(run, pool.threads.acquire())
        await asyncio.to_thread(run, pool.threads.release(conn))
    await pool.close()
    assert len(pauses.seconds) == TRIES
    assert max(pauses.seconds) <= 1.0
    assert not link.outage.is_on() and not any(each.under_way for each in pool.openings)
