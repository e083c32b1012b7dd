"""Breaks a connection whose server does not answer, so that what waits on it gets an error instead of waiting on."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

from psycopg import AsyncConnection, Connection, OperationalError


def hang_up(conn: AsyncConnection[Any] | Connection[Any]) -> None:
    """Break a connection from any thread: a call that waits for an answer on it gets an OperationalError at once."""
    with (
        suppress(OSError, OperationalError),
        _socket(conn) as link,
    ):  # an error means that it broke by itself, or was closed just now
        link.shutdown(socket.SHUT_RDWR)


def _socket(conn: AsyncConnection[Any] | Connection[Any]) -> socket.socket:
    """A second handle of the connection's socket. Its family does not matter for a shutdown."""
    return socket.fromfd(conn.fileno(), socket.AF_INET, socket.SOCK_STREAM)
