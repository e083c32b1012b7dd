"""NOTIFY is only a hint: while the server's NOTIFY queue is full, nothing fails, and nothing waits longer than a poll.

The server is the tests' own, with a queue of 64 pages. A session that listens and stays in a transaction keeps it full.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from notify_queues import full, small_server
from servers import Server
from workers import Eyes

import pgqueue
from pgqueue import Unique, task
from pgqueue.pytest_plugin import Databases


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    server = small_server()
    yield server
    server.end()


@pytest.fixture(scope="module")
def small_databases(small: Server) -> Iterator[Databases]:
    made = Databases(small.dsn("postgres"), small.copy_strategy)
    yield made
    made.close()


@pytest.fixture
def dsn(small_databases: Databases) -> Iterator[str]:
    with small_databases.copy() as made:
        pgqueue.configure(dsn=made)
        yield made


@pytest.fixture
def holder(dsn: str) -> Iterator[int]:
    """The queue is full; the pid of the session that holds it back."""
    with full(dsn) as pid:
        yield pid


@task(name="full.plain")
async def plain() -> None: ...


@task(name="full.unique", unique=Unique("{key}", on_duplicate="replace"))
async def unique(key: str) -> None: ...


@pytest.mark.promise("F28")
@pytest.mark.parametrize("autocommit", [False, True])
def test_every_way_to_enqueue_commits(dsn: str, eyes: Eyes, holder: int, autocommit: bool) -> None:
    later = plain.using(delay=60)
    with psycopg.connect(dsn, autocommit=autocommit) as conn:
        plain.enqueue(conn)
        later.enqueue(conn)
        for _ in range(2):
            unique.enqueue(conn, "a")
        pgqueue.enqueue_many(conn, [plain.new(), plain.new()])
        pgqueue.enqueue_many(conn, [later.new(), plain.new()])
        pgqueue.enqueue_many(conn, [unique.new("b"), plain.new()])
        conn.execute("SELECT pgqueue.enqueue('full.plain')")
        conn.execute("SELECT pgqueue.enqueue('full.plain', run_at => now() + interval '1 minute')")
        conn.execute("SELECT pgqueue.enqueue('full.plain', unique_key => 'c')")
    assert eyes.states() == {"available": 9, "scheduled": 3}
