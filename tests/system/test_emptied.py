"""Tables of settings that a fixture has emptied, rows that row level security hides, a restore of the data alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psycopg
import pytest
from clocks import step_clock
from psycopg.conninfo import conninfo_to_dict
from roles import Role, role
from servers import binaries
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database import migrations
from pgqueue.database.backoff import without_values
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement
from pgqueue.errors import Error, SchemaMissing

__all__ = ["role"]

TABLES = """
    SELECT string_agg(oid::regclass::text, ', ') FROM pg_class
    WHERE relnamespace = 'pgqueue'::regnamespace AND relkind IN ('r', 'p') AND relname <> ALL (%s)
"""
SETTINGS = "SELECT kind, leaves, retention FROM pgqueue.ring ORDER BY 1"


@task(name="emptied.ends")
async def ends() -> None:
    pass


@task(name="emptied.fails", retry=1)
async def fails() -> None:
    raise ValueError


def truncate(eyes: Eyes, *but: str) -> None:
    """As a fixture does between two tests."""
    eyes.do(f"TRUNCATE {eyes.one(TABLES, list(but))}")


def enqueued(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as conn:
        return [ends.enqueue(conn).id, fails.enqueue(conn).id]


@pytest.mark.promise("F45")
async def test_a_worker_puts_back_what_a_fixture_has_emptied(dsn: str, eyes: Eyes) -> None:
    settings = eyes.all(SETTINGS)
    truncate(eyes, "migration")
    good, bad = enqueued(dsn)
    async with work(dsn, ends, fails):
        await until(eyes.is_in(good, "completed"))
        await until(eyes.is_in(bad, "failed"))
    assert eyes.all(SETTINGS) == settings
    assert eyes.all("SELECT name FROM pgqueue.duty ORDER BY name") == [("history",), ("sweep",)]


@pytest.mark.promise("F45")
async def test_history_goes_on_where_it_was_written_last(dsn: str, eyes: Eyes) -> None:
    eyes.do("UPDATE pgqueue.ring SET bin = 5 WHERE kind = 'done'")
    enqueued(dsn)
    async with work(dsn, ends, fails):
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_done") == 1)
        for each in ("ring", "duty"):  # while it works: the locks of both at once could be a deadlock
            eyes.do(f"TRUNCATE pgqueue.{each}")
        good, bad = enqueued(dsn)
        await until(eyes.is_in(good, "completed"))
        await until(eyes.is_in(bad, "failed"))
    assert eyes.one("SELECT count(*) FROM pgqueue.job_done_5") == 2
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE reason = 'refused'") == 0


@pytest.mark.promise("F45")
def test_an_emptied_list_of_migrations_is_named(dsn: str, eyes: Eyes) -> None:
    """With what puts its rows back; to make the schema anew would fail at the first table."""
    before = eyes.all("SELECT version, name FROM pgqueue.migration ORDER BY 1")
    truncate(eyes)
    with psycopg.connect(dsn) as conn:
        with pytest.raises(SchemaMissing, match="migration is empty: something has truncated it"):
            migrations.migrate(conn, "pgqueue")
        with pytest.raises(SchemaMissing, match="migration is empty: something has truncated it") as caught:
            migrations.require(conn, "pgqueue")
        said = str(caught.value)
        eyes.do(said[said.index("INSERT INTO") :])
        migrations.require(conn, "pgqueue")
    assert eyes.all("SELECT version, name FROM pgqueue.migration ORDER BY 1") == before


@pytest.mark.promise("F44")
async def test_row_level_security_is_named(dsn: str, role: Role, eyes: Eyes) -> None:
    mine = role("work")
    eyes.do("ALTER TABLE pgqueue.job_running ENABLE ROW LEVEL SECURITY")
    with pytest.raises(Error, match=r"row level security is on for pgqueue.job_running, .*BYPASSRLS"):
        async with work(mine, ends):
            pass
    eyes.do("ALTER TABLE pgqueue.migration ENABLE ROW LEVEL SECURITY")
    with psycopg.connect(mine) as conn, pytest.raises(Error, match=r"pgqueue\.job_running, pgqueue\.migration"):
        migrations.require(conn, "pgqueue")
    with psycopg.connect(dsn) as conn:  # not for the owner, nor for a superuser
        migrations.require(conn, "pgqueue")


@pytest.mark.promise("F206")
async def test_rows_that_are_hidden_from_an_open_session_are_refused(role: Role, eyes: Eyes) -> None:
    """Else a worker would see no job, and say nothing."""
    session = Session(Link(role("work"), "pgqueue"), "pgqueue test")
    count = Statement("SELECT count(*) FROM pgqueue.job_available", {}, list)
    try:
        assert await session.run(count) == [[(0,)]]
        eyes.do("ALTER TABLE pgqueue.job_available ENABLE ROW LEVEL SECURITY")
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught:
            await session.run(count)
        assert "DISABLE ROW LEVEL SECURITY, or ALTER ROLE … BYPASSRLS" in without_values(caught.value)
    finally:
        await session.close()


@pytest.mark.promise("F45", "F192")
@pytest.mark.skipif(not (binaries() / "pg_dump").exists(), reason="this server comes without pg_dump")
@pytest.mark.parametrize("behind", [0, 3600])
def test_the_data_alone_restores_into_a_migrated_schema(
    behind: int, dsn: str, empty_dsn: str, eyes: Eyes, tmp_path: Path
) -> None:
    """If the clock is behind there, a job that was due becomes due there as well, and no job is lost."""
    eyes.do("UPDATE pgqueue.ring SET bin = 3, retention = interval '9 days' WHERE kind = 'done'")
    migrations.migrate(dsn, "pgqueue", line=migrations.OUTBOX)
    eyes.do("UPDATE pgqueue.outbox_source SET epoch = 7")
    with psycopg.connect(dsn) as conn:
        ids = [ends.enqueue(conn).id, ends.using(delay=60).enqueue(conn).id, ends.using(unique="u").enqueue(conn).id]
        ids.append(ends.using(lock="k").enqueue(conn).id)
        conn.execute(
            "INSERT INTO pgqueue.job (task, state, finished_at, bin) VALUES ('x', 'completed', pgqueue.now(), 3)"
        )
        conn.execute(
            "INSERT INTO pgqueue.job (id, task, enqueued_at, run_at) "
            "VALUES (99, 'due', now() - interval '9 min', now() - interval '5 min')"
        )
    script = str(tmp_path / "data.sql")
    subprocess.run([str(binaries() / "pg_dump"), "-a", "-n", "pgqueue", "-f", script, "-d", dsn], check=True)
    if eyes.one("SHOW server_version_num") < "170000":  # pg_dump may be a newer one, and sets what this server lacks
        text = Path(script).read_text(encoding="utf-8")
        Path(script).write_text(text.replace("SET transaction_timeout = 0;\n", ""), encoding="utf-8")
    migrations.migrate(empty_dsn, "pgqueue")
    migrations.migrate(empty_dsn, "pgqueue", line=migrations.OUTBOX)
    there = Eyes(empty_dsn)
    step_clock(there, -behind)
    there.close()
    done = subprocess.run(
        [str(binaries() / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-1", "-f", script, "-d", empty_dsn],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        for sql in (
            "SELECT * FROM pgqueue.ring ORDER BY 1",
            "SELECT * FROM pgqueue.job WHERE task <> 'due' ORDER BY id",
            "SELECT * FROM pgqueue.relay_target",
            "SELECT * FROM pgqueue.outbox_source",
        ):
            assert conn.execute(sql.encode()).fetchall() == eyes.all(sql)
        due = conn.execute("SELECT id, state FROM pgqueue.job WHERE task = 'due'").fetchall()
        assert due == [(99, "scheduled" if behind else "available")]
        migrations.require(conn, "pgqueue")
        migrations.require(conn, "pgqueue", migrations.OUTBOX)
        assert ends.enqueue(conn).id > max(ids)
        assert pgqueue.get(conn, ids[0]).state == "available"
        assert conninfo_to_dict(dsn) != conninfo_to_dict(empty_dsn)
