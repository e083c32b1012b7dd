"""NOTIFY is only a hint: while the server's NOTIFY queue is full, nothing fails, and nothing waits longer than a poll.

The server is the tests' own, with a queue of 64 pages. A session that listens and stays in a transaction keeps it full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import asyncpg
import psycopg
import psycopg2
import pytest
from notify_queues import full, small_server
from servers import Server
from workers import Eyes

import pgqueue
from pgqueue import Unique, task
from pgqueue.database import drivers
from pgqueue.database.notify_queue import is_full
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Row, Statement
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


# Notifies without a look at the queue, as a statement of ours does whose look was a moment too early.
TOO_EARLY = (
    "WITH made AS (INSERT INTO pgqueue.job (state, task, args, rank) VALUES ('available', 'full.plain', '{}', 11))"
    "SELECT CASE WHEN %(notify)s::boolean THEN pg_notify('pgqueue.default', '')::text END"
)


def too_early() -> Statement[list[Row]]:
    return Statement(TOO_EARLY, {"notify": True}, list)


@pytest.mark.promise("F28")
async def test_a_message_whose_notify_is_refused_is_sent_again_without_it(dsn: str, eyes: Eyes, holder: int) -> None:
    session = Session(Link(dsn, "pgqueue"), "test")
    reading: Statement[list[Row]] = Statement("SELECT count(*) FROM pgqueue.job", {}, list)
    assert await session.run(too_early()) == [[(None,)]]
    assert await session.run_then(too_early(), then=[reading]) == [[(None,)], [(2,)]]
    assert session.generation == 1  # its connection is as good as before
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):  # which transaction was refused is not known
        await session.run_then(too_early(), then=[too_early()])
    assert eyes.states() == {"available": 2}
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):  # another's NOTIFY, as of a trigger
        await session.run(Statement("SELECT pg_notify('app', '')", {}, list))
    await session.close()


@pytest.mark.promise("F28")
async def test_so_is_a_statement_that_is_a_transaction_of_its_own(dsn: str, eyes: Eyes, holder: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        assert drivers.run(conn, too_early()) == [(None,)]
        assert drivers.run(conn.cursor(), too_early()) == [(None,)]
    with closing(psycopg2.connect(dsn)) as conn2:
        conn2.autocommit = True
        assert drivers.run(conn2, too_early()) == [(None,)]
    conn3 = await asyncpg.connect(dsn)
    assert await drivers.arun(conn3, too_early()) == [(None,)]
    await conn3.close()
    assert eyes.states() == {"available": 4}
    with closing(psycopg.connect(dsn)) as conn:
        drivers.run(conn, too_early())
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):  # in an application's transaction it is the COMMIT
            conn.commit()
    assert eyes.states() == {"available": 4}


@pytest.mark.promise("F28")
async def test_other_limits_of_the_server_are_no_full_queue(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        with pytest.raises(psycopg.errors.ProgramLimitExceeded) as caught:
            conn.execute("DO $$ BEGIN RAISE EXCEPTION 'no more' USING ERRCODE = '54000'; END $$")
        assert not is_full(caught.value)
