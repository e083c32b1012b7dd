"""Migrations: applied once, whole or not at all, by one at a time, the same by every way and in every schema."""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from made_up_files import GROUND, written
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from servers import Server, binaries
from workers import wait_until

from pgqueue.database import migrations, revisions
from pgqueue.database.migrations import migrate, require
from pgqueue.database.statements import sql_directory
from pgqueue.errors import Error, InvalidOption, SchemaBehind, SchemaForeign, SchemaMissing, SchemaTooNew
from pgqueue.pytest_plugin import Databases

Lay = Callable[..., None]


@pytest.fixture
def lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lay:
    """`lay("sql", …)` puts other migrations in place of ours, numbered, each entering itself."""

    def put(*sqls: str, breaking: bool = False) -> None:
        place = written(tmp_path, *sqls, breaking=breaking)
        monkeypatch.setattr(migrations, "sql_directory", lambda: place)

    return put


@pytest.fixture
def empty(empty_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(empty_dsn) as connection:
        yield connection


@pytest.fixture
def role(empty: psycopg.Connection) -> Iterator[str]:
    """A role that may connect and nothing else."""
    name = f"pgqueue_test_role_{empty.info.backend_pid}"
    empty.execute(f"CREATE ROLE {name} LOGIN")
    empty.commit()
    yield name
    empty.rollback()
    empty.execute(f"DROP OWNED BY {name}")
    empty.execute(f"DROP ROLE {name}")
    empty.commit()


def schemas(conn: psycopg.Connection) -> list[str]:
    rows = conn.execute(
        "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_|^information_schema|^public'"
    ).fetchall()
    conn.commit()
    return [str(name) for (name,) in rows]


# What exists --------------------------------------------------------------------------------------------------------

# Everything of a schema that a migration can make, one text per thing, fully qualified.
CATALOG = """
WITH rel AS (SELECT * FROM pg_class WHERE relnamespace = %(schema)s::regnamespace)
SELECT concat_ws(' ', 'relation', relname, relkind, relpersistence, reloptions, relispartition, relacl, relreplident,
                 pg_get_expr(relpartbound, oid), pg_get_partkeydef(oid), obj_description(oid, 'pg_class')) FROM rel
UNION ALL
SELECT concat_ws(' ', 'column', relname, attnum, attname, format_type(atttypid, atttypmod), attnotnull, attidentity,
                 attgenerated, attstorage, attcompression, attcollation::regcollation, attoptions, attislocal,
                 pg_get_expr(adbin, adrelid), col_description(rel.oid, attnum))
FROM rel JOIN pg_attribute ON attrelid = rel.oid LEFT JOIN pg_attrdef ON adrelid = rel.oid AND adnum = attnum
WHERE attnum > 0
UNION ALL
SELECT concat_ws(' ', 'constraint', conrelid::regclass, conname, contype, convalidated, pg_get_constraintdef(oid))
FROM pg_constraint WHERE connamespace = %(schema)s::regnamespace
UNION ALL
SELECT concat_ws(' ', 'index', indisvalid, indisunique, pg_get_indexdef(indexrelid))
FROM pg_index JOIN rel ON rel.oid = indexrelid
UNION ALL
SELECT concat_ws(' ', 'function', proacl, pg_get_functiondef(oid), obj_description(oid, 'pg_proc'))
FROM pg_proc WHERE pronamespace = %(schema)s::regnamespace AND prokind IN ('f', 'p')
UNION ALL
SELECT concat_ws(' ', 'trigger', tgenabled, pg_get_triggerdef(pg_trigger.oid))
FROM pg_trigger JOIN rel ON rel.oid = tgrelid
UNION ALL
SELECT concat_ws(' ', 'sequence', relname, seqtypid::regtype, seqstart, seqincrement, seqmax, seqmin, seqcache,
                 seqcycle)
FROM pg_sequence JOIN rel ON rel.oid = seqrelid
UNION ALL
SELECT concat_ws(' ', 'type', typname, typtype) FROM pg_type WHERE typnamespace = %(schema)s::regnamespace
UNION ALL
SELECT concat_ws(' ', 'schema', nspacl, obj_description(oid, 'pg_namespace'))
FROM pg_namespace WHERE oid = %(schema)s::regnamespace
"""


def catalog(conn: psycopg.Connection, schema: str) -> list[str]:
    """All that is in the schema, with its name taken out."""
    conn.execute("SET search_path TO ''")
    rows = conn.execute(CATALOG, {"schema": schema}).fetchall()
    conn.rollback()
    return sorted(str(text).replace(f"{schema}.", "SCHEMA.") for (text,) in rows)


def test_another_schema_gets_the_same_catalogs(empty: psycopg.Connection) -> None:
    assert len(migrate(empty, "pgqueue")) == len(migrate(empty, "elsewhere_1234567890")) > 0
    assert catalog(empty, "elsewhere_1234567890") == catalog(empty, "pgqueue")
    assert len(catalog(empty, "pgqueue")) > 100


def test_another_schema_stands_without_ours(empty: psycopg.Connection) -> None:
    migrate(empty, "jobs")
    assert schemas(empty) == ["jobs"]
    empty.execute("SELECT jobs.enqueue('a.task')")
    assert empty.execute("SELECT task FROM jobs.job").fetchall() == [("a.task",)]


def test_psql_makes_the_same_as_migrate(dsn: str, empty_dsn: str) -> None:
    for file in sorted((sql_directory() / "migrations").glob("*.sql")):
        psql(empty_dsn, "-1", "-f", str(file))
    with psycopg.connect(dsn) as ours, psycopg.connect(empty_dsn) as by_hand:
        assert catalog(by_hand, "pgqueue") == catalog(ours, "pgqueue")
        assert require(by_hand, "pgqueue").pending == ()


def test_the_script_makes_the_same_as_migrate(dsn: str, empty_dsn: str, tmp_path: Path) -> None:
    script = tmp_path / "all.sql"
    script.write_text(migrations.as_sql("jobs"), encoding="utf-8")
    psql(empty_dsn, "-1", "-f", str(script))
    with psycopg.connect(dsn) as ours, psycopg.connect(empty_dsn) as by_hand:
        assert catalog(by_hand, "jobs") == catalog(ours, "pgqueue")


@pytest.mark.promise("F276")
def test_a_revision_makes_the_same_as_migrate_and_takes_it_back(dsn: str, empty: psycopg.Connection) -> None:
    before = schemas(empty)
    empty.execute(revisions.up_to(len(migrations.files()), "jobs").encode())
    with psycopg.connect(dsn) as ours:
        empty.commit()
        assert catalog(empty, "jobs") == catalog(ours, "pgqueue")
    empty.execute(revisions.drop("jobs").encode())
    assert schemas(empty) == before


def psql(dsn: str, *arguments: str) -> None:
    command = [str(binaries() / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", *arguments, "-d", dsn]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_file_of_ours_ends_its_transaction_itself() -> None:
    for file in migrations.files():
        lines = [line.strip().upper() for line in file.sql.splitlines()]
        assert not {"BEGIN;", "COMMIT;", "ROLLBACK;", "END;"} & set(lines), file


# Applying -----------------------------------------------------------------------------------------------------------


def test_twice_is_once(empty_dsn: str) -> None:
    assert migrate(empty_dsn) == list(migrations.files())
    assert migrate(empty_dsn) == []


def test_only_what_lacks_is_applied(empty_dsn: str, lay: Lay) -> None:
    lay(GROUND)
    assert [str(file) for file in migrate(empty_dsn)] == ["0001_step_1"]
    lay(GROUND, "ALTER TABLE pgqueue.job ADD COLUMN more int;")
    assert [str(file) for file in migrate(empty_dsn)] == ["0002_step_2"]
    assert "ADD COLUMN" in migrations.as_sql("jobs", from_version=1)
    assert "CREATE TABLE" not in migrations.as_sql("jobs", from_version=1)


@pytest.mark.promise("F15")
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_eight_at_once_apply_each_file_once(empty_dsn: str, lay: Lay, isolation: str) -> None:
    steps = [f"ALTER TABLE pgqueue.job ADD COLUMN step_{number} int;" for number in range(5)]
    lay(GROUND, *steps)
    escaped = isolation.replace(" ", "\\ ")
    target = make_conninfo(empty_dsn, options=f"-c default_transaction_isolation={escaped}")
    together = threading.Barrier(8)

    def one(_: int) -> list[str]:
        together.wait()
        return [str(file) for file in migrate(target)]

    with ThreadPoolExecutor(8) as threads:
        applied = [name for names in threads.map(one, range(8)) for name in names]
    assert sorted(applied) == [f"{number:04}_step_{number}" for number in range(1, 7)]


def test_a_failure_in_the_middle_of_a_file_leaves_nothing(empty: psycopg.Connection, lay: Lay) -> None:
    lay(GROUND + "SELECT 1 / 0;")
    with pytest.raises(Error, match=r"0001_step_1 failed and changed nothing: division by zero"):
        migrate(empty, "pgqueue")
    assert schemas(empty) == []


def test_the_files_before_a_failing_one_stay(empty: psycopg.Connection, lay: Lay) -> None:
    lay(GROUND, "ALTER TABLE pgqueue.job ADD COLUMN more int;", "CREATE TABLE pgqueue.x (); SELECT 1 / 0;")
    with pytest.raises(Error, match="0003_step_3"):
        migrate(empty, "pgqueue")
    assert require_version(empty) == 2
    assert empty.execute("SELECT to_regclass('pgqueue.x')").fetchone() == (None,)


def test_a_file_that_does_not_enter_itself_is_refused_and_undone(
    empty: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "migrations").mkdir()
    (tmp_path / "migrations" / "0001_silent.sql").write_text(f"-- breaking: no\n{GROUND}")
    monkeypatch.setattr(migrations, "sql_directory", lambda: tmp_path)
    with pytest.raises(Error, match="0001_silent must end by entering itself"):
        migrate(empty, "pgqueue")
    assert schemas(empty) == []


def test_what_a_file_warns_of_is_logged_and_nothing_else(
    empty: psycopg.Connection, lay: Lay, caplog: pytest.LogCaptureFixture
) -> None:
    says = "RAISE NOTICE 'by the way'; RAISE WARNING 'a view keeps a column' USING HINT = 'Run this.';"
    lay(f"{GROUND}DO $$ BEGIN {says} END $$;")
    with caplog.at_level(logging.WARNING, "pgqueue"):
        migrate(empty, "pgqueue")
    assert [record.getMessage() for record in caplog.records] == ["a view keeps a column. Run this."]


def test_on_an_open_transaction_it_is_part_of_it(empty: psycopg.Connection) -> None:
    empty.execute("CREATE TABLE app (id int)")
    assert migrate(empty, "pgqueue")
    empty.rollback()
    assert schemas(empty) == []


def test_a_connection_that_makes_other_rows_will_do(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, row_factory=dict_row, cursor_factory=psycopg.ClientCursor) as conn:
        assert migrate(conn, "pgqueue")
        assert migrate(conn, "pgqueue") == []
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


# Locks --------------------------------------------------------------------------------------------------------------


class Heard(logging.Handler):
    """Sets an event at the first message that tells of a retry."""

    def __init__(self) -> None:
        super().__init__()
        self.retry = threading.Event()
        self.message = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "trying again" in record.getMessage():
            self.message = record.getMessage()
            self.retry.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("pgqueue.database.schema_locks")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_who_holds_a_lock_is_named(empty_dsn: str, lay: Lay) -> None:
    lay(GROUND)
    migrate(empty_dsn)
    lay(GROUND, "ALTER TABLE pgqueue.job ADD COLUMN more int;")
    with psycopg.connect(empty_dsn, application_name="forgotten shell") as holder:
        holder.execute("SELECT count(*) FROM pgqueue.job")
        with pytest.raises(Error) as refused:
            migrate(empty_dsn, lock_timeout=0.05)
        pid = holder.info.backend_pid
    message = str(refused.value)
    assert "0002_step_2: no lock within 0.05 s, tried 5 times" in message
    assert f"pid {pid} (forgotten shell, " in message
    assert "idle in transaction since" in message
    assert "holds job: SELECT count(*) FROM pgqueue.job" in message
    assert "pg_terminate_backend" in message


def test_a_prepared_transaction_that_holds_a_lock_is_named(empty_dsn: str, lay: Lay) -> None:
    lay(GROUND)
    migrate(empty_dsn)
    lay(GROUND, "ALTER TABLE pgqueue.job ADD COLUMN more int;")
    with psycopg.connect(empty_dsn) as holder:
        holder.tpc_begin("forgotten")
        holder.execute("INSERT INTO pgqueue.job (id) VALUES (1)")
        holder.tpc_prepare()
        with pytest.raises(Error, match=r"a prepared transaction .* holds job"):
            migrate(empty_dsn, lock_timeout=0.05)
        holder.tpc_rollback()


def test_another_migration_that_hangs_is_named(empty_dsn: str, lay: Lay) -> None:
    lay(GROUND)
    with psycopg.connect(empty_dsn, application_name="hung migration") as holder:
        holder.execute("SELECT pg_advisory_xact_lock(hashtextextended('pgqueue migrate pgqueue', 0))")
        with pytest.raises(Error, match=r"hung migration, .* holds the migration lock"):
            migrate(empty_dsn, lock_timeout=0.05, wait=0.05)
        assert [str(file) for file in migrate(empty_dsn, "elsewhere", wait=0.05)] == ["0001_step_1"]


@pytest.mark.promise("F15")
def test_it_lets_others_work_while_it_waits_and_goes_on_when_it_can(empty_dsn: str, lay: Lay, heard: Heard) -> None:
    """Without lock_timeout the waiting ALTER TABLE would stop every worker behind it, as long as the reader stays."""
    lay(GROUND)
    migrate(empty_dsn)
    lay(GROUND, "ALTER TABLE pgqueue.job ADD COLUMN more int;")
    with (
        ThreadPoolExecutor(1) as thread,
        psycopg.connect(empty_dsn) as reader,
        psycopg.connect(empty_dsn, autocommit=True, options="-c statement_timeout=20s") as worker,
    ):
        reader.execute("SELECT count(*) FROM pgqueue.job")
        migrating = thread.submit(migrate, empty_dsn, lock_timeout=0.5)
        assert heard.retry.wait(30)
        worker.execute("INSERT INTO pgqueue.job (id) VALUES (1)")
        reader.rollback()
        assert len(migrating.result(30)) == 1
        assert worker.execute("SELECT id, more FROM pgqueue.job").fetchall() == [(1, None)]


@pytest.mark.promise("F193")
def test_it_may_take_longer_than_a_transaction_may(empty_dsn: str, lay: Lay) -> None:
    lay(GROUND, "SELECT pg_sleep(1.2);")
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        if conn.info.server_version < 170_000:
            pytest.skip("transaction_timeout is of PostgreSQL 17")
        conn.execute(f'ALTER DATABASE "{conn.info.dbname}" SET transaction_timeout = 1000'.encode())
    assert len(migrate(empty_dsn)) == 2


# Standing -----------------------------------------------------------------------------------------------------------


def require_version(conn: psycopg.Connection) -> int:
    version = migrations.check(conn, "pgqueue").version
    conn.commit()
    return version


def test_a_database_without_schema(empty: psycopg.Connection) -> None:
    with pytest.raises(SchemaMissing, match=r"schema 'jobs' of database '\w+' is not there.*migrate --schema jobs"):
        require(empty, "jobs")
    assert migrations.pending(empty, "jobs") == list(migrations.files())
    assert require_version(empty) == 0


def test_a_migrated_database_is_as_we_need_it(conn: psycopg.Connection) -> None:
    standing = require(conn, "pgqueue")
    assert standing.version == len(migrations.files())
    assert (standing.pending, standing.unknown) == ((), ())
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_schema_that_is_behind(empty: psycopg.Connection, lay: Lay) -> None:
    lay(GROUND)
    migrate(empty, "pgqueue")
    lay(GROUND, "SELECT 1;")
    with pytest.raises(SchemaBehind, match="at version 1 and lacks 0002_step_2; run `pgqueue migrate`"):
        require(empty, "pgqueue")
    lay(GROUND, *["SELECT 1;"] * 4)
    with pytest.raises(SchemaBehind, match="lacks 0002_step_2 and 3 more up to 0005_step_5; run `pgqueue migrate`"):
        require(empty, "pgqueue")


@pytest.mark.promise("F15")
def test_a_newer_schema_is_refused_only_if_it_breaks_us(empty: psycopg.Connection, lay: Lay) -> None:
    lay(GROUND, "SELECT 1;")
    migrate(empty, "pgqueue")
    lay(GROUND)
    assert [row.version for row in require(empty, "pgqueue").unknown] == [2]
    assert migrate(empty, "pgqueue") == []
    lay(GROUND, "SELECT 1;", "SELECT 2;", breaking=True)
    migrate(empty, "pgqueue")
    lay(GROUND, "SELECT 1;")
    with pytest.raises(SchemaTooNew, match=r"0003_step_3, .*know \(its newest is 0002_step_2\).*upgrade pgqueue"):
        require(empty, "pgqueue")


def test_reading_the_standing_keeps_the_callers_transaction(conn: psycopg.Connection) -> None:
    conn.execute("CREATE TEMP TABLE mine (id int)")
    with pytest.raises(SchemaMissing):
        require(conn, "nowhere")
    assert conn.execute("SELECT count(*) FROM mine").fetchone() == (0,)


# Another history ----------------------------------------------------------------------------------------------------

OUTBOX = migrations.OUTBOX
OLD = ("initial", "transactions", "locks", "unique", "supervisor", "schedules", "limits", "rates")
"""The first names of a history that is not ours: that of a pgqueue before the first release."""
LINES = pytest.mark.parametrize("line", [migrations.QUEUE, OUTBOX], ids=["queue", "outbox"])


def enter_old(conn: psycopg.Connection, line: migrations.Line) -> None:
    for number, name in enumerate(OLD, 1):
        conn.execute(f"{line.enter} ({number}, '{name}', false)".encode())
    conn.commit()


def everything(conn: psycopg.Connection, line: migrations.Line) -> object:
    """All that is in the schema, and the rows of the line's table."""
    rows = conn.execute(line.read.encode()).fetchall()
    return catalog(conn, "pgqueue"), rows


def refuses(conn: psycopg.Connection, line: migrations.Line) -> None:
    """Each way in says what it is, and nothing is changed."""
    before = everything(conn, line)
    file = migrations.files(line)[0]
    for look in (migrations.check, require, migrate):
        with pytest.raises(SchemaForeign, match=f"migration 1 is 0001_initial there, and {file} in this") as caught:
            look(conn, "pgqueue", line=line)
        assert f"`pgqueue migrate{line.option} --schema NAME`" in str(caught.value)
        conn.rollback()
    assert everything(conn, line) == before


@pytest.mark.promise("F15")
@LINES
def test_a_schema_of_another_history_is_named_and_left_as_it_is(
    line: migrations.Line, empty: psycopg.Connection
) -> None:
    """By the numbers alone it would be ours, and newer by seven."""
    empty.execute(f"{GROUND}CREATE TABLE pgqueue.outbox (id int)".encode())
    empty.execute("CREATE TABLE pgqueue.outbox_migration (LIKE pgqueue.migration INCLUDING ALL)")
    enter_old(empty, line)
    refuses(empty, line)
    assert migrate(empty, "another", line=line) == list(migrations.files(line))
    assert require(empty, "another", line).pending == ()


@pytest.mark.promise("F15")
@LINES
def test_rows_of_another_history_that_were_restored_into_our_schema_are_named(
    line: migrations.Line, empty: psycopg.Connection
) -> None:
    """A restore of the data alone replaces the rows of the same numbers. The other line is what it was."""
    other = OUTBOX if line is migrations.QUEUE else migrations.QUEUE
    migrate(empty, "pgqueue", line=line)
    migrate(empty, "pgqueue", line=other)
    enter_old(empty, line)
    refuses(empty, line)
    assert require(empty, "pgqueue", other).pending == ()


def test_a_later_number_with_another_name_is_named_as_soon_as_it_is_ours(empty: psycopg.Connection, lay: Lay) -> None:
    lay(GROUND, "SELECT 1;")
    migrate(empty, "pgqueue")
    empty.execute("UPDATE pgqueue.migration SET name = 'colour' WHERE version = 2")
    empty.commit()
    lay(GROUND)
    assert [str(row) for row in require(empty, "pgqueue").unknown] == ["0002_colour"]
    lay(GROUND, "SELECT 1;", "CREATE TABLE pgqueue.third ();")
    for look in (require, migrate):
        with pytest.raises(SchemaForeign, match="2 is 0002_colour there, and 0002_step_2 in this"):
            look(empty, "pgqueue")
    assert empty.execute("SELECT to_regclass('pgqueue.third')").fetchone() == (None,)
    assert empty.execute("UPDATE pgqueue.migration SET name = 'step_2' WHERE version = 2").rowcount == 1
    assert [str(file) for file in migrate(empty, "pgqueue")] == ["0003_step_3"]


@pytest.mark.promise("F15")
def test_another_history_that_begins_while_we_wait_for_the_lock_is_named(
    empty_dsn: str, empty: psycopg.Connection, lay: Lay
) -> None:
    lay(GROUND)
    with psycopg.connect(empty_dsn) as other, ThreadPoolExecutor(1) as thread:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('pgqueue migrate pgqueue', 0))")
        migrating = thread.submit(migrate, empty_dsn)
        wait_until(lambda: empty.execute("SELECT FROM pg_locks WHERE NOT granted AND locktype = 'advisory'").rowcount)
        other.execute(GROUND)
        enter_old(other, migrations.QUEUE)
        with pytest.raises(SchemaForeign, match="1 is 0001_initial there, and 0001_step_1 in this"):
            migrating.result(30)
    assert empty.execute("SELECT count(*) FROM pgqueue.migration").fetchone() == (len(OLD),)


# Rights and servers -------------------------------------------------------------------------------------------------


def test_a_role_that_may_not_create_is_told_what_it_needs(empty_dsn: str, role: str) -> None:
    with pytest.raises(Error, match=rf"role '{role}' may not change schema 'pgqueue'.*GRANT CREATE ON DATABASE.*--sql"):
        migrate(make_conninfo(empty_dsn, user=role))


def test_a_role_that_may_not_read_is_told_what_it_needs(empty_dsn: str, role: str) -> None:
    migrate(empty_dsn)
    with (
        psycopg.connect(make_conninfo(empty_dsn, user=role)) as conn,
        pytest.raises(Error, match=f"role '{role}' may not read pgqueue.migration.*pgqueue grants {role} --for work"),
    ):
        require(conn, "pgqueue")


@pytest.mark.second
def test_a_standby_sends_to_the_primary(own_server: Server) -> None:
    own_server.stop()
    assert own_server.cluster is not None
    (own_server.cluster.data / "standby.signal").touch()
    own_server.start()
    with pytest.raises(Error, match="is a standby and cannot be written; migrate the primary"):
        migrate(own_server.dsn("postgres"))


@pytest.fixture
def latin_dsn(pgqueue_databases: Databases) -> Iterator[str]:
    """An empty database that cannot hold every text."""
    with pgqueue_databases.copy("template0 ENCODING 'LATIN1' LOCALE 'C'") as dsn:
        yield dsn


def test_a_database_that_is_not_utf8_is_refused(latin_dsn: str) -> None:
    with pytest.raises(Error, match=r"needs a database with encoding UTF8, \S+ has LATIN1"):
        migrate(latin_dsn)
    with psycopg.connect(latin_dsn) as conn:
        assert conn.execute("SELECT to_regnamespace('pgqueue')").fetchone() == (None,)


def test_a_schema_name_is_checked_before_anything(empty: psycopg.Connection) -> None:
    with pytest.raises(InvalidOption):
        migrate(empty, 'x"; DROP SCHEMA public; --')


# Files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [("0001_a.sql", "SELECT 1;"), ("0001_a.sql", "-- breaking: perhaps\n"), ("1_a.sql", "-- breaking: no\n")],
)
def test_a_file_that_is_not_as_it_must_be(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(Error, match=r"must be named NNNN_words\.sql and begin with"):
        migrations._files(tmp_path)


@pytest.mark.parametrize("names", [["0002_a"], ["0001_a", "0001_b"], ["0001_a", "0003_b"]])
def test_numbers_without_gap_or_double(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / f"{name}.sql").write_text("-- breaking: no\n")
    with pytest.raises(Error, match="must be numbered 0001, 0002, …"):
        migrations._files(tmp_path)


# The outbox: a line of its own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [migrations.QUEUE, OUTBOX])
def test_queue_and_outbox_stand_beside_each_other_in_one_schema(first: migrations.Line, empty_dsn: str) -> None:
    second = OUTBOX if first is migrations.QUEUE else migrations.QUEUE
    assert migrate(empty_dsn, line=first) == list(migrations.files(first))
    with psycopg.connect(empty_dsn) as conn, pytest.raises(SchemaMissing):
        require(conn, "pgqueue", second)
    assert migrate(empty_dsn, line=second) == list(migrations.files(second))
    assert (migrate(empty_dsn, line=first), migrate(empty_dsn, line=second)) == ([], [])


def test_the_outbox_is_the_same_by_every_way_and_in_every_schema(empty: psycopg.Connection) -> None:
    migrate(empty, "jobs", line=OUTBOX)
    empty.execute(migrations.as_sql("pgqueue", line=OUTBOX).encode())
    empty.commit()
    assert catalog(empty, "jobs") == catalog(empty, "pgqueue")


def test_an_outbox_that_is_missing_or_hidden_is_said(empty: psycopg.Connection, role: str) -> None:
    with pytest.raises(SchemaMissing, match="run `pgqueue migrate --outbox`"):
        require(empty, "pgqueue", OUTBOX)
    migrate(empty, "pgqueue", line=OUTBOX)
    empty.execute("ALTER TABLE pgqueue.outbox ENABLE ROW LEVEL SECURITY")
    empty.execute(f"GRANT USAGE ON SCHEMA pgqueue TO {role}".encode())
    empty.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA pgqueue TO {role}".encode())
    empty.execute(f"SET ROLE {role}".encode())
    with pytest.raises(Error, match=r"row level security is on for pgqueue.outbox"):
        require(empty, "pgqueue", OUTBOX)
    empty.rollback()


def test_an_emptied_outbox_says_what_to_put_back(empty: psycopg.Connection) -> None:
    migrate(empty, "pgqueue", line=OUTBOX)
    empty.execute("TRUNCATE pgqueue.outbox_migration")
    with pytest.raises(SchemaMissing, match=r"INSERT INTO pgqueue.outbox_migration .* \(1, 'staging', false\)"):
        require(empty, "pgqueue", OUTBOX)


# Made in part --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F45")
@pytest.mark.parametrize("line", [migrations.QUEUE, OUTBOX], ids=["queue", "outbox"])
def test_a_script_that_stopped_half_way_is_told_by_the_tables_that_are_missing(
    empty_dsn: str, line: migrations.Line
) -> None:
    """Naive is to take the empty list of migrations for a truncated one: its INSERT is followed by `nothing to do`."""
    script, stop = migrations.as_sql("pgqueue", line=line), "attempt" if line is migrations.QUEUE else "outbox_refused"
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(script[: script.index(f"CREATE TABLE pgqueue.{stop} ")].encode())
        for ask in (lambda: migrate(conn, "pgqueue", line=line), lambda: require(conn, "pgqueue", line)):
            with pytest.raises(SchemaMissing, match="was made in part: it lacks") as caught:
                ask()
            assert stop in str(caught.value) and "INSERT" not in str(caught.value)
        conn.execute("DROP SCHEMA pgqueue CASCADE")
        assert migrate(conn, "pgqueue", line=line) == list(migrations.files(line))


@pytest.mark.promise("F45")
@pytest.mark.parametrize("table", ["job_cursor", "job_running", "duty"])
def test_a_statement_that_failed_while_the_others_went_on_is_told(dsn: str, table: str) -> None:
    """As psql does without ON_ERROR_STOP. The list of migrations is complete."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"DROP TABLE pgqueue.{table} CASCADE".encode())
        with pytest.raises(SchemaMissing, match=f"made in part: it lacks {table}"):
            migrate(conn, "pgqueue")


def test_a_table_of_the_application_in_the_schema_is_no_part_of_ours(empty: psycopg.Connection) -> None:
    empty.execute("CREATE SCHEMA pgqueue; CREATE TABLE pgqueue.notes (text text)")
    assert migrate(empty, "pgqueue") == list(migrations.files())
    assert migrate(empty, "pgqueue") == []
