"""What workers see of an application's transactions: of an open one nothing, of a committed one everything at once.

`test_connections` asks the same of every kind of connection, `test_flow` under every fault at once.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from time import monotonic, sleep

import psycopg
import pytest
from workers import Eyes, wait_until, workers

import pgqueue

TASKS = """
import psycopg, threading

mine = threading.local()

@pgqueue.task(name="visible.notes")
async def notes(key: int) -> None:
    say("ran", key=key)

@pgqueue.task(name="visible.greets")
def greets(user: int) -> str:
    if not hasattr(mine, "conn"):
        mine.conn = psycopg.connect(os.environ["SHOP"], autocommit=True)
    found = mine.conn.execute("SELECT name FROM app_user WHERE id = %s", [user]).fetchone()
    if found is None:
        raise LookupError(f"record not found: user {user}")
    return found[0]
"""
notes = pgqueue.remote("visible.notes")
greets = pgqueue.remote("visible.greets")

# Before the commit ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("E01")
@pytest.mark.parametrize("seconds", [1.0, pytest.param(5.0, marks=pytest.mark.long)])
def test_nothing_of_an_open_transaction_is_seen_or_claimed(
    seconds: float, dsn: str, eyes: Eyes, tmp_path: Path
) -> None:
    """Two idle workers poll all the while, and are told of other jobs, which they work."""
    with (
        workers(tmp_path, dsn, TASKS) as made,
        psycopg.connect(dsn) as held,
        psycopg.connect(dsn, autocommit=True) as others,
    ):
        both = made.ready(2, poll=0.02)
        keys = [-1, -2, -3, -4, -5, -6]
        ids = [notes.enqueue(held, key=keys[0]).id, notes.using(priority=0).enqueue(held, key=keys[1]).id]
        with held.transaction():
            ids.append(notes.using(lock="a").enqueue(held, key=keys[2]).id)
        ids.append(notes.using(delay=0.01).enqueue(held, key=keys[3]).id)
        ids += [handle.id for handle in pgqueue.enqueue_many(held, [notes.new(key=key) for key in keys[4:]])]
        number, seen, until = 0, 0, monotonic() + seconds
        while monotonic() < until:
            notes.enqueue(others, key=number)
            number += 1
            wait_until(eyes.done(number))
            seen = max(seen, eyes.one("SELECT count(*) FROM pgqueue.job WHERE id = ANY (%s)", ids))
        on_the_clock_of_the_database, before = eyes.one("SELECT pgqueue.now()"), monotonic()
        held.commit()
        wait_until(eyes.done(number + len(keys)))
        wait_until(lambda: sum(len(each.all("ran")) for each in both) == number + len(keys))
    print(f"{number} other jobs were worked while they were held")
    ran = {event["key"]: event["at"] for each in both for event in each.all("ran")}
    assert seen == 0
    assert [key for key in keys if ran[key] < before] == []
    started = eyes.all("SELECT started_at, attempt, crashes FROM pgqueue.job WHERE id = ANY (%s)", ids)
    assert all(row > (on_the_clock_of_the_database, 1) and row[1:] == (1, 0) for row in started) and len(started) == 6


# After the commit ----------------------------------------------------------------------------------------------------


def sign_up(dsn: str, number: int, seed: int) -> None:
    """So many transactions of an application: a user and the job to greet them, in either order, some of them slow.

    Only so fast that the workers keep up: a job that waits in a line for its turn meets no race.
    """
    random = Random(seed)
    with psycopg.connect(dsn) as conn:
        for done in range(number):
            [[user]] = conn.execute("SELECT nextval('app_user_id')")
            steps = [
                lambda user=user: conn.execute("INSERT INTO app_user VALUES (%s, %s)", [user, f"user {user}"]),
                lambda user=user: greets.enqueue(conn, user=user),
            ]
            for step in steps if random.random() < 0.5 else reversed(steps):
                step()
                if random.random() < 0.02:
                    sleep(0.01)  # it does something else in between
            conn.commit()
            if done % 20 == 0:
                wait_until(lambda: waiting(conn) < 20)


def waiting(conn: psycopg.Connection) -> int:
    [[number]] = conn.execute("SELECT count(*) FROM pgqueue.job_available")
    conn.commit()
    return int(number)


@pytest.mark.promise("E03", "E06")
@pytest.mark.parametrize("number", [2_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_job_finds_what_was_written_with_it_at_its_first_attempt(
    number: int, dsn: str, eyes: Eyes, tmp_path: Path
) -> None:
    """Four applications sign up users while two workers greet them; each handler asks on a connection of its own."""
    eyes.do("CREATE TABLE app_user (id bigint PRIMARY KEY, name text NOT NULL)")
    eyes.do("CREATE SEQUENCE app_user_id")
    with workers(tmp_path, dsn, TASKS) as made, ThreadPoolExecutor(4) as applications:
        for _ in range(2):
            made.start({"SHOP": dsn}, poll=0.05)
        for process in made.all:
            process.event("ready")
        list(applications.map(lambda seed: sign_up(dsn, number // 4, seed), range(4)))
        meanwhile = eyes.one("SELECT count(*) FROM pgqueue.job_done")
        wait_until(lambda: not eyes.states().keys() & {"available", "running"})
        states, ends = eyes.states(), [process.stop() for process in made.all]
        said = [line for each in made.all for line in each.written().splitlines() if not ORDINARY.match(line)]
    print(f"{meanwhile} of {number} were worked before the last was enqueued")
    assert eyes.all("SELECT error_type, message, count(*) FROM pgqueue.attempt GROUP BY 1, 2") == []
    assert (states, ends, said) == ({"completed": number}, [0, 0], [])
    assert eyes.all("SELECT DISTINCT attempt, crashes, snoozes FROM pgqueue.job") == [(1, 0, 0)]
    greeted = "SELECT count(*) FROM app_user u JOIN pgqueue.job j ON j.result #>> '{}' = u.name"
    assert eyes.one(greeted) == eyes.one("SELECT count(*) FROM app_user") == number
    assert meanwhile > number // 2, "they were worked after the load, not under it"


# A line of the log that says no more than that all is well.
ORDINARY = re.compile(r"\S+ \S+ \d+ (DEBUG|INFO) ")
