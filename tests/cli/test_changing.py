"""`pgqueue migrate`, `enqueue`, `prune`: the commands that change something."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from commands import pgqueue

import pgqueue as api
from pgqueue.database import migrations

Conn = psycopg.Connection[Any]

# migrate -------------------------------------------------------------------------------------------------------------


@pytest.mark.second
def test_migrate_checks_makes_and_checks(empty_dsn: str) -> None:
    before = pgqueue("migrate", "--check", dsn=empty_dsn)
    assert (before.returncode, "lacks 0001_schema" in before.stdout) == (1, True)
    first = pgqueue("migrate", dsn=empty_dsn)
    assert (first.returncode, "applied 0001_schema" in first.stdout) == (0, True)
    again = pgqueue("migrate", dsn=empty_dsn)
    assert (again.returncode, "applied" in again.stdout, "nothing to do" in again.stdout) == (0, False, True)
    assert pgqueue("migrate", "--check", dsn=empty_dsn).returncode == 0


def test_migrate_prints_sql_that_applies_without_a_database_of_its_own(empty_dsn: str) -> None:
    printed = pgqueue("migrate", "--sql", "--schema", "jobs")
    assert (printed.returncode, printed.stderr) == (0, "")
    with psycopg.connect(empty_dsn) as conn:
        conn.execute(printed.stdout.encode())
    assert pgqueue("migrate", "--check", "--schema", "jobs", dsn=empty_dsn).returncode == 0
    newest = migrations.files()[-1].version
    assert pgqueue("migrate", "--sql", "--from", str(newest)).stdout == ""
    beyond = pgqueue("migrate", "--sql", "--from", str(newest + 1))
    assert (beyond.returncode, beyond.stdout) == (2, "")
    assert f"--from {newest + 1}: no migration has this number, the newest of this pgqueue is {newest}" in beyond.stderr


def test_migrate_as_somebody_who_may_not_is_3(dsn: str, empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("DROP ROLE IF EXISTS pgqueue_test_nobody")
        conn.execute("CREATE ROLE pgqueue_test_nobody LOGIN PASSWORD 'secret'")
        try:
            who = psycopg.conninfo.make_conninfo(empty_dsn, user="pgqueue_test_nobody", password="secret")
            done = pgqueue("migrate", dsn=who)
        finally:
            conn.execute("DROP ROLE pgqueue_test_nobody")
    assert (done.returncode, "GRANT CREATE" in done.stderr, "Traceback" in done.stderr) == (3, True, False)


# enqueue -------------------------------------------------------------------------------------------------------------


def test_enqueue_prints_the_id_and_nothing_else(conn: Conn, dsn: str) -> None:
    done = pgqueue("enqueue", "mail.send", '{"to": "é", "n": [1, 2.5, null]}', dsn=dsn)
    job = api.get(conn, int(done.stdout))
    assert (job.task, job.args, job.queue, job.priority) == (
        "mail.send",
        {"to": "é", "n": [1, 2.5, None]},
        "default",
        5,
    )
    assert done.stderr == ""


def test_enqueue_reads_stdin(conn: Conn, dsn: str) -> None:
    done = pgqueue("enqueue", "t", "-", dsn=dsn, stdin='{\n  "x": 1\n}\n')
    assert api.get(conn, int(done.stdout)).args == {"x": 1}


def test_enqueue_takes_queue_priority_and_time(conn: Conn, dsn: str) -> None:
    at = pgqueue("enqueue", "t", "--queue", "slow", "--priority", "9", "--at", "2099-01-01T00:00+02:00", dsn=dsn)
    job = api.get(conn, int(at.stdout))
    assert (job.queue, job.priority, job.state) == ("slow", 9, "scheduled")
    assert job.run_at == datetime(2098, 12, 31, 22, tzinfo=UTC)
    later = api.get(conn, int(pgqueue("enqueue", "t", "--delay", "2h", dsn=dsn).stdout))
    assert later.run_at is not None
    assert timedelta(hours=1.9) < later.run_at - later.enqueued_at < timedelta(hours=2.1)


def test_enqueue_refuses_what_a_job_cannot_hold_before_it_connects() -> None:
    for arguments in ('{"x": "\\u0000"}', '{"x": "\\ud800"}', '{"x": Infinity}', json.dumps({"x": "y" * 1_100_000})):
        done = pgqueue("enqueue", "t", "-", dsn="host=127.0.0.1 port=1", stdin=arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), arguments[:30]


# prune ---------------------------------------------------------------------------------------------------------------

RINGS = ("attempt", "dead", "done", "hour", "minute")


def bins(conn: Conn) -> dict[str, int]:
    found = dict(conn.execute("SELECT kind, bin FROM pgqueue.ring").fetchall())
    conn.commit()
    return found


def test_prune_leaves_what_is_not_due(conn: Conn, dsn: str) -> None:
    done = pgqueue("prune", dsn=dsn)
    assert (done.returncode, done.stdout.count("not due")) == (0, 5)
    assert bins(conn) == dict.fromkeys(RINGS, 0)


def test_prune_advances_what_is_due(conn: Conn, dsn: str) -> None:
    conn.execute("UPDATE pgqueue.ring SET since = since - interval '5 hours' WHERE kind = 'done'")
    conn.execute("INSERT INTO pgqueue.job_done (state, task, bin, finished_at) VALUES ('completed', 't', 1, now())")
    conn.commit()
    done = pgqueue("prune", dsn=dsn)
    assert (done.returncode, done.stdout.count("not due"), "advanced" in done.stdout) == (0, 4, True)
    assert bins(conn) == dict.fromkeys(RINGS, 0) | {"done": 1}
    assert conn.execute("SELECT count(*) FROM pgqueue.job_done").fetchone() == (0,)


def test_prune_all_advances_every_ring_once(conn: Conn, dsn: str) -> None:
    assert pgqueue("prune", "--all", dsn=dsn).returncode == 0
    assert bins(conn) == dict.fromkeys(RINGS, 1)


@pytest.mark.promise("F20")
def test_a_reader_that_prevents_it_is_told_of_and_the_rest_goes_on(conn: Conn, dsn: str) -> None:
    with psycopg.connect(dsn) as reader:
        reader.execute("SELECT count(*) FROM pgqueue.job_done_1")
        done = pgqueue("prune", "--all", dsn=dsn)
        assert f"done: pid {reader.info.backend_pid} (" in done.stderr
        assert (done.returncode, done.stdout.count("prevented: a reader"), done.stdout.count("advanced")) == (1, 1, 4)
        assert bins(conn) == dict.fromkeys(RINGS, 1) | {"done": 0}
    assert pgqueue("prune", "--all", dsn=dsn).returncode == 0
    assert bins(conn) == dict.fromkeys(RINGS, 2) | {"done": 1}
