"""Opens the connections of the pools for handlers, and tries again until one is there.

Used by psycopg's pools in place of a class of connections. Naive: the pool tries after 1, 2, 4 … 30 s. After an outage
the slots of transactional jobs then stay empty for as long again.

1. A try follows a second after another one at most (`outage` paces them), as for the worker's own sessions.
2. A try ends with a connection that is configured: a server that accepts and dies at once counts as away.
3. The worker's end stops it.
4. What is under way is known (`under_way`): if a server accepts and says nothing, the first try lasts long, and no
   error says meanwhile that it is away.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from psycopg import Error

from pgqueue.database import primary
from pgqueue.database.backoff import is_loss, wait
from pgqueue.database.sessions import Link
from pgqueue.worker.transactions.handler_connection import AsyncHandlerConnection, HandlerConnection

AGAIN_SECONDS = 1.0
"""The longest pause between two tries."""
NAME = "job"
"""Of these connections, in what is said of an outage."""


class Opening:
    """Opens connections in threads, for psycopg's pool."""

    def __init__(self, link: Link, configure: Callable[[HandlerConnection], None]) -> None:
        self._link = link
        self._configure = configure
        self._closed = threading.Event()
        self.under_way: set[object] = set()
        """One for each connection that is being opened."""

    def close(self) -> None:
        """No more tries."""
        self._closed.set()

    def connect(self, _: str, **options: Any) -> HandlerConnection:
        """A connection that is configured. Raises what the last try has raised if the worker ends."""
        with _noted(self.under_way):
            while True:
                try:
                    conn = primary.connect(HandlerConnection, self._link.address(), **options)
                    try:
                        self._configure(conn)
                    except BaseException:
                        conn.close()
                        raise
                except Error as error:
                    if not is_loss(error) or self._closed.wait(lost(self._link, error)):
                        raise
                else:
                    self._link.outage.answered(NAME)
                    return conn


class AsyncOpening:
    """The same on the loop."""

    def __init__(self, link: Link, configure: Callable[[AsyncHandlerConnection], Awaitable[None]]) -> None:
        self._link = link
        self._configure = configure
        self._closed = asyncio.Event()
        self.under_way: set[object] = set()
        """One for each connection that is being opened."""

    def close(self) -> None:
        """No more tries."""
        self._closed.set()

    async def connect(self, _: str, **options: Any) -> AsyncHandlerConnection:
        """A connection that is configured. Raises what the last try has raised if the worker ends."""
        with _noted(self.under_way):
            while True:
                try:
                    conn = await primary.aconnect(AsyncHandlerConnection, self._link.address(), **options)
                    try:
                        await self._configure(conn)
                    except BaseException:
                        await conn.close()
                        raise
                except Error as error:
                    if not is_loss(error) or await wait(self._closed, lost(self._link, error)):
                        raise
                else:
                    self._link.outage.answered(NAME)
                    return conn


@contextmanager
def _noted(under_way: set[object]) -> Iterator[None]:
    mine = object()
    under_way.add(mine)
    try:
        yield
    finally:
        under_way.discard(mine)


def lost(link: Link, error: Error) -> float:
    """The pause after a try that has failed."""
    return link.outage.lost(NAME, error, AGAIN_SECONDS)
