"""Our own operations on many jobs never wait for each other in a circle: keys first, then jobs by their ids.

The order is written down in docs/design/database.md. The server looks for deadlocks after 20 ms here, so that a circle
is an error (40P01) at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations_with_replacement
from random import Random
from threading import Event
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from unique_jobs import Conn, keyed
from workers import Eyes, wait_until

import pgqueue
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


# All pairs -----------------------------------------------------------------------------------------------------------

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
    drivers.run(conn, unique_enqueue.following(mixed(some(random), random, "return"), schema="pgqueue", notify=True))


def cancel(conn: Conn, random: Random) -> None:
    if ids := named(conn, random, "available", "scheduled"):
        pgqueue.cancel(conn, *ids)


def retry(conn: Conn, random: Random) -> None:
    if ids := named(conn, random, "failed", "cancelled"):
        pgqueue.retry(conn, *ids)


def promote(conn: Conn, random: Random) -> None:
    send(conn, "scheduler_promote", after="-infinity", passed="{}", n=100, notify=True)


def settle(conn: Conn, random: Random) -> None:
    send(conn, "cancellation_settle", n=100)


def tidy(conn: Conn, random: Random) -> None:
    send(conn, "pruner_unique_keys", after="", n=1000)


def send(conn: Conn, name: str, **params: object) -> None:
    conn.execute(text(name, "pgqueue").encode(), params)


KEEPING: list[Operation] = [duplicate, replace, both_ways, successors, promote, settle, tidy]
ENDING: list[Operation] = [successors, cancel, retry, promote, settle, tidy]
"""With `cancel`, keys become free: enqueue_many and a cancel are the known gap of docs/design/database.md."""


@pytest.mark.second
@pytest.mark.promise("F38")
@pytest.mark.parametrize("operations", [KEEPING, ENDING], ids=["keys stay held", "keys become free"])
def test_no_two_of_our_operations_deadlock(dsn: str, operations: list[Operation]) -> None:
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
        for one, other in combinations_with_replacement(operations, 2):
            lost = sum(pool.map(act, range(4), [one, other, one, other]))
            if lost:
                found[one.__name__, other.__name__] = lost
    assert found == {}
