"""Our own operations on many jobs never wait for each other in a circle: keys first, then jobs by their ids.

The order is written down in docs/design/database.md. The server looks for deadlocks after 20 ms here, so that a circle
is an error (40P01) at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import combinations_with_replacement, product
from random import Random
from threading import Event, get_ident
from typing import Any, LiteralString, NamedTuple, Self

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from unique_jobs import Conn, keyed
from workers import Eyes, wait_until

import pgqueue
from pgqueue.admin import actions
from pgqueue.admin.bulk import runner
from pgqueue.admin.bulk.operations import STATES
from pgqueue.client import unique_enqueue
from pgqueue.database import drivers
from pgqueue.database.statements import text
from pgqueue.jobs.job import NewJob

KEYS = [f"k{n}" for n in range(12)]


def patient(dsn: str) -> str:
    return make_conninfo(dsn, options="-c deadlock_timeout=20ms")


# The circle of two ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("F38")
def test_duplicates_that_return_and_duplicates_that_replace_lock_in_one_order(dsn: str, eyes: Eyes) -> None:
    """Key a is of a scheduled job, b of an available one with a higher id. A third transaction has job a locked.

    The naive order, partition by partition, has the one that replaces lock b and wait for a, while the other one has a.
    """
    with psycopg.connect(dsn) as conn:
        later = pgqueue.remote("t").using(unique=pgqueue.Unique(lambda **_: "a", hold="pending"), delay=3600)
        [a, b] = pgqueue.enqueue_many(conn, [later.new(), keyed("b", hold="pending")])
    assert a.id < b.id
    gone = Event()

    def act(on_duplicate: str) -> None:
        with psycopg.connect(patient(dsn)) as conn:
            jobs = [keyed(key, hold="pending", on_duplicate=on_duplicate) for key in "ab"]
            pgqueue.enqueue_many(conn, jobs)
            gone.wait(0.2)  # what it has locked stays locked while the other one asks for more

    with psycopg.connect(dsn) as third, ThreadPoolExecutor(2) as pool:
        third.execute("SELECT FROM pgqueue.job_scheduled WHERE id = %s FOR UPDATE", [a.id])
        both = [pool.submit(act, on_duplicate) for on_duplicate in ("return", "replace")]
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_until(lambda: eyes.one(waiting) == 2 or any(each.done() for each in both))
        third.rollback()
        for each in both:
            each.result()
    gone.set()


# Step by step ---------------------------------------------------------------------------------------------------------


class Stage:
    """Transactions that are stopped where they want a lock, so that their steps come in a given order."""

    def __init__(self, dsn: str, eyes: Eyes) -> None:
        self._dsn, self._eyes = dsn, eyes
        self._ends = ExitStack()
        self._pool = self._ends.enter_context(ThreadPoolExecutor(4))
        self._started: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def gate(self, sql: LiteralString, *params: object) -> Conn:
        """A transaction that has a lock until it ends."""
        conn: Conn = self._ends.enter_context(psycopg.connect(self._dsn))
        conn.execute(sql, params)
        return conn

    def start(self, act: Callable[[Conn], object]) -> None:
        """Start a transaction. Return when it waits for a lock, or has ended."""
        conn: Conn = self._ends.enter_context(psycopg.connect(patient(self._dsn)))

        def transact() -> None:
            act(conn)
            conn.commit()

        started = self._pool.submit(transact)
        self._started.append(started)
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: started.done() or self._eyes.one(waits, conn.info.backend_pid))

    def waiting(self) -> list[bool]:
        """Of the transactions in the order of their start: which of them have not ended."""
        return [not each.done() for each in self._started]

    def end(self) -> list[str | None]:
        """How the transactions ended: None, or the SQLSTATE of the error."""
        ends = [each.exception(30) for each in self._started]
        return [getattr(end, "sqlstate", str(end)) if end else None for end in ends]


TAKE = "INSERT INTO pgqueue.unique_key VALUES (%s, -1, 'live', 0, NULL, now())"
LOCK_KEY = "SELECT FROM pgqueue.unique_key WHERE key = %s FOR UPDATE"
LOCK_JOB = "SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE"


def both(unique: str, idempotency: str, *, hold: Any = None, on_duplicate: Any = "return") -> NewJob[Any]:
    task = pgqueue.remote("unique.mail")
    given = pgqueue.Unique(lambda **_: unique, hold=hold, on_duplicate=on_duplicate)
    return task.using(unique=given, idempotency_key=idempotency).new()


def dead(conn: Conn, *jobs: NewJob[Any]) -> list[int]:
    """Jobs that were cancelled. The rows of their keys are left over."""
    ids = [handle.id for handle in pgqueue.enqueue_many(conn, jobs)]
    pgqueue.cancel(conn, *ids)
    return ids


def tidied(conn: Conn, *keys: str) -> None:
    conn.execute("DELETE FROM pgqueue.unique_key WHERE key = ANY (%s)", [list(keys)])


@pytest.mark.promise("F38")
@pytest.mark.parametrize("hold", ["live", "pending"])
@pytest.mark.parametrize("on_duplicate", ["return", "replace"])
def test_a_free_key_is_taken_in_its_turn(dsn: str, eyes: Eyes, on_duplicate: str, hold: str) -> None:
    """The jobs of keys a and b were cancelled, and the row of b was tidied away. A third transaction has just taken c.

    The naive order inserts b, waits for c, and then goes back to remove the row of a.
    """
    with psycopg.connect(dsn) as conn:
        ids = dead(conn, keyed("a", hold=hold), keyed("b", hold=hold))
        tidied(conn, "unique:b")
    batch = [keyed(key, hold=hold, on_duplicate=on_duplicate) for key in "abc"]
    with Stage(dsn, eyes) as stage:
        third = stage.gate(TAKE, "unique:c")
        stage.start(lambda conn: pgqueue.enqueue_many(conn, batch))
        stage.start(lambda conn: pgqueue.retry(conn, *ids))
        assert stage.waiting() == [True, True]
        third.rollback()
        assert stage.end() == [None, None]


@pytest.mark.promise("F38")
def test_what_moved_is_looked_for_without_the_locks_of_the_first_look(dsn: str, eyes: Eyes) -> None:
    """Key f is of a job that was cancelled, p and q of jobs that wait. While a batch asks for all three, f's job is
    retried, so that the batch has to keep that one from starting, too.

    The naive order has the job of p locked when it looks a second time, and then wants the job of f, which is older.
    """
    with psycopg.connect(dsn) as conn:
        [f] = dead(conn, keyed("f", hold="pending"))
        p, q = (handle.id for handle in pgqueue.enqueue_many(conn, [keyed(key, hold="pending") for key in "pq"]))
    with Stage(dsn, eyes) as stage:
        third = stage.gate(TAKE, "unique:g")
        fourth = stage.gate(LOCK_JOB, q)
        stage.start(lambda conn: pgqueue.enqueue_many(conn, [keyed(key, hold="pending") for key in "fgpq"]))
        retrying = stage.gate("SELECT")
        pgqueue.retry(retrying, f)
        third.rollback()
        wait_until(
            lambda: eyes.one(
                "SELECT count(*) > 0 FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))",
                retrying.info.backend_pid,
            )
        )
        retrying.commit()
        wait_until(
            lambda: eyes.one(
                "SELECT count(*) > 0 FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))",
                fourth.info.backend_pid,
            )
        )
        stage.start(lambda conn: pgqueue.cancel(conn, f, p))
        assert stage.waiting() == [True, True]
        fourth.rollback()
        assert stage.end() == [None, None]
    assert eyes.all("SELECT unique_key FROM pgqueue.job WHERE state = 'available' ORDER BY 1") == [("g",), ("q",)]


@pytest.mark.promise("F38")
@pytest.mark.parametrize("retried", [True, False], ids=["retry", "successors"])
def test_jobs_with_two_keys_take_them_in_the_order_of_the_keys(dsn: str, eyes: Eyes, retried: bool) -> None:
    """The naive order takes both keys of one job, and then those of the next: u1 before i2."""
    jobs = [both("u1", "i1"), both("u2", "i2")]
    with psycopg.connect(dsn) as conn:
        ids = dead(conn, *jobs)
        tidied(conn, "idempotency:i1", "idempotency:i2", "unique:u1", "unique:u2")
    with Stage(dsn, eyes) as stage:
        third = stage.gate(TAKE, "unique:u0")
        stage.start(lambda conn: pgqueue.enqueue_many(conn, [both("u0", "i2"), keyed("u1")]))
        stage.start(lambda conn: pgqueue.retry(conn, *ids) if retried else succeed(conn, jobs))
        assert stage.waiting() == [True, True]
        third.rollback()
        assert stage.end() == [None, None]


# More jobs than one statement changes ---------------------------------------------------------------------------------


def many_dead(conn: Conn, first: str, last: str) -> list[int]:
    """More dead jobs than one statement retries. The first wants one key, the last another one; neither has a row."""
    plain = pgqueue.remote("unique.mail")
    ids = dead(conn, keyed(first), *(plain.new() for _ in range(actions.BATCH)), keyed(last))
    tidied(conn, f"unique:{first}", f"unique:{last}")
    return ids


@pytest.mark.promise("F120")
@pytest.mark.parametrize("other", ["enqueue_many", "retry"])
def test_a_retry_of_many_takes_all_keys_in_one_order(dsn: str, eyes: Eyes, other: str) -> None:
    """The naive order, thousand by thousand, takes z for the first job, and then a for the last one."""
    with psycopg.connect(dsn) as conn:
        ids = many_dead(conn, "z", "a")
        rival = dead(conn, *map(keyed, "amz"))
        tidied(conn, "unique:a", "unique:m", "unique:z")
    with Stage(dsn, eyes) as stage:
        third = stage.gate(TAKE, "unique:m")
        if other == "retry":
            stage.start(lambda conn: pgqueue.retry(conn, *rival))
        else:
            stage.start(lambda conn: pgqueue.enqueue_many(conn, list(map(keyed, "amz"))))
        stage.start(lambda conn: pgqueue.retry(conn, *ids))
        assert stage.waiting() == [True, True]
        third.rollback()
        assert stage.end() == [None, None]
    live = eyes.all("SELECT unique_key, count(*) FROM pgqueue.job WHERE state = 'available' GROUP BY 1 ORDER BY 1")
    assert live == [("a", 1), ("m", 1), ("z", 1), (None, actions.BATCH)]


# All pairs, step by step ----------------------------------------------------------------------------------------------


class World(NamedTuple):
    """Six keys: a job of each state, or none. Every operation is about all of them."""

    n: int
    dead: list[int]
    waiting: list[int]

    def jobs(self, **options: Any) -> list[NewJob[Any]]:
        n = self.n
        return [
            *(keyed(f"{n}{key}", **options) for key in "abcd"),
            both(f"{n}e", f"{n}e", **options),
            keyed(f"{n}z", **options),
        ]


def make_world(conn: Conn, n: int) -> World:
    """a: a row that is left over. b, e: no row any more; e is of a job with two keys. c, d: held. z: never there."""
    ids = dead(
        conn, keyed(f"{n}a", hold="pending"), keyed(f"{n}b", hold="pending"), both(f"{n}e", f"{n}e", hold="pending")
    )
    tidied(conn, f"unique:{n}b", f"unique:{n}e", f"idempotency:{n}e")
    later = pgqueue.remote("t").using(unique=pgqueue.Unique(lambda **_: f"{n}c", hold="pending"), delay=3600)
    held = pgqueue.enqueue_many(conn, [later.new(), keyed(f"{n}d", hold="pending")])
    conn.commit()
    return World(n, ids, [handle.id for handle in held])


def succeed(conn: Conn, jobs: list[NewJob[Any]]) -> None:
    drivers.run(conn, unique_enqueue.following(jobs, schema="pgqueue", notify=True))


def one_by_one(conn: Conn, world: World) -> None:
    """Single calls, in the order of the keys."""
    conn.execute("SELECT pgqueue.enqueue('t', idempotency_key => %s)", [f"{world.n}e"])
    for key in "abcdz":
        conn.execute("SELECT pgqueue.enqueue('t', unique_key => %s)", [f"{world.n}{key}"])


def unless_gone(change: Callable[..., object], conn: Conn, ids: list[int]) -> None:
    """Of the jobs that have been discarded meanwhile it says so when all others are done."""
    with suppress(pgqueue.JobNotFound):
        change(conn, *ids)


STEPS: dict[str, Callable[[Conn, World], object]] = {
    "return": lambda conn, world: pgqueue.enqueue_many(conn, world.jobs(hold="pending")),
    "return, live": lambda conn, world: pgqueue.enqueue_many(conn, world.jobs()),
    "replace": lambda conn, world: pgqueue.enqueue_many(conn, world.jobs(hold="pending", on_duplicate="replace")),
    "reversed": lambda conn, world: pgqueue.enqueue_many(conn, world.jobs(hold="pending")[::-1]),
    "successors": lambda conn, world: succeed(conn, world.jobs(hold="pending")),
    "retry": lambda conn, world: unless_gone(pgqueue.retry, conn, world.dead),
    "discard": lambda conn, world: unless_gone(pgqueue.discard, conn, world.dead),
    "cancel": lambda conn, world: pgqueue.cancel(conn, *world.waiting),
    "single calls": one_by_one,
}


def step(name: str, world: World) -> Callable[[Conn], object]:
    return lambda conn: STEPS[name](conn, world)


def gates(world: World) -> list[tuple[LiteralString, object]]:
    n, (c, d) = world.n, world.waiting
    return [
        (LOCK_KEY, f"unique:{n}a"),
        (TAKE, f"unique:{n}b"),
        (TAKE, f"unique:{n}e"),
        (TAKE, f"idempotency:{n}e"),
        (TAKE, f"unique:{n}z"),
        (LOCK_JOB, c),
        (LOCK_JOB, d),
    ]


@pytest.mark.second
@pytest.mark.promise("F38")
@pytest.mark.parametrize("gate", [0, 2, 4, 6, *(pytest.param(gate, marks=pytest.mark.long) for gate in (1, 3, 5))])
def test_no_two_operations_deadlock_wherever_the_first_is_stopped(dsn: str, eyes: Eyes, gate: int) -> None:
    """The first is stopped at one of its locks. The second goes on until it waits for the first, or for the same."""
    found: dict[tuple[str, str], list[str | None]] = {}
    for n, (one, other) in enumerate(product(STEPS, repeat=2)):
        with psycopg.connect(dsn) as conn:
            world = make_world(conn, n)
        with Stage(dsn, eyes) as stage:
            third = stage.gate(*gates(world)[gate])
            stage.start(step(one, world))
            stage.start(step(other, world))
            third.rollback()
            if (ends := stage.end()) != [None, None]:
                found[one, other] = ends
    assert found == {}


# All pairs, at random -------------------------------------------------------------------------------------------------

Operation = Callable[[Conn, Random], object]


def some(random: Random) -> list[str]:
    return random.sample(KEYS, 8)


def named(conn: Conn, random: Random, *states: str) -> list[int]:
    rows = conn.execute("SELECT id FROM pgqueue.job WHERE state = ANY (%s)", [list(states)]).fetchall()
    ids = [id for (id,) in rows]
    random.shuffle(ids)
    return ids[:8]


def duplicate(conn: Conn, random: Random) -> None:
    pgqueue.enqueue_many(conn, mixed(some(random), random, "return"))


def replace(conn: Conn, random: Random) -> None:
    pgqueue.enqueue_many(conn, mixed(some(random), random, "replace"))


def both_ways(conn: Conn, random: Random) -> None:
    keys = some(random)
    pgqueue.enqueue_many(conn, mixed(keys[:4], random, "replace") + mixed(keys[4:], random, "return"))


def two_keys(conn: Conn, random: Random) -> None:
    """Jobs with keys of both kinds, which do not belong together: some get one of the two and give it back."""
    given = random.choice(["return", "replace"])
    jobs = [
        both(one, other, hold="pending", on_duplicate=given)
        for one, other in zip(some(random), some(random), strict=True)
    ]
    pgqueue.enqueue_many(conn, jobs)


def mixed(keys: list[str], random: Random, on_duplicate: Any) -> list[NewJob[Any]]:
    """Some of the jobs start later: so the order of ids is not that of the partitions."""
    later = pgqueue.remote("unique.mail")
    return [
        later.using(
            unique=pgqueue.Unique(lambda key=key, **_: key, hold="pending", on_duplicate=on_duplicate),
            delay=random.choice([0, 3600]),
        ).new()
        for key in keys
    ]


def successors(conn: Conn, random: Random) -> None:
    succeed(conn, mixed(some(random), random, "return"))


def cancel(conn: Conn, random: Random) -> None:
    if ids := named(conn, random, "available", "scheduled"):
        unless_gone(pgqueue.cancel, conn, ids)


def retry(conn: Conn, random: Random) -> None:
    if ids := named(conn, random, "failed", "cancelled"):
        unless_gone(pgqueue.retry, conn, ids)


def discard(conn: Conn, random: Random) -> None:
    """Jobs whose keys hold on after their end, too."""
    if ids := named(conn, random, "failed", "cancelled"):
        unless_gone(pgqueue.discard, conn, ids[:2])


def by_filter(conn: Conn, random: Random) -> None:
    """Steps of operations by filter, each a transaction of its own."""
    conn.autocommit = True
    try:
        for action in random.sample(["cancel", "retry", "discard"], 2):
            begun = pgqueue.bulk(conn, action, state=STATES[action][0][:2], task="unique.mail")
            made = runner.take(conn, f"{get_ident()}", begun.id)
            while made is not None and made.open and made.pause <= 0:
                runner.step(conn, made)
                if isinstance(made.error, psycopg.errors.DeadlockDetected):
                    raise made.error
    finally:
        conn.autocommit = False


def promote(conn: Conn, random: Random) -> None:
    send(conn, "scheduler_promote", after="-infinity", passed="{}", n=100, notify=True)


def settle(conn: Conn, random: Random) -> None:
    send(conn, "cancellation_settle", n=100, notify=True)


def tidy(conn: Conn, random: Random) -> None:
    send(conn, "pruner_unique_keys", after="", n=1000)


def send(conn: Conn, name: str, **params: object) -> None:
    conn.execute(text(name, "pgqueue").encode(), params)


OPERATIONS: list[Operation] = [
    duplicate, replace, both_ways, two_keys, successors, cancel, retry, discard, by_filter, promote, settle, tidy,
]  # fmt: skip


@pytest.mark.second
@pytest.mark.promise("F38", "F86")
def test_no_two_of_our_operations_deadlock(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        duplicate(conn, Random(0))

    def act(number: int, operation: Operation) -> int:
        """Eight transactions; how many were ended by the server."""
        random, lost = Random(number), 0
        with psycopg.connect(patient(dsn)) as conn:
            for _ in range(8):
                try:
                    operation(conn, random)
                    conn.commit()
                except psycopg.errors.DeadlockDetected:
                    conn.rollback()
                    lost += 1
        return lost

    found: dict[tuple[str, str], int] = {}
    with ThreadPoolExecutor(4) as pool:
        for one, other in combinations_with_replacement(OPERATIONS, 2):
            lost = sum(pool.map(act, range(4), [one, other, one, other]))
            if lost:
                found[one.__name__, other.__name__] = lost
    assert found == {}


@pytest.mark.second
@pytest.mark.promise("F38", "F86")
@pytest.mark.parametrize("by_hand", [retry, discard, cancel, replace])
@pytest.mark.parametrize("seed", range(5))
def test_a_job_that_lives_and_ends_again_meanwhile_is_locked_in_its_turn(
    dsn: str, seed: int, by_hand: Operation
) -> None:
    """Operations by filter change the same jobs. The naive order asks for such a job anew while it has keys."""
    with psycopg.connect(dsn) as conn:
        for n in range(6):
            for operation in (duplicate, two_keys, both_ways, cancel):
                operation(conn, Random(97 * seed + n))
                conn.commit()
    circles: list[str] = []

    def act(number: int, operation: Operation) -> None:
        random = Random(1000 * number + seed)
        with psycopg.connect(patient(dsn)) as conn:
            for n in range(40):
                try:
                    if n % 10 == 9 and number == 0:  # more of them
                        two_keys(conn, random)
                        conn.commit()
                    operation(conn, random)
                    conn.commit()
                except psycopg.errors.DeadlockDetected as error:
                    conn.rollback()
                    circles.append(f"{operation.__name__}: {error}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(act, range(4), [by_hand, by_filter, by_hand, by_filter]))
    assert circles == []
