"""What the world does to a worker: its sessions are ended, its wires go dead, the server goes away, an application
holds what it has touched. Real processes; the account holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
import pytest
from faults import TASKS, Stream, Wire, account, keys, notes, put, waits
from servers import Server
from workers import Eyes, Stalls, Workers, until, wait_until, work, workers

import pgqueue
import pgqueue.database.pipeline
from pgqueue.database import migrations, sessions
from pgqueue.database.statements import Statement, text

LEASE = 6.0
WIRES = "fetch", "complete", "listen", "beat"
QUICK = """
from pgqueue.database import sessions
from pgqueue.worker.fetch import notifier
sessions.ROUND_TRIP_SECONDS = 3.0
notifier.PING_SECONDS = 0.3
notifier.PING_ANSWER_SECONDS = 3.0
"""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file whose coming lets the waiting handlers end."""
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    return tmp_path / "go"


def leave(made: Workers) -> None:
    """Every worker ends in order, and none was ever taken for dead."""
    for process in made.all:
        assert process.stop() == 0, process.written()
        assert "taken for dead" not in process.written()


# The database ends what it likes -------------------------------------------------------------------------------------


def end_sessions_at_random(dsn: str, tmp_path: Path, eyes: Eyes, number: int) -> None:
    random, ended = Random(6), 0
    with workers(tmp_path, dsn, TASKS) as made, Stream(dsn, 200.0) as stream:
        made.ready(2, lease=6.0, concurrency=20, poll=0.2)
        while ended < number:
            stream.more(random.randint(1, 20))
            if sessions := eyes.backends():
                ended += eyes.one("SELECT pg_terminate_backend(%s)::int", random.choice(sessions)[0])
        stream.end()
        found = account(eyes, stream, made.all)
        print(f"{ended} sessions ended; {found}")
        assert (found.lost, found.twice, found.crashes) == ([], [], 0)
        leave(made)


@pytest.mark.second
@pytest.mark.promise("F06")
def test_sessions_that_are_ended_at_random_lose_nothing_and_double_nothing(
    dsn: str, tmp_path: Path, eyes: Eyes
) -> None:
    end_sessions_at_random(dsn, tmp_path, eyes, 25)


@pytest.mark.long
@pytest.mark.promise("F06")
def test_five_hundred_sessions_are_ended_at_random(dsn: str, tmp_path: Path, eyes: Eyes) -> None:
    end_sessions_at_random(dsn, tmp_path, eyes, 500)


@pytest.mark.long
@pytest.mark.promise("F06")
def test_an_outage_of_thirty_seconds(tmp_path: Path, own_server: Server) -> None:
    """Jobs run on through it and end after it, once; nobody is taken for dead, no crash is counted."""
    dsn = own_server.dsn("postgres")
    migrations.migrate(dsn)
    with workers(tmp_path, dsn, TASKS) as made, Stream(dsn, 50.0, seconds=3.0) as stream:
        made.ready(2, concurrency=200)
        stream.more(200)
        own_server.stop()
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began >= 30.0, 60.0)
        own_server.start()
        stream.more(200)
        stream.end()
        eyes = Eyes(dsn)
        found = account(eyes, stream, made.all)
        print(found)
        assert (found.lost, found.twice, found.crashes) == ([], [], 0)
        assert eyes.one("SELECT max(attempt) FROM pgqueue.job") == 1
        leave(made)
        eyes.close()


# Wires go dead -------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("F06")
def test_wires_that_go_dead_without_closing_are_noticed_and_replaced(dsn: str, tmp_path: Path, eyes: Eyes) -> None:
    """All four at once. The first listener leads; its session does not live on in the server, with its lock."""
    with Wire(dsn) as wire, workers(tmp_path, wire.dsn, TASKS + QUICK) as made, Stream(dsn, 100.0) as stream:
        [process] = made.ready(lease=LEASE, poll=0.2)
        wait_until(lambda: "this worker leads now" in process.written())
        stream.more(50)
        before = [each for each in eyes.backends() if each[1] in {f"pgqueue {name}" for name in WIRES}]
        assert wire.kill(*(f"pgqueue {name}" for name in WIRES)) == 4
        stream.more(50)
        stream.end()
        found = account(eyes, stream, made.all)
        print(found)
        assert (found.lost, found.twice, found.crashes) == ([], [], 0)
        for name in WIRES:
            wait_until(lambda name=name: len({*eyes.backends(f"pgqueue {name}")} - {*before}) == 1)  # type: ignore[misc]
        wait_until(lambda: not {*eyes.backends()} & {*before})
        wait_until(lambda: process.written().count("this worker leads now") == 2)
        leave(made)


@pgqueue.task(name="faults.plain")
async def plain() -> None: ...


@pgqueue.task(name="faults.locked", lock="one", timeout=60)
async def locked() -> None: ...


@pgqueue.task(name="faults.paced", rate="1000/second")
async def paced() -> None: ...


CUTS = {
    "claim": (plain, "pgqueue fetch", "fetch_claim"),
    "completion": (plain, "pgqueue complete", "complete_plain"),
    "unblock": (locked, "pgqueue unblock", "unblock_next"),
    "rate": (paced, "pgqueue rates", "rates_move"),
}
RECEIVED = """
    SELECT true FROM pg_stat_activity
    WHERE application_name = %s AND wait_event = 'ClientRead' AND starts_with(query, %s)
    AND datname = current_database()
"""


@pytest.mark.second
@pytest.mark.promise("F06")
@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("what", CUTS)
async def test_what_a_dead_wire_has_cut_off_is_settled_in_seconds(
    what: str, committed: bool, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its COMMIT, so that the session lives on with its locks; or after it, so that we do not know of it."""
    monkeypatch.setattr(sessions, "ROUND_TRIP_SECONDS", 1.0)
    task, name, statement = CUTS[what]
    put, cut, before = pgqueue.database.pipeline.Wire.put, asyncio.Event(), text(statement, "pgqueue")
    sent: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()

    def cutting_put(self: pgqueue.database.pipeline.Wire, message: Statement[Any]) -> int:
        said, query = sent.setdefault(self, []), message.sql
        if query == "COMMIT" and before in said and eyes.states() not in ({}, {"completed": 1}) and not cut.is_set():
            while self.pgconn.flush():
                pass
            # The server has done all that was sent, and waits for more.
            wait_until(lambda: eyes.one(RECEIVED, name, said[-1].partition("%(")[0]))
            assert wire.kill(name, answers_only=committed) == 1
            cut.set()
        sent[self] = [*said, query] if query != "COMMIT" else []
        return put(self, message)

    monkeypatch.setattr(pgqueue.database.pipeline.Wire, "put", cutting_put)
    with Wire(dsn) as wire:
        async with work(wire.dsn, plain, locked, paced, poll=0.2):
            with psycopg.connect(dsn) as conn:
                task.enqueue(conn)
            with Stalls() as stalls:
                await until(cut.is_set)
                began = eyes.one("SELECT clock_timestamp()")
                await until(eyes.done(1), 60.0)
                took = eyes.one("SELECT extract(epoch FROM clock_timestamp() - %s)::float8", began)
            print(f"{what}: settled after {took:.1f} s")
            assert eyes.all("SELECT attempt, crashes FROM pgqueue.job") == [(1, 0)]
            assert took - stalls.seconds < 10.0


@pytest.mark.long
@pytest.mark.promise("F06")
@pytest.mark.parametrize("name", WIRES)
def test_a_dead_wire_is_noticed_within_its_patience(name: str, dsn: str, tmp_path: Path, eyes: Eyes) -> None:
    """With the patience workers have: 45 s for an answer. The listener asks every 20 s at least, and waits 10 s."""
    with Wire(dsn) as wire, workers(tmp_path, wire.dsn, TASKS) as made, Stream(dsn, 50.0) as stream:
        made.ready(lease=30.0)
        stream.more(50)
        before = {*eyes.backends(f"pgqueue {name}")}
        assert wire.kill(f"pgqueue {name}") == 1
        began = time.monotonic()
        wait_until(lambda: {*eyes.backends(f"pgqueue {name}")} - before, 80.0)
        print(f"{name}: another session after {time.monotonic() - began:.0f} s")
        stream.more(50)
        stream.end()
        found = account(eyes, stream, made.all)
        assert (found.lost, found.twice, found.crashes) == ([], [], 0)
        leave(made)


# An application holds what it has touched ----------------------------------------------------------------------------


@contextmanager
def application_that_stays_open(dsn: str, *, commit: bool, **ids: list[int]) -> Iterator[int]:
    """A transaction that has cancelled, retried and enqueued jobs, and stays open as long as the block; the new id."""
    with psycopg.connect(dsn) as conn:
        pgqueue.cancel(conn, *ids["available"], *ids["scheduled"], *ids["running"])
        pgqueue.retry(conn, *ids["dead"])
        yield notes.enqueue(conn, key=-1).id
        if commit:
            conn.commit()
        else:
            conn.rollback()


def stay_open(dsn: str, tmp_path: Path, eyes: Eyes, seconds: float, *, commit: bool) -> None:
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('later', now())")
    available = put(dsn, *(notes.using(queue="later").new(key=-2) for _ in range(20)))
    scheduled = put(dsn, *(notes.using(delay=1.0, queue="later").new(key=-3) for _ in range(20)))
    dead = put(dsn, *(notes.using(delay=3600.0).new(key=-4) for _ in range(20)))
    with psycopg.connect(dsn) as conn:
        pgqueue.cancel(conn, *dead)
    with workers(tmp_path, dsn, TASKS) as made:
        [process] = made.ready(concurrency=20, queues=["default", "later"], lease=6.0)
        running = put(dsn, *(waits.new(key=-5) for _ in range(5)))
        wait_until(lambda: keys(process.all("ran")) == [-5] * 5)
        with application_that_stays_open(
            dsn, commit=commit, available=available, scheduled=scheduled, running=running, dead=dead
        ) as new:
            eyes.do("DELETE FROM pgqueue.queue")
            with Stream(dsn, 100.0) as stream, Stalls() as stalls:
                began = time.monotonic()
                wait_until(lambda: time.monotonic() - began > seconds, seconds + 30.0)
            other = put(dsn, *(notes.using(delay=0.2, queue="later").new(key=-6) for _ in range(20)))
            Path(tmp_path / "go").touch()
            beside = [*other, *running, *stream.committed.values()]
            wait_until(lambda: set(found(eyes, beside)) == {"completed"})
            waited = eyes.one(
                "SELECT max(extract(epoch FROM finished_at - enqueued_at))::float8 FROM pgqueue.job_done "
                "WHERE id = ANY (%s)",
                list(stream.committed.values()),
            )
            print(
                f"{len(stream.committed)} jobs beside it, the slowest {waited * 1e3:.0f} ms from enqueue to completion"
            )
            assert waited - stalls.seconds < min(0.9 * seconds, 2.0)
        wait_until(lambda: set(found(eyes, [*available, *scheduled])) == {"cancelled" if commit else "completed"})
        wait_until(lambda: found(eyes, dead) == ["completed" if commit else "cancelled"] * 20)
        wait_until(lambda: found(eyes, [new]) == ["completed"] * commit)
        leave(made)


def found(eyes: Eyes, ids: list[int]) -> list[str]:
    return [state for (state,) in eyes.all("SELECT state FROM pgqueue.job WHERE id = ANY (%s)", ids)]


@pytest.mark.second
@pytest.mark.promise("F23")
@pytest.mark.parametrize("commit", [True, False])
def test_an_application_that_stays_open_stalls_nobody(
    commit: bool, go: Path, dsn: str, tmp_path: Path, eyes: Eyes
) -> None:
    stay_open(dsn, tmp_path, eyes, 2.5, commit=commit)


@pytest.mark.long
@pytest.mark.promise("F23")
@pytest.mark.parametrize("commit", [True, False])
def test_an_application_that_stays_open_for_a_minute(
    commit: bool, go: Path, dsn: str, tmp_path: Path, eyes: Eyes
) -> None:
    stay_open(dsn, tmp_path, eyes, 60.0, commit=commit)
