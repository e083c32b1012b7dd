"""A copy of a production database on the same server: its workers end no session of the original.

The rows of the copy name the workers of the original, with their sessions, and these sessions live. To a worker of the
copy they look like those of a worker that beats no more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import psycopg
import pytest
from commands import pgqueue as command
from workers import Eyes, Taker, until, work

from pgqueue.client import schedules
from pgqueue.client.tasks import task
from pgqueue.database.sessions import Link
from pgqueue.jobs.cron import Every
from pgqueue.worker.liveness.rescue import Rescue

IDENTITY = "SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()"


@pytest.fixture
def production(empty_dsn: str) -> Iterator[psycopg.Connection]:
    """A session of the original, another database of the same server."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        yield conn


def identity(conn: psycopg.Connection) -> tuple[int, str]:
    [found] = conn.execute(IDENTITY).fetchall()
    return found


@pytest.mark.promise("F186")
async def test_a_rescue_in_a_copy_ends_no_session_of_the_original(
    dsn: str, eyes: Eyes, production: psycopg.Connection
) -> None:
    """Naive is to compare the pid and its start only, which are those of the server."""
    victim, rescuer = Taker(dsn), Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('x')")
    await victim.fetch()
    here = psycopg.connect(dsn, autocommit=True)
    sessions = [{"pid": pid, "backend_start": start} for pid, start in (identity(production), identity(here))]
    eyes.do("UPDATE pgqueue.worker SET sessions = %s WHERE id = %s", json.dumps(sessions), victim.worker_id)
    assert await Rescue(rescuer.session, notify=True, rescued=lambda: None).rescue(victim.worker_id, 0)
    assert eyes.states() == {"available": 1}
    assert production.execute("SELECT 1").fetchall() == [(1,)]
    with pytest.raises(psycopg.OperationalError):  # a session of the copy is ended, as ever
        here.execute("SELECT 1")
    for each in (victim, rescuer):
        await each.close()


@pytest.mark.promise("F186")
@pytest.mark.parametrize("name", ["sessions_end", "transactions_end_session"])
async def test_no_statement_that_ends_a_session_of_ours_ends_one_of_another_database(
    name: str, dsn: str, production: psycopg.Connection
) -> None:
    taker = Taker(dsn)
    link = Link(dsn, "pgqueue")
    for conn, alive in ((production, True), (psycopg.connect(dsn, autocommit=True), False)):
        pid, start = identity(conn)
        await taker.session.run(link.statement(name, pid=pid, backend_start=start))
        if alive:
            assert conn.execute("SELECT 1").fetchall() == [(1,)]
        else:
            with pytest.raises(psycopg.OperationalError):
                conn.execute("SELECT 1")
    await taker.close()


@pytest.mark.promise("F186")
async def test_workers_of_a_copy_take_over_its_jobs_and_the_original_goes_on(
    dsn: str, eyes: Eyes, production: psycopg.Connection
) -> None:
    @task(name="copies.quick")
    async def quick() -> None: ...

    eyes.do(
        "INSERT INTO pgqueue.worker (host, pid, version_tag, queues, concurrency, lease, beat_at, sessions) "
        "VALUES ('original', 7, 'v', '{default}', 1, '1 second', now() - interval '1 hour', %s)",
        json.dumps([{"pid": pid, "backend_start": start} for pid, start in [identity(production)]]),
    )
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at) "
        "SELECT 'copies.quick', 'running', id, 1, now() FROM pgqueue.worker"
    )
    async with work(dsn, quick):
        await until(eyes.done(1))
    assert production.execute("SELECT 1").fetchall() == [(1,)]


@pytest.mark.promise("F186")
async def test_what_the_docs_say_of_a_copy_lets_none_of_its_jobs_run(dsn: str, eyes: Eyes) -> None:
    """Running ones of the original, too: to the copy their worker is dead."""
    ran: list[int] = []

    @task(name="copies.counted", lock="{n}")
    async def counted(n: int) -> None:
        ran.append(n)

    eyes.do(
        "INSERT INTO pgqueue.worker (host, pid, version_tag, queues, concurrency, lease, beat_at, tasks) "
        "VALUES ('original', 7, 'v', '{default}', 1, '1 second', now() - interval '1 hour', '{copies.counted}')"
    )
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at, args, lock_key, holds) "
        "SELECT 'copies.counted', 'running', id, 1, now(), '{\"n\": 1}', '1', true FROM pgqueue.worker"
    )
    counted.enqueue(eyes.conn, 2)
    counted.using(delay=1).enqueue(eyes.conn, 3)
    schedules.add(eyes.conn, "each", Every(1), counted.name, args={"n": 4})
    for line in ("pause default", "schedules pause each"):
        assert (await asyncio.to_thread(command, *line.split(), dsn=dsn)).returncode == 0
    async with work(dsn, counted):
        await until(lambda: "running" not in eyes.states())
        for line in (
            "cancel --state available --state scheduled --state blocked --yes",
            "resume default",
        ):
            assert (await asyncio.to_thread(command, *line.split(), dsn=dsn)).returncode == 0
        assert eyes.states() == {"cancelled": 3}
        counted.enqueue(eyes.conn, 5)
        await until(lambda: ran)
    assert ran == [5]
