"""Statements in a session that is not pgqueue's own: of an application, or of a handler.

Such a session plans as it likes. A plan that was made while a table was small is kept when the table has grown. Under
SERIALIZABLE a statement that reads a table as a whole locks it as a whole, and then any two transactions conflict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import errors
from workers import EARLIER

import pgqueue
from pgqueue.database.statements import text

MANY = 2_000
# A session that reads fewer rows than this, beside thousands, has looked each of its few rows up.
FEW = 200
RUNNING = """
    INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at)
    SELECT 'x', 'running', 7, 1, pgqueue.now() FROM generate_series(1, %s) RETURNING id
"""
DEAD = """
    INSERT INTO pgqueue.job (task, state, reason, finished_at)
    SELECT 'x', 'failed', 'x', pgqueue.now() FROM generate_series(1, %s) RETURNING id
"""
WAITING = """
    INSERT INTO pgqueue.job (task, state, run_at)
    SELECT 'x', 'scheduled', pgqueue.now() + interval '1 hour' FROM generate_series(1, %s) RETURNING id
"""
READ = """
    SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE schemaname = 'pgqueue')
         + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = 'pgqueue')
"""
"""How many rows and entries of indexes have been read, ever."""
FILL = """
    INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, outcome)
    SELECT g, pgqueue.now(), 1, 1, 7, pgqueue.now(), pgqueue.now(), 0, 'failed'
    FROM generate_series(1000000, 1002000) AS g;
    INSERT INTO pgqueue.job_waiter (job_id) SELECT g FROM generate_series(1000000, 1002000) AS g;
    INSERT INTO pgqueue.job_progress (job_id, done) SELECT g, 1 FROM generate_series(1000000, 1002000) AS g;
    INSERT INTO pgqueue.job_signal (job_id, enqueued_at, kind, reason)
    SELECT g, pgqueue.now(), 'cancel', 'x' FROM generate_series(1000000, 1002000) AS g;
    INSERT INTO pgqueue.job_cursor (job_id, enqueued_at, n, cursor)
    SELECT g, pgqueue.now(), 1, '1' FROM generate_series(1000000, 1002000) AS g;
"""
EMPTY = """
    DELETE FROM pgqueue.job; DELETE FROM pgqueue.attempt; DELETE FROM pgqueue.job_waiter;
    DELETE FROM pgqueue.job_progress; DELETE FROM pgqueue.job_signal; DELETE FROM pgqueue.job_cursor;
"""


def say(conn: psycopg.Connection[Any], name: str, **params: object) -> list[tuple[Any, ...]]:
    """Send this statement of pgqueue as a session of an application would: it may prepare it."""
    cursor = conn.execute(text(name, "pgqueue").encode(), params)
    return cursor.fetchall()


def fence(id: int) -> dict[str, object]:
    return {"id": id, "claim": 1, "worker_id": 7}


def completes(conn: psycopg.Connection[Any], id: int) -> None:
    say(conn, "complete_within", **fence(id), mark=None, version_tag="1", ago=None, result=None, notify=True)


def appends(conn: psycopg.Connection[Any], id: int) -> None:
    say(conn, "iteration_last", id=id, since="2020-01-01")
    say(conn, "iteration_append", **fence(id), mark=None, n=100, cursor="1")
    assert say(conn, "iteration_appended", id=id, since="infinity", n=99) == []


def gets(conn: psycopg.Connection[Any], id: int) -> None:
    assert pgqueue.get(conn, id).id == id


Ask = Callable[[psycopg.Connection[Any], int], object]
ASKS: dict[str, tuple[str, Ask]] = {
    "a completion": (RUNNING, completes),
    "a completion in doubt": (RUNNING, lambda conn, id: say(conn, "complete_mine", **fence(id), mark=None)),
    "a batch": (RUNNING, appends),
    "its state": (RUNNING, lambda conn, id: say(conn, "handle_state", id=id)),
    "its outcome": (DEAD, lambda conn, id: say(conn, "wait_outcome", id=id)),
    "get": (RUNNING, gets),
    "get of a dead one": (DEAD, gets),
    "cancel of a running one": (RUNNING, lambda conn, id: pgqueue.cancel(conn, id)),
    "cancel of a waiting one": (WAITING, lambda conn, id: pgqueue.cancel(conn, id)),
    "a filter": (
        WAITING,
        lambda conn, id: say(
            conn, "filters_matching", states=["scheduled", "failed"], after=0, most=9, queue=None, task=None, older=None
        ),
    ),
    "retry": (DEAD, lambda conn, id: pgqueue.retry(conn, id)),
}
"""What an application, or the transaction of a handler, says of one job; and in which state that is."""


@pytest.mark.promise("F37")
@pytest.mark.parametrize("ask", ASKS)
def test_one_job_is_looked_up_whenever_its_session_planned(dsn: str, ask: str) -> None:
    """The session prepared its statements while the tables were empty, and keeps the plans."""
    fill, asks = ASKS[ask]
    with psycopg.connect(dsn, autocommit=True) as conn, psycopg.connect(dsn, autocommit=True) as app:

        def read() -> int:
            for each in (app, conn):
                each.execute("SELECT pg_stat_force_next_flush()")
            [[rows]] = conn.execute(READ.encode()).fetchall()
            return int(rows)

        app.execute("SET plan_cache_mode = force_generic_plan")
        conn.execute(fill.encode(), [20])
        conn.execute(EMPTY.encode())
        conn.execute("VACUUM ANALYZE")
        for _ in range(10):  # psycopg prepares
            [[id]] = conn.execute(fill.encode(), [1]).fetchall()
            asks(app, id)
            conn.execute(EMPTY.encode())
        [id, *_] = [id for (id,) in conn.execute(fill.encode(), [MANY])]
        conn.execute(FILL.encode())
        before = read()
        asks(app, id)
        assert 0 < read() - before < FEW


PAIRS = ("a completion", "a batch")
"""What two handlers do beside each other, each with its own job."""


@pytest.mark.promise("F37")
@pytest.mark.parametrize("ask", PAIRS)
@pytest.mark.parametrize("rows", [2, 50])
def test_two_handlers_under_serializable_do_not_conflict(dsn: str, ask: str, rows: int) -> None:
    """Each reads and changes the rows of its own job only. With a table that is read as a whole one of them fails."""
    fill, asks = ASKS[ask]
    with psycopg.connect(dsn, autocommit=True) as conn:
        ids = [id for (id,) in conn.execute(fill.encode(), [rows])]
        conn.execute("VACUUM ANALYZE")
        with psycopg.connect(dsn) as one, psycopg.connect(dsn) as other:
            for session, id in ((one, ids[0]), (other, ids[1])):
                session.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
                asks(session, id)
            one.commit()
            try:
                other.commit()
            except errors.SerializationFailure as error:
                pytest.fail(f"two handlers of two jobs conflict: {error}")


def test_an_application_on_an_earlier_schema_is_told(dsn: str) -> None:
    """Its functions are not there yet: the server's own words would name one that no application has called."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        job = pgqueue.enqueue(conn, "x")
        conn.execute(EARLIER)
        for ask in (pgqueue.cancel, pgqueue.retry, pgqueue.get):
            with pytest.raises(pgqueue.SchemaBehind, match="pgqueue migrate"):
                ask(conn, job.id)
