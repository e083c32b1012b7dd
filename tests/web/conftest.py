"""What the tests of the dashboard have in common: their patience, a browser, the queue of a shop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
import shop_queue
from browsers import launched

import pgqueue
from pgqueue.pytest_plugin import Databases
from pgqueue.web import connections

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the server may take a while to make a connection. That is no reason for a test to fail."""
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 30.0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real one, for the tests of a file."""
    with launched() as made:
        yield made


@pytest.fixture(scope="module")
def shop(pgqueue_databases: Databases) -> Iterator[str]:
    """The database of a shop, for the tests of a file."""
    with pgqueue_databases.copy() as made:
        shop_queue.fill(made)
        yield made


@pytest.fixture(scope="module")
def long(shop: str) -> dict[str, int]:
    """The ids of a job, an operation and a flow. Names have 60 characters, errors 500. Each list has such a row."""
    with psycopg.connect(shop) as conn:
        conn.execute(
            "WITH made AS (INSERT INTO pgqueue.job (task, queue, state, finished_at, bin, reason, args, attempt) "
            "VALUES (repeat('t', 60), repeat('q', 40), 'cancelled', now(), 0, repeat('r', 500), "
            "jsonb_build_object(repeat('a', 60), repeat('v', 500)), 2) RETURNING id, enqueued_at) "
            "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, "
            "bin, outcome, error_type, message) SELECT id, enqueued_at, 1, 1, 1, now(), now(), 0, 'error', "
            "repeat('E', 60), repeat('m', 500) FROM made"
        )
        conn.execute(
            "INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, failed, wait, run) SELECT "
            "date_trunc('minute', now()) - interval '5 min', bin, repeat('q', 40), repeat('t', 60), 100000, 99999, 9, "
            "ARRAY[100000], ARRAY[100000] FROM pgqueue.ring WHERE kind = 'minute'"
        )
        conn.execute(
            "INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, place, message, first_at, last_at, "
            "count, job_ids) VALUES ('long', repeat('q', 40), repeat('t', 60), repeat('E', 60), repeat('p', 60), "
            "repeat('m', 500), now(), now(), 1, '{}')"
        )
        conn.execute(
            "INSERT INTO pgqueue.audit (actor, action, target, details) VALUES (repeat('a', 60), 'bulk retry', "
            "jsonb_build_object('task', repeat('t', 60)), jsonb_build_object('note', repeat('n', 500)))"
        )
        conn.execute(
            "INSERT INTO pgqueue.schedule (name, line, tz, catch_up, task, args, queue, priority, options, next_at) "
            "VALUES (repeat('n', 60), '30 9 * * *', 'Europe/Berlin', 'latest', repeat('t', 60), '{}', "
            "repeat('q', 40), 5, '{}', now())"
        )
        conn.execute(
            "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, tasks, beat_at) "
            "VALUES ('1 hour', 1, 9, repeat('h', 60), repeat('v', 60), ARRAY[repeat('q', 40)], 'running', "
            "ARRAY[repeat('t', 60)], now())"
        )
        conn.execute(
            "INSERT INTO pgqueue.job_blocked (state, task, queue, lock_key, limit_key, key) VALUES "
            "('blocked', repeat('t', 60), repeat('q', 40), repeat('k', 60), NULL, 'lock:' || repeat('k', 60)), "
            "('blocked', repeat('t', 60), repeat('q', 40), NULL, repeat('l', 60), 'limit:' || repeat('l', 60))"
        )
        conn.execute(
            "INSERT INTO pgqueue.job_step (job_id, enqueued_at, name, result) SELECT id, enqueued_at, "
            "repeat('s', 60), to_jsonb(repeat('r', 500)) FROM pgqueue.job "
            "WHERE task = repeat('t', 60) AND state = 'cancelled'"
        )
        conn.execute(
            "INSERT INTO pgqueue.bulk (actor, action, target, states, task, up_to, ended_at, note) VALUES "
            "(repeat('a', 60), 'retry', jsonb_build_object('states', '{failed}'::text[], 'task', repeat('t', 60)), "
            "'{failed}', repeat('t', 60), 1, now(), repeat('n', 500))"
        )
        [(job, bulk)] = conn.execute(
            "SELECT (SELECT id FROM pgqueue.job WHERE task = repeat('t', 60) AND state = 'cancelled'), "
            "(SELECT max(id) FROM pgqueue.bulk)"
        ).fetchall()
        step, flow = pgqueue.remote("t" * 60).using(queue="q" * 40), pgqueue.Flow("f" * 60)
        flow.add(step.new(), name="n" * 60, after=[flow.add(step.new(), name="m" * 60)])
        made = flow.enqueue(conn).id
    return {"job": job, "bulk": bulk, "flow": made, "preview_flow": made}
