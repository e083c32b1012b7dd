"""Another server, as docs/operations.md says it: a whole dump restored, and a switchover by logical replication."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from clocks import step_clock
from psycopg.conninfo import conninfo_to_dict
from servers import Server, binaries, embedded_server
from workers import Eyes, until, work

from pgqueue import task
from pgqueue.database import migrations

pytestmark = [
    pytest.mark.second,
    pytest.mark.promise("F35"),
    pytest.mark.skipif(not (binaries() / "pg_dump").exists(), reason="this server comes without pg_dump"),
]


@task(name="switchover.ends")
async def ends(said: str = "") -> None: ...


@pytest.fixture
def logical() -> Iterator[Server]:
    server = embedded_server(wal_level="logical")
    yield server
    server.end()


def tool(name: str, *arguments: str) -> None:
    done = subprocess.run([str(binaries() / name), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def copy(source: str, target: str, path: Path, *options: str) -> None:
    """Dump the schema of the queue, and restore it in an empty database."""
    script = str(path / "dump.sql")
    tool("pg_dump", "-n", "pgqueue", *options, "-f", script, "-d", source)
    tool("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-1", "-f", script, "-d", target)


def staged(dsn: str, request: str) -> list[int]:
    """Jobs of each kind that wait, one of them for this request; their ids."""
    with psycopg.connect(dsn) as conn:
        jobs = [ends.enqueue(conn) for _ in range(20)]
        jobs += [ends.using(lock="k").enqueue(conn) for _ in range(5)]
        jobs += [ends.using(delay=0.5).enqueue(conn), ends.using(unique="u").enqueue(conn)]
        jobs += [ends.using(idempotency_key=request).enqueue(conn)]
        return [job.id for job in jobs]


def completed(dsn: str) -> int:
    with psycopg.connect(dsn) as conn:
        [(completed,)] = conn.execute("SELECT count(*) FROM pgqueue.job WHERE state = 'completed'").fetchall()
    return int(completed)


async def goes_on(dsn: str, ids: list[int]) -> None:
    """All jobs run on the new server, new ones get new ids, and keys are still held."""
    with psycopg.connect(dsn) as conn:
        assert not ends.using(unique="u").enqueue(conn).created
        assert not ends.using(idempotency_key="last").enqueue(conn).created
        new = [ends.enqueue(conn).id for _ in range(5)]
    assert min(new) > max(ids)
    async with work(dsn, ends):
        await until(lambda: completed(dsn) == len(ids) + len(new))
    with psycopg.connect(dsn) as conn:
        assert not ends.using(idempotency_key="last").enqueue(conn).created
        assert ends.using(unique="u").enqueue(conn).created


async def test_a_whole_dump_is_restored_and_goes_on(dsn: str, own_server: Server, tmp_path: Path) -> None:
    ids = await asyncio.to_thread(staged, dsn, "last")
    target = own_server.dsn("postgres")
    await asyncio.to_thread(copy, dsn, target, tmp_path)
    assert await asyncio.to_thread(migrations.migrate, target) == []
    await goes_on(target, ids)


@pytest.mark.parametrize("migrated", [True, False])
async def test_a_switchover_by_logical_replication_loses_no_job(
    logical: Server, own_server: Server, tmp_path: Path, migrated: bool
) -> None:
    """The source works until the switchover. Its sequences do not come along: the new server's are where they began.

    Its clock is behind meanwhile, so that each delayed job starts before its time has come there.
    """
    source, target = logical.dsn("postgres"), own_server.dsn("postgres")
    await asyncio.to_thread(migrations.migrate, source)
    before = Eyes(source)
    await asyncio.to_thread(copy, source, target, tmp_path, "--schema-only")
    before.do("CREATE PUBLICATION switchover FOR TABLES IN SCHEMA pgqueue")
    there = Eyes(target)
    step_clock(there, -3600)
    at = conninfo_to_dict(source)
    with psycopg.connect(target, autocommit=True) as conn:
        conn.execute(
            f"CREATE SUBSCRIPTION switchover CONNECTION 'host={at['host']} port={at['port']} user={at['user']} "
            "dbname=postgres' PUBLICATION switchover".encode()
        )
        async with work(source, ends):
            done = await asyncio.to_thread(staged, source, "first")
            await until(before.done(len(done)))
        ids = await asyncio.to_thread(staged, source, "last")  # the workers are stopped, the applications too
        [(end,)] = before.all("SELECT pg_current_wal_lsn()::text")
        caught_up = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= %s::pg_lsn"
        synced = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'"
        await until(lambda: not conn.execute(synced).fetchall()[0][0] and before.one(caught_up, end))
        conn.execute("DROP SUBSCRIPTION switchover")
        step_clock(there, 0)
        there.close()
        moved = "SELECT id, state, task, unique_key, lock_key, enqueued_at FROM pgqueue.job ORDER BY id"
        assert conn.execute(moved.encode()).fetchall() == before.all(moved)
        assert conn.execute("SELECT last_value FROM pgqueue.job_id_seq").fetchall() == [(1,)]
        conn.execute("DELETE FROM pgqueue.job WHERE state = 'completed'")
    before.close()
    if migrated:
        assert await asyncio.to_thread(migrations.migrate, target) == []
        await goes_on(target, ids)
    else:  # a worker that starts first does the same
        async with work(target, ends):
            await until(lambda: completed(target) == len(ids))
        with psycopg.connect(target) as conn:
            assert ends.enqueue(conn).id > max(ids)
