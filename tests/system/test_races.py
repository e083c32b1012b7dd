"""Promises that cross several rooms: races of reading with moving, batching, a busy database, migrations under load."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from servers import Server
from workers import Eyes, Taker, apply_later, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database import migrations
from pgqueue.database.embedded import wheel_binaries
from pgqueue.errors import SchemaTooNew

ran: list[int] = []


@pytest.fixture(autouse=True)
def anew() -> None:
    ran.clear()


@task(name="rows.overwrite")
def overwrite(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO setting VALUES (1, 'new') ON CONFLICT (id) DO UPDATE SET value = excluded.value")


@task(name="rows.notes")
async def notes(number: int = 0) -> None:
    ran.append(number)


@task(name="rows.again")
async def again(times: int) -> None:
    job = pgqueue.current_job()
    if job.attempt < times:
        raise ValueError("again")


again_at_once = again.using(queue="again")


@pytest.mark.promise("I01")
async def test_a_naturally_idempotent_job_needs_nothing_extra(dsn: str, eyes: Eyes) -> None:
    eyes.do("CREATE TABLE setting (id integer PRIMARY KEY, value text)")
    with psycopg.connect(dsn) as conn:
        for _ in range(100):
            overwrite.enqueue(conn, dsn)
    async with work(dsn, overwrite):
        await until(eyes.done(100))
        locks = eyes.one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    assert (eyes.all("SELECT id, value FROM setting"), locks) == ([(1, "new")], 0)
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE unique_key IS NOT NULL OR lock_key IS NOT NULL") == 0


@pytest.mark.promise("F25")
async def test_a_job_is_found_wherever_it_is_while_it_moves(dsn: str, eyes: Eyes) -> None:
    """`get` in a tight race with promotion, claim, completion and retry: never "not found", never a state twice."""
    states: set[str] = set()
    missed: list[int] = []
    over = threading.Event()
    with psycopg.connect(dsn) as conn:
        ids = [again_at_once.using(delay=0.05).enqueue(conn, times=1).id for _ in range(30)]
        ids += [notes.enqueue(conn, number).id for number in range(30)]

    def look() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not over.is_set():
                for job_id in ids:
                    try:
                        states.add(pgqueue.get(conn, job_id).state)
                    except pgqueue.JobNotFound:
                        missed.append(job_id)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        async with work(dsn, again, notes, queues=["again", "default"]):
            await until(eyes.done(60))
            # Each completed one is moved about by hand as well: given back and claimed again, many times over.
            await _to_and_fro(dsn)
    finally:
        over.set()
        await asyncio.to_thread(looking.join)
    assert not missed
    assert {"completed"} <= states <= {"scheduled", "available", "running", "completed"}


async def _to_and_fro(dsn: str) -> None:
    taker = Taker(dsn, ("to_and_fro",))
    with psycopg.connect(dsn) as conn:
        handle = notes.using(queue="to_and_fro").enqueue(conn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        for _ in range(50):
            [job] = await taker.fetch()
            assert pgqueue.get(conn, handle.id).state == "running"
            release = taker.link.statement(
                "complete_release",
                ids=f"{{{job.id}}}",
                claims=f"{{{job.claim}}}",
                worker_id=taker.worker_id,
                notify=False,
            )
            await taker.session.run(release)
            assert pgqueue.get(conn, handle.id).state == "available"
    await taker.close()


@pytest.mark.promise("E15")
@pytest.mark.parametrize(("k", "statements"), [(1, 100), (10, 10), (100, 1)])
async def test_claims_are_paid_for_by_the_batch_not_by_the_job(
    dsn: str, k: int, statements: int, record_property: Any
) -> None:
    with psycopg.connect(dsn) as conn:
        pgqueue.enqueue_many(conn, [notes.new(number) for number in range(100)])
    taker = Taker(dsn)
    taken = 0
    await taker.session.ready()
    began = monotonic()
    while taken < 100:
        taken += len(await taker.fetch(k))
    record_property("µs per job", (monotonic() - began) / 100 * 1e6)
    assert (taken, taker.fetcher.fetches) == (100, statements)
    await taker.close()


@pytest.fixture
def busy(server: Server, dsn: str, tmp_path: Path) -> Iterator[Path]:
    """pgbench in the same database, both cores of it."""
    pgbench = wheel_binaries(18) / "pgbench"
    if not pgbench.exists():
        pytest.skip("no pgbench beside the embedded server")
    subprocess.run([pgbench, "--initialize", "--quiet", "--scale=1", dsn], check=True, capture_output=True)
    log = tmp_path / "pgbench.log"
    with log.open("wb") as out:
        load = subprocess.Popen([pgbench, "--client=4", "--time=60", dsn], stdout=out, stderr=out)
    try:
        yield log
    finally:
        load.terminate()
        load.wait(30)


@pytest.mark.second
@pytest.mark.promise("E16")
async def test_it_is_usable_while_the_database_is_otherwise_loaded(dsn: str, eyes: Eyes, busy: Path) -> None:
    """`python -m bench beside-pgbench` measures how well; here: nothing waits long, nothing fails."""
    async with work(dsn, notes):
        with psycopg.connect(dsn, autocommit=True) as conn:
            for number in range(50):
                await asyncio.to_thread(notes.enqueue, conn, number)
                await until(lambda: len(ran) > number, seconds=30)  # noqa: B023 (awaited before the next round)
        await until(eyes.done(50))
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") == 0
    transactions = eyes.one("SELECT sum(abalance) IS NOT NULL FROM pgbench_accounts")
    assert transactions, "the load ran in this database"


@pytest.mark.promise("F15")
@pytest.mark.parametrize("breaking", [False, True])
async def test_a_later_schema_arrives_while_workers_work(dsn: str, eyes: Eyes, breaking: bool) -> None:
    """Under load, in one transaction and as patiently as `migrate` does it: no lost job; the old worker goes on with
    what it has, and does not start on a schema that breaks it."""
    async with work(dsn, notes):
        with psycopg.connect(dsn) as conn:
            pgqueue.enqueue_many(conn, [notes.new(number) for number in range(3000)])
        await until(lambda: len(ran) > 200)
        await asyncio.to_thread(apply_later, dsn, breaking=breaking)
        with psycopg.connect(dsn) as conn:
            pgqueue.enqueue_many(conn, [notes.new(number) for number in range(3000, 4000)])
        await until(eyes.done(4000), seconds=30)
    assert sorted(set(ran)) == list(range(4000))
    with psycopg.connect(dsn) as conn:
        if breaking:
            with pytest.raises(SchemaTooNew):
                migrations.require(conn, "pgqueue")
        else:
            migrations.require(conn, "pgqueue")
