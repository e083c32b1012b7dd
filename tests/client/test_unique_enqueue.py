"""Unique keys where they are taken: races, waits, what holds, replacing; on real connections, without a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import psycopg
import pytest
from psycopg import errors
from servers import Server
from unique_jobs import ENDS, Conn, keyed, mail, make, put
from workers import EARLIER, Eyes, Taker, wait_until

import pgqueue
from pgqueue import DuplicateJob, InvalidArguments, JobHandle, NewJob, Unique
from pgqueue.client import unique_enqueue
from pgqueue.database import migrations
from pgqueue.database.statements import text
from pgqueue.testing import Clock

ORDERS = "SELECT count(*) FROM pgqueue.job"


@contextmanager
def connections(dsn: str, number: int, **options: Any) -> Iterator[list[Conn]]:
    with ExitStack() as stack:
        yield [stack.enter_context(psycopg.connect(dsn, **options)) for _ in range(number)]


def together(number: int, act: Callable[[int], Any]) -> list[Any]:
    """Let so many threads act at the same moment; what each gave."""
    barrier = threading.Barrier(number)

    def start(n: int) -> Any:
        barrier.wait()
        return act(n)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(start, range(number)))


def waits_for_a_lock(eyes: Eyes, pid: int) -> Callable[[], bool]:
    return lambda: bool(eyes.one("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", pid))


# One of many ---------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("T12")
@pytest.mark.parametrize("autocommit", [False, True])
def test_fifty_connections_one_key_one_job(dsn: str, eyes: Eyes, autocommit: bool) -> None:
    with connections(dsn, 50, autocommit=autocommit) as conns:

        def act(n: int) -> JobHandle[Any]:
            handle = put(conns[n], "order:7", n=n)
            if not autocommit:
                conns[n].commit()
            return handle

        handles = together(50, act)
    [(id,)] = eyes.all("SELECT id FROM pgqueue.job")
    assert {handle.id for handle in handles} == {id}
    assert sum(handle.created for handle in handles) == 1


@pytest.mark.promise("T12")
def test_the_constraint_is_there(conn: Conn) -> None:
    primary = "contype = 'p' AND conrelid = 'pgqueue.unique_key'::regclass"
    sql = f"SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE {primary}"  # noqa: S608
    assert conn.execute(sql.encode()).fetchall() == [("PRIMARY KEY (key)",)]
    put(conn, "k")
    with pytest.raises(errors.UniqueViolation):
        conn.execute("INSERT INTO pgqueue.unique_key VALUES ('unique:k', 1, 'live', 0, NULL, now())")


def test_who_looks_first_and_inserts_then_makes_two(dsn: str, eyes: Eyes) -> None:
    """The naive version, without the constraint: both look before either has committed."""
    with connections(dsn, 2) as conns:
        there = [conn.execute("SELECT id FROM pgqueue.job WHERE unique_key = 'k'").fetchone() for conn in conns]
        for conn, found in zip(conns, there, strict=True):
            if found is None:
                conn.execute("INSERT INTO pgqueue.job (task, unique_key) VALUES ('t', 'k')")
            conn.commit()
    assert eyes.one(ORDERS) == 2


@pytest.mark.second
@pytest.mark.promise("F11")
def test_bulk_duplicates_inside_and_outside_are_a_normal_answer(own_server: Server) -> None:
    """50 connections, each with 60 jobs of 40 keys in an order of its own, twice over."""
    dsn = own_server.dsn("postgres")
    migrations.migrate(dsn, "pgqueue")
    with connections(dsn, 50) as conns:

        def act(n: int) -> list[tuple[str, JobHandle[Any]]]:
            given: list[tuple[str, JobHandle[Any]]] = []
            for round in range(2):
                random = Random(100 * round + n)
                keys = [f"k{random.randrange(40)}" for _ in range(60)]
                handles = pgqueue.enqueue_many(conns[n], [keyed(key) for key in keys] + [mail.new()])
                conns[n].commit()
                assert handles.pop().created
                given += zip(keys, handles, strict=True)
            return given

        answers = [answer for given in together(50, act) for answer in given]
        rows = conns[0].execute("SELECT unique_key, id FROM pgqueue.job WHERE unique_key IS NOT NULL").fetchall()
    assert len(rows) == len(dict(rows)) == 40
    assert {(key, handle.id) for key, handle in answers} == set(rows)
    assert sum(handle.created for _, handle in answers) == 40
    assert "ERROR" not in log_of(own_server)

    # The naive way, an INSERT that fails: each loser is an error in the log.
    with psycopg.connect(dsn, autocommit=True) as conn, pytest.raises(errors.UniqueViolation):
        conn.execute("INSERT INTO pgqueue.unique_key VALUES ('unique:k1', 1, 'live', 0, NULL, now())")
    assert "ERROR" in log_of(own_server)


def log_of(server: Server) -> str:
    assert server.cluster is not None
    return (server.cluster.directory / "log").read_text(errors="replace")


def test_two_batches_never_wait_for_each_others_keys(dsn: str, eyes: Eyes) -> None:
    keys = [f"k{n}" for n in range(200)]
    with connections(dsn, 8) as conns:

        def act(n: int) -> None:
            for round in range(5):
                mine = Random(n).sample(keys, 100)
                pgqueue.enqueue_many(conns[n], [keyed(f"{round}:{key}") for key in mine])
                conns[n].commit()

        together(8, act)  # unsorted: 40P01 within the first rounds
    assert eyes.one("SELECT count(*) = count(DISTINCT unique_key) FROM pgqueue.job")


# The answer ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("T10")
def test_a_key_is_the_request_not_its_arguments(conn: Conn) -> None:
    first = mail.using(idempotency_key="K1").enqueue(conn, to=1)
    assert mail.using(idempotency_key="K1").enqueue(conn, to=1) == JobHandle(first.id, created=False)
    second = mail.using(idempotency_key="K2").enqueue(conn, to=1)
    assert second.created and second.id != first.id
    assert mail.using(unique="to:{to}").enqueue(conn, to=1).created
    assert not mail.using(unique="to:{to}", idempotency_key="K3").enqueue(conn, to=1).created
    assert mail.using(idempotency_key="K3").enqueue(conn, to=1).created, "what was not enqueued holds nothing"


@pytest.mark.promise("I09")
def test_what_uniqueness_costs_in_statements(dsn: str) -> None:
    sent: list[str] = []

    class Counting(psycopg.Cursor[Any]):
        def execute(self, *args: Any, **kwargs: Any) -> Any:
            sent.append(str(args[0]))
            return super().execute(*args, **kwargs)

    def cost(*jobs: NewJob[Any]) -> int:
        sent.clear()
        pgqueue.enqueue_many(conn, jobs)
        return len(sent)

    with psycopg.connect(dsn, cursor_factory=Counting) as conn:
        mail.enqueue(conn, x=1)
        assert len(sent) == 1, "plain"
        assert cost(keyed("a")) == 1, "the winner"
        assert cost(keyed("a")) == 1, "a duplicate"
        assert cost(*[keyed(f"b{n}") for n in range(100)], mail.new()) == 1, "100 winners"
        assert cost(*[keyed(f"c{n % 10}") for n in range(100)]) == 1, "duplicates among themselves"
        assert cost(*[keyed(f"b{n}") for n in range(50, 150)]) == 1, "half of them duplicates"


def test_the_order_of_the_handles_is_that_of_the_jobs(conn: Conn) -> None:
    there = put(conn, "b")
    handles = pgqueue.enqueue_many(
        conn, [keyed("c"), mail.new(), keyed("b"), keyed("a"), keyed("c"), mail.using(delay=60).new()]
    )
    assert [handle.created for handle in handles] == [True, True, False, True, False, True]
    assert handles[2].id == there.id and handles[4].id == handles[0].id
    rows = conn.execute("SELECT id, unique_key FROM pgqueue.job ORDER BY id").fetchall()
    places = [0, 1, 3, 5]
    assert rows == [(there.id, "b"), *((handles[p].id, [*"c-b", "a"][p] if p in (0, 3) else None) for p in places)]


def test_raise_names_the_holder_and_the_transaction_goes_on(conn: Conn) -> None:
    there = put(conn, "k")
    with pytest.raises(DuplicateJob, match=f"job {there.id} has the unique key 'k'") as refused:
        put(conn, "k", on_duplicate="raise")
    assert (refused.value.existing, refused.value.job_id) == (there.id, there.id)
    with pytest.raises(DuplicateJob):
        pgqueue.enqueue_many(conn, [keyed("new", on_duplicate="raise"), keyed("new", on_duplicate="raise")])
    assert put(conn, "other").created


@pytest.mark.parametrize("key", ["100% %(task)s $1 \\ ' \"", "a\nb\tc", "日本 🙂 é", "x" * 500, "{}", "unique:k"])
def test_any_text_is_a_key(conn: Conn, key: str) -> None:
    first = put(conn, key)
    assert not put(conn, key).created and put(conn, key[:-1] + "!").created
    [(stored,)] = conn.execute("SELECT unique_key FROM pgqueue.job WHERE id = %s", [first.id]).fetchall()
    assert stored == key
    [(other,)] = conn.execute("SELECT pgqueue.enqueue('t', unique_key => %s)", [key]).fetchall()
    assert other == first.id


@pytest.mark.parametrize("key", ["", "x" * 501, "a\0b", "\ud800", 7])
def test_what_cannot_be_a_key_is_refused_before_anything_is_sent(conn: Conn, key: Any) -> None:
    with pytest.raises(InvalidArguments, match="unique key"):
        put(conn, key)
    with pytest.raises(InvalidArguments, match="idempotency key"):
        mail.using(idempotency_key=key)
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_the_two_kinds_of_keys_are_two_names(conn: Conn) -> None:
    assert put(conn, "k").created
    assert mail.using(idempotency_key="k").enqueue(conn).created
    assert mail.using(unique=lambda **_: None).enqueue(conn).created, "None is no key"


def test_one_that_wins_one_of_two_keys_leaves_nothing(conn: Conn) -> None:
    holder = put(conn, "k")
    for _ in range(2):
        both = mail.using(unique=lambda **_: "k", idempotency_key="i")
        assert both.enqueue(conn) == JobHandle(holder.id, created=False)
    assert conn.execute("SELECT key FROM pgqueue.unique_key").fetchall() == [("unique:k",)]
    [(answer,)] = conn.execute("SELECT pgqueue.enqueue('t', unique_key => 'k', idempotency_key => 'i')").fetchall()
    assert answer == holder.id
    assert conn.execute("SELECT key FROM pgqueue.unique_key").fetchall() == [("unique:k",)]


def test_a_key_that_is_given_back_goes_to_the_next_job_of_the_batch(conn: Conn) -> None:
    """The first job loses one of its two keys. The second wants the other one, the third what the second has."""
    holder = put(conn, "k")
    both = mail.using(unique=lambda **_: "k", idempotency_key="i")
    one = mail.using(unique=lambda **_: "free", idempotency_key="i")
    handles = pgqueue.enqueue_many(conn, [both.new(n=1), one.new(n=2), keyed("free"), mail.new()])
    assert [handle.created for handle in handles] == [False, True, False, True]
    assert handles[0].id == holder.id and handles[2].id == handles[1].id
    rows = conn.execute("SELECT key, job_id, hold FROM pgqueue.unique_key ORDER BY key").fetchall()
    assert rows == [
        ("idempotency:i", handles[1].id, "after"),
        ("unique:free", handles[1].id, "live"),
        ("unique:k", holder.id, "live"),
    ]


# In transactions -----------------------------------------------------------------------------------------------------


def test_a_key_lives_and_dies_with_its_transaction(conn: Conn) -> None:
    put(conn, "k")
    conn.rollback()
    with conn.transaction(force_rollback=True):
        assert put(conn, "k").created
    assert put(conn, "k").created and not put(conn, "k").created


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_who_comes_second_waits_for_the_first_to_end(dsn: str, eyes: Eyes, end: str) -> None:
    with connections(dsn, 2) as (first, second), ThreadPoolExecutor(1) as pool:
        handle = put(first, "k")
        waiting = pool.submit(put, second, "k")
        wait_until(waits_for_a_lock(eyes, second.info.backend_pid))
        first.commit() if end == "commit" else first.rollback()
        answer = waiting.result(30)
        second.commit()
    assert answer.created == (end == "rollback")
    assert (answer.id == handle.id) == (end == "commit")
    assert eyes.all("SELECT id FROM pgqueue.job") == [(answer.id,)]


@pytest.mark.parametrize(("said", "most"), [("250ms", 4.5), pytest.param(None, 30.0, marks=pytest.mark.second)])
def test_the_wait_ends_with_a_clear_error(dsn: str, said: str | None, most: float) -> None:
    """By the session's own lock_timeout; by 5 seconds if it has none."""
    with connections(dsn, 2) as (first, second), ThreadPoolExecutor(1) as pool:
        if said:
            second.execute(f"SET lock_timeout = '{said}'".encode())
        put(first, "k")
        with second.transaction():
            with pytest.raises(errors.LockNotAvailable) as refused, second.transaction():
                pool.submit(put, second, "k").result(most)
            assert "another transaction has just taken" in "".join(refused.value.__notes__)
            assert put(second, "other").created, "after the savepoint"
        first.rollback()
        assert put(second, "k").created


@pytest.mark.second
@pytest.mark.parametrize("judge", [True, False])
def test_who_waits_for_a_table_waits_as_long_as_he_has_said(dsn: str, eyes: Eyes, judge: bool) -> None:
    """The 5 seconds are for keys and jobs. Whoever alters a table is waited for as by every other statement."""
    with connections(dsn, 2) as (other, app), ThreadPoolExecutor(1) as pool:
        first = put(other, "k")
        other.commit()
        other.execute("LOCK TABLE pgqueue.job_blocked IN ACCESS EXCLUSIVE MODE")
        asking = pool.submit(lambda: put(app, "k") if judge else taken_back(app, first.id))
        long = (
            "SELECT wait_event_type = 'Lock' AND pgqueue.now() - query_start > interval '5.2 s' FROM pg_stat_activity"
        )
        wait_until(lambda: asking.done() or eyes.one(f"{long} WHERE pid = %s", app.info.backend_pid))
        assert not asking.done(), asking.exception() or "it waited for nothing"
        other.rollback()
        assert asking.result(30).id == first.id


def taken_back(conn: Conn, id: int) -> JobHandle[Any]:
    since = "SELECT enqueued_at FROM pgqueue.job_available WHERE id = %(id)s"
    back = f"SELECT id FROM pgqueue.take_back(ARRAY[%(id)s::bigint], ARRAY({since}))"  # noqa: S608
    [(taken,)] = conn.execute(back, {"id": id}).fetchall()
    return JobHandle(taken)


def test_an_earlier_schema_is_named(conn: Conn) -> None:
    conn.execute(EARLIER)
    with pytest.raises(pgqueue.SchemaBehind, match="older than this pgqueue: run `pgqueue migrate`"):
        put(conn, "k")


@pytest.mark.parametrize("said", ["0", "3s"])
def test_the_sessions_lock_timeout_is_as_it_was(conn: Conn, said: str) -> None:
    conn.execute(f"SET lock_timeout = '{said}'".encode())
    conn.commit()
    put(conn, "k")
    put(conn, "k")
    put(conn, "k", hold="pending", on_duplicate="replace")
    conn.execute("SELECT pgqueue.enqueue('t', unique_key => 'j')")
    for _ in range(2):
        assert conn.execute("SHOW lock_timeout").fetchone() == (said,)
        conn.commit()


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_race_under_an_old_snapshot_is_the_applications_own(dsn: str, isolation: str) -> None:
    with connections(dsn, 2) as (old, other):
        old.execute(f"SET default_transaction_isolation = '{isolation.lower()}'".encode())
        old.commit()
        old.execute("SELECT 1")
        first = put(other, "k")
        other.commit()
        with pytest.raises(errors.SerializationFailure) as refused:
            put(old, "k")
        assert "taken since this transaction took its snapshot" in "".join(refused.value.__notes__)
        old.rollback()
        assert put(old, "k") == JobHandle(first.id, created=False)
        assert put(old, "mine").created and not put(old, "mine").created


@pytest.mark.promise("F23")
def test_who_keeps_a_duplicates_transaction_open_stalls_only_that_key(dsn: str, eyes: Eyes) -> None:
    put_there = put(eyes.conn, "k")
    with connections(dsn, 2) as (app, other):
        assert put(app, "k").id == put_there.id  # and stays open
        other.execute("SET lock_timeout = '100ms'")
        assert not put(other, "k").created
        assert put(other, "j").created


# What holds ----------------------------------------------------------------------------------------------------------

LIVES = ("scheduled", "available", "blocked", "running")


MATRIX: list[tuple[str, str, dict[str, Any], bool]] = [
    *((state, "live", {}, True) for state in LIVES),
    *((state, "live", {"attempt": 2}, True) for state in LIVES),
    *((state, "live", {}, False) for state in ENDS),
    *((state, "pending", {}, state != "running") for state in LIVES),
    *((state, "pending", {"attempt": 1}, False) for state in LIVES),
    ("scheduled", "pending", {"snoozes": 1}, False),
    *((state, "pending", {}, False) for state in ENDS),
    *((state, "60", {}, True) for state in LIVES + ENDS),
    *((state, "60", {"ended": 59}, True) for state in ENDS),
    *((state, "60", {"ended": 61}, False) for state in ENDS),
]


@pytest.mark.each_value
@pytest.mark.parametrize("by", ["python", "sql"])
@pytest.mark.parametrize(("state", "hold", "more", "held"), MATRIX)
def test_what_holds(conn: Conn, by: str, state: str, hold: str, more: dict[str, Any], held: bool) -> None:
    holder = make(conn, state, hold, **more)
    if by == "python":
        answer = put(conn, "k").id
    else:
        [(answer,)] = conn.execute("SELECT pgqueue.enqueue('t', unique_key => 'k')").fetchall()
    assert (answer == holder) == held
    [(owner,)] = conn.execute("SELECT job_id FROM pgqueue.unique_key WHERE key = 'unique:k'").fetchall()
    assert owner == answer


@pytest.mark.parametrize("by", ["python", "sql"])
@pytest.mark.parametrize(("left", "held"), [(30, True), (-1, False)])
def test_a_noted_expiry_holds_when_history_has_forgotten_the_job(conn: Conn, by: str, left: int, held: bool) -> None:
    sql = (
        "INSERT INTO pgqueue.unique_key VALUES ('unique:k', 77, 'after', 60, now() + make_interval(secs => %s), now())"
    )
    conn.execute(sql, [left])
    if by == "python":
        answer = put(conn, "k").id
    else:
        [(answer,)] = conn.execute("SELECT pgqueue.enqueue('t', unique_key => 'k')").fetchall()
    assert (answer == 77) == held


def test_an_idempotency_key_is_held_for_a_day(conn: Conn) -> None:
    mail.using(idempotency_key="i").enqueue(conn)
    rows = conn.execute("SELECT key, hold, seconds FROM pgqueue.unique_key").fetchall()
    assert rows == [("idempotency:i", "after", 86400.0)]
    put(conn, "k", hold=timedelta(minutes=2))
    rows = conn.execute("SELECT hold, seconds FROM pgqueue.unique_key WHERE key = 'unique:k'").fetchall()
    assert rows == [("after", 120.0)]


async def test_a_pending_job_waits_for_who_relies_on_it(dsn: str, eyes: Eyes, conn: Conn) -> None:
    """It is to see what the transaction has written that did not enqueue because of it."""
    first = put(eyes.conn, "k", hold="pending")
    taker = Taker(dsn)
    assert put(conn, "k", hold="pending").id == first.id
    assert await taker.fetch() == []
    conn.commit()
    await taker.close()
    again = Taker(dsn)
    assert [job.id for job in await again.fetch()] == [first.id]
    await again.close()
    assert put(eyes.conn, "k", hold="pending").created, "it has started"


async def test_a_live_one_does_not_wait(dsn: str, eyes: Eyes, conn: Conn) -> None:
    first = put(eyes.conn, "k")
    taker = Taker(dsn)
    assert put(conn, "k").id == first.id
    assert [job.id for job in await taker.fetch()] == [first.id]
    await taker.close()


# Replacing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["scheduled", "available", "blocked"])
def test_replace_changes_a_job_that_has_not_started(conn: Conn, state: str) -> None:
    holder = make(conn, state, "pending")
    new = mail.using(
        unique=Unique("k", on_duplicate="replace"), queue="other", priority=2, headers={"h": 1}, lock="l2", retry=4
    )
    assert new.enqueue(conn, x=1) == JobHandle(holder, created=False, replaced=True)
    columns = "id, state, args, queue, priority, rank, headers, lock_key, max_attempts, unique_key, key"
    rank = 5 if state == "scheduled" else 4
    row = (holder, "available", {"x": 1}, "other", 2, rank, {"h": 1}, "l2", 4, "k", None)
    assert conn.execute(f"SELECT {columns} FROM pgqueue.job".encode()).fetchall() == [row]  # noqa: S608
    assert new.using(delay=60).enqueue(conn, x=2).replaced
    assert conn.execute("SELECT state, args FROM pgqueue.job").fetchall() == [("scheduled", {"x": 2})]


@pytest.mark.parametrize(
    ("state", "hold", "more"), [("running", "live", {}), ("scheduled", "live", {"attempt": 1}), ("completed", "60", {})]
)
def test_one_that_has_started_is_not_replaced_and_the_handle_says_so(
    conn: Conn, state: str, hold: str, more: dict[str, Any]
) -> None:
    holder = make(conn, state, hold, **more)
    assert put(conn, "k", on_duplicate="replace", x=1) == JobHandle(holder, created=False, replaced=False)
    assert conn.execute("SELECT args FROM pgqueue.job").fetchall() == [({},)]


@pytest.mark.promise("F25")
@pytest.mark.parametrize("hold", ["live", "pending"])
@pytest.mark.parametrize("record", ["job_step", "job_cursor", "of an earlier job"])
@pytest.mark.parametrize("state", ["scheduled", "available", "blocked"])
@pytest.mark.parametrize("number", [1, 2], ids=["one", "many"])
def test_one_with_a_committed_step_or_batch_has_started_although_no_attempt_is_spent(
    conn: Conn, number: int, state: str, record: str, hold: str
) -> None:
    """The naive version changes the arguments, and the next run takes the answers recorded for the old ones."""
    holder, earlier = make(conn, state, hold), record == "of an earlier job"
    table, names, values = (
        ("job_cursor", "n, cursor", "1, '1'") if record == "job_cursor" else ("job_step", "name", "'s'")
    )
    since = "enqueued_at - interval '1 hour'" if earlier else "enqueued_at"
    insert = f"INSERT INTO pgqueue.{table} (job_id, enqueued_at, {names}) SELECT id, {since}, {values} FROM pgqueue.job"  # noqa: S608
    conn.execute(insert.encode())
    [(judged,)] = conn.execute("SELECT pgqueue.key_state(k) FROM pgqueue.unique_key k").fetchall()
    assert judged == ("waiting" if earlier else "free" if hold == "pending" else "held")
    if not earlier:
        back = "SELECT count(*) FROM pgqueue.take_back(ARRAY[%s]::bigint[], ARRAY(SELECT enqueued_at FROM pgqueue.job))"
        assert conn.execute(back, [holder]).fetchone() == (0,)
    asked = [keyed("k", on_duplicate="replace", x=1), keyed("other")][:number]
    [handle, *_] = pgqueue.enqueue_many(conn, asked)
    assert (handle.replaced, handle.created) == (earlier, not earlier and hold == "pending")
    args = {"x": 1} if earlier else {}
    assert conn.execute("SELECT args FROM pgqueue.job WHERE id = %s", [holder]).fetchone() == (args,)


def test_the_last_of_a_batch_replaces(conn: Conn) -> None:
    handles = pgqueue.enqueue_many(conn, [keyed(f"k{n % 2}", on_duplicate="replace", n=n) for n in range(6)])
    assert [handle.created for handle in handles] == [True, True, False, False, False, False]
    assert [handle.id for handle in handles] == [handles[0].id, handles[1].id] * 3
    assert conn.execute("SELECT args FROM pgqueue.job ORDER BY id").fetchall() == [({"n": 4},), ({"n": 5},)]


def test_debounce_pushes_the_start_and_not_beyond_its_most(conn: Conn) -> None:
    def ask(debounce: float, most: float | None, n: int) -> float:
        unique = Unique("k", debounce=debounce, debounce_max=most)
        pgqueue.enqueue(conn, mail.using(unique=unique), n=n)
        [(after, args)] = conn.execute("SELECT run_at - enqueued_at, args FROM pgqueue.job").fetchall()
        assert args == {"n": n}
        return float(after.total_seconds())

    with Clock(conn, datetime(2030, 1, 1, tzinfo=UTC)) as clock:
        for n, (debounce, most) in enumerate(((5, 60), (30, 60), (50, 60), (59, 60), (300, 300), (300, None))):
            assert ask(debounce, most, n) == debounce
        clock.advance(3)
        assert ask(50, 60, 6) == 53
        assert ask(59, 60, 7) == 60
        assert ask(5, 5, 8) == 5


def test_a_replaced_job_whose_time_has_come_keeps_its_turn(conn: Conn) -> None:
    first = put(conn, "k", hold="pending")
    put(conn, "other")
    put(conn, "k", on_duplicate="replace")
    ids = conn.execute("SELECT id FROM pgqueue.job_available ORDER BY rank, pos").fetchall()
    assert ids[0] == (first.id,)


@pytest.mark.promise("F25")
@pytest.mark.parametrize("forgets", [True, False], ids=["forgets", "naive"])
@pytest.mark.parametrize("asked", ["this job", "another job", "an earlier job of its id", "a job that runs"])
def test_a_job_that_was_replaced_is_not_cancelled_by_an_earlier_request(
    asked: str, forgets: bool, conn: Conn, eyes: Eyes
) -> None:
    """It was asked to stop while it ran, and its worker gave it back before it had begun. The naive version lets the
    request stand, and with it the job that was just enqueued is lost."""
    if not forgets:
        eyes.do(
            "CREATE OR REPLACE FUNCTION pgqueue.forget_requests(ids bigint[], since timestamptz[]) RETURNS integer "
            "LANGUAGE sql RETURN 0"
        )
    job = make(conn, "running", "pending", attempt=1)
    other = make(conn, "running", "pending", key="other", attempt=1)
    if asked == "another job":
        pgqueue.cancel(conn, other)
    elif asked != "a job that runs":
        assert [answer.did for answer in pgqueue.cancel(conn, job)] == ["requested"]
    if asked == "an earlier job of its id":
        conn.execute("UPDATE pgqueue.job_signal SET enqueued_at = enqueued_at - interval '1 hour'")
    released = [job] if asked == "a job that runs" else [job, other]
    release = {"ids": released, "claims": [1] * len(released), "worker_id": 1, "notify": True}
    conn.execute(text("complete_release", "pgqueue").encode(), release)
    if asked == "a job that runs":
        pgqueue.cancel(conn, other)
        direct = "SELECT pgqueue.forget_requests(array_agg(id), array_agg(enqueued_at)) FROM pgqueue.job WHERE id = %s"
        assert conn.execute(direct, [other]).fetchone() == (0,)
    assert put(conn, "k", on_duplicate="replace", x=1) == JobHandle(job, created=False, replaced=True)
    conn.execute(text("cancellation_settle", "pgqueue").encode(), {"n": 10, "notify": True})
    states = dict(conn.execute("SELECT id, state FROM pgqueue.job").fetchall())
    lost = asked == "this job" and not forgets
    assert states[job] == ("cancelled" if lost else "available")
    assert states[other] == {"another job": "cancelled", "a job that runs": "running"}.get(asked, "available")
    left = conn.execute("SELECT job_id FROM pgqueue.job_signal").fetchall()
    assert left == ([(other,)] if asked == "a job that runs" else [])


@pytest.mark.second
@pytest.mark.promise("F25")
@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=pytest.mark.long)])
async def test_a_replace_in_a_race_with_a_claim_hits_the_job_or_makes_another(
    dsn: str, eyes: Eyes, rounds: int
) -> None:
    """Whatever comes first: the newest arguments are those of a job that has not started before."""
    taker, stop = Taker(dsn), threading.Event()
    said: list[tuple[int, JobHandle[Any]]] = []

    def ask() -> None:
        try:
            with psycopg.connect(dsn, autocommit=True) as conn:
                for n in range(rounds):
                    said.append((n, put(conn, "k", on_duplicate="replace", n=n)))
        finally:
            stop.set()

    thread = threading.Thread(target=ask)
    thread.start()
    ran: dict[int, str] = {}
    while not stop.is_set():
        ran |= {job.id: job.args for job in await taker.fetch()}
    thread.join()
    ran |= {job.id: job.args for job in await taker.fetch()}
    await taker.close()
    taker = Taker(dsn)  # what was locked while the cursor passed
    ran |= {job.id: job.args for job in await taker.fetch()}
    await taker.close()
    assert set(ran) == {handle.id for _, handle in said}
    last = {handle.id: n for n, handle in said}
    assert ran == {id: f'{{"n": {n}}}' for id, n in last.items()}, "no ask is lost: the last of each job is what ran"
    assert all(handle.created or handle.replaced for _, handle in said)
    assert len(ran) > 1


def test_in_autocommit_a_holder_that_is_gone_before_the_second_statement_is_asked_for_again(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock has ended with the first statement, and another session cancels it."""
    first = put(conn, "k")
    conn.commit()
    replacing, rounds = unique_enqueue._replacing, 0

    def meanwhile(*args: Any) -> Any:
        nonlocal rounds
        rounds += 1
        with psycopg.connect(dsn) as other:
            pgqueue.cancel(other, first.id)
        return (yield from replacing(*args))

    monkeypatch.setattr(unique_enqueue, "_replacing", meanwhile)
    with psycopg.connect(dsn, autocommit=True) as auto:
        handle = put(auto, "k", on_duplicate="replace", n=8)
        assert handle.created and handle.id != first.id and rounds == 1
        assert pgqueue.get(auto, handle.id).args == {"n": 8}


def test_a_retry_of_many_takes_no_key_from_one_of_them_that_still_holds_it(conn: Conn) -> None:
    """As one after the other: the job that has ended lately holds the key for an hour, and the older one is told so."""
    old = put(conn, "k")
    pgqueue.cancel(conn, old.id)
    lately = put(conn, "k", hold=3600)
    pgqueue.cancel(conn, lately.id)
    conn.execute("UPDATE pgqueue.unique_key SET hold = 'after', seconds = 3600, expires_at = NULL")
    answers = {answer.id: answer.did for answer in pgqueue.retry(conn, old.id, lately.id)}
    assert answers == {old.id: "held", lately.id: "retried"}
    assert conn.execute("SELECT job_id, hold, seconds FROM pgqueue.unique_key").fetchall() == [
        (lately.id, "after", 3600)
    ]


# Ended and taken over ------------------------------------------------------------------------------------------------


def test_a_job_retried_by_hand_takes_its_key_again_or_is_told_who_has_it(conn: Conn) -> None:
    first = put(conn, "k", hold="pending")
    assert pgqueue.cancel(conn, first.id)[0].did == "cancelled"
    [answer] = pgqueue.retry(conn, first.id)
    assert answer.did == "retried" and put(conn, "k").id == first.id
    assert conn.execute("SELECT hold FROM pgqueue.unique_key").fetchall() == [("pending",)], "as it held it before"
    pgqueue.cancel(conn, first.id)
    second = put(conn, "k")
    assert second.created
    [answer] = pgqueue.retry(conn, first.id)
    assert (answer.did, answer.holder, answer.state) == ("held", second.id, "cancelled")
    pgqueue.cancel(conn, second.id)
    third = put(conn, "other")
    pgqueue.cancel(conn, third.id)
    answers = pgqueue.retry(conn, second.id, first.id, third.id)
    assert sorted(answer.did for answer in answers[:2]) == ["held", "retried"], "one of the two"
    assert answers[2].did == "retried"


@pytest.mark.second
def test_a_retry_and_an_enqueue_in_a_race_never_both_live(dsn: str, eyes: Eyes) -> None:
    with connections(dsn, 2, autocommit=True) as (retrying, enqueuing):
        won = set()
        for round in range(60):
            key = f"k{round}"
            dead = put(eyes.conn, key)
            pgqueue.cancel(eyes.conn, dead.id)
            acts: list[Callable[[], Any]] = [
                lambda dead=dead: pgqueue.retry(retrying, dead.id)[0].did,  # type: ignore[misc]
                lambda key=key: put(enqueuing, key).created,  # type: ignore[misc]
            ]
            answers = together(2, lambda n, acts=acts: acts[n]())  # type: ignore[misc]
            assert answers in (["retried", False], ["held", True])
            live = eyes.one("SELECT count(*) FROM pgqueue.job WHERE unique_key = %s AND state = 'available'", key)
            assert live == 1
            won.add(answers[0])


@pytest.mark.second
@pytest.mark.parametrize("by", ["python", "sql"])
def test_many_who_take_over_one_leftover_make_one_job(dsn: str, eyes: Eyes, by: str) -> None:
    """The SQL function looks and removes in two statements: not by the version, it removes what another has taken."""

    def act(conn: Conn) -> int:
        if by == "python":
            return put(conn, "k").id
        [(id,)] = conn.execute("SELECT pgqueue.enqueue('t', unique_key => 'k')").fetchall()
        return int(id)

    with connections(dsn, 20, autocommit=True) as conns:
        for _ in range(20):
            pgqueue.cancel(eyes.conn, put(eyes.conn, "k").id)
            ids = together(20, lambda n: act(conns[n]))
            assert len(set(ids)) == 1 == eyes.one("SELECT count(*) FROM pgqueue.job_available")
            pgqueue.cancel(eyes.conn, ids[0])


# From SQL ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("E17")
def test_sql_enqueues_with_keys_in_one_call(dsn: str, eyes: Eyes) -> None:
    sql = "SELECT pgqueue.enqueue('t', '{}', unique_key => 'u', idempotency_key => 'i')"

    with connections(dsn, 20, autocommit=True) as conns:
        ids = together(20, lambda n: conns[n].execute(sql).fetchone())
    assert len(set(ids)) == 1
    assert eyes.all("SELECT unique_key, idempotency_key FROM pgqueue.job") == [("u", "i")]
    assert eyes.one("SELECT pgqueue.enqueue('t', unique_key => 'u')") == ids[0][0]
    for name in ("unique_key", "idempotency_key", "lock_key"):
        with pytest.raises(errors.InvalidParameterValue, match=f"{name} has 501 bytes"):
            eyes.one(f"SELECT pgqueue.enqueue('t', {name} => repeat('x', 501))")


# What is asked of keys at once ----------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("F11")
@pytest.mark.parametrize("asking", [2, 6])
def test_debounces_in_transactions_do_not_deadlock(dsn: str, eyes: Eyes, asking: int) -> None:
    """Two who had both locked the job against its start, and then both wanted to change it, could not go on."""
    put(eyes.conn, "k", hold="pending", on_duplicate="replace", n=0)
    with connections(dsn, asking) as conns:

        def ask(n: int) -> None:
            for turn in range(20):
                assert put(conns[n], "k", on_duplicate="replace", n=100 * n + turn).replaced
                conns[n].commit()

        together(asking, ask)
    assert eyes.one("SELECT count(*) FROM pgqueue.job") == 1


@pytest.mark.second
@pytest.mark.promise("F11")
def test_batches_that_take_over_leftovers_do_not_deadlock(dsn: str, eyes: Eyes) -> None:
    names = [f"k{n}" for n in range(300)]
    for turn in range(6):
        pgqueue.enqueue_many(eyes.conn, [keyed(name) for name in names])
        pgqueue.cancel(eyes.conn, queue="default")
        with connections(dsn, 6) as conns:

            def ask(n: int, turn: int = turn, conns: list[Conn] = conns) -> None:
                mine = Random(7 * n + turn).sample(names, 30 + 40 * n)
                pgqueue.enqueue_many(conns[n], [keyed(name) for name in mine])
                conns[n].commit()

            together(6, ask)
        pgqueue.cancel(eyes.conn, queue="default")


def test_a_refused_retry_leaves_the_idempotency_key_where_it_was(conn: psycopg.Connection) -> None:
    both = pgqueue.remote("t").using(unique=lambda **_: "u", idempotency_key="i")
    first = both.enqueue(conn)
    pgqueue.cancel(conn, first.id)
    second = pgqueue.remote("t").using(unique=lambda **_: "u").enqueue(conn)
    assert second.created
    assert pgqueue.retry(conn, first.id)[0].did == "held"
    again = pgqueue.remote("t").using(idempotency_key="i").enqueue(conn)
    assert (again.id, again.created) == (first.id, False)
    pgqueue.cancel(conn, second.id)
    assert pgqueue.retry(conn, first.id)[0].did == "retried"
    assert conn.execute("SELECT count(*) FROM pgqueue.unique_key WHERE job_id = %s", [first.id]).fetchone() == (2,)


@pytest.mark.promise("F127")
@pytest.mark.parametrize("number", [1, 3], ids=["one job", "several"])
def test_a_key_that_can_never_be_taken_is_an_error(conn: Conn, eyes: Eyes, number: int) -> None:
    """A trigger of the application lets no row into the table of keys. Naive: it is asked for without an end."""
    eyes.do(
        """CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
        CREATE TRIGGER swallow BEFORE INSERT ON pgqueue.unique_key FOR EACH ROW EXECUTE FUNCTION swallow()"""
    )
    conn.execute("SET statement_timeout = '20s'")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=r"'unique:k0' .* 1,000 times") as caught:
        pgqueue.enqueue_many(conn, [keyed(f"k{n}") for n in range(number)])
    assert "trigger on pgqueue.unique_key" in str(caught.value.diag.message_hint)
    assert eyes.one(ORDERS) == 0


@pytest.mark.promise("F127")
@pytest.mark.parametrize("number", [1, 3], ids=["one job", "several"])
def test_a_retry_whose_key_can_never_be_taken_is_an_error(conn: Conn, eyes: Eyes, number: int) -> None:
    ids = [put(eyes.conn, f"k{n}").id for n in range(number)]
    pgqueue.cancel(eyes.conn, *ids)
    eyes.do(
        """DELETE FROM pgqueue.unique_key;
        CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
        CREATE TRIGGER swallow BEFORE INSERT ON pgqueue.unique_key FOR EACH ROW EXECUTE FUNCTION swallow()"""
    )
    conn.execute("SET statement_timeout = '20s'")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="1,000 times"):
        pgqueue.retry(conn, *ids)
    assert eyes.one("SELECT count(*) FROM pgqueue.job_dead") == number
