"""How many workers there should be: never too few for what waits, at once, and in any state of the measurement."""

from __future__ import annotations

from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg import errors
from roles import Role, role

from pgqueue.database.grants import Kind
from pgqueue.database.sessions import Link, Session
from pgqueue.worker.leader.depth import Depth

__all__ = ["role"]

Conn = psycopg.Connection[Any]
PUT = "INSERT INTO pgqueue.job (task, queue) SELECT %s, %s FROM generate_series(1, %s)"
RUN = """
    INSERT INTO pgqueue.job_running (state, task, queue, worker_id, claim, started_at)
    SELECT 'running', 't', %s, 1, 1, now() FROM generate_series(1, %s)
"""
BLOCK = """
    INSERT INTO pgqueue.job_blocked (state, task, queue, lock_key, key)
    SELECT 'blocked', 't', %s, 'one', 'lock:one' FROM generate_series(1, %s)
"""
SCHEDULE = """
    INSERT INTO pgqueue.job_scheduled (state, task, queue, run_at)
    SELECT 'scheduled', 't', 'mail', now() + make_interval(secs => n) FROM unnest(%s::float8[]) AS n
"""


def desired(conn: Conn, queue: str | None, per_worker: int | None) -> int:
    [[answer]] = conn.execute("SELECT pgqueue.desired_workers(%s, %s)", [queue, per_worker]).fetchall()
    assert isinstance(answer, int)
    return answer


def large(conn: Conn) -> None:
    """Make a table of jobs large, by rows that are dead then."""
    conn.execute(PUT, ["t", "before", 6_000])
    conn.execute("DELETE FROM pgqueue.job_available")
    assert conn.execute("SELECT pg_relation_size('pgqueue.job_available') > 524288").fetchone() == (True,)


async def measure(dsn: str) -> None:
    session = Session(Link(dsn, "pgqueue"), "fetch")
    await Depth(session, leads=lambda: True).measure()
    await session.close()


# Small tables: of now ------------------------------------------------------------------------------------------------


@pytest.mark.promise("F169")
def test_what_waits_and_runs_is_divided_among_workers_and_rounded_up(conn: Conn) -> None:
    assert [desired(conn, queue, 10) for queue in ("mail", "unknown", "", None)] == [0, 0, 0, 0]
    conn.execute(PUT, ["t", "mail", 21])
    conn.execute(RUN, ["mail", 10])
    conn.execute(PUT, ["t", "other", 1])
    assert [desired(conn, "mail", per_worker) for per_worker in (1, 10, 31, 32, 2**31 - 1)] == [31, 4, 1, 1, 1]
    assert (desired(conn, None, 31), desired(conn, "other", 31)) == (2, 1)


@pytest.mark.promise("F169")
def test_jobs_of_paused_queues_and_tasks_wait_for_no_worker(conn: Conn) -> None:
    conn.execute(PUT, ["t", "mail", 10])
    conn.execute(PUT, ["paused.task", "mail", 100])
    conn.execute("INSERT INTO pgqueue.paused_task (name) VALUES ('paused.task')")
    assert desired(conn, "mail", 10) == 1
    conn.execute("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('mail', now())")
    assert (desired(conn, "mail", 10), desired(conn, None, 10)) == (0, 0)
    conn.execute(RUN, ["mail", 11])  # they run on, and need their workers
    assert (desired(conn, "mail", 10), desired(conn, None, 10)) == (2, 2)


@pytest.mark.promise("F169")
def test_a_blocked_job_needs_one_worker_and_a_due_one_needs_to_be_promoted(conn: Conn) -> None:
    conn.execute(SCHEDULE, [[-5.0, -1.0, 3_600.0]])
    assert (desired(conn, "mail", 1), desired(conn, None, 1)) == (2, 2)
    conn.execute("DELETE FROM pgqueue.job_scheduled")
    assert desired(conn, "mail", 1) == 0
    conn.execute(BLOCK, ["mail", 50])
    assert (desired(conn, "mail", 1), desired(conn, None, 1), desired(conn, "other", 1)) == (1, 1, 0)
    conn.execute("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('mail', now())")
    assert (desired(conn, "mail", 1), desired(conn, None, 1)) == (0, 0)


@pytest.mark.promise("F169")
@pytest.mark.parametrize("per_worker", [0, -1, None])
def test_a_number_that_cannot_be_is_refused(conn: Conn, per_worker: int | None) -> None:
    with pytest.raises(
        errors.InvalidParameterValue, match=f"per_worker is {'NULL' if per_worker is None else per_worker}"
    ):
        desired(conn, "mail", per_worker)


# Large tables: as measured, and if that is overdue, counted as far as is needed --------------------------------------


@pytest.mark.promise("F169")
async def test_a_large_table_is_answered_from_the_measurement(dsn: str, conn: Conn) -> None:
    large(conn)
    conn.execute(PUT, ["paused.task", "mail", 30])  # where the measurement walks; behind 10,000 jobs it estimates
    conn.execute(PUT, ["t", "mail", 20_000])
    conn.execute(RUN, ["mail", 7])
    conn.execute("INSERT INTO pgqueue.paused_task (name) VALUES ('paused.task')")
    conn.execute(BLOCK, ["held", 3])
    conn.commit()
    await measure(dsn)
    measured = desired(conn, "mail", 10)
    [[n]] = conn.execute(
        "SELECT sum(n) FROM pgqueue.depth "
        "WHERE queue = 'mail' AND state IN ('available', 'running') AND reason <> 'task_paused'"
    ).fetchall()
    assert measured == -(-int(n) // 10) and abs(measured - 2_001) < 200
    assert (desired(conn, "held", 10), desired(conn, None, 10)) == (1, measured)
    conn.execute(PUT, ["t", "mail", 20_000])
    assert desired(conn, "mail", 10) == measured  # of its time
    conn.execute("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('mail', now())")
    assert desired(conn, "mail", 10) == 1  # a pause counts at once; seven jobs run
    conn.execute("DELETE FROM pgqueue.queue")
    conn.execute("DELETE FROM pgqueue.paused_task")
    assert desired(conn, "mail", 10) == -(-(int(n) + 30) // 10)


@pytest.mark.promise("F169")
async def test_without_a_leader_it_is_counted_now_also_what_came_since(dsn: str, conn: Conn) -> None:
    """The naive version believes the last measurement, finds nothing, and starts no worker for ever."""
    large(conn)
    conn.execute(BLOCK, ["held", 3])
    conn.commit()
    assert desired(conn, "mail", 10) == 0  # never measured
    await measure(dsn)
    conn.execute("UPDATE pgqueue.depth SET at = at - interval '1 hour', next_at = next_at - interval '1 hour'")
    assert desired(conn, "mail", 10) == 0
    conn.execute(PUT, ["t", "mail", 25])
    conn.execute(SCHEDULE, [[-5.0, 3_600.0]])
    assert (desired(conn, "mail", 10), desired(conn, None, 10), desired(conn, "held", 10)) == (3, 3, 1)
    conn.execute(PUT, ["t", "mail", 2_000])
    assert desired(conn, "mail", 10) == 101  # 100 for what is available, and the due one; then a leader measures
    conn.execute("""
        INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, running)
        VALUES ('15 s', 1, 10, 'h', '1', '{other}', 'running', '{1,2,3}')
    """)
    assert desired(conn, "other", 1) == 3
    conn.execute("UPDATE pgqueue.depth SET at = at + interval '1 day', next_at = next_at + interval '1 day'")
    assert desired(conn, "mail", 10) == 101  # of a time to come: not believed


@pytest.mark.promise("F169")
@pytest.mark.parametrize("kind", ["read", "work", "operate"])
def test_roles_that_see_jobs_may_ask(conn: Conn, role: Role, kind: Kind) -> None:
    conn.execute(PUT, ["t", "mail", 1])
    conn.commit()
    with psycopg.connect(role(kind)) as mine:
        assert desired(mine, "mail", 10) == 1


@pytest.mark.second
@pytest.mark.promise("F169")
async def test_it_takes_milliseconds_beside_a_million_jobs(dsn: str, conn: Conn) -> None:
    conn.execute(PUT, ["t", "mail", 1_000_000])
    conn.commit()
    took = {}
    for name in ("missing", "fresh"):
        if name == "fresh":
            await measure(dsn)
        times = []
        for _ in range(9):
            began = monotonic()
            assert desired(conn, "mail", 40) >= 100
            times.append(1e3 * (monotonic() - began))
        took[name] = sorted(times)[4]
    print(took)
    assert max(took.values()) < 50.0  # 5 are meant on a quiet machine
