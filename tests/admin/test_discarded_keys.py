"""A key that holds on after its job was discarded: it answers as before, and its text is nowhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from workers import Eyes, wait_until

import pgqueue
from pgqueue import Unique
from pgqueue.database.statements import text
from pgqueue.errors import DuplicateJob

Conn = psycopg.Connection[Any]
SECRET = "customer-7-of-acme"
mail = pgqueue.remote("keys.mail")

REQUESTS: dict[str, Any] = {
    "an idempotency key": mail.using(idempotency_key=SECRET),
    "a unique key": mail.using(unique=Unique(SECRET, hold=3600)),
    "a unique key that replaces": mail.using(unique=Unique(SECRET, hold=3600, on_duplicate="replace")),
}


def discarded(conn: Conn, eyes: Eyes, request: Any = None) -> int:
    """A job with this key has completed, and is discarded. In two transactions; the second is committed, too."""
    id = int((request or mail.using(idempotency_key=SECRET)).enqueue(conn).id)
    conn.commit()
    end(eyes, id)
    [answer] = pgqueue.discard(conn, id)
    assert answer.did == "discarded"
    conn.commit()
    return id


def end(eyes: Eyes, id: int) -> None:
    columns = "id, enqueued_at, queue, task, args, unique_key, idempotency_key"
    eyes.do(
        f"WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = {id} RETURNING {columns}) "  # noqa: S608
        f"INSERT INTO pgqueue.job_done (state, finished_at, {columns}) "
        f"SELECT 'completed', pgqueue.now(), {columns} FROM gone"
    )


def tables_with(eyes: Eyes, said: str) -> list[str]:
    """The tables of ours in which a row has this text."""
    tables = eyes.all(
        "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = 'pgqueue'::regnamespace "
        "AND c.relkind = 'r' ORDER BY 1"
    )
    look = "SELECT count(*) FROM {} AS r WHERE position(%s IN r::text) > 0"
    return [name for (name,) in tables if eyes.one(look.format(name), said)]


@pytest.mark.promise("F130")
@pytest.mark.parametrize("request_", list(REQUESTS.values()), ids=list(REQUESTS))
def test_a_discard_leaves_no_text_of_a_key_and_the_key_answers(conn: Conn, eyes: Eyes, request_: Any) -> None:
    """The naive version leaves the row of the key, with its text, for as long as it holds."""
    id = int(request_.enqueue(conn).id)
    conn.commit()
    assert tables_with(eyes, SECRET) == ["pgqueue.job_available", "pgqueue.unique_key"]
    end(eyes, id)
    pgqueue.discard(conn, id)
    conn.commit()
    assert tables_with(eyes, SECRET) == []
    again = request_.enqueue(conn)
    assert (again.id, again.created, again.replaced) == (id, False, False)
    conn.commit()
    assert tables_with(eyes, SECRET) == []
    eyes.do("UPDATE pgqueue.discarded_key SET expires_at = pgqueue.now()")
    fresh = request_.enqueue(conn)
    assert fresh.created and fresh.id != id
    conn.commit()
    assert not request_.enqueue(conn).created


@pytest.mark.promise("F130")
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "naive"])
@pytest.mark.parametrize("writes", ["a completion", "the pruner", "nothing, after all"])
def test_a_discard_that_waits_for_the_row_of_a_key_deletes_it(
    writes: str, by_name: bool, dsn: str, conn: Conn, eyes: Eyes
) -> None:
    """The row is written anew while the discard waits. The naive version deletes at the place where it has
    locked the row: its snapshot has nothing there."""
    id = int(mail.using(idempotency_key=SECRET).enqueue(conn).id)
    conn.commit()
    end(eyes, id)
    if not by_name:
        source = str(eyes.one("SELECT pg_get_functiondef('pgqueue.discard_ended(bigint[])'::regprocedure)"))
        naive = source.replace("mine.enqueued_at, k.hold", "mine.enqueued_at, k.place, k.hold")
        naive = naive.replace("SELECT k.hold, coalesce", "SELECT k.ctid AS place, k.hold, coalesce")
        naive = naive.replace(
            "k.key = ANY (ARRAY(SELECT keys.key FROM keys))", "k.ctid = ANY (ARRAY(SELECT keys.place FROM keys))"
        )
        assert naive.count("place") == source.count("place") + 3
        eyes.do(naive)
    before: dict[str, tuple[str, dict[str, Any]]] = {
        "a completion": ("complete_release_keys", {"keys": [f"idempotency:{SECRET}"], "ids": [id]}),
        "the pruner": ("pruner_unique_keys", {"after": "", "n": 10}),
    }
    with psycopg.connect(dsn) as other, ThreadPoolExecutor() as threads:
        if writes in before:
            name, params = before[writes]
            other.execute(text(name, "pgqueue").encode(), params)
        else:
            other.execute("SELECT FROM pgqueue.unique_key FOR UPDATE")
        answer = threads.submit(pgqueue.discard, conn, id)
        wait_until(lambda: eyes.one("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0)
        other.commit()
        [answered] = answer.result()
    conn.commit()
    assert answered.did == "discarded"
    if not by_name and writes in before:
        assert tables_with(eyes, SECRET) == ["pgqueue.unique_key"], "until it expires"
        return
    assert tables_with(eyes, SECRET) == []
    again = mail.using(idempotency_key=SECRET).enqueue(conn)
    assert (again.id, again.created) == (id, False)


@pytest.mark.promise("F130")
def test_one_that_is_to_raise_names_the_discarded_job_and_the_key_that_was_asked_for(conn: Conn, eyes: Eyes) -> None:
    id = discarded(conn, eyes, mail.using(unique=Unique(SECRET, hold=3600)))
    with pytest.raises(DuplicateJob, match=f"job {id} has the unique key '{SECRET}'") as raised:
        mail.using(unique=Unique(SECRET, on_duplicate="raise")).enqueue(conn)
    assert raised.value.existing == id


@pytest.mark.promise("F130")
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_in_a_batch_each_key_gets_its_own_answer(conn: Conn, eyes: Eyes, isolation: str) -> None:
    """Keys of discarded jobs, of one that waits, of one that has ended and is free, new ones, and one of them twice."""
    gone = discarded(conn, eyes)
    waits = mail.using(unique="waits").enqueue(conn).id
    free = mail.using(unique="free").enqueue(conn).id
    pgqueue.cancel(conn, free)
    conn.commit()
    conn.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}".encode())
    asked = [
        mail.using(idempotency_key=SECRET).new(),
        mail.using(unique="waits").new(),
        mail.using(unique="free").new(),
        mail.using(unique="new", idempotency_key=SECRET).new(),
        mail.using(unique="new").new(),
        mail.using(unique="new").new(),
        mail.using(idempotency_key=SECRET).new(),
    ]
    handles = pgqueue.enqueue_many(conn, asked)
    new = handles[4].id
    assert [(handle.id, handle.created) for handle in handles] == [
        (gone, False), (waits, False), (handles[2].id, True), (gone, False), (new, True), (new, False), (gone, False),
    ]  # fmt: skip
    assert handles[2].id != free
    conn.commit()
    assert eyes.all("SELECT key, job_id FROM pgqueue.unique_key ORDER BY key") == [
        ("unique:free", handles[2].id), ("unique:new", new), ("unique:waits", waits),
    ]  # fmt: skip
    assert eyes.all("SELECT job_id FROM pgqueue.discarded_key") == [(gone,)]


ENQUEUES: dict[str, Callable[[Conn], Any]] = {
    "one": lambda conn: mail.using(idempotency_key=SECRET).enqueue(conn).id,
    "one with two keys": lambda conn: mail.using(idempotency_key=SECRET, unique="other").enqueue(conn).id,
    "several": lambda conn: (
        pgqueue.enqueue_many(conn, [mail.using(idempotency_key=key).new() for key in (SECRET, "another")])[0].id
    ),
    "by SQL": lambda conn: conn.execute(
        "SELECT pgqueue.enqueue('keys.mail', idempotency_key => %s)", [SECRET]
    ).fetchall()[0][0],
}


@pytest.mark.promise("F130")
@pytest.mark.each_value
@pytest.mark.parametrize("enqueue", list(ENQUEUES.values()), ids=list(ENQUEUES))
@pytest.mark.parametrize("again", ["the first discard", "a discard after another one"])
def test_an_enqueue_that_waits_for_a_discard_gets_its_job(
    dsn: str, eyes: Eyes, enqueue: Callable[[Conn], Any], again: str
) -> None:
    """The key has expired, so the enqueue wants its row; a discard has it. The naive version looks for the hash before
    it waits, and makes a second job.
    """
    with psycopg.connect(dsn) as conn, psycopg.connect(dsn) as other, ThreadPoolExecutor(1) as pool:
        if again != "the first discard":
            discarded(conn, eyes, mail.using(idempotency_key="some other key"))
        id = int(mail.using(idempotency_key=SECRET).enqueue(conn).id)
        conn.commit()
        end(eyes, id)
        pgqueue.discard(conn, id)
        # What the enqueue waits for: the row of the key, deleted and not committed.
        asked = pool.submit(enqueue, other)
        wait_until(
            lambda: (
                eyes.one(
                    "SELECT count(*) > 0 FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))",
                    conn.info.backend_pid,
                )
                or asked.done()
            )
        )
        conn.commit()
        assert asked.result(30) == id
        other.commit()
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE idempotency_key = %s", SECRET) == 0


@pytest.mark.promise("F130")
@pytest.mark.each_value
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("enqueue", list(ENQUEUES.values()), ids=list(ENQUEUES))
def test_a_snapshot_from_before_the_discard_makes_no_second_job(
    dsn: str, eyes: Eyes, enqueue: Callable[[Conn], Any], isolation: str
) -> None:
    with psycopg.connect(dsn) as conn, psycopg.connect(dsn) as old:
        id = int(mail.using(idempotency_key=SECRET).enqueue(conn).id)
        conn.commit()
        end(eyes, id)
        old.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}".encode())
        old.execute("SELECT count(*) FROM pgqueue.unique_key")
        pgqueue.discard(conn, id)
        conn.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            enqueue(old)
        old.rollback()
        assert enqueue(old) == id


@pytest.mark.promise("F130")
def test_a_duplicate_of_a_discarded_job_keeps_no_other_waiting(dsn: str, eyes: Eyes) -> None:
    with psycopg.connect(dsn) as conn, psycopg.connect(dsn) as other:
        id = discarded(conn, eyes)
        twice = [mail.using(idempotency_key=SECRET).new()] * 2
        other.execute("SET lock_timeout = '50ms'")
        for each in (conn, other):
            for name in ("one", "one with two keys", "by SQL"):
                assert ENQUEUES[name](each) == id
            assert [handle.id for handle in pgqueue.enqueue_many(each, twice)] == [id, id]


@pytest.mark.promise("F130")
def test_a_retry_takes_no_key_from_a_discarded_job(conn: Conn, eyes: Eyes) -> None:
    """An older job had the key before, failed, and the key had expired when the discarded job took it."""
    request = mail.using(unique=Unique(SECRET, hold=3600))
    old = request.enqueue(conn).id
    pgqueue.cancel(conn, old)
    conn.execute("DELETE FROM pgqueue.unique_key")
    conn.commit()
    gone = discarded(conn, eyes, request)
    [answer] = pgqueue.retry(conn, old)
    assert (answer.did, answer.holder) == ("held", gone)
    conn.commit()
    eyes.do("UPDATE pgqueue.discarded_key SET expires_at = pgqueue.now()")
    assert [each.did for each in pgqueue.retry(conn, old)] == ["retried"]


@pytest.mark.promise("F130")
def test_hashes_that_have_expired_are_forgotten(conn: Conn, eyes: Eyes) -> None:
    discarded(conn, eyes)
    eyes.do("UPDATE pgqueue.discarded_key SET expires_at = pgqueue.now() - interval '1 s'")
    kept = discarded(conn, eyes, mail.using(idempotency_key="another"))
    assert conn.execute(text("pruner_discarded_keys", "pgqueue"), {"n": 10}).fetchall() == [(1, 0, None, None)]
    conn.commit()
    assert eyes.all("SELECT job_id FROM pgqueue.discarded_key") == [(kept,)]


READ = """
    SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE schemaname = 'pgqueue')
         + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = 'pgqueue')
"""
PAST = """
    INSERT INTO pgqueue.job (task, state, reason, finished_at, idempotency_key)
    SELECT 'x', CASE n % 2 WHEN 0 THEN 'completed' ELSE 'failed' END, 'error', pgqueue.now(), 'k' || n
    FROM generate_series(1, 4000) AS n;
    INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, outcome)
    SELECT id, enqueued_at, 1, 1, 1, pgqueue.now(), pgqueue.now(), 0, 'failed' FROM pgqueue.job
    WHERE state <> 'available';
    INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds)
    SELECT 'idempotency:' || idempotency_key, id, enqueued_at, 'after', 86400 FROM pgqueue.job
    WHERE state <> 'available';
    INSERT INTO pgqueue.discarded_key (hash, job_id, enqueued_at, expires_at)
    SELECT pgqueue.key_hash('idempotency:gone' || n), n, pgqueue.now(), pgqueue.now() + interval '1 h'
    FROM generate_series(1, 4000) AS n
"""


@pytest.mark.promise("F131")
def test_a_discard_reads_a_few_rows_whenever_its_session_planned(dsn: str, eyes: Eyes) -> None:
    """A session keeps what it planned while the tables were empty. The naive version reads all of history then."""

    def read() -> int:
        app.execute("SELECT pg_stat_force_next_flush()")
        app.execute("SELECT 1")
        return int(eyes.one(READ))

    with psycopg.connect(dsn, autocommit=True, prepare_threshold=0) as app:
        for _ in range(8):
            with pytest.raises(pgqueue.JobNotFound):
                pgqueue.discard(app, 10**6)
            mail.using(idempotency_key=SECRET).enqueue(app)
        eyes.do(PAST)
        some = [id for (id,) in eyes.all("SELECT id FROM pgqueue.job WHERE state <> 'available' ORDER BY id LIMIT 10")]
        before = read()
        assert [each.did for each in pgqueue.discard(app, *some)] == ["discarded"] * 10
        assert not mail.using(idempotency_key="k1").enqueue(app).created
        assert read() - before < 1_500
