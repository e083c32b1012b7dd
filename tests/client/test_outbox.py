"""Staging: the same calls on every kind of connection, the same checks, and one row of the outbox for a job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from driver_kinds import ASYNC, KINDS, drive

import pgqueue
from pgqueue.database import migrations
from pgqueue.jobs.staged import check_format, job_of, options_of
from pgqueue.pytest_plugin import Databases

THEN = datetime(2030, 1, 1, tzinfo=UTC)
mail = pgqueue.remote("shop.mail")


@pgqueue.task(name="test_outbox.charge", lock="c:{customer}", unique=pgqueue.Unique("c:{customer}", hold=60.0))
def charge(customer: int, note: str = "") -> None: ...


@pytest.fixture(scope="module")
def template(pgqueue_databases: Databases) -> Iterator[str]:
    with pgqueue_databases.copy("template0") as made:
        migrations.migrate(made, line=migrations.OUTBOX)
        yield made


@pytest.fixture
def app(template: str) -> Iterator[psycopg.Connection[Any]]:
    """The application's own database, with an outbox and no queue."""
    with psycopg.connect(template, autocommit=True) as conn:
        conn.execute("TRUNCATE pgqueue.outbox")
        yield conn


def rows(conn: psycopg.Connection[Any]) -> list[Any]:
    return conn.execute("SELECT id, task, args, options FROM pgqueue.outbox ORDER BY id").fetchall()


@pytest.mark.promise("E07")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_connection_stages_in_its_transaction(
    kind: str, app: psycopg.Connection[Any], template: str
) -> None:
    async def scenario() -> None:
        for commits in (False, True):
            async with KINDS[kind](template, False) as given:
                await given.execute("SELECT 1")  # a transaction has begun
                outbox = pgqueue.Outbox(given.conn)
                if kind in ASYNC:
                    one = await pgqueue.aenqueue(outbox, charge, 7)
                    many = await pgqueue.aenqueue_many(outbox, [mail.new(x=1), charge.new(8)])
                else:
                    one = pgqueue.enqueue(outbox, charge, 7)
                    many = pgqueue.enqueue_many(outbox, [mail.new(x=1), charge.new(8)])
                assert rows(app) == []
                await (given.commit() if commits else given.rollback())
            found = [] if not commits else [handle.staged_id for handle in (one, *many)]
            assert [row[0] for row in rows(app)] == found
        assert [row[1] for row in rows(app)] == ["test_outbox.charge", "shop.mail", "test_outbox.charge"]

    drive(kind, scenario())


def test_the_configuration_stages_too_and_a_staged_job_has_no_id(app: psycopg.Connection[Any]) -> None:
    pgqueue.configure(outbox=True, dsn="postgresql://nowhere")
    handle = mail.enqueue(app, to="a")
    assert pgqueue.enqueue_many(app, []) == []
    assert rows(app) == [(handle.staged_id, "shop.mail", {"to": "a"}, None)]
    assert repr(handle) == f"JobHandle(id=None, created=True, replaced=False, staged_id={handle.staged_id})"
    for ask in (lambda: handle.state, lambda: handle.result(0)):
        with pytest.raises(pgqueue.Error, match=f"staged job {handle.staged_id}: it has no id yet"):
            ask()


@pytest.mark.promise("E17")
def test_task_and_arguments_suffice_and_even_a_task_does(app: psycopg.Connection[Any]) -> None:
    app.execute("INSERT INTO pgqueue.outbox (task, args) VALUES ('a', '{\"x\": 1}'), ('b', DEFAULT)")
    assert [row[1:] for row in rows(app)] == [("a", {"x": 1}, None), ("b", {}, None)]
    uids = "SELECT count(DISTINCT uid), bool_and(staged_at <= clock_timestamp()) FROM pgqueue.outbox"
    assert app.execute(uids.encode()).fetchone() == (2, True)


def test_what_no_queue_can_answer_yet_is_refused_before_anything_is_sent(app: psycopg.Connection[Any]) -> None:
    once = mail.using(unique=pgqueue.Unique("k", on_duplicate="raise"))
    with pytest.raises(pgqueue.InvalidOption, match='on_duplicate="raise" cannot be staged'):
        pgqueue.enqueue(pgqueue.Outbox(app), once)
    with pytest.raises(pgqueue.InvalidArguments):
        pgqueue.enqueue(pgqueue.Outbox(app), charge, "seven")  # type: ignore[call-overload]
    assert rows(app) == []


def test_without_an_outbox_the_error_names_the_command(conn: psycopg.Connection[Any]) -> None:
    with pytest.raises(pgqueue.SchemaMissing, match="run `pgqueue migrate --outbox`"):
        pgqueue.enqueue(pgqueue.Outbox(conn), mail)


@pytest.mark.parametrize(("notify", "heard"), [(True, 1), (False, 0)])
def test_a_relay_hears_of_it_once_a_transaction(
    notify: bool, heard: int, app: psycopg.Connection[Any], template: str
) -> None:
    pgqueue.configure(notify=notify)
    app.execute('LISTEN "pgqueue.:outbox"')
    with psycopg.connect(template) as other:
        for _ in range(3):
            pgqueue.enqueue(pgqueue.Outbox(other), mail)
    app.execute("SELECT pg_notify('pgqueue.:outbox', 'end')")
    notes = [note.payload for note in app.notifies(timeout=10, stop_after=heard + 1)]
    assert notes == [""] * heard + ["end"]


# What travels along --------------------------------------------------------------------------------------------------

JOBS = [
    mail.new(),
    mail.using(queue="post", priority=0, retry=3, headers={"a": [1, {"b": None}]}, timeout=3).new(x=10**30),
    mail.using(delay=90).new(),
    mail.using(run_at=THEN, deadline=THEN + timedelta(hours=1)).new(),
    mail.using(deadline=30).new(),
    mail.using(lock=pgqueue.Lock("l\n1", limit=3, on_locked="once"), idempotency_key="i").new(),
    mail.using(unique=pgqueue.Unique("u", debounce=5, debounce_max=60)).new(),
    charge.new(7),
]


@pytest.mark.parametrize("job", JOBS, ids=range(len(JOBS)))
def test_a_job_comes_out_as_it_went_in_but_for_times_that_count_from_the_staging(job: pgqueue.NewJob[Any]) -> None:
    back = job_of(job.task, job.args, options_of(job), THEN)
    if job.delay is not None:
        assert back.run_at == THEN + timedelta(seconds=job.delay)
    if isinstance(job.deadline, float):
        assert back.deadline == THEN + timedelta(seconds=job.deadline)
    timed = ("run_at", "delay", "deadline")
    same = [name for name in job.__struct_fields__ if name not in timed]
    assert [getattr(back, name) for name in same] == [getattr(job, name) for name in same]


WRONG = [
    ({"task": "two words"}, "task name"),
    ({"task": ""}, "task name"),
    ({"args": "[1]"}, "args are a JSON object"),
    ({"args": None}, "args have more than 2,097,152 bytes as text"),
    ({"options": "[]"}, "options: Expected `object`"),
    ({"options": '{"colour": 1}'}, "unknown field `colour`"),
    ({"options": '{"queue": "a b"}'}, "queue 'a b'"),
    ({"options": '{"priority": 10}'}, "priority 10"),
    ({"options": '{"run_at": "2030-01-01T00:00:00"}'}, r"timezone component - at `\$.run_at`"),
    ({"options": '{"on_duplicate": "raise"}'}, r"Invalid enum value 'raise' - at `\$.on_duplicate`"),
    ({"options": '{"headers": 7}'}, "headers are a JSON object"),
    ({"options": '{"run_at": "0001-01-01T00:00:00+14:00"}'}, "between the years 1 and 9999"),
    ({"options": '{"deadline": "9999-12-31T23:59:59-14:00"}'}, "between the years 1 and 9999"),
    ({"options": '{"max_attempts": 0}'}, r"`\$.max_attempts`"),
]


@pytest.mark.parametrize(("row", "why"), WRONG, ids=range(len(WRONG)))
def test_a_row_that_can_be_no_job_says_why(row: dict[str, Any], why: str) -> None:
    whole: dict[str, Any] = {"task": "t", "args": json.dumps({}), "options": None} | row
    with pytest.raises((pgqueue.InvalidOption, pgqueue.InvalidArguments), match=why):
        job_of(**whole, staged_at=THEN)


def test_a_newer_format_is_no_fault_of_the_row() -> None:
    check_format(1)
    with pytest.raises(pgqueue.Error, match="upgrade the relay") as refused:
        check_format(2)
    assert not isinstance(refused.value, pgqueue.InvalidOption)
