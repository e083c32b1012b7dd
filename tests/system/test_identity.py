"""Ids that are given again: what is said of a job stays with that job, and no number is given twice for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from ids_again import SEQUENCES, ids_again
from roles import Role, refused, role
from unique_jobs import Conn, make, put
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job
from pgqueue.admin.queries import get
from pgqueue.client.tasks import Task, task
from pgqueue.database import migrations
from pgqueue.database.statements import text
from pgqueue.jobs.retry import RetryPolicy

__all__ = ["role"]

ONCE = RetryPolicy(attempts=1)


def plain(dsn: str, number: int = 1) -> list[int]:
    """Plain jobs, committed; their ids."""
    with psycopg.connect(dsn) as conn:
        return [pgqueue.enqueue(conn, "plain").id for _ in range(number)]


# Unique keys ---------------------------------------------------------------------------------------------------------


def by_python(conn: Conn) -> bool:
    return put(conn, "k").created


def by_idempotency(conn: Conn) -> bool:
    return pgqueue.enqueue(conn, pgqueue.remote("t").using(idempotency_key="k")).created


def by_sql(conn: Conn) -> bool:
    before = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    conn.execute("SELECT pgqueue.enqueue('t', unique_key => 'k', idempotency_key => 'k')")
    return conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() != before


@pytest.mark.promise("F29")
@pytest.mark.parametrize("by", [by_python, by_idempotency, by_sql])
def test_a_key_of_a_job_that_is_gone_is_not_held_by_a_stranger_with_its_id(
    dsn: str, conn: Conn, by: Callable[[Conn], bool]
) -> None:
    assert by(conn)
    assert not by(conn)
    conn.commit()
    ids_again(dsn, "truncated")
    assert plain(dsn) == [1]  # by its id alone, this job would have the key
    assert by(conn)
    assert not by(conn)


def test_a_retry_by_hand_takes_back_the_key_of_its_job_and_no_strangers(dsn: str, conn: Conn) -> None:
    first = make(conn, "failed", "live", key="a")
    conn.commit()
    ids_again(dsn, "truncated")
    second = make(conn, "failed", "live", key="b")
    conn.execute("UPDATE pgqueue.unique_key SET enqueued_at = '2001-01-01' WHERE key = 'unique:a'")
    assert first == second
    [answer] = pgqueue.retry(conn, second)
    assert answer.did == "retried"
    assert put(conn, "a").created
    assert not put(conn, "b").created


# Cursors, requests, attempts -----------------------------------------------------------------------------------------


def walking(seen: list[int], stop_at: int) -> Task[..., Any]:
    def items(cursor: int | None) -> Iterator[tuple[int, int]]:
        yield from ((n, n) for n in range((cursor or 0) + 1, 7))

    @task(name="identity.walks", retry=ONCE)
    def walks(job: Job, stop: bool) -> None:
        for batch in job.iterate(items, 2):
            if stop and stop_at in batch:
                raise ValueError("stops here")
            seen.extend(batch)

    return walks


@pytest.mark.promise("F29")
async def test_a_new_iteration_does_not_go_on_at_the_cursor_of_a_stranger(dsn: str, eyes: Eyes) -> None:
    seen: list[int] = []
    walks = walking(seen, 5)
    async with work(dsn, walks):
        eyes.do("SELECT setval('pgqueue.job_pos_seq', 100)")  # the worker sees that its head goes back
        with psycopg.connect(dsn) as conn:
            first = pgqueue.enqueue(conn, walks, stop=True).id
        await until(eyes.is_in(first, "failed"))
        assert eyes.one("SELECT count(*) FROM pgqueue.job_cursor") == 2
        seen.clear()
        ids_again(dsn, "truncated")
        with psycopg.connect(dsn) as conn:
            second = pgqueue.enqueue(conn, walks, stop=False).id
        assert first == second
        await until(eyes.is_in(second, "completed"))
    assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.promise("F29")
async def test_a_request_to_cancel_a_job_that_is_gone_stops_no_stranger(dsn: str, eyes: Eyes) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    @task(name="identity.waits", retry=ONCE)
    async def waits() -> None:
        began.set()
        await go_on.wait()

    with psycopg.connect(dsn) as conn:  # a running job, as another worker left it
        conn.execute(
            "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at) VALUES "
            "('running', 't', 77, 1, now())"
        )
        assert pgqueue.cancel(conn, 1)[0].did == "requested"
    async with work(dsn, waits) as worker:
        ids_again(dsn, "truncated")
        with psycopg.connect(dsn) as conn:
            job = pgqueue.enqueue(conn, waits).id
        assert job == 1
        await began.wait()
        [requests] = await worker.services.fetch_session.run(
            worker.state.link.statement("cancellation_read", worker_id=worker.worker_id)
        )
        assert requests == []
        await worker.services.cancellation.settle()
        assert eyes.one("SELECT count(*) FROM pgqueue.job_signal") == 0
        go_on.set()
        await until(eyes.is_in(job, "completed"))


@pytest.mark.promise("F29")
def test_of_two_jobs_with_one_id_the_one_that_got_it_last_is_cancelled(dsn: str, conn: Conn) -> None:
    later = pgqueue.enqueue(conn, pgqueue.remote("old").using(delay=60)).id
    conn.commit()
    ids_again(dsn, "lagging")
    new = pgqueue.enqueue(conn, "new").id
    assert new == later
    pgqueue.cancel(conn, new)
    states = conn.execute("SELECT task, state FROM pgqueue.job ORDER BY 1").fetchall()
    assert states == [("new", "cancelled"), ("old", "scheduled")]


def test_attempts_of_a_stranger_are_not_shown(conn: Conn) -> None:
    id = pgqueue.enqueue(conn, "t").id
    note = (
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome) VALUES (%s, %s, 1, 1, 1, now(), now(), 0, 'failed')"
    )
    conn.execute(note, [id, "2001-01-01"])
    assert get(conn, id).attempts == ()


@pytest.mark.promise("F36")
def test_a_run_is_named_by_its_claim_because_a_snooze_spends_no_attempt(conn: Conn) -> None:
    """An earlier run of the same attempt on the same worker was snoozed: this run has not been ended by it."""
    conn.execute(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, attempt, worker_id, claim, started_at, finished_at, bin, "
        "outcome) VALUES (1, now(), 1, 5, 3, now(), now(), 0, 'snoozed'), "
        "(2, now(), 1, 5, 4, now(), now(), 0, 'failed')"
    )
    asked = {"ids": [1, 1, 2], "claims": [3, 9, 4], "worker_ids": [5]}
    settled = conn.execute(text("complete_settled", "pgqueue").encode(), asked).fetchall()
    assert settled == [(1,), (2,)]  # once: the run of claim 3


# Sequences -----------------------------------------------------------------------------------------------------------

GIVEN = "SELECT id, pos FROM pgqueue.job_available ORDER BY 1"
ADVANCE = "SELECT sequence, given, highest, advanced_to FROM pgqueue.advance_sequences(true) ORDER BY 1"
MARGIN = 1 << 20
LEFT_OUT = {"pgqueue.audit_id_seq", "pgqueue.stack_request_id_seq"}
"""No uniqueness hangs on the first; rows with numbers of the second live for seconds."""


def filled(dsn: str) -> None:
    """A row for each of the sequences."""
    plain(dsn, 20)
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "INSERT INTO pgqueue.job_running "
            "(id, state, task, worker_id, claim, started_at, lock_key, holds, hold_pos) "
            "VALUES (30, 'running', 't', 40, 1, now(), 'l', true, 50)"
        )
        conn.execute("INSERT INTO pgqueue.supervisor_order (supervisor_id, kind) VALUES (60, 'quiet'), (60, 'quiet')")
        conn.execute("INSERT INTO pgqueue.job_waiter (job_id) VALUES (1), (1), (70)")
        conn.execute("INSERT INTO pgqueue.unique_key VALUES ('unique:k', 80, 'live', 0, NULL, now())")
        conn.execute(
            "INSERT INTO pgqueue.bulk (id, actor, action, target, states, queue, up_to) "
            "OVERRIDING SYSTEM VALUE VALUES (100, 'a', 'discard', '{}', '{failed}', 'q', 1)"
        )
        conn.execute("INSERT INTO pgqueue.flow (id, name) VALUES (90, 'f'), ((1::bigint << 43) - 1, 'by hand')")
        conn.execute("INSERT INTO pgqueue.node (id) VALUES (110 << 20 | 7)")  # restored without its flow
        conn.commit()


@pytest.mark.promise("F35")
def test_every_sequence_that_lags_is_advanced_and_none_that_does_not(dsn: str, conn: Conn) -> None:
    filled(dsn)
    ids_again(dsn, "lagging")
    found = {name: (given, highest, to) for name, given, highest, to in conn.execute(ADVANCE).fetchall()}
    highest = {
        "pgqueue.bulk_id_seq": 100,
        "pgqueue.flow_id_seq": 110,
        "pgqueue.job_hold_seq": 50,
        "pgqueue.job_id_seq": 80,
        "pgqueue.job_pos_seq": 20,
        "pgqueue.job_waiter_waiter_seq": 3,
        "pgqueue.supervisor_id_seq": 60,
        "pgqueue.supervisor_order_id_seq": 2,
        "pgqueue.worker_id_seq": 40,
    }
    assert found == {name: (0, most, most + MARGIN) for name, most in highest.items()}
    # A new sequence belongs to one of the two.
    assert {name for (name,) in conn.execute(SEQUENCES).fetchall()} == highest.keys() | LEFT_OUT
    assert conn.execute(ADVANCE).fetchall() == []
    assert pgqueue.enqueue(conn, "t").id == 80 + MARGIN + 1
    conn.execute("INSERT INTO pgqueue.job (id, task) VALUES (%s, 'by hand')", [(1 << 62) + 7])
    assert conn.execute(ADVANCE).fetchall() == []  # a row that was made by hand does not use up the numbers


@pytest.mark.promise("F35")
def test_many_that_advance_beside_many_that_enqueue_give_no_number_twice(dsn: str, eyes: Eyes) -> None:
    plain(dsn, 50)
    ids_again(dsn, "lagging")

    def act(n: int) -> list[int]:
        given: list[int] = []
        with psycopg.connect(dsn, autocommit=True) as conn:
            for _ in range(30):
                conn.execute(ADVANCE)
                given.append(conn.execute("SELECT nextval('pgqueue.job_id_seq')").fetchone()[0])  # type: ignore[index]
        return given

    with ThreadPoolExecutor(6) as pool:
        given = [id for ids in pool.map(act, range(6)) for id in ids]
    assert len(given) == len(set(given)) and min(given) > 50


def test_who_sets_what_was_read_before_gives_numbers_twice(dsn: str, conn: Conn) -> None:
    """The naive way, without the lock and the second look: the second caller sets the sequence back."""
    plain(dsn, 50)
    ids_again(dsn, "lagging")
    read = "SELECT max(id) FROM pgqueue.job"
    with psycopg.connect(dsn) as other:
        [(first,)], [(second,)] = conn.execute(read).fetchall(), other.execute(read).fetchall()
        conn.execute("SELECT setval('pgqueue.job_id_seq', %s)", [first])
        once = conn.execute("SELECT nextval('pgqueue.job_id_seq')").fetchone()
        other.execute("SELECT setval('pgqueue.job_id_seq', %s)", [second])
        assert other.execute("SELECT nextval('pgqueue.job_id_seq')").fetchone() == once


@pytest.mark.promise("F35")
async def test_a_worker_advances_what_lags_before_its_first_claim_and_says_so(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    @task(name="plain")
    async def nothing() -> None: ...

    plain(dsn, 5)
    ids_again(dsn, "lagging")
    async with work(dsn, nothing) as worker:
        await until(eyes.done(5))
        assert "sequence pgqueue.job_pos_seq had given 0, but there is 5 in the tables" in caplog.text
        assert eyes.one("SELECT pg_sequence_last_value('pgqueue.job_pos_seq')") >= 5 + MARGIN
        # A switchover, for a worker that lives: its sessions are gone, and the next server's sequences lag.
        eyes.do("INSERT INTO pgqueue.job (id, state, task, run_at) VALUES (3000000, 'scheduled', 't', 'tomorrow')")
        ids_again(dsn, "lagging")
        caplog.clear()
        generation = worker.services.fetch_session.generation
        worker.services.fetch_session._server = "when another server began"
        eyes.do("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgqueue fetch'")
        await until(lambda: worker.services.fetch_session.generation > generation)
        await until(lambda: eyes.one("SELECT pg_sequence_last_value('pgqueue.job_id_seq')") == 3000000 + MARGIN)
        await until(lambda: "sequence pgqueue.job_id_seq" in caplog.text)


@pytest.mark.promise("F35")
def test_migrate_advances_what_lags_and_says_so(dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture) -> None:
    plain(dsn, 5)
    ids_again(dsn, "lagging")
    with caplog.at_level(logging.WARNING):
        assert migrations.migrate(dsn, "pgqueue") == []
    assert "sequence pgqueue.job_id_seq had given 0, but there is 5 in the tables" in caplog.text
    assert pgqueue.enqueue(conn, "t").id == 5 + MARGIN + 1


@pytest.mark.promise("F35")
def test_a_worker_may_advance_sequences_and_set_none(dsn: str, role: Role) -> None:
    plain(dsn, 5)
    ids_again(dsn, "lagging")
    enqueuing, working = role("enqueue"), role("work")
    for mine in (enqueuing, role("read"), role("operate")):
        refused(mine, ADVANCE, "SELECT * FROM pgqueue.lagging_sequences(true)")
    refused(working, "SELECT setval('pgqueue.job_id_seq', 1)", "SELECT * FROM pgqueue.lagging_sequences(true)")
    with psycopg.connect(working) as conn:
        # A function of the caller's cannot come in between.
        conn.execute("CREATE FUNCTION pg_temp.setval(regclass, bigint) RETURNS bigint LANGUAGE sql AS 'SELECT 1 / 0'")
        conn.execute("SET search_path = pg_temp, pg_catalog")
        assert len(conn.execute(ADVANCE).fetchall()) >= 2
    with psycopg.connect(enqueuing) as conn:
        assert put(conn, "k").created and not put(conn, "k").created
