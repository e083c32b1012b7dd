"""Breaks a connection whose server does not answer, so that what waits on it gets an error instead of waiting on.

What waits for a connection that is only being opened leaves that behind (`opened`). Naive: psycopg is cancelled
half-way, which leaves the socket open.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from psycopg import AsyncConnection, Connection, OperationalError
from psycopg.errors import ConnectionTimeout

A = TypeVar("A", bound=AsyncConnection[Any])


def hang_up(conn: AsyncConnection[Any] | Connection[Any]) -> None:
    """Break a connection from any thread: a call that waits for an answer on it gets an OperationalError at once."""
    with (
        suppress(OSError, OperationalError),
        _socket(conn) as link,
    ):  # an error means that it broke by itself, or was closed just now
        link.shutdown(socket.SHUT_RDWR)


async def opened(opening: Coroutine[Any, Any, A], seconds: float | None = None) -> A:
    """The connection that this opens. After so many seconds ConnectionTimeout is raised.

    If that is so, or the caller is cancelled, the connection is closed as soon as it is there.
    """
    task = asyncio.ensure_future(opening)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if done:
            return task.result()
    except asyncio.CancelledError:
        task.add_done_callback(_finish)
        raise
    task.add_done_callback(_finish)
    raise ConnectionTimeout("connection timeout expired")


def _finish(opening: asyncio.Future[Any]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().pgconn.finish()


def _socket(conn: AsyncConnection[Any] | Connection[Any]) -> socket.socket:
    """A second handle of the connection's socket. Its family does not matter for a shutdown."""
    return socket.fromfd(conn.fileno(), socket.AF_INET, socket.SOCK_STREAM)
