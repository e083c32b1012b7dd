"""A fault: the server's NOTIFY queue is full. Every transaction that notifies fails at its COMMIT (SQLSTATE 54000).

`small_server` has the smallest queue there is: 64 pages instead of 1,048,576. A session that listens and stays in a
transaction holds the queue back; `full` opens one, and fills the queue behind it. When the block ends, so does that
session, and the queue is empty again.

    server = small_server()
    with full(server.dsn("postgres")) as holder:  # the pid of the session that holds the queue back
        ...

Nothing here knows pgqueue: any application can do this to its own server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg
import pytest
from servers import VERSION, Server, embedded_server

PAGES = 64
FIRST = 17
"""The first version of PostgreSQL with the setting max_notify_queue_pages. Before, the queue has 8 GB."""
PAYLOAD = "x" * 7_900
"""A notification of this size takes a page of the queue."""


def small_server() -> Server:
    """A server of its own whose NOTIFY queue is soon full. Skips the test if this version has no such setting."""
    if int(VERSION) < FIRST:
        pytest.skip(f"PostgreSQL {VERSION} has no max_notify_queue_pages")
    return embedded_server(max_notify_queue_pages=str(PAGES))


@contextmanager
def full(dsn: str, application_name: str = "holds the queue back") -> Iterator[int]:
    """The server's NOTIFY queue is full while the block lasts; the pid of the session that holds it back."""
    with held(dsn, application_name) as pid:
        fill(dsn)
        yield pid


@contextmanager
def held(dsn: str, application_name: str = "holds the queue back") -> Iterator[int]:
    """A session listens and stays in a transaction: the server forgets no notification while the block lasts."""
    with psycopg.connect(dsn, autocommit=True, application_name=application_name) as holder:
        holder.execute('LISTEN "app.news"')
        with holder.transaction():
            holder.execute("SELECT 1")
            yield holder.info.backend_pid
        holder.execute("UNLISTEN *")


def fill(dsn: str, usage: float = 1.0) -> None:
    """Notify until this share of the queue is in use. The last one is refused."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        while used(conn) < usage:
            with suppress(psycopg.errors.ProgramLimitExceeded):
                conn.execute("SELECT pg_notify('app.filling', %s)", [PAYLOAD])


def used(conn: psycopg.Connection) -> float:
    """The share of the server's NOTIFY queue that is in use."""
    row = conn.execute("SELECT pg_notification_queue_usage()").fetchone()
    assert row is not None
    return float(row[0])
