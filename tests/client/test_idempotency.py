"""What handlers guard with row locks and keys, because the database alone cannot know: and what happens without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Event, Lock
from typing import Any

import psycopg
import pytest
from workers import Eyes, until, wait_until, work, workers

import pgqueue
from pgqueue import Job
from pgqueue.client.tasks import task

Conn = psycopg.Connection[Any]

read: list[int] = []  # the jobs that are past their read
sent: list[int] = []
left: list[int] = []
guard = Lock()
doors: Barrier


@pytest.fixture
def shop(dsn: str, eyes: Eyes) -> Iterator[Eyes]:
    """Accounts 1, 2, 3 with 100, 200 and 50; an order that nobody was told of."""
    global doors
    for seen in (read, sent, left):
        seen.clear()
    doors = Barrier(20)
    eyes.do("CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL)")
    eyes.do("INSERT INTO account VALUES (1, 100), (2, 200), (3, 50)")
    eyes.do("CREATE TABLE orders (id int PRIMARY KEY, delivered boolean NOT NULL DEFAULT false)")
    eyes.do("INSERT INTO orders VALUES (7)")
    yield eyes


def meet(conn: Conn, job: Job) -> None:
    """Wait, having read, until the other has read as well; or stands before the lock that we hold."""
    with guard:
        read.append(job.id)
    blocked = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
    wait_until(lambda: len(read) == 2 or conn.execute(blocked.encode()).fetchone() == (True,))


# A read, and a write that follows from it ----------------------------------------------------------------------------


BALANCE = "SELECT balance FROM account WHERE id = 1"


@task(name="idempotent.transfer", transactional=True)
def transfer(job: Job, taker: int, lock: bool) -> None:
    conn = job.connection
    row = conn.execute(f"{BALANCE} FOR UPDATE" if lock else BALANCE).fetchone()
    assert row is not None
    meet(conn, job)
    conn.execute("UPDATE account SET balance = %s WHERE id = 1", [row[0] - 50])
    conn.execute("UPDATE account SET balance = balance + 50 WHERE id = %s", [taker])


@pytest.mark.promise("T05")
@pytest.mark.parametrize(("lock", "end"), [(True, [0, 250, 100]), (False, [50, 250, 100])])
async def test_two_transfers_from_one_account_take_turns_at_its_lock(
    dsn: str, shop: Eyes, lock: bool, end: list[int]
) -> None:
    """Without the lock both read 100, and money is made: the transaction alone does not guard what was read."""
    with psycopg.connect(dsn) as conn:
        for taker in (2, 3):
            transfer.enqueue(conn, taker, lock)
    async with work(dsn, transfer, concurrency=2):
        await until(shop.done(2))
    assert [balance for (balance,) in shop.all("SELECT balance FROM account ORDER BY id")] == end
    assert shop.one("SELECT count(*) FROM pgqueue.attempt") == 0


# A look, an effect, a mark -------------------------------------------------------------------------------------------


DELIVERED = "SELECT delivered FROM orders WHERE id = 7"


@task(name="idempotent.deliver", transactional=True)
def deliver(job: Job, lock: bool) -> str:
    conn = job.connection
    row = conn.execute(f"{DELIVERED} FOR UPDATE" if lock else DELIVERED).fetchone()
    assert row is not None
    if row[0]:
        return "was delivered"
    meet(conn, job)
    sent.append(job.id)
    conn.execute("UPDATE orders SET delivered = true WHERE id = 7")
    return "delivered"


@pytest.mark.promise("I04")
@pytest.mark.parametrize(("lock", "sends"), [(False, 2), (True, 1)])
async def test_a_look_before_the_effect_needs_a_lock(dsn: str, shop: Eyes, lock: bool, sends: int) -> None:
    with psycopg.connect(dsn) as conn:
        for _ in range(2):
            deliver.enqueue(conn, lock)
    async with work(dsn, deliver, concurrency=2):
        await until(shop.done(2))
    assert len(sent) == sends
    results = ["delivered"] * sends + ["was delivered"] * (2 - sends)
    assert sorted(shop.all("SELECT result FROM pgqueue.job_done")) == [(result,) for result in results]


@task(name="idempotent.crowd", transactional=True)
def crowd(job: Job) -> str:
    """All twenty are at the door when the first is let in."""
    conn = job.connection
    doors.wait(30)
    row = conn.execute(f"{DELIVERED} FOR UPDATE").fetchone()
    assert row is not None
    if row[0]:
        left.append(job.id)
        return "was delivered"
    sent.append(job.id)
    conn.execute("UPDATE orders SET delivered = true WHERE id = 7")
    return "delivered"


@pytest.mark.second
@pytest.mark.promise("I05")
async def test_of_twenty_at_once_one_enters_and_the_others_look_again_and_leave(dsn: str, shop: Eyes) -> None:
    with psycopg.connect(dsn) as conn:
        pgqueue.enqueue_many(conn, [crowd.new() for _ in range(20)])
    async with work(dsn, crowd, concurrency=20):
        await until(shop.done(20), 30)
    assert (len(sent), len(left)) == (1, 19)
    assert shop.one("SELECT count(*) FROM pgqueue.attempt") == 0


# What waits in the queue ---------------------------------------------------------------------------------------------

inside: list[int] = []
leave = Event()


@task(name="idempotent.alone", transactional=True)
def alone(job: Job) -> None:
    job.connection.execute("SELECT FROM account WHERE id = %s FOR UPDATE", [job.id])
    inside.append(job.id)
    leave.wait(30)


@pytest.mark.promise("I10")
@pytest.mark.parametrize("backlog", [100, 10_000])
async def test_a_job_that_waits_for_its_turn_holds_no_lock(dsn: str, eyes: Eyes, backlog: int) -> None:
    """Five are inside their critical sections; what is queued behind them has no transaction, and locks nothing."""
    inside.clear()
    leave.clear()
    eyes.do("CREATE TABLE account (id int PRIMARY KEY)")
    eyes.do("INSERT INTO account SELECT generate_series(1, %s)", backlog)
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 'idempotent.alone' FROM generate_series(1, %s)", backlog)
    held = """SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
              WHERE a.datname = current_database() AND (l.locktype IN ('transactionid', 'tuple')
                  OR l.relation = 'account'::regclass AND l.mode = 'RowShareLock')"""
    async with work(dsn, alone, concurrency=5) as worker:
        await until(lambda: len(inside) == 5)
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_available") >= backlog - 200)
        await until(lambda: eyes.one(held) == 10)  # of each of the five its transaction and its table; a fetch is over
        leave.set()
        worker.quiet()


# An effect outside ---------------------------------------------------------------------------------------------------

PAYS = """
import psycopg
from pgqueue.config import config

@pgqueue.task(name="pays", transactional=True)
def pays(job: pgqueue.Job) -> None:
    job.connection.execute("INSERT INTO receipt (job) VALUES (%s)", [job.id])
    with psycopg.connect(config().dsn, autocommit=True) as provider:  # no part of our transaction
        provider.execute("INSERT INTO call (key) VALUES (%s)", [job.id])
        provider.execute("INSERT INTO payment (key) VALUES (%s) ON CONFLICT DO NOTHING", [job.id])
    if job.crashes == 0:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.second
@pytest.mark.promise("I08")
def test_an_effect_outside_is_repeated_after_a_crash_and_its_key_makes_it_one(
    dsn: str, eyes: Eyes, conn: Conn, tmp_path: Path
) -> None:
    """Killed between the payment and the commit: paid, and no trace of it here. The provider knows the key again."""
    eyes.do("CREATE TABLE receipt (job bigint)")
    eyes.do("CREATE TABLE call (key bigint)")
    eyes.do("CREATE TABLE payment (key bigint PRIMARY KEY)")
    with workers(tmp_path, dsn, PAYS) as processes:
        environment = {"PGQUEUE_DSN": dsn}
        first = processes.start(environment, lease=1.0)
        first.event("ready")
        job = pgqueue.enqueue(conn, "pays")
        conn.commit()
        assert first.wait() == -9
        assert (eyes.all("SELECT key FROM payment"), eyes.all("SELECT job FROM receipt")) == ([(job.id,)], [])
        processes.start(environment, lease=1.0)
        wait_until(eyes.done(1))
    assert eyes.all("SELECT key FROM call") == [(job.id,)] * 2
    assert eyes.all("SELECT key FROM payment") == eyes.all("SELECT job FROM receipt") == [(job.id,)]
