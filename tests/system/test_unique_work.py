"""Unique keys while workers work: what a handler reads, when a key is free again, successors, what is left over."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from commands import items
from commands import pgqueue as command
from completer_desk import Desk, desk_of
from psycopg.conninfo import conninfo_to_dict
from psycopg.sql import SQL, Identifier
from roles import Role, refused, role
from unique_jobs import keyed, make, put
from workers import Eyes, least, until, wait_until, work, workers

import pgqueue
from pgqueue import Job, Lock, Snooze, Unique
from pgqueue.client.tasks import task
from pgqueue.database.grants import grant
from pgqueue.database.sessions import Link, Session
from pgqueue.jobs.outcomes import COMPLETED, Completed
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.testing import Clock, assert_enqueued, drain, run
from pgqueue.worker.leader.pruner import Pruner

__all__ = ["role"]  # a fixture

Conn = psycopg.Connection[Any]
SOON = RetryPolicy(attempts=5, first=0.01, most=0.05)


def keys(eyes: Eyes) -> list[tuple[Any, ...]]:
    return eyes.all("SELECT key, job_id, expires_at - pgqueue.now() > '23:59' FROM pgqueue.unique_key ORDER BY key")


# What a handler reads ------------------------------------------------------------------------------------------------


@task(name="unique.reading", unique="order:{order}")
def reading(job: Job, order: int) -> list[str | None]:
    return [job.unique_key, job.idempotency_key]


@task(name="unique.reading_alone", unique="order:{order}", lock="order:{order}")
def reading_alone(job: Job, order: int) -> list[str | None]:
    return [job.unique_key, job.idempotency_key]


@pytest.mark.promise("T17")
@pytest.mark.parametrize("asked", [reading, reading_alone], ids=["free", "locked"])
async def test_the_keys_are_readable_in_the_handler(dsn: str, eyes: Eyes, conn: Conn, asked: Any) -> None:
    plain = pgqueue.remote("unique.plain")

    @task(name="unique.plain")
    async def bare(job: Job) -> list[Any]:
        if job.attempt == 1:
            raise ValueError
        return [job.id, job.unique_key, job.idempotency_key]

    wanted = {
        asked.enqueue(conn, 1).id: ["order:1", None],
        asked.using(idempotency_key="i\n").enqueue(conn, 2).id: ["order:2", "i\n"],
        pgqueue.remote(asked.name).using(idempotency_key="j").enqueue(conn, order=3).id: [None, "j"],
    }
    alone = plain.using(retry=2).enqueue(conn).id
    conn.commit()
    async with work(dsn, asked, pgqueue.client.tasks.find("unique.plain") or bare):
        await until(eyes.done(3))
    found = dict(eyes.all("SELECT id, result FROM pgqueue.job WHERE state = 'completed'"))
    assert {id: found[id] for id in wanted} == wanted
    assert eyes.one("SELECT id FROM pgqueue.job WHERE task = 'unique.plain'") == alone
    assert eyes.one("SELECT count(*) FROM pgqueue.unique_key WHERE job_id = %s", alone) == 0, "omitted: none is held"


def test_drain_and_run_give_the_keys_too(pgqueue_conn: Conn) -> None:
    reading.using(idempotency_key="i").enqueue(pgqueue_conn, 7)
    assert not reading.enqueue(pgqueue_conn, 7).created
    assert_enqueued(pgqueue_conn, reading, order=7)
    assert drain(pgqueue_conn).check().completed == 1
    assert pgqueue_conn.execute("SELECT result FROM pgqueue.job").fetchall() == [(["order:7", "i"],)]
    assert pgqueue_conn.execute("SELECT key FROM pgqueue.unique_key").fetchall() == [("idempotency:i",)]
    assert reading.enqueue(pgqueue_conn, 7).created
    assert not reading.using(idempotency_key="i").enqueue(pgqueue_conn, 8).created
    assert run(reading.using(idempotency_key="k"), 7) == ["order:7", "k"]
    assert run(reading, 7) == ["order:7", None]


def test_a_drain_debounces_with_its_clock(pgqueue_conn: Conn) -> None:
    index = reading.using(unique=Unique("shop:{order}", debounce=30, debounce_max=60))
    with Clock(pgqueue_conn) as clock:
        for seconds, created in ((0, True), (20, False), (20, False), (20, False), (20, True)):
            clock.advance(seconds)
            assert index.enqueue(pgqueue_conn, 1).created == created
            drain(pgqueue_conn, clock)
    states = pgqueue_conn.execute("SELECT state FROM pgqueue.job ORDER BY id").fetchall()
    assert states == [("completed",), ("scheduled",)]


# Free again ----------------------------------------------------------------------------------------------------------


@task(name="unique.quick", unique="k:{n}")
async def quick(n: int) -> None: ...


@task(name="unique.transactional", unique="k:{n}", transactional=True)
async def transactional(job: Job, n: int) -> None:
    await job.aconnection()


@pytest.mark.promise("T13")
@pytest.mark.parametrize("asked", [quick, transactional], ids=["plain", "transactional"])
async def test_a_duplicate_is_a_normal_answer_before_and_after_the_end(
    dsn: str, eyes: Eyes, conn: Conn, asked: Any
) -> None:
    asked = asked.using(idempotency_key="request")
    first = asked.enqueue(conn, 1)
    assert not asked.enqueue(conn, 1).created
    conn.commit()
    async with work(dsn, asked):
        await until(eyes.done(1))
        await until(lambda: keys(eyes) == [("idempotency:request", first.id, True)])
        for _ in range(3):
            again = asked.enqueue(conn, 1)
            assert (again.id, again.created) == (first.id, False)
        conn.commit()
    [(state, attempt)] = eyes.all("SELECT state, attempt FROM pgqueue.job")
    assert (state, attempt) == ("completed", 1) and not eyes.all("SELECT FROM pgqueue.attempt")
    with Clock(eyes.conn) as clock:
        clock.advance(86_390)
        assert not asked.enqueue(conn, 1).created
        conn.rollback()  # in the middle of a transaction PostgreSQL need not notice that a function was replaced
        clock.advance(20)
        assert asked.enqueue(conn, 1).created
        conn.rollback()


@task(name="unique.stubborn", unique="k", retry=SOON)
async def stubborn(job: Job) -> Snooze | None:
    if job.attempt == 1 and not job.snoozes:
        return Snooze(0.01)
    if job.attempt < 3:
        raise ValueError("again")
    return None


async def test_retries_and_snoozes_never_conflict_with_their_own_key(dsn: str, eyes: Eyes, conn: Conn) -> None:
    first = stubborn.enqueue(conn)
    conn.commit()
    created: list[bool] = []
    async with work(dsn, stubborn):
        while eyes.state(first.id) != "completed":
            handle = stubborn.enqueue(conn)
            created.append(handle.created)
            conn.rollback() if handle.created else conn.commit()
            await asyncio.sleep(0)
    assert created.count(True) <= 1, "held through all attempts; the last may come after the end"
    [(attempts, snoozes)] = eyes.all("SELECT attempt, snoozes FROM pgqueue.job")
    assert (attempts, snoozes) == (3, 1)


@pytest.mark.second
async def test_a_rescued_job_keeps_its_key(dsn: str, eyes: Eyes, tmp_path: Path) -> None:
    source = """
@pgqueue.task(name="hang", unique="k")
def hang(job: pgqueue.Job) -> None:
    say("began", crashes=job.crashes)
    if not job.crashes:
        time.sleep(60)
"""
    first = pgqueue.remote("hang").using(unique=lambda **_: "k").enqueue(eyes.conn)
    with workers(tmp_path, dsn, source) as made:
        one = made.start(lease=1.0)
        one.event("began", crashes=0)
        assert put(eyes.conn, "k").id == first.id
        one.kill()
        [two] = made.ready(1, lease=1.0)
        two.event("began", crashes=1)
        wait_until(eyes.done(1))
        wait_until(lambda: not keys(eyes))
    assert put(eyes.conn, "k").created


@pytest.mark.promise("I10")
async def test_locks_live_for_the_critical_section_not_for_queue_time(dsn: str, eyes: Eyes, conn: Conn) -> None:
    gate, began = asyncio.Event(), 0

    @task(name="unique.section", unique="u:{n}", lock=Lock("l:{n}"))
    async def section(n: int) -> None:
        nonlocal began
        began += 1
        await gate.wait()

    section.enqueue_many(conn, [(n,) for n in range(10_000)])
    conn.commit()
    held = """SELECT (SELECT count(*) FROM pgqueue.job WHERE state = 'running' OR holds) + count(*) FROM pg_locks l
              JOIN pg_stat_activity a USING (pid)  -- the leader's own, of its session, is no job's
              WHERE l.locktype IN ('advisory', 'tuple') AND a.application_name <> 'pgqueue listen'"""
    assert eyes.one(held) == 0
    async with work(dsn, section, concurrency=5):
        await until(lambda: began == 5)
        await until(lambda: eyes.one(held) == 5)
        assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE state IN ('available', 'blocked')") == 9_995
        gate.set()


async def test_a_role_that_was_granted_before_there_were_keys_completes_all_the_same(
    dsn: str, role: Role, eyes: Eyes, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    mine = role("work")
    name = str(conninfo_to_dict(mine)["user"])
    eyes.conn.execute(SQL("REVOKE ALL ON pgqueue.unique_key FROM {}").format(Identifier(name)))
    quick.enqueue(conn, 1)
    quick.enqueue(conn, 2)
    conn.commit()
    async with work(mine, quick):
        await until(eyes.done(2))
    with pytest.raises(psycopg.errors.InsufficientPrivilege):  # what the loop of duties does then: test_duties.py
        await sweep(mine)
    assert caplog.text.count("needs its rights again") >= 1 and len(keys(eyes)) == 2
    assert quick.enqueue(conn, 1).created


async def test_a_stranger_who_holds_the_row_of_a_key_delays_no_completion(dsn: str, eyes: Eyes, conn: Conn) -> None:
    async with desk_of(dsn, eyes) as desk:
        first = put(eyes.conn, "k")
        [job] = await desk.taker.fetch()
        conn.execute("SELECT FROM pgqueue.unique_key FOR UPDATE")
        desk.completer.finish(job, Completed("1"))
        await asyncio.wait_for(desk.completer.flushed(), 30)
        assert eyes.state(first.id) == "completed" and len(keys(eyes)) == 1, "a leftover"
        conn.rollback()
        assert put(eyes.conn, "k").created


# Successors ----------------------------------------------------------------------------------------------------------


async def ended_with(desk: Desk, *successors: pgqueue.NewJob[Any]) -> list[tuple[Any, ...]]:
    """A job that ends with these; what there is then of jobs with keys, in order."""
    [job] = await desk.jobs(1)
    desk.completer.finish(job, Completed(None, successors))
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert desk.eyes.state(job.id) == "completed"
    return waiting(desk.eyes)


def waiting(eyes: Eyes) -> list[tuple[Any, ...]]:
    return eyes.all("SELECT unique_key, idempotency_key FROM pgqueue.job WHERE state <> 'completed' ORDER BY id")


async def test_successors_take_keys_and_a_duplicate_is_not_made(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk_of(dsn, eyes) as desk:
        there = put(eyes.conn, "b").id
        eyes.do(
            "WITH gone AS (DELETE FROM pgqueue.job_available RETURNING *) "
            "INSERT INTO pgqueue.job_scheduled (id, enqueued_at, state, run_at, task) "
            "SELECT id, enqueued_at, 'scheduled', now() + '1 h', 't' FROM gone"
        )
        with caplog.at_level(logging.INFO, "pgqueue"):
            both = pgqueue.remote("t").using(unique=lambda **_: "c", idempotency_key="i", delay=9)
            found = await ended_with(desk, keyed("a"), keyed("b"), pgqueue.remote("t").new(), keyed("a"), both.new())
        assert found == [(None, None), ("a", None), (None, None), ("c", "i")]
        said = [record.getMessage() for record in caplog.records if "successor" in record.getMessage()]
        assert len(said) == 2 and any(f"job {there} has its unique key" in line for line in said)


async def test_a_successor_has_the_key_of_its_parent(dsn: str, eyes: Eyes, conn: Conn) -> None:
    """For as long as the parent lives nobody else has; it hands it on."""
    runs: list[int] = []

    @task(name="unique.again", unique="k", transactional=False)
    async def again(job: Job, left: int) -> None:
        runs.append(left)
        if left:
            job.enqueue(again, left - 1)

    @task(name="unique.again_written", unique="w", transactional=True)
    async def written(job: Job, left: int) -> None:
        await job.aconnection()
        runs.append(left)
        if left:
            job.enqueue(written, left - 1)

    again.enqueue(conn, 3)
    written.enqueue(conn, 13)
    conn.commit()
    async with work(dsn, again, written):
        await until(eyes.done(4 + 14))
        await until(lambda: not keys(eyes))
    assert sorted(runs) == sorted([*range(4), *range(14)])


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_one_who_is_just_taking_the_key_delays_that_parent_only(
    dsn: str, eyes: Eyes, conn: Conn, end: str
) -> None:
    async with desk_of(dsn, eyes) as desk:
        theirs = put(conn, "k")
        waits, *others = await desk.jobs(4)
        desk.completer.finish(waits, Completed(None, (keyed("k"),)))
        for n, job in enumerate(others):
            desk.completer.finish(job, Completed(None, (keyed(f"other{n}"),)))
        await until(lambda: all(eyes.state(job.id) == "completed" for job in others))
        assert eyes.state(waits.id) == "running"
        conn.commit() if end == "commit" else conn.rollback()
        await asyncio.wait_for(desk.completer.flushed(), 30)
        assert eyes.state(waits.id) == "completed"
        ids = [id for (id,) in eyes.all("SELECT id FROM pgqueue.job WHERE unique_key = 'k'")]
        assert len(ids) == 1 and (ids == [theirs.id]) == (end == "commit")


async def test_two_parents_of_one_flush_make_one_successor(dsn: str, eyes: Eyes) -> None:
    async with desk_of(dsn, eyes) as desk:
        jobs = await desk.jobs(20)
        for n, job in enumerate(jobs):
            desk.completer.finish(job, Completed(None, (keyed(f"k{n % 3}"), keyed(f"k{n % 2}"))))
        await asyncio.wait_for(desk.completer.flushed(), 30)
        assert eyes.states()["completed"] == 20
        assert sorted(waiting(eyes)) == [("k0", None), ("k1", None), ("k2", None)]


async def test_a_successor_whose_key_is_held_by_a_job_with_a_leftover_of_another_key_ends_its_parent(
    dsn: str, eyes: Eyes, conn: Conn
) -> None:
    """The holder has started, so its pending key is free, and still has a row. The parent lost on the other key."""
    both = pgqueue.remote("t").using(unique=Unique(lambda **_: "u", hold="pending"), idempotency_key="i")
    async with desk_of(dsn, eyes) as desk:
        holder = both.enqueue(conn)
        conn.commit()
        desk.taker.fetcher.wake(zero=True)
        assert [job.id for job in await desk.taker.fetch(1)] == [holder.id]
        parent, *others = await desk.jobs(3)
        desk.completer.finish(parent, Completed(None, (both.new(),)))
        for job in others:
            desk.completer.finish(job, COMPLETED)
        await asyncio.wait_for(desk.completer.flushed(), 10)
        assert eyes.states() == {"completed": 3, "running": 1}


async def test_completions_of_two_workers_with_the_same_keys_wait_for_nobody(dsn: str, eyes: Eyes) -> None:
    async with desk_of(dsn, eyes) as one, desk_of(dsn, eyes) as two:
        for round in range(10):
            mine, theirs = await one.jobs(8), await two.jobs(8)
            for n in range(8):
                one.completer.finish(mine[n], Completed(None, (keyed(f"{round}:{n}"), keyed(f"{round}:{7 - n}"))))
                two.completer.finish(theirs[n], Completed(None, (keyed(f"{round}:{7 - n}"), keyed(f"{round}:{n}"))))
            await asyncio.wait_for(asyncio.gather(one.completer.flushed(), two.completer.flushed()), 30)
            found = eyes.all("SELECT unique_key FROM pgqueue.job WHERE unique_key LIKE %s", f"{round}:%")
            assert sorted(found) == [(f"{round}:{n}",) for n in range(8)]
            eyes.do("DELETE FROM pgqueue.job_available")


async def test_a_parent_that_cannot_get_all_keys_for_its_successors_keeps_its_own(
    dsn: str, eyes: Eyes, conn: Conn
) -> None:
    """Or there would be two live jobs with its key."""
    async with desk_of(dsn, eyes) as desk:
        put(eyes.conn, "mine")
        [parent] = await desk.taker.fetch()
        put(conn, "open")
        desk.completer.finish(parent, Completed(None, (keyed("mine"), keyed("open"))))
        await until(lambda: desk.completer._busy)
        assert eyes.state(parent.id) == "running"
        asked = put(eyes.conn, "mine")
        assert (asked.id, asked.created) == (parent.id, False)
        conn.rollback()
        await asyncio.wait_for(desk.completer.flushed(), 30)
        assert eyes.state(parent.id) == "completed"
        assert waiting(eyes) == [("mine", None), ("open", None)]


async def test_parents_that_want_the_same_keys_in_any_order_all_end(dsn: str, eyes: Eyes) -> None:
    """Decided in one statement they left each other out for ever."""
    async with desk_of(dsn, eyes) as desk:
        one, two = await desk.jobs(2)
        both = pgqueue.remote("t").using(unique=lambda **_: "u", idempotency_key="i").new()
        desk.completer.finish(one, Completed(None, (keyed("u"), keyed("v"))))
        desk.completer.finish(two, Completed(None, (both, keyed("v"))))
        await asyncio.wait_for(desk.completer.flushed(), 30)
        assert waiting(eyes) == [("u", None), ("v", None)]


async def test_many_who_want_a_key_that_is_open_do_not_keep_others_waiting(dsn: str, eyes: Eyes, conn: Conn) -> None:
    """Each would cost the flush its patience: 1,000 of them took 11 s."""
    async with desk_of(dsn, eyes) as desk:
        *jobs, one, two, three = await desk.jobs(503)
        plain = iter((one, two, three))
        put(conn, "open")
        for job in jobs:
            desk.completer.finish(job, Completed(None, (keyed("open"),)))
        await until(lambda: len(desk.completer._busy) == 500)

        async def once() -> float:
            job, started = next(plain), monotonic()
            desk.completer.finish(job, COMPLETED)
            await until(eyes.is_in(job.id, "completed"))
            return monotonic() - started

        assert await least(once, 1.0) < 1.0
        for job in plain:
            desk.completer.finish(job, COMPLETED)
        conn.rollback()
        await asyncio.wait_for(desk.completer.flushed(), 30)
        assert waiting(eyes) == [("open", None)]


# What is left over ---------------------------------------------------------------------------------------------------


LEFT = """INSERT INTO pgqueue.unique_key (key, job_id, hold, enqueued_at)
          SELECT 'unique:' || n, -n, 'live', now() FROM generate_series(1, %s) n"""


async def sweep(dsn: str) -> None:
    session = Session(Link(dsn, "pgqueue"), "housekeeping")
    await Pruner(session).keys()
    await session.close()


async def test_the_sweep_removes_what_nobody_can_need_and_nothing_else(dsn: str, eyes: Eyes) -> None:
    def named(name: str, *args: Any, **more: Any) -> None:
        make(eyes.conn, *args, key=name, **more)

    for state in ("scheduled", "available", "blocked", "running", "failed", "cancelled"):
        for hold in ("pending", "live", "60"):
            named(f"stays {state} {hold}", state, hold)
    for state in ("completed", "skipped"):
        for hold in ("pending", "live"):
            named(f"goes {state} {hold}", state, hold)
        named(f"stays {state} after", state, "60", ended=50)
        named(f"goes {state} over", state, "60", ended=70)
    for n, left in ((1, -5), (2, 5)):
        until = "pgqueue.now() + make_interval(secs => %s)"
        sql = f"INSERT INTO pgqueue.unique_key VALUES (%s, 4711, 'after', 60, {until}, now())"  # noqa: S608
        eyes.do(sql, f"unique:{'goes' if left < 0 else 'stays'} {n}", left)
    eyes.do("INSERT INTO pgqueue.unique_key VALUES ('unique:goes forgotten', 4711, 'live', 0, NULL, now())")
    eyes.do("INSERT INTO pgqueue.unique_key VALUES ('unique:goes never made', 4712, 'after', 60, NULL, now())")
    stays = eyes.all("SELECT key FROM pgqueue.unique_key WHERE key LIKE 'unique:stays%' ORDER BY key")
    await sweep(dsn)
    assert eyes.all("SELECT key FROM pgqueue.unique_key ORDER BY key") == stays
    noted = eyes.all("SELECT key FROM pgqueue.unique_key WHERE expires_at IS NOT NULL ORDER BY key")
    wanted = ["cancelled 60", "completed after", "failed 60", "skipped after"]
    assert noted == [("unique:stays 2",), *((f"unique:stays {name}",) for name in wanted)]
    [(about,)] = eyes.all(
        "SELECT extract(epoch FROM expires_at - pgqueue.now())::float8 FROM pgqueue.unique_key "
        "WHERE key = 'unique:stays completed after'"
    )
    assert 0 < about <= 10


async def test_the_sweep_goes_through_all_of_many(dsn: str, eyes: Eyes) -> None:
    eyes.do(LEFT, 3500)
    await sweep(dsn)
    assert keys(eyes) == []


async def test_the_sweep_waits_for_nobody(dsn: str, eyes: Eyes, conn: Conn) -> None:
    eyes.do(LEFT, 9)
    conn.execute("SELECT FROM pgqueue.unique_key WHERE key = 'unique:5' FOR UPDATE")
    await asyncio.wait_for(sweep(dsn), 30)
    assert [key for key, *_ in keys(eyes)] == ["unique:5"]


# By hand, and by whom ------------------------------------------------------------------------------------------------


def test_the_shell_enqueues_once(dsn: str, eyes: Eyes) -> None:
    first = command("enqueue", "t", '{"x": 1}', "--unique", "k", "--idempotency-key", "i", dsn=dsn)
    again = command("enqueue", "t", '{"x": 1}', "--unique", "k", dsn=dsn)
    assert (first.returncode, again.returncode) == (0, 0)
    assert first.stdout == again.stdout and "nothing was enqueued" in again.stderr and not first.stderr
    assert not command("enqueue", "t", "--idempotency-key", "j", dsn=dsn).stderr
    put(eyes.conn, "other")
    listed = command("jobs", "--key", "k", "--json", dsn=dsn)
    assert [job["unique_key"] for job in items(listed)] == ["k"]
    listed = command("jobs", "--key", "j", "--json", dsn=dsn)
    assert [job["idempotency_key"] for job in items(listed)] == ["j"]
    shown = command("jobs", first.stdout.strip(), dsn=dsn).stdout
    assert "unique_key:" in shown and "idempotency_key:" in shown
    eyes.do("SELECT 1")
    pgqueue.cancel(eyes.conn, int(first.stdout))
    holder = put(eyes.conn, "k").id
    retried = command("retry", first.stdout.strip(), dsn=dsn)
    assert (retried.returncode, retried.stdout) == (
        1,
        f"job {first.stdout.strip()} was not retried: job {holder} has its unique key\n",
    )


def test_an_enqueuing_role_takes_keys_and_replaces_only_if_it_operates_too(dsn: str, role: Role, eyes: Eyes) -> None:
    with psycopg.connect(role("enqueue")) as conn:
        first = put(conn, "k", hold="pending")
        assert put(conn, "k", hold="pending").id == first.id
        done = make(eyes.conn, "completed", "60", key="done", ended=10)
        assert put(conn, "done").id == done
        make(eyes.conn, "completed", "live", key="old")
        assert put(conn, "old").created
        assert pgqueue.remote("t").using(idempotency_key="i").enqueue(conn).created
        conn.execute("SELECT pgqueue.enqueue('t', unique_key => 'sql'), pgqueue.enqueue('t', unique_key => 'sql')")
        conn.commit()
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            put(conn, "k", on_duplicate="replace")
    refused(role("enqueue"), "UPDATE pgqueue.unique_key SET job_id = 1", "TRUNCATE pgqueue.unique_key")
    both = role("enqueue")
    with psycopg.connect(dsn) as conn:
        grant(conn, str(conninfo_to_dict(both)["user"]), "operate", "pgqueue")
    with psycopg.connect(both) as conn:
        assert put(conn, "k", on_duplicate="replace").replaced
        pgqueue.cancel(conn, first.id)
        assert pgqueue.retry(conn, first.id)[0].did == "retried"


async def test_a_working_role_ends_keyed_jobs_with_keyed_successors(dsn: str, role: Role, eyes: Eyes) -> None:
    @task(name="unique.granted", unique="g:{left}")
    async def granted(job: Job, left: int) -> None:
        if left:
            job.enqueue(granted, left - 1)

    with psycopg.connect(role("enqueue")) as conn:
        granted.using(idempotency_key="i").enqueue(conn, 2)
    mine = role("work")
    async with work(mine, granted):
        await until(eyes.done(3))
    assert [key for key, *_ in keys(eyes)] == ["idempotency:i"]
    await sweep(mine)
    refused(role("read"), "DELETE FROM pgqueue.unique_key")
    with psycopg.connect(role("read")) as conn:
        assert len(conn.execute("SELECT * FROM pgqueue.unique_key").fetchall()) == 1


@pytest.mark.second
def test_threads_that_drain_and_enqueue_make_each_key_once_at_a_time(dsn: str, eyes: Eyes) -> None:
    """The whole thing at once: producers on ten live keys, a taker that runs them; never two of a key."""
    stop, seen = threading.Event(), []

    def produce(n: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not stop.is_set():
                pgqueue.enqueue_many(conn, [keyed(f"k{(n + i) % 10}") for i in range(4)])

    def watch() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            sql = (
                "SELECT unique_key FROM pgqueue.job WHERE state IN ('available', 'running') "
                "GROUP BY 1 HAVING count(*) > 1"
            )
            while not stop.is_set():
                seen.extend(conn.execute(sql).fetchall())

    async def consume() -> int:
        done = 0
        async with desk_of(dsn, eyes) as desk:
            while done < 300:
                for job in await desk.taker.fetch():
                    desk.completer.finish(job, Completed("1"))
                    done += 1
                await desk.completer.flushed()
        return done

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(4)] + [threading.Thread(target=watch)]
    for thread in threads:
        thread.start()
    try:
        assert asyncio.run(consume()) >= 300
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert seen == []
