"""What workers see of an application's transactions: of an open one nothing, of a committed one everything at once.

`test_connections` asks the same of every kind of connection, `test_flow` under every fault at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from time import monotonic, sleep

import psycopg
import pytest
from naive_cursor import NaiveCursor
from noted_jobs import anew, ran, started
from noted_jobs import notes as flow_notes
from workers import Eyes, Stalls, until, wait_until, work, workers

import pgqueue
from pgqueue.worker.fetch.passed_over import ASK_MOST, PassedOver

__all__ = ["anew"]

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
LATEST = 10 * ASK_MOST  # seconds

# Before the commit ---------------------------------------------------------------------------------------------------


@pytest.mark.second
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
        number, seen, end = 0, 0, monotonic() + seconds
        while monotonic() < end:
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


@pytest.mark.second
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


# Late, and behind what has been looked at ----------------------------------------------------------------------------


@asynccontextmanager
async def pair(dsn: str) -> AsyncIterator[None]:
    """Two workers whose poll is no help, and that never start at zero again."""
    async with work(dsn, flow_notes, poll=60.0) as one, work(dsn, flow_notes, poll=60.0) as two:
        for worker in one, two:
            worker.services.fetcher.watermark._sweep_every = 1e9
            worker.services.fetcher.watermark._sweep_due = 1e9
        yield


async def stream(conn: psycopg.AsyncConnection, most: int = 200) -> list[int]:
    """Enqueue some, on a connection in autocommit mode, and wait until most have been started."""
    jobs = [handle.id for handle in await pgqueue.aenqueue_many(conn, [flow_notes.new() for _ in range(most)])]
    await until(lambda: sum(job not in started for job in jobs) < most // 10)
    return jobs


async def open_for(seconds: float, dsn: str, patience: float = 30.0) -> tuple[list[int], list[float]]:
    """A transaction enqueues now and then and stays open while other jobs pass by; who of all was not started, and how
    long after its commit those of the transaction were."""
    async with (
        pair(dsn),
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as others,
        await psycopg.AsyncConnection.connect(dsn) as late,
    ):
        passed, held = await stream(others), list[int]()
        end = monotonic() + seconds
        while monotonic() < end:
            if len(held) < 5:  # at several places of the line, the last of which is long gone at the end
                held.append((await pgqueue.aenqueue(late, flow_notes)).id)
            passed += await stream(others)
        assert not started.keys() & set(held)
        await late.commit()
        with Stalls() as stalls:
            committed = monotonic()
            with suppress(AssertionError):
                await until(lambda: len(started) == len(held) + len(passed), patience)
    left = [job for job in [*held, *passed] if job not in started]
    waits = [started[job] - committed for job in held if job in started]
    print(f"{len(passed)} jobs passed by in {seconds} s, then those held within {max(waits, default=0) * 1000:.0f} ms")
    assert len(ran) == len(started) and len(passed) > 500 * seconds
    return left, [wait - stalls.between(committed, committed + wait) for wait in waits]


@pytest.mark.second
@pytest.mark.promise("F21")
@pytest.mark.parametrize("seconds", [2.5, pytest.param(60.0, marks=pytest.mark.long)])
async def test_the_jobs_of_a_transaction_open_for_long_are_started_at_once_when_it_commits(
    seconds: float, dsn: str
) -> None:
    left, waits = await open_for(seconds, dsn)
    assert (left, len(waits)) == ([], 5)
    assert max(waits) < 1.0


@pytest.mark.second
@pytest.mark.promise("F21")
async def test_the_naive_cursor_never_finds_the_jobs_of_a_transaction_open_for_long(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.fetch.fetcher.Watermark", NaiveCursor)
    monkeypatch.setattr(PassedOver, "passed", lambda *what: None)
    left, _ = await open_for(0.5, dsn, patience=1.0)
    assert len(left) > 0


def withdraw(dsn: str, rounds: int, seed: int) -> int:
    """Cancel waiting jobs and think better of it, so many times; how many were cancelled so.

    Each time it stays open until others have been started, which stood behind those in the line.
    """
    undone, random = 0, Random(seed)
    with psycopg.connect(dsn) as conn:

        def cancelled() -> int:
            answers = pgqueue.cancel(conn, state="available", limit=random.randint(1, 20))
            return sum(answer.did == "cancelled" for answer in answers)

        for _ in range(rounds):
            undone += wait_until(cancelled)
            goal = len(started) + 100
            wait_until(lambda: len(started) >= goal, LATEST)  # noqa: B023 (awaited before the next round)
            conn.rollback()
    return undone


async def cancels_undone(rounds: int, dsn: str, patience: float) -> list[int]:
    """Who was left behind, while three applications cancel what waits, and roll back."""
    jobs: list[int] = []
    async with pair(dsn), await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        undoing = asyncio.gather(*[asyncio.to_thread(withdraw, dsn, rounds, seed) for seed in range(3)])
        while not undoing.done():
            made = await pgqueue.aenqueue_many(conn, [flow_notes.new() for _ in range(200)])
            jobs.extend(handle.id for handle in made)
            # Workers take jobs before they start them: so many wait that some are available to be cancelled.
            await until(lambda: undoing.done() or len(jobs) - len(started) < 3_000, LATEST)
        undone = await undoing
        with suppress(AssertionError):
            await until(lambda: len(started) == len(jobs), patience)
    print(f"{len(jobs)} jobs, {sum(undone)} cancels rolled back")
    assert len(ran) == len(started) and sum(undone) >= 3 * rounds
    return [job for job in jobs if job not in started]


@pytest.mark.second
@pytest.mark.promise("F21")
@pytest.mark.parametrize("rounds", [15, pytest.param(500, marks=pytest.mark.long)])
async def test_jobs_whose_cancel_was_rolled_back_are_all_worked(rounds: int, dsn: str, eyes: Eyes) -> None:
    """They were locked when the cursor passed them: what was passed is read again."""
    assert await cancels_undone(rounds, dsn, LATEST) == []
    await until(lambda: eyes.states().keys() == {"completed"})
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") == eyes.one("SELECT count(*) FROM pgqueue.job_signal") == 0


@pytest.mark.second
@pytest.mark.promise("F21")
async def test_the_naive_cursor_never_finds_jobs_whose_cancel_was_rolled_back(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.fetch.fetcher.Watermark", NaiveCursor)
    monkeypatch.setattr(PassedOver, "passed", lambda *what: None)
    assert len(await cancels_undone(10, dsn, 1.0)) > 0
