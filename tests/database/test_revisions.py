"""A revision of another tool ends at its version for ever, whatever pgqueue is installed and whatever is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from made_up_files import Release, release

from pgqueue.database import migrations, revisions
from pgqueue.database.migrations import migrate, require
from pgqueue.errors import InvalidOption, SchemaMissing

__all__ = ["release"]

pytestmark = pytest.mark.promise("F276")


@pytest.fixture
def empty(empty_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(empty_dsn) as connection:
        yield connection


def upgrade(conn: psycopg.Connection, *ends: int, schema: str = "pgqueue") -> list[int]:
    """Run these revisions in one transaction, as Alembic does; the files that were applied, ever."""
    with conn.transaction():
        for end in ends:
            conn.execute(revisions.up_to(end, schema).encode())
    with conn.transaction():
        return [number for (number,) in conn.execute(f"TABLE {schema}.log ORDER BY file").fetchall()]


@pytest.mark.parametrize("newest", [2, 3])
def test_two_revisions_on_an_empty_database(empty: psycopg.Connection, release: Release, newest: int) -> None:
    release(newest)
    assert upgrade(empty, 1, 2) == [1, 2]
    assert migrations.check(empty, "pgqueue").version == 2
    assert [file.version for file in migrate(empty, "pgqueue")] == list(range(3, newest + 1))


@pytest.mark.parametrize("newest", [2, 3])
def test_the_second_on_a_database_at_the_first(empty: psycopg.Connection, release: Release, newest: int) -> None:
    release(1)
    assert upgrade(empty, 1) == [1]
    release(newest)
    assert upgrade(empty, 2) == [1, 2]


def test_the_library_ahead_of_both_changes_no_revision(empty: psycopg.Connection, release: Release) -> None:
    release(2)
    then = [revisions.up_to(end, "jobs") for end in (1, 2)]
    release(3)
    assert [revisions.up_to(end, "jobs") for end in (1, 2)] == then
    assert upgrade(empty, 1, schema="jobs") == [1]
    assert upgrade(empty, 2, schema="jobs") == [1, 2]
    assert [file.version for file in migrations.pending(empty, "jobs")] == [3]


def test_a_revision_may_take_several_releases_at_once(empty: psycopg.Connection, release: Release) -> None:
    release(3)
    assert upgrade(empty, 3) == [1, 2, 3]
    assert require(empty, "pgqueue").pending == ()


@pytest.mark.parametrize("end", [1, 2, 3])
def test_a_database_that_is_ahead_is_left_as_it_is(empty: psycopg.Connection, release: Release, end: int) -> None:
    release(3)
    migrate(empty, "pgqueue")
    rows = empty.execute("SELECT xmin::text, * FROM pgqueue.migration").fetchall()
    assert upgrade(empty, end) == [1, 2, 3]
    assert empty.execute("SELECT xmin::text, * FROM pgqueue.migration").fetchall() == rows


@pytest.mark.parametrize("end", [3, 40])
def test_a_revision_beyond_the_library_is_refused_with_a_sentence(release: Release, end: int) -> None:
    release(2)
    with pytest.raises(InvalidOption, match=f"to={end}: the newest migration of this pgqueue is 0002_step_2. Install"):
        revisions.up_to(end, "pgqueue")


@pytest.mark.parametrize("end", [0, -1, True, 1.0, "1", None])
def test_what_is_no_version_is_refused(release: Release, end: int) -> None:
    release(2)
    with pytest.raises(InvalidOption, match="it is the number of a migration, from 1 to 2"):
        revisions.up_to(end, "pgqueue")


def test_eight_at_once_apply_each_file_once(empty_dsn: str, release: Release) -> None:
    release(3)
    together = threading.Barrier(8)

    def one(_: int) -> list[int]:
        with psycopg.connect(empty_dsn) as conn:
            together.wait()
            return upgrade(conn, 1, 2, 3)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(8))) == [[1, 2, 3]] * 8


def test_a_revision_that_fails_leaves_nothing(empty: psycopg.Connection, release: Release) -> None:
    release(2)
    empty.execute("CREATE SCHEMA pgqueue; CREATE FUNCTION pgqueue.take() RETURNS int LANGUAGE sql AS 'SELECT 1'")
    empty.commit()
    with pytest.raises(psycopg.errors.DuplicateFunction) as failed:
        upgrade(empty, 1, 2)
    says = 'migration 0002_step_2 failed and changed nothing: function "take" already exists with same argument types'
    assert failed.value.diag.message_primary == says
    assert len(str(failed.value)) < 2 * len(says)  # and not the text of the file
    with pytest.raises(SchemaMissing):
        require(empty, "pgqueue")


def test_a_revision_lets_workers_go_on_while_a_lock_is_held(empty_dsn: str, release: Release) -> None:
    """It does not wait for ever at the head of the lock's queue; and the session has its own patience again."""
    release(3)
    with psycopg.connect(empty_dsn) as holder, psycopg.connect(empty_dsn) as conn:
        upgrade(conn, 2)
        assert conn.execute("SHOW lock_timeout").fetchone() == ("0",)
        conn.execute("SET lock_timeout = '50ms'")
        conn.commit()
        holder.execute("SELECT count(*) FROM pgqueue.job")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            upgrade(conn, 3)
        holder.rollback()
        assert upgrade(conn, 3) == [1, 2, 3]
        assert conn.execute("SHOW lock_timeout").fetchone() == ("50ms",)


def test_it_waits_for_pgqueue_migrate(empty_dsn: str, release: Release) -> None:
    release(1)
    with psycopg.connect(empty_dsn) as other, psycopg.connect(empty_dsn) as conn:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('pgqueue migrate pgqueue', 0))")
        conn.execute("SET lock_timeout = '50ms'")
        conn.commit()
        with pytest.raises(psycopg.errors.LockNotAvailable):
            upgrade(conn, 1)
        other.rollback()
        assert upgrade(conn, 1) == [1]


@pytest.mark.parametrize("setting", ["statement_timeout = '50ms'", "lock_timeout = '50ms'"])
def test_an_error_does_not_show_the_files(empty_dsn: str, setting: str) -> None:
    with psycopg.connect(empty_dsn) as holder, psycopg.connect(empty_dsn) as conn:
        holder.execute("CREATE SCHEMA pgqueue")
        conn.execute(f"SET {setting}".encode())
        conn.commit()
        with pytest.raises((psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable)) as failed:
            conn.execute(revisions.up_to(1, "pgqueue").encode())
        assert len(str(failed.value)) < 500


def test_its_own_patience_is_five_seconds(release: Release) -> None:
    release(1)
    assert "set_config('lock_timeout', '5s', true)" in revisions.up_to(1, "pgqueue")


def test_the_tables_of_another_history_stay(empty: psycopg.Connection, release: Release) -> None:
    release(2)
    migrate(empty, "pgqueue")
    empty.execute("UPDATE pgqueue.migration SET name = 'initial' WHERE version = 1")
    empty.commit()
    with pytest.raises(psycopg.errors.RaiseException, match="migration 1 is initial there, and step_1 in this pgqueue"):
        upgrade(empty, 2)
    empty.execute("TRUNCATE pgqueue.migration")
    empty.commit()
    with pytest.raises(psycopg.errors.RaiseException, match="table migration of schema pgqueue is empty"):
        upgrade(empty, 2)
