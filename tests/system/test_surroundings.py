"""PostgreSQL as people run it: what else they have in the database does not stop the queue."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from commands import pgqueue as command
from psycopg.conninfo import make_conninfo
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database import migrations
from pgqueue.jobs.job import Job
from pgqueue.jobs.retry import RetryPolicy


@task(name="around.adds")
async def adds(x: int) -> int:
    return x + 1


@task(name="around.fails", retry=RetryPolicy(attempts=2, first=0.05, most=0.05))
async def fails(job: Job) -> None:
    job.progress(1, 2)
    raise ValueError("as often as it is tried")


@task(name="around.moves", transactional=True)
def moves(job: Job) -> None:
    job.connection.execute("SELECT 1")


@task(name="around.walks")
def walks(job: Job) -> None:
    for _ in job.iterate(lambda after: ((n, n) for n in range((after or 0) + 1, 4)), 1):
        pass


async def all_that_moves_rows(dsn: str, eyes: Eyes) -> None:
    """Jobs of all kinds are enqueued, run, fail, are cancelled, retried and thrown away: every table loses rows."""
    pgqueue.configure(dsn=dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        jobs: list[pgqueue.JobHandle[Any]] = [adds.enqueue(conn, 1), moves.enqueue(conn), walks.enqueue(conn)]
        options: dict[str, Any]
        for options in ({"lock": "k"}, {"unique": "u"}, {"delay": 0.2}):
            jobs.append(adds.using(**options).enqueue(conn, 2))
        bad, away = fails.enqueue(conn), adds.using(delay=3600).enqueue(conn, 5)
        async with work(dsn, adds, fails, moves, walks):
            assert await jobs[0].aresult(50) == 2
            for job in jobs:
                await until(eyes.is_in(job.id, "completed"))
            await until(eyes.is_in(bad.id, "failed"))
            assert [answer.did for answer in pgqueue.cancel(conn, away.id)] == ["cancelled"]
            assert [answer.did for answer in pgqueue.retry(conn, bad.id)] == ["retried"]
            await until(eyes.is_in(bad.id, "failed"))


# Settings ------------------------------------------------------------------------------------------------------------

AROUND = {
    "the default tablespace has a name": ["default_tablespace = 'pg_default'"],
    "a client of bytes": ["client_encoding = 'SQL_ASCII'"],
    "no NULL in arrays": ["array_nulls = off"],
}
"""Defaults of a database that an older application needs."""
LOOKS: tuple[tuple[str, ...], ...] = (
    ("status",), ("jobs",), ("why", "1"), ("doctor",), ("audit",), ("locks",), ("errors",), ("migrate", "--check"),
)  # fmt: skip


@pytest.mark.promise("F193")
@pytest.mark.parametrize("name", AROUND)
async def test_no_default_of_the_database_stops_migrations_jobs_or_commands(name: str, empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        for setting in AROUND[name]:
            conn.execute(f'ALTER DATABASE "{conn.info.dbname}" SET {setting}'.encode())
    for line in (migrations.QUEUE, migrations.OUTBOX):
        await asyncio.to_thread(migrations.migrate, empty_dsn, "pgqueue", line=line)
    eyes = Eyes(make_conninfo(empty_dsn, client_encoding="utf8"))
    await all_that_moves_rows(empty_dsn, eyes)
    eyes.close()
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        found = pgqueue.find(conn)
        assert {job.state for job in found} == {"completed", "failed", "cancelled"}
        assert [answer.state for answer in pgqueue.cancel(conn, found[0].id)] == [found[0].state]
        assert [finding.name for finding in pgqueue.doctor(conn).findings if finding.severity == "critical"] == []
    for words in LOOKS:
        done = await asyncio.to_thread(command, *words, dsn=empty_dsn)
        assert done.returncode == 0 and "b'" not in done.stdout, (words, done.stderr)


# Collations ----------------------------------------------------------------------------------------------------------

OF_A_LANGUAGE = """
    SELECT t.relname, i.relname, a.attname
    FROM pg_index JOIN pg_class t ON t.oid = indrelid JOIN pg_class i ON i.oid = indexrelid
    JOIN pg_attribute a ON a.attrelid = i.oid
    WHERE t.relnamespace = 'pgqueue'::regnamespace AND a.attcollation NOT IN (0, '"C"'::regcollation)
"""


@pytest.mark.promise("F43")
def test_no_index_is_in_the_order_of_a_language(eyes: Eyes) -> None:
    """Such an index is wrong after an update of the server's libc or ICU: a key is not found, and two jobs hold it."""
    assert eyes.all(OF_A_LANGUAGE) == []
    keys = ("lock_key", "limit_key", "rate_key", "key", "unique_key", "idempotency_key")
    sql = "SELECT count(*) FROM pg_attribute WHERE attrelid IN (SELECT relid FROM pg_partition_tree('pgqueue.job')) "
    assert eyes.one(sql + """AND attname = ANY (%s) AND attcollation <> '"C"'::regcollation""", list(keys)) == 0


# Publications --------------------------------------------------------------------------------------------------------

NAMELESS = """
    SELECT relname FROM pg_class c
    WHERE relnamespace = 'pgqueue'::regnamespace AND relkind = 'r' AND NOT (
        relreplident = 'f'
        OR relreplident = 'd' AND EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary)
        OR relreplident = 'i' AND EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisreplident))
"""


@pytest.mark.promise("F43")
def test_every_table_can_name_its_rows(eyes: Eyes) -> None:
    """One that cannot refuses each DELETE as soon as a publication has it."""
    assert eyes.all(NAMELESS) == []


@pytest.mark.promise("F43")
@pytest.mark.parametrize(
    "of",
    [
        "ALL TABLES",
        pytest.param("TABLES IN SCHEMA pgqueue", marks=pytest.mark.second),
        pytest.param("TABLE pgqueue.job", marks=pytest.mark.second),
    ],
)
async def test_a_publication_does_not_stop_the_queue(dsn: str, eyes: Eyes, of: str) -> None:
    eyes.do(f"CREATE PUBLICATION everything FOR {of}")
    await all_that_moves_rows(dsn, eyes)
