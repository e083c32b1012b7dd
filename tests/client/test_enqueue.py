"""Enqueue: what the rows say, what it costs, what is refused before it reaches the database, what survives a crash."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

import pgqueue
from pgqueue.client.enqueue import many, one
from pgqueue.database import migrations
from pgqueue.database.statements import in_schema
from pgqueue.jobs.job import NewJob
from pgqueue.testing import Clock

mail = pgqueue.remote("shop.mail")
SOON = timedelta(hours=1)


@pgqueue.task(name="test_enqueue.charge")
def charge(customer: int, note: str = "", **extra: Any) -> str:
    return f"{customer} {note} {extra}"


@pytest.fixture
def witness(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """Another session, which sees what is committed."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def jobs(conn: psycopg.Connection[Any], columns: str = "id") -> list[Any]:
    return conn.execute(f"SELECT {columns} FROM pgqueue.job ORDER BY id".encode()).fetchall()  # noqa: S608


# What the row says ----------------------------------------------------------------------------------------------------


def test_a_job_is_available_with_what_it_was_given(conn: psycopg.Connection[Any]) -> None:
    handle = pgqueue.enqueue(
        conn, charge.using(queue="money", priority=2, retry=3, headers={"trace": "x"}), 7, note="n"
    )
    columns = "id, state, task, args, queue, priority, rank, headers, max_attempts, run_at, attempt, pos IS NOT NULL"
    given = ("test_enqueue.charge", {"customer": 7, "note": "n"}, "money", 2, 5, {"trace": "x"}, 3, None, 0, True)
    assert jobs(conn, columns) == [(handle.id, "available", *given)]
    assert handle.created


def test_a_name_stands_for_a_task_of_another_codebase(conn: psycopg.Connection[Any]) -> None:
    pgqueue.enqueue(conn, "billing.charge", customer=7)
    assert jobs(conn, "task, args, queue, priority") == [("billing.charge", {"customer": 7}, "default", 5)]
    with pytest.raises(pgqueue.InvalidArguments, match="positional"):
        pgqueue.enqueue(conn, "billing.charge", 7)  # type: ignore[call-overload]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("options", "state", "after"),
    [
        ({}, "available", None),
        ({"delay": 0}, "available", 0.0),
        ({"delay": 90}, "scheduled", 90.0),
        ({"delay": timedelta(minutes=1, milliseconds=500)}, "scheduled", 60.5),
        ({"run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "available", 0.0),
        ({"run_at": datetime(2029, 12, 31, 23, tzinfo=UTC)}, "available", -3600.0),
        ({"run_at": datetime(2030, 1, 1, 1, 0, 1, tzinfo=timezone(timedelta(hours=1)))}, "scheduled", 1.0),
        ({"run_at": datetime(2030, 1, 1, 23, 59, tzinfo=timezone(timedelta(hours=23, minutes=59)))}, "available", 0.0),
    ],
)
def test_the_databases_clock_decides_what_is_due(
    conn: psycopg.Connection[Any], options: dict[str, Any], state: str, after: float | None, batch: bool
) -> None:
    with Clock(conn, datetime(2030, 1, 1, tzinfo=UTC)):
        new = mail.using(**options).new()
        pgqueue.enqueue_many(conn, [new, mail.new()]) if batch else pgqueue.enqueue(conn, mail.using(**options))
        rows = jobs(conn, "state, extract(epoch FROM run_at - pgqueue.now())::float8")
    assert rows[0] == (state, after)
    assert rows[1:] == ([("available", None)] if batch else [])


def test_a_batch_may_mix_everything_and_answers_in_order(conn: psycopg.Connection[Any]) -> None:
    def job(number: int) -> NewJob[Any]:
        options: dict[str, Any] = {"queue": f"q{number % 3}", "priority": number % 10}
        options |= {"delay": 3600 + number} if number % 4 == 1 else {}
        options |= {"run_at": datetime(2020 + number % 30, 1, 1, tzinfo=UTC)} if number % 4 == 2 else {}
        options |= {"headers": {"n": number}} if number % 5 == 0 else {}
        options |= {"retry": number} if number % 7 == 1 else {}
        return pgqueue.remote(f"task.{number % 11}").using(**options).new(n=number, text="\n\r\x85\u2028")

    batch = [job(number) for number in range(2000)]
    handles = pgqueue.enqueue_many(conn, batch)
    columns = "task, args, queue, priority, headers, max_attempts, run_at IS NOT NULL, id"
    wanted = [
        (
            new.task,
            json.loads(new.args),
            new.queue,
            new.priority,
            None if new.headers is None else json.loads(new.headers),
            new.max_attempts,
            new.run_at is not None or new.delay is not None,
            handle.id,
        )
        for new, handle in zip(batch, handles, strict=True)
    ]
    assert jobs(conn, columns) == wanted
    rows = conn.execute("SELECT state, run_at > pgqueue.now() FROM pgqueue.job").fetchall()
    assert set(rows) == {("available", None), ("available", False), ("scheduled", True)}


def test_ten_thousand_at_once_keep_their_order(conn: psycopg.Connection[Any]) -> None:
    handles = pgqueue.enqueue_many(conn, (mail.new(n=n) for n in range(10_000)))
    rows = jobs(conn, "id, (args ->> 'n')::int")
    assert rows == [(handle.id, n) for n, handle in enumerate(handles)]


def test_a_single_job_is_a_batch_too(conn: psycopg.Connection[Any]) -> None:
    for options in ({}, {"delay": 5}):
        (handle,) = pgqueue.enqueue_many(conn, [mail.using(**options).new(n=1)])  # type: ignore[arg-type]
        assert handle.id == jobs(conn)[-1][0]


def test_another_schema_is_honoured(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    migrations.migrate(empty_dsn, schema="jobs")
    monkeypatch.setenv("PGQUEUE_SCHEMA", "jobs")
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute('LISTEN "jobs.default"')
        pgqueue.enqueue(conn, mail, n=1)
        pgqueue.enqueue_many(conn, [mail.new(n=2), mail.using(delay=9).new(n=3)])
        assert conn.execute("SELECT count(*) FROM jobs.job").fetchone() == (3,)
        assert [each.channel for each in conn.notifies(timeout=30, stop_after=2)] == ["jobs.default"] * 2


@pytest.mark.promise("E07", "E17")
def test_the_plain_sql_function_joins_the_transaction_too(
    conn: psycopg.Connection[Any], witness: psycopg.Connection[Any]
) -> None:
    conn.execute("SELECT pgqueue.enqueue('shop.mail', '{\"n\": 1}')")
    conn.execute("INSERT INTO pgqueue.job (task, args) VALUES ('shop.mail', '{\"n\": 2}')")
    assert jobs(witness) == []
    conn.commit()
    assert len(jobs(witness)) == 2


# NOTIFY ---------------------------------------------------------------------------------------------------------------

HEARD: dict[str, tuple[Callable[[psycopg.Connection[Any]], object], list[str]]] = {
    "one": (lambda conn: pgqueue.enqueue(conn, mail.using(queue="a")), ["a"]),
    "one later": (lambda conn: pgqueue.enqueue(conn, mail.using(queue="a", delay=60)), [":scheduled"]),
    "one due": (lambda conn: pgqueue.enqueue(conn, mail.using(queue="a", delay=0)), ["a"]),
    "many": (
        lambda conn: pgqueue.enqueue_many(conn, [mail.using(queue=queue).new() for queue in "abcab"]),
        ["a", "b", "c"],
    ),
    "many later": (
        lambda conn: pgqueue.enqueue_many(conn, [mail.using(queue="a", delay=n % 2 * 60).new() for n in range(9)]),
        [":scheduled", "a"],
    ),
}


@pytest.mark.parametrize("case", HEARD)
def test_workers_hear_of_it_once_per_queue_with_the_commit(
    conn: psycopg.Connection[Any], witness: psycopg.Connection[Any], case: str
) -> None:
    act, channels = HEARD[case]
    for queue in ("a", "b", "c", ":scheduled", "default", "end"):
        witness.execute(f'LISTEN "pgqueue.{queue}"'.encode())
    assert heard(witness, lambda: act(conn)) == []
    assert heard(witness, conn.rollback) == []
    act(conn)
    assert heard(witness, conn.commit) == [f"pgqueue.{channel}" for channel in channels]


def heard(witness: psycopg.Connection[Any], act: Callable[[], object]) -> list[str]:
    """The channels notified by then: a NOTIFY of our own marks the end, so nothing is waited for in vain."""
    act()
    witness.execute("""NOTIFY "pgqueue.end" """)
    channels: list[str] = []
    for each in witness.notifies(timeout=30):
        if each.channel == "pgqueue.end":
            return sorted(channels)
        channels.append(each.channel)
    raise AssertionError("the mark did not come")


@pytest.mark.parametrize("batch", [False, True])
def test_two_phase_commit_works_without_notify(
    dsn: str, witness: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, batch: bool
) -> None:
    def act(conn: psycopg.Connection[Any]) -> None:
        for delay in (None, 60):
            task = mail.using(delay=delay) if delay else mail
            pgqueue.enqueue_many(conn, [task.new(), mail.new()]) if batch else pgqueue.enqueue(conn, task)

    with closing(psycopg.connect(dsn)) as conn:
        conn.tpc_begin(f"refused {batch}")
        act(conn)
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
            conn.tpc_prepare()
    monkeypatch.setenv("PGQUEUE_NOTIFY", "off")
    with psycopg.connect(dsn) as conn:
        conn.tpc_begin(f"kept {batch}")
        act(conn)
        conn.tpc_prepare()
        assert jobs(witness) == []
        conn.tpc_commit()
    assert len(jobs(witness)) == (4 if batch else 2)


# What it costs --------------------------------------------------------------------------------------------------------


def round_trips(conn: psycopg.Connection[Any], act: Callable[[], object]) -> tuple[int, int]:
    """How many statements the client executed, and how often it waited for the server, as the wire shows."""
    with tempfile.TemporaryFile("w+") as file:
        conn.pgconn.trace(file.fileno())
        act()
        conn.pgconn.untrace()
        file.seek(0)
        sent = re.findall(r"\tF\t\d+\t(\w+)", file.read())
    return sent.count("Execute") + sent.count("Query"), sent.count("Sync") + sent.count("Query")


@pytest.mark.promise("I09")
@pytest.mark.parametrize("case", HEARD)
def test_it_is_one_statement_and_one_round_trip(conn: psycopg.Connection[Any], case: str) -> None:
    conn.execute("SELECT 1")
    assert round_trips(conn, lambda: HEARD[case][0](conn)) == (1, 1)


def test_an_empty_batch_sends_nothing(conn: psycopg.Connection[Any]) -> None:
    def act() -> None:
        assert pgqueue.enqueue_many(conn, []) == []
        assert charge.enqueue_many(conn, iter(())) == []

    assert round_trips(conn, act) == (0, 0)
    assert conn.info.transaction_status == TransactionStatus.IDLE


@pytest.mark.promise("I02")
@pytest.mark.parametrize("case", HEARD)
def test_a_default_enqueue_takes_no_lock_and_no_unique_row(conn: psycopg.Connection[Any], case: str) -> None:
    HEARD[case][0](conn)
    held = "SELECT locktype, mode FROM pg_locks WHERE pid = pg_backend_pid()"
    locks = set(conn.execute(held.encode()).fetchall())
    assert not [lock for lock in locks if lock[0] == "advisory"]
    # Besides reading: what any INSERT takes, and its own transaction's id.
    assert {mode for kind, mode in locks if kind == "relation"} <= {"AccessShareLock", "RowExclusiveLock"}
    assert {kind for kind, _ in locks} <= {"relation", "virtualxid", "transactionid"}
    assert set(jobs(conn, "unique_key, idempotency_key, lock_key, limit_key")) == {(None, None, None, None)}


@pytest.mark.promise("T10", "T11")
def test_equal_arguments_without_a_key_are_two_jobs(conn: psycopg.Connection[Any]) -> None:
    first, second = (pgqueue.enqueue(conn, charge, 7, note="transfer 50") for _ in range(2))
    third, fourth = pgqueue.enqueue_many(conn, [charge.new(7, note="transfer 50")] * 2)
    assert len({first.id, second.id, third.id, fourth.id}) == len(jobs(conn)) == 4


# What is refused ------------------------------------------------------------------------------------------------------

DEEP: Any = None
for _ in range(20_000):
    DEEP = [DEEP]

REFUSED: dict[str, tuple[Callable[[psycopg.Connection[Any]], object], type[Exception]]] = {
    "a wrong name": (lambda conn: pgqueue.enqueue(conn, "billing charge"), pgqueue.InvalidOption),
    "a name with NUL": (lambda conn: pgqueue.enqueue(conn, "billing\0"), pgqueue.InvalidOption),
    "a name too long": (lambda conn: pgqueue.enqueue(conn, "b" * 201), pgqueue.InvalidOption),
    "a missing argument": (lambda conn: pgqueue.enqueue(conn, charge), pgqueue.InvalidArguments),  # type: ignore[call-overload]
    "an unknown argument": (lambda conn: pgqueue.enqueue(conn, charge, 1, 2, 3), pgqueue.InvalidArguments),  # type: ignore[call-overload]
    "a wrong type": (lambda conn: pgqueue.enqueue(conn, charge, "1"), pgqueue.InvalidArguments),  # type: ignore[call-overload]
    "no JSON": (lambda conn: pgqueue.enqueue(conn, charge, 1, x=object()), pgqueue.InvalidArguments),
    "too large": (lambda conn: pgqueue.enqueue(conn, charge, 1, note="x" * (1 << 20)), pgqueue.PayloadTooLarge),
    "NUL": (lambda conn: pgqueue.enqueue(conn, charge, 1, note="a\0b"), pgqueue.InvalidArguments),
    "NUL in a key": (lambda conn: pgqueue.enqueue(conn, charge, 1, x={"a\0": 1}), pgqueue.InvalidArguments),
    "a lone surrogate": (lambda conn: pgqueue.enqueue(conn, charge, 1, note="\ud800"), pgqueue.InvalidArguments),
    "NaN": (lambda conn: pgqueue.enqueue(conn, charge, 1, x=float("nan")), pgqueue.InvalidArguments),
    "infinity": (lambda conn: pgqueue.enqueue(conn, charge, 1, x=[float("inf")]), pgqueue.InvalidArguments),
    "a number too long": (lambda conn: pgqueue.enqueue(conn, charge, 10**140_000), pgqueue.InvalidArguments),
    "nested too deep": (lambda conn: pgqueue.enqueue(conn, charge, 1, x=DEEP), pgqueue.InvalidArguments),
    "NUL in headers": (
        lambda conn: pgqueue.enqueue(conn, charge.using(headers={"a": "\0"}), 1),
        pgqueue.InvalidArguments,
    ),
    "a wrong queue": (lambda conn: pgqueue.enqueue(conn, charge.using(queue="a b"), 1), pgqueue.InvalidOption),
    "a wrong priority": (lambda conn: pgqueue.enqueue(conn, charge.using(priority=10), 1), pgqueue.InvalidOption),
    "too many attempts": (lambda conn: pgqueue.enqueue(conn, charge.using(retry=40_000), 1), pgqueue.InvalidOption),
    "a delay for ever": (
        lambda conn: pgqueue.enqueue(conn, charge.using(delay=float("inf")), 1),
        pgqueue.InvalidOption,
    ),
    "a naive time": (
        lambda conn: pgqueue.enqueue(conn, charge.using(run_at=datetime(2030, 1, 1)), 1),
        pgqueue.InvalidOption,
    ),
    "a time out of range": (
        lambda conn: pgqueue.enqueue(conn, charge.using(run_at=datetime.max.replace(tzinfo=timezone(-SOON))), 1),
        pgqueue.InvalidOption,
    ),
    "no task": (lambda conn: pgqueue.enqueue(conn, len, 1), pgqueue.InvalidArguments),  # type: ignore[call-overload]
    "no job in a batch": (
        lambda conn: pgqueue.enqueue_many(conn, [charge.new(1), "shop.mail"]),  # type: ignore[list-item]
        pgqueue.InvalidArguments,
    ),
    "a bad row in a batch": (lambda conn: charge.enqueue_many(conn, [(1,), ("x",)]), pgqueue.InvalidArguments),
    "a job made by hand": (
        lambda conn: pgqueue.enqueue_many(conn, [NewJob("a", '{"x":\n1}', "default", 5, None, None, None, None)]),
        pgqueue.InvalidArguments,
    ),
}


@pytest.mark.promise("F17")
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_never_reaches_the_database(
    conn: psycopg.Connection[Any], witness: psycopg.Connection[Any], case: str
) -> None:
    act, error = REFUSED[case]
    first = pgqueue.enqueue(conn, charge, 1)

    def refused() -> None:
        with pytest.raises(error):
            act(conn)

    assert round_trips(conn, refused) == (0, 0)
    second = pgqueue.enqueue(conn, charge, 2)
    conn.commit()
    assert [row[0] for row in jobs(witness)] == [first.id, second.id]


@pytest.mark.promise("F17")
def test_what_just_fits_is_accepted(conn: psycopg.Connection[Any]) -> None:
    edges = {"note": "x" * ((1 << 20) - 40), "least": -(2**63), "most": 2**64 - 1, "tiny": 5e-324, "huge": 1.7e308}
    pgqueue.enqueue(conn, charge.using(queue="q" * 40, priority=9, retry=32_767), 0, note=edges["note"])  # type: ignore[arg-type]
    pgqueue.enqueue(conn, "t" * 200, **{name: value for name, value in edges.items() if name != "note"})
    pgqueue.enqueue(conn, mail.using(run_at=datetime.max.replace(tzinfo=UTC)))
    pgqueue.enqueue(conn, mail.using(run_at=datetime.min.replace(tzinfo=UTC)))
    pgqueue.enqueue(conn, mail.using(delay=timedelta(days=36_500)))
    deep: Any = None
    for _ in range(200):
        deep = [deep]
    pgqueue.enqueue(conn, mail, deep=deep)
    assert len(jobs(conn)) == 6


@pytest.mark.promise("F19")
def test_sql_text_is_never_made_of_data() -> None:
    evil: NewJob[Any] = NewJob(
        "'; DROP TABLE x; --", '{"%s": "%(task)s"}', "pgqueue.", 5, None, 3.0, '{"pgqueue.job": 1}', 1
    )
    for jobs_ in ([evil], [evil] * 3):
        assert many(jobs_, schema="jobs").sql == many([evil, evil], schema="jobs").sql
    statement = one(evil, schema="jobs")
    assert "DROP" not in statement.sql and "pgqueue" not in statement.sql
    assert in_schema("pgqueue.job", "jobs") == "jobs.job"


# Others see it when it is committed, whatever happens then ------------------------------------------------------------


@pytest.mark.promise("E03")
def test_the_data_of_a_job_is_there_when_it_is_seen(dsn: str, witness: psycopg.Connection[Any]) -> None:
    """Users and their jobs, by four applications at once: whoever sees a job finds its user, in a later look."""
    rounds, writers = 100, 4
    witness.execute("CREATE TABLE app_user (id bigint GENERATED ALWAYS AS IDENTITY, writer integer)")

    def application(number: int) -> None:
        with psycopg.connect(dsn) as conn:
            for _ in range(rounds):
                pgqueue.enqueue(conn, mail, writer=number)  # before its user, which a job by itself would miss
                conn.execute("INSERT INTO app_user (writer) VALUES (%s)", [number])
                conn.commit()

    def look() -> None:
        found = witness.execute("SELECT (args ->> 'writer')::int, count(*) FROM pgqueue.job GROUP BY 1").fetchall()
        users = dict(witness.execute("SELECT writer, count(*) FROM app_user GROUP BY 1").fetchall())
        assert all(count <= users.get(writer, 0) for writer, count in found)

    with ThreadPoolExecutor(writers) as pool:
        running = [pool.submit(application, number) for number in range(writers)]
        while not all(each.done() for each in running):
            look()
        for each in running:
            each.result()
    assert len(jobs(witness)) == rounds * writers


@pytest.mark.promise("E05")
@pytest.mark.parametrize(("committed", "there"), [(True, 1), (False, 0)])
def test_a_killed_application_has_the_jobs_it_committed(
    dsn: str, witness: psycopg.Connection[Any], committed: bool, there: int
) -> None:
    code = f"""
        import signal, psycopg, pgqueue
        conn = psycopg.connect({dsn!r})
        pgqueue.enqueue(conn, "shop.mail", n=1)
        if {committed}:
            conn.commit()
        print(conn.info.backend_pid, flush=True)
        signal.pause()
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        session = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
    wait_for_the_end_of(witness, session)
    assert len(jobs(witness)) == there


def wait_for_the_end_of(conn: psycopg.Connection[Any], session: int) -> None:
    """Ask the server to end the session, which it does at once, and wait until it has."""
    conn.execute("SELECT pg_terminate_backend(%s, 10000)", [session])


async def test_the_async_functions_do_the_same(aconn: psycopg.AsyncConnection[Any]) -> None:
    first = await pgqueue.aenqueue(aconn, charge, 7)
    second, third = await pgqueue.aenqueue_many(aconn, [charge.new(8), mail.using(delay=5).new()])
    assert await pgqueue.aenqueue_many(aconn, []) == []
    with pytest.raises(pgqueue.InvalidArguments):
        await pgqueue.aenqueue(aconn, charge, "7")  # type: ignore[call-overload]
    cursor = await aconn.execute("SELECT id, state FROM pgqueue.job ORDER BY id")
    states = ["available", "available", "scheduled"]
    assert await cursor.fetchall() == list(zip([first.id, second.id, third.id], states, strict=True))
