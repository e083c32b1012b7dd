"""How many jobs each queue has: counted now while that is cheap, else what was measured last; and its age is told."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from commands import items, pgqueue

import pgqueue as api
from pgqueue.admin import queries
from pgqueue.admin.depth import Count
from pgqueue.errors import InvalidOption
from pgqueue.testing import Clock

Conn = psycopg.Connection[Any]


def fill(conn: Conn, number: int, queue: str = "q") -> None:
    conn.execute(
        "INSERT INTO pgqueue.job_available (task, queue) SELECT 't', %s FROM generate_series(1, %s)", [queue, number]
    )


def measured(conn: Conn, number: int, *, age: float = 3.0, late: float = -5.0, queue: str = "q") -> None:
    """A measurement of the leader, so many seconds ago. The next one is due since `late` seconds."""
    conn.execute(
        "INSERT INTO pgqueue.depth (at, next_at, queue, state, reason, n, exact, oldest, longest_blocked) "
        "SELECT now() - make_interval(secs => %(age)s), now() - make_interval(secs => %(late)s), "
        "       queue, state, reason, n, true, now() - interval '90 s', "
        "       CASE state WHEN 'blocked' THEN now() - interval '40 s' END "
        "FROM (VALUES (%(queue)s, 'available', 'slot', %(n)s::bigint), (%(queue)s, 'blocked', 'lock', 3), "
        "             ('', 'completed', '', 77)) AS v (queue, state, reason, n)",
        {"age": age, "late": late, "n": number, "queue": queue},
    )


@pytest.mark.promise("F80")
def test_small_tables_are_counted_now_also_what_this_transaction_has_enqueued(conn: Conn) -> None:
    measured(conn, 5_000)
    api.enqueue(conn, "t")
    [default] = api.queues(conn)  # what the measurement says of other queues is over
    assert (default.name, default.available) == ("default", Count(1))
    assert default.counted_at is not None and datetime.now(UTC) - default.counted_at < timedelta(seconds=60)
    assert queries.status(conn).states["completed"] == Count(0)


@pytest.mark.promise("F80")
def test_of_a_large_table_the_last_measurement_is_told_with_its_age(conn: Conn) -> None:
    fill(conn, 20_000)
    measured(conn, 123_456)
    [queue] = api.queues(conn)
    assert (queue.available, queue.blocked, queue.running) == (Count(123_456), Count(3), Count(0))
    assert queue.oldest == pytest.approx(90, abs=30) and queue.longest_blocked == pytest.approx(40, abs=30)
    now = conn.execute("SELECT now()").fetchone()
    assert now is not None and queue.counted_at is not None
    assert abs(now[0] - queue.counted_at - timedelta(seconds=3)) < timedelta(seconds=0.1)
    assert api.depth(conn, "q").available == Count(123_456)
    assert api.depth(conn, "other").available == Count(0)
    status = queries.status(conn)
    assert (status.counted_at, status.states["available"]) == (queue.counted_at, Count(123_456))


@pytest.mark.promise("F80")
@pytest.mark.parametrize(("age", "late"), [(60.0, 30.0), (-3600.0, -3700.0)])
def test_a_measurement_that_is_overdue_or_of_a_time_to_come_is_not_told(conn: Conn, age: float, late: float) -> None:
    fill(conn, 20_000)
    measured(conn, 1, age=age, late=late)
    [queue] = api.queues(conn)
    assert not queue.available.exact and 15_000 < queue.available.n < 25_000
    assert queue.counted_at is not None and datetime.now(UTC) - queue.counted_at < timedelta(seconds=60)
    assert api.depth(conn, "q").available == queue.available


@pytest.mark.promise("F80")
def test_a_measurement_that_is_a_little_late_is_the_last_one_all_the_same(conn: Conn) -> None:
    fill(conn, 20_000)
    measured(conn, 7, age=20.0, late=4.0)
    assert api.depth(conn, "q").available == Count(7)


@pytest.mark.promise("F82")
def test_a_job_of_an_unknown_task_does_not_make_a_queue_old(conn: Conn) -> None:
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, tasks) "
        "VALUES ('15 s', 1, 1, 'h', 'v', '{q}', 'running', '{known}')"
    )
    old = datetime.now(UTC) - timedelta(hours=3)
    conn.execute("INSERT INTO pgqueue.job (task, queue, enqueued_at) VALUES ('typo', 'q', %s)", [old])
    assert api.depth(conn, "q").oldest is None
    conn.execute("INSERT INTO pgqueue.job (task, queue) VALUES ('known', 'q')")
    found = api.depth(conn, "q")
    assert found.oldest is not None and found.oldest < 60 and found.available == Count(2)


@pytest.mark.promise("F82")
@pytest.mark.parametrize("what", [{"queue": "q"}, {"task": "t"}], ids=["queue", "task"])
def test_a_paused_job_does_not_make_a_queue_old(conn: Conn, what: dict[str, str]) -> None:
    """Whether its queue is paused, or its task. It could not run, whatever workers there are."""
    old = datetime.now(UTC) - timedelta(hours=3)
    conn.execute("INSERT INTO pgqueue.job (task, queue, enqueued_at) VALUES ('t', 'q', %s)", [old])
    before = api.depth(conn, "q")
    assert before.oldest == pytest.approx(3 * 3600, abs=300)
    api.pause(conn, **what)
    paused = api.depth(conn, "q")
    assert (paused.oldest, paused.available) == (None, Count(1))
    api.resume(conn, **what)
    assert api.depth(conn, "q").oldest == pytest.approx(3 * 3600, abs=300)


@pytest.mark.promise("F82")
@pytest.mark.parametrize("beside", [0, 20_000], ids=["counted now", "measured"])
def test_a_scheduled_job_whose_time_has_come_makes_its_queue_old(conn: Conn, beside: int) -> None:
    """No worker leads, so nothing makes it available. One that waits for its time could not run."""
    fill(conn, beside, "other")
    later = "INSERT INTO pgqueue.job (state, task, queue, run_at) VALUES ('scheduled', %s, 'q', now() + %s::interval)"
    conn.execute(later, ["t", "1 h"])
    assert api.depth(conn, "q").oldest is None
    conn.execute(later, ["t", "-3 h"])
    assert api.depth(conn, "q").oldest == pytest.approx(3 * 3600, abs=300)
    for paused in ({"queue": "q"}, {"task": "t"}):
        api.pause(conn, **paused)
        assert api.depth(conn, "q").oldest is None
        api.resume(conn, **paused)
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, tasks) "
        "VALUES ('15 s', 1, 1, 'h', 'v', '{q}', 'running', '{known}')"
    )
    assert api.depth(conn, "q").oldest is None, "no worker of the queue knows the task"
    conn.execute(later, ["known", "-2 h"])
    assert api.depth(conn, "q").oldest == pytest.approx(2 * 3600, abs=300)


@pytest.mark.promise("F82")
def test_of_a_paused_queue_it_counts_whether_it_is_paused_now(conn: Conn) -> None:
    """Beside many jobs the numbers are those of a measurement, which may be of the time before the pause or its end."""
    fill(conn, 20_000)
    measured(conn, 7)
    conn.execute("INSERT INTO pgqueue.queue VALUES ('q', now())")
    assert api.depth(conn, "q").oldest is None
    conn.execute("UPDATE pgqueue.depth SET reason = 'paused'")
    conn.execute("DELETE FROM pgqueue.queue")
    assert api.depth(conn, "q").oldest is not None


def test_one_queue_is_told_alone(conn: Conn) -> None:
    fill(conn, 3)
    fill(conn, 2, "other")
    conn.execute("INSERT INTO pgqueue.queue VALUES ('q', now())")
    found = api.depth(conn, "q")
    assert (found.name, found.available, found.paused_at is not None, found.workers) == ("q", Count(3), True, 0)
    assert api.depth(conn, "none").available == Count(0)
    with pytest.raises(InvalidOption, match="queue"):
        api.depth(conn, "not a name")


@pytest.mark.promise("F80")
@pytest.mark.parametrize("jobs", [3, 20_000])
async def test_every_kind_of_connection_is_told_the_same(conn: Conn, aconn: Any, dsn: str, jobs: int) -> None:
    psycopg2, asyncpg = pytest.importorskip("psycopg2"), pytest.importorskip("asyncpg")
    fill(conn, jobs)
    conn.commit()
    expected = api.depth(conn, "q").available
    with closing(psycopg2.connect(dsn)) as other:
        assert api.depth(other, "q").available == api.queues(other)[0].available == expected
    assert (await api.adepth(aconn, "q")).available == expected
    other = await asyncpg.connect(dsn)
    try:
        assert (await api.adepth(other, "q")).available == expected
        assert [queue.available for queue in await api.aqueues(other)] == [expected]
    finally:
        await other.close()


@pytest.mark.promise("F80")
def test_the_commands_say_how_old_the_numbers_are(conn: Conn, dsn: str) -> None:
    fill(conn, 20_000)
    conn.commit()
    assert "Counted" not in pgqueue("queues", dsn=dsn).stdout, "no worker leads: they were counted just now"
    measured(conn, 123, age=70.0, late=-50.0)
    conn.commit()
    for command in ("queues", "status"):
        shown = pgqueue(command, dsn=dsn).stdout
        assert "Counted 7" in shown and "STUCK" in shown and " 123 " in shown
    [found] = items(pgqueue("queues", "--json", dsn=dsn))
    assert found["longest_blocked"] > 40 and datetime.fromisoformat(found["counted_at"]) < datetime.now(UTC)
    assert "Counted " in pgqueue("doctor", dsn=dsn).stdout
    said = json.loads(pgqueue("doctor", "--json", dsn=dsn).stdout)
    assert said["counted_at"] == found["counted_at"] < said["at"]


@pytest.mark.promise("F80")
def test_the_status_says_how_old_the_numbers_of_ended_jobs_are(conn: Conn, dsn: str) -> None:
    """The few jobs that wait are counted now. The many that have ended were measured."""
    conn.execute(
        "INSERT INTO pgqueue.job (state, task, finished_at) "
        "SELECT 'completed', 't', now() FROM generate_series(1, 6000)"
    )
    assert queries.status(conn).states["completed"] == Count(6_000)
    measured(conn, 1, age=3000.0, late=-500.0)
    conn.commit()
    found = queries.status(conn)
    assert found.states["completed"] == Count(77)
    assert found.at - found.counted_at >= timedelta(seconds=3000)
    assert "Counted 50m ago" in pgqueue("status", dsn=dsn).stdout


@pytest.mark.promise("F80")
@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_an_age_is_by_the_databases_clock(conn: Conn, dsn: str, ahead: int) -> None:
    """The clock of the machine that asks may be wrong, by an hour here."""
    with Clock(conn) as clock:
        clock.set(datetime.now(UTC) + timedelta(seconds=ahead))
        fill(conn, 20_000)
        conn.execute("INSERT INTO pgqueue.queue VALUES ('q', pgqueue.now() - interval '65 s')")
        conn.commit()
        for command in ("queues", "status"):
            shown = pgqueue(command, dsn=dsn).stdout
            assert "PAUSED queue q for 65s" in shown and "Counted" not in shown
