"""How far a relay is behind, as `pgqueue status` and applications see it."""

from __future__ import annotations

import json

import psycopg
import pytest
from commands import pgqueue
from relays import Sides, app_dsn, eventually, relaying, sides
from roles import Role, role

from pgqueue.admin.lag import Lag, lag, relays, visible
from pgqueue.database import migrations
from pgqueue.database.statements import text
from pgqueue.relay.relay import Relay

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
    found = json.loads(pgqueue("status", "--json", dsn=app_dsn).stdout)["items"][0]["outbox"]
    assert (found["waiting"], found["refused"]) == (2, 2) and 300 <= found["oldest"] < 400


def test_where_queue_and_outbox_are_in_one_database_both_are_shown(dsn: str, sides: Sides) -> None:
    assert "OUTBOX" not in pgqueue("status", dsn=dsn).stdout
    assert json.loads(pgqueue("status", "--json", dsn=dsn).stdout)["items"][0]["outbox"] is None
    migrations.migrate(dsn, line=migrations.OUTBOX)
    sides.queue.execute("INSERT INTO pgqueue.outbox (task) VALUES ('t')")
    lines = pgqueue("status", dsn=dsn).stdout.splitlines()
    assert lines[0].startswith("database ") and lines[-1].startswith(
        "OUTBOX: staged jobs that wait for a relay: 1, the"
    )


@pytest.mark.parametrize(("at", "least"), [("infinity", 0), ("-infinity", 1e9), ("4713-01-01 BC", 1e9)])
def test_a_job_that_was_staged_at_an_infinite_time_is_counted(sides: Sides, at: str, least: float) -> None:
    sides.app.execute("INSERT INTO pgqueue.outbox (task, staged_at) VALUES ('t', %s)", [at])
    of_relay = sides.app.execute(
        text("source_waiting", "pgqueue").encode(), {"after": 0, "stayed": [], "held": []}
    ).fetchone()
    for found in (lag(sides.app), Lag(*of_relay or ())):
        assert found.waiting == 1 and found.oldest is not None and least <= found.oldest < 1e10


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


async def test_in_the_queues_database_the_status_shows_what_relays_have_reported(
    app_dsn: str, dsn: str, sides: Sides, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.relay.rounds.REPORT_SECONDS", 0.05)
    assert json.loads(pgqueue("status", "--json", dsn=dsn).stdout)["items"][0]["relays"] == []
    with psycopg.connect(app_dsn) as application:
        sides.stage("a", "b")
        sides.app.execute("UPDATE pgqueue.outbox SET staged_at = staged_at - interval '5 min'")
        application.execute("SELECT FROM pgqueue.outbox WHERE id = 2 FOR UPDATE")
        relay = Relay(app_dsn, dsn)
        async with relaying(relay):
            await eventually(lambda: [(each.waiting, each.refused) for each in relays(sides.queue)] == [(1, 0)])
            [found] = relays(sides.queue)
            assert found.oldest is not None and 300 <= found.oldest < 400 and not found.is_silent
            assert (relay.counts.waiting, relay.counts.delivered, relay.counts.oldest) == (1, 2, found.oldest)
            last = pgqueue("status", dsn=role("read")).stdout.splitlines()[-1]
            assert last.startswith(f"RELAY of {relay.name}: staged jobs that wait: 1, the oldest for 5m (")
            application.rollback()
            await eventually(lambda: relays(sides.queue)[0].waiting == 0)
            assert relays(sides.queue)[0].oldest is None
    sides.queue.execute("UPDATE pgqueue.relay_fence SET reported_at = reported_at - interval '10 min', refused = 3")
    lines = pgqueue("status", dsn=dsn).stdout.splitlines()[-2:]
    assert lines[0] == f"NO RELAY of {relay.name} has reported for 10m; staged jobs that waited then: 0."
    assert lines[1].startswith(f"REFUSED staged jobs of {relay.name}: 3; ")


async def test_what_is_held_back_by_its_order_key_is_counted(app_dsn: str, dsn: str, sides: Sides) -> None:
    sides.app.execute(
        "INSERT INTO pgqueue.outbox (task, order_key) VALUES ('two words', 'k'), ('a', 'k'), ('b', 'k'), ('c', 'l')"
    )
    assert await Relay(app_dsn, dsn).once()
    assert [(each.waiting, each.refused) for each in relays(sides.queue)] == [(2, 1)]
