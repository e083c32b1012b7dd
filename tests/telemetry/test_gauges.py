"""The gauges of the database: whose they are, what they say, and that reading them never measures."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any

import psycopg
import pytest
from roles import Role, role
from stopped import stopped
from workers import until, wait_until, work

import pgqueue
from pgqueue.admin import depth
from pgqueue.client.tasks import task
from pgqueue.database import steps
from pgqueue.database.grants import Kind
from pgqueue.database.sessions import Link, Session, options
from pgqueue.jobs.states import LIVE
from pgqueue.jobs.totals import Numbers
from pgqueue.telemetry import gauges as gauges_module
from pgqueue.telemetry.gauges import ANSWER_SECONDS, OTHER_QUEUES, QUEUES_MOST, Reader, gauges
from pgqueue.telemetry.scrape import Scrape
from pgqueue.worker.leader.depth import Depth

__all__ = ["role"]

Conn = psycopg.Connection[Any]
Read = dict[tuple[str, tuple[str, ...]], float]


def read(conn: Conn) -> Read:
    """By name and values of the labels, what the gauges say; a series that is there twice fails."""
    samples = steps.drive(conn, gauges("pgqueue"), {})
    found = {(name, tuple(labels.values())): value for name, labels, value in samples}
    assert len(found) == len(samples)
    return found


@pytest.fixture
def reader(dsn: str) -> Iterator[Reader]:
    pgqueue.configure(dsn=dsn)
    made = Reader()
    yield made
    made.close()


@task(name="gauge.noop")
async def noop() -> None: ...


# What they say -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F168")
def test_jobs_are_shown_by_queue_state_and_reason(conn: Conn) -> None:
    conn.execute("""
        INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state)
        SELECT '15 s', n, 1, 'h', '1', '{mail}', '{t}', state
        FROM unnest('{running,quiet}'::text[]) WITH ORDINALITY AS s (state, n)
    """)
    conn.execute("INSERT INTO pgqueue.job (task, queue) SELECT 't', 'mail' FROM generate_series(1, 3)")
    conn.execute("INSERT INTO pgqueue.job (task, queue) VALUES ('unknown.one', 'mail')")
    conn.execute(
        "INSERT INTO pgqueue.job_scheduled (state, task, queue, run_at) "
        "VALUES ('scheduled', 't', 'mail', now() + interval '1 hour')"
    )
    conn.execute(
        "INSERT INTO pgqueue.job_blocked (state, task, queue, lock_key, key) "
        "SELECT 'blocked', 't', 'mail', 'order:7', 'lock:order:7' FROM generate_series(1, 2)"
    )
    found = read(conn)
    states = {state: found["pgqueue_depth", ("mail", state)] for state in LIVE}
    assert states == {"available": 4, "scheduled": 1, "blocked": 2, "running": 0}
    assert found["pgqueue_blocked", ("lock",)] == 2 and found["pgqueue_blocked", ("rate",)] == 0
    assert found["pgqueue_unknown_tasks", ()] == 1
    assert found["pgqueue_workers_alive", ()] == 1  # one is quiet
    assert 0.0 <= found["pgqueue_oldest_eligible_seconds", ("mail",)] < 60.0
    assert found["pgqueue_longest_blocked_seconds", ("mail",)] == 0.0
    assert 0.0 <= found["pgqueue_notify_queue_ratio", ()] < 0.5
    assert {name for name, _ in found if name.startswith("pgqueue_outbox")} == set()


@pytest.mark.promise("F168")
def test_the_oldest_snapshot_and_the_outboxes_are_shown(dsn: str, conn: Conn) -> None:
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT pg_current_xact_id()")
        conn.execute("SELECT pg_sleep(0.05)")
        conn.commit()
        assert read(conn)["pgqueue_oldest_snapshot_seconds", ()] >= 0.05
    conn.rollback()
    conn.execute("""
        INSERT INTO pgqueue.relay_fence (source, name, epoch, waiting, oldest, refused, reported_at)
        VALUES (gen_random_uuid(), 'app@h/shop', 1, 7, 3.5, 0, now() - interval '20 s'),
               (gen_random_uuid(), 'app@h/shop', 1, 0, NULL, 0, now() - interval '20 s')
    """)
    found = read(conn)
    lags = {round(value) for (name, _), value in found.items() if name == "pgqueue_outbox_lag_seconds"}
    assert lags == {0, 24} or lags == {0, 23}
    assert sorted(value for (name, _), value in found.items() if name == "pgqueue_outbox_waiting") == [0, 7]
    ages = [value for (name, _), value in found.items() if name == "pgqueue_outbox_report_age_seconds"]
    assert len(ages) == 2 and all(20 <= age < 60 for age in ages)


@pytest.mark.promise("F168")
def test_beyond_200_queues_the_rest_is_one(conn: Conn) -> None:
    conn.execute("INSERT INTO pgqueue.job (task, queue) SELECT 't', 'q' || n FROM generate_series(1, 250) AS n")
    conn.execute("INSERT INTO pgqueue.job (task, queue) VALUES ('t', 'q250')")
    found = read(conn)
    queues = {labels[0] for name, labels in found if name == "pgqueue_depth"}
    assert len(queues) == QUEUES_MOST + 1 and {"q250", OTHER_QUEUES} <= queues
    assert found["pgqueue_depth", (OTHER_QUEUES, "available")] == 50


@pytest.mark.promise("F168")
@pytest.mark.parametrize("n", [999, 1_000, 1_001, 1_500])
def test_of_any_number_of_queues_the_largest_are_shown_and_none_is_left_out(conn: Conn, n: int) -> None:
    conn.execute("INSERT INTO pgqueue.job (task, queue) SELECT 't', 'q' || g FROM generate_series(1, %s) AS g", [n])
    conn.execute("INSERT INTO pgqueue.job (task, queue) SELECT 't', 'zz' FROM generate_series(1, 7)")
    found = read(conn)
    assert found["pgqueue_depth", ("zz", "available")] == 7
    available = [value for (name, labels), value in found.items() if name == "pgqueue_depth" and "available" in labels]
    assert len(available) == QUEUES_MOST + 1 and sum(available) == n + 7


@pytest.mark.promise("F168")
async def test_a_large_queue_is_told_as_it_was_measured_and_never_measured_here(dsn: str, conn: Conn) -> None:
    conn.execute("INSERT INTO pgqueue.job (task, queue) SELECT 't', 'mail' FROM generate_series(1, 20000)")
    conn.commit()
    assert ("pgqueue_workers_alive", ()) in read(conn)
    assert [name for name, _ in read(conn) if name in ("pgqueue_depth", "pgqueue_blocked")] == []
    session = Session(Link(dsn, "pgqueue"), "fetch")
    await Depth(session, leads=lambda: True).measure()
    await session.close()
    conn.rollback()
    found = read(conn)
    assert found["pgqueue_depth", ("mail", "available")] >= 10_000
    assert 0.0 <= found["pgqueue_depth_age_seconds", ()] < 60.0
    conn.execute("UPDATE pgqueue.depth SET at = at - interval '1 hour', next_at = next_at - interval '1 hour'")
    assert [name for name, _ in read(conn) if name in ("pgqueue_depth", "pgqueue_blocked")] == []
    assert depth.queues(conn) != []  # who may measure does


@pytest.mark.promise("F168")
@pytest.mark.parametrize("kind", ["work", "read"])
def test_a_role_that_works_or_reads_may_read_them(role: Role, kind: Kind) -> None:
    with psycopg.connect(role(kind)) as mine:
        found = read(mine)
    assert ("pgqueue_workers_alive", ()) in found and ("pgqueue_depth_age_seconds", ()) in found


# Whose they are ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F167")
async def test_only_the_worker_that_leads_shows_them_and_drops_them_with_the_lead(
    dsn: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.telemetry.scrape.SAME_SECONDS", 0.0)

    async def shows(scrape: Scrape) -> bool:
        text, _ = await asyncio.to_thread(scrape.text, "")
        return b"pgqueue_workers_alive" in text

    async with work(dsn, noop) as first:
        await until(lambda: first.services.election.leads())
        async with work(dsn, noop) as second:
            scrapes = [Scrape(worker.ask_numbers, reader.read) for worker in (first, second)]
            assert [await shows(scrape) for scrape in scrapes] == [True, False]
            first.services.election.leave()  # its session has ended, and with it the lock
            assert not await shows(scrapes[0])
    assert not await shows(scrapes[0])


@pytest.mark.promise("F167")
def test_without_an_answer_of_the_database_there_are_none_and_it_is_said_once(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    assert reader.read() and reader.read(False) == ()
    pgqueue.configure(dsn="host=/nowhere password=secret")
    assert (reader.read(), reader.read()) == ((), ())
    [record] = caplog.records
    assert "gauges of the database are left out" in record.getMessage() and "secret" not in record.getMessage()


@pytest.mark.promise("F165", "F167")
def test_a_server_that_is_stuck_holds_no_scrape_and_no_gauges_are_old(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.telemetry.scrape.SAME_SECONDS", 0.0)
    monkeypatch.setattr(gauges_module, "ANSWER_SECONDS", ANSWER_SECONDS)
    numbers = Numbers(leads=True)
    numbers.totals.of("mail", "send").happened["completed"] = 4

    def ask() -> Future[Numbers]:
        asked: Future[Numbers] = Future()
        asked.set_result(numbers)
        return asked

    scrape, seconds = Scrape(ask, reader.read), list[float]()

    def shows() -> bool:
        began = monotonic()
        text, _ = scrape.text("")
        seconds.append(monotonic() - began)
        assert b'pgqueue_jobs_total{outcome="completed",queue="mail",task="send"} 4.0' in text
        return b"pgqueue_workers_alive" in text

    wait_until(shows)
    conn = reader._conn
    assert conn is not None
    pid = conn.info.backend_pid
    thaws = threading.Timer(20.0, os.kill, (pid, signal.SIGCONT))  # else a scrape that is held would hold this test
    thaws.start()
    try:
        with stopped([pid]):
            with ThreadPoolExecutor(8) as clients:
                assert not any(clients.map(lambda _: shows(), range(8)))
            assert [each.name for each in threading.enumerate()].count("pgqueue-gauges") == 1
            numbers.leads = False
            assert not shows()
            assert max(seconds) < 5.0
    finally:
        thaws.cancel()
    wait_until(lambda: conn.closed)  # the lead was lost meanwhile
    numbers.leads = True
    wait_until(shows)


@pytest.mark.promise("F167")
def test_without_a_thread_to_be_had_there_are_none_and_the_next_reading_has_them(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert reader.begin().result(0) == ()
    assert reader.read()


@pytest.mark.promise("F167")
def test_a_dead_link_to_the_server_is_noticed_as_a_workers_is(reader: Reader) -> None:
    assert reader.read() and reader._conn is not None
    said = reader._conn.info.get_parameters()
    wanted = options(Link("", "pgqueue"), "")
    for name in ("keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout"):
        assert said[name] == str(wanted[name])


@pytest.mark.promise("F167")
def test_two_do_not_read_at_once(reader: Reader) -> None:
    with reader._reading:
        assert reader.read() == ()
    assert reader.read()
