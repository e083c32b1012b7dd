"""How far a relay is behind, as `pgqueue status` and applications see it."""

from __future__ import annotations

import json

import psycopg
from commands import pgqueue
from relays import Sides, app_dsn, sides
from roles import Role, role

from pgqueue.admin.lag import Lag, lag, visible
from pgqueue.database import migrations

__all__ = ["app_dsn", "role", "sides"]


def test_the_status_of_the_applications_database_is_its_outbox(app_dsn: str, sides: Sides) -> None:
    assert pgqueue("status", dsn=app_dsn).stdout == "OUTBOX: staged jobs that wait for a relay: 0.\n"
    sides.stage("a", "b")
    sides.app.execute("UPDATE pgqueue.outbox SET staged_at = staged_at - interval '5 min' WHERE id = 2")
    assert pgqueue("status", dsn=app_dsn).stdout == "OUTBOX: staged jobs that wait for a relay: 2, the oldest for 5m.\n"
    sides.app.execute(
        "INSERT INTO pgqueue.outbox_refused (id, task, args, format, uid, staged_at, reason) "
        "SELECT id, task, args, format, uid, staged_at, 'no' FROM pgqueue.outbox"
    )
    assert "REFUSED staged jobs: 2; `pgqueue relay --list-refused`" in pgqueue("status", dsn=app_dsn).stdout
    found = json.loads(pgqueue("status", "--json", dsn=app_dsn).stdout)["outbox"]
    assert (found["waiting"], found["refused"]) == (2, 2) and 300 <= found["oldest"] < 400


def test_where_queue_and_outbox_are_in_one_database_both_are_shown(dsn: str, sides: Sides) -> None:
    assert "OUTBOX" not in pgqueue("status", dsn=dsn).stdout
    assert json.loads(pgqueue("status", "--json", dsn=dsn).stdout)["outbox"] is None
    migrations.migrate(dsn, line=migrations.OUTBOX)
    sides.queue.execute("INSERT INTO pgqueue.outbox (task) VALUES ('t')")
    lines = pgqueue("status", dsn=dsn).stdout.splitlines()
    assert lines[0].startswith("database ") and lines[-1].startswith(
        "OUTBOX: staged jobs that wait for a relay: 1, the"
    )


def test_more_than_ten_thousand_are_not_counted(app_dsn: str, sides: Sides) -> None:
    sides.app.execute("INSERT INTO pgqueue.outbox (task) SELECT 't' FROM generate_series(1, 10100)")
    assert lag(sides.app).waiting == 10_001
    assert "wait for a relay: more than 10,000, the oldest" in pgqueue("status", dsn=app_dsn).stdout


def test_a_role_that_may_not_read_the_outbox_does_not_see_it(dsn: str, role: Role) -> None:
    migrations.migrate(dsn, line=migrations.OUTBOX)
    reader = role("read")
    with psycopg.connect(reader) as conn:
        assert not visible(conn)
    assert "OUTBOX" not in pgqueue("status", dsn=reader).stdout
    with psycopg.connect(dsn) as conn:
        assert visible(conn) and lag(conn) == Lag(0, None, 0)


def test_a_database_without_either_names_the_command_for_a_queue(empty_dsn: str) -> None:
    done = pgqueue("status", dsn=empty_dsn)
    assert (done.returncode, "run `pgqueue migrate`" in done.stderr) == (4, True)
