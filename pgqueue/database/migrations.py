"""The schema of a database: which numbered files of `sql/migrations` it has. Applies the files it lacks.

`pgqueue migrate` and the tests' template call `migrate`. The worker calls `require` before it takes a job. There is no
way back: files are only added. Each file is one transaction whose last statement enters it in `pgqueue.migration`. A
file can therefore be applied with `psql -1 -f`, too, and half a migration never exists. A worker that starts never
changes a schema.

There are two lines of migrations, each with files and a table of its own: that of the queue, and that of the outbox in
an application's database (`sql/migrations/outbox`). Both may be in one schema of one database.

A row counts as a file of ours if number and name are ours. A number of ours with another name is another history: the
tables are those of a pgqueue before the first release, or of something else. Then nothing is changed and no worker
starts. By numbers alone the rest of that history would look like a newer pgqueue, and our next file like one applied.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
from psycopg import errors
from psycopg.rows import tuple_row

from pgqueue import config
from pgqueue.database import embedded, primary
from pgqueue.database.conninfo import connect_timeout
from pgqueue.database.grants import Needs, lacks
from pgqueue.database.number import check_number, set_number, warn_of_others
from pgqueue.database.schema_locks import lock_name, plain_cursor, set_local, take_time, with_locks
from pgqueue.database.sequences import advancing
from pgqueue.database.statements import in_schema, sql_directory, text
from pgqueue.errors import (
    Error,
    InvalidOption,
    SchemaBehind,
    SchemaForeign,
    SchemaMissing,
    SchemaTooNew,
    UnsupportedServer,
)
from pgqueue.options import checks_options

OLDEST_POSTGRES = 15
Connection = psycopg.Connection[Any]

_log = logging.getLogger(__name__)
_FILE = re.compile(r"(\d{4})_(\w+)\.sql")
_HEADER = re.compile(r"-- breaking: (no|yes)\n")


@dataclass(frozen=True, slots=True)
class Migration:
    """One file, applied in the order of `version`. `breaking`: an older pgqueue must not work on its result."""

    version: int
    name: str
    breaking: bool
    sql: str

    def __str__(self) -> str:
        return f"{self.version:04}_{self.name}"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of migrations: the files of a folder of `sql/`, and the table that says which were applied."""

    folder: str
    table: str
    read: str
    enter: str
    option: str = ""
    """Of `pgqueue migrate`."""


QUEUE = Line(
    "migrations",
    "migration",
    "SELECT version, name, breaking FROM pgqueue.migration ORDER BY version",
    "INSERT INTO pgqueue.migration (version, name, breaking) VALUES",
)
OUTBOX = Line(
    "migrations/outbox",
    "outbox_migration",
    "SELECT version, name, breaking FROM pgqueue.outbox_migration ORDER BY version",
    "INSERT INTO pgqueue.outbox_migration (version, name, breaking) VALUES",
    " --outbox",
)


@dataclass(frozen=True, slots=True)
class Applied:
    """A row of the line's table."""

    version: int
    name: str
    breaking: bool

    def __str__(self) -> str:
        return f"{self.version:04}_{self.name}"


@dataclass(frozen=True, slots=True)
class Standing:
    """The migrations of a database compared with our files. `unknown` are migrations of a newer pgqueue."""

    applied: tuple[Applied, ...]
    pending: tuple[Migration, ...]
    unknown: tuple[Applied, ...]

    @property
    def version(self) -> int:
        """The newest migration applied; 0 if there is no schema."""
        return max((row.version for row in self.applied), default=0)


@checks_options
def migrate(
    target: str | Connection | None = None,
    schema: str | None = None,
    *,
    lock_timeout: float = 5.0,
    wait: float = 60.0,
    line: Line = QUEUE,
    number: int | None = None,
) -> list[Migration]:
    """Apply the files the database lacks and return them; [] if it lacks none.

    `target` is a DSN or a psycopg connection; without it, the configured DSN.

    Many processes may call this at once: they wait up to `wait` seconds for each other. Workers may go on working. If a
    file cannot get a table's lock within `lock_timeout` seconds, it is rolled back and tried again, 5 times in all.
    Then Error names the holders of the lock. If the connection has an open transaction, the files become part of it.
    SchemaForeign: the tables are not of this pgqueue, and stay as they are.
    At last, sequences that lag behind the tables are advanced (see `sequences`), if this role may.

    `number`, from 0 to 1023: the ids of this database's new jobs begin at `number * 2**43 + 1`, and no other database
    with another number gives them. InvalidOption: there are higher ids. Without it the number stays; it is 0 at first.
    """
    if number is not None:
        check_number(number)
        if line is not QUEUE:
            raise InvalidOption("number: an outbox has none; its jobs get their ids from the queue")
    schema = config.config(schema=schema).schema
    with _connected(config.config().require_dsn() if target is None else target) as conn:
        _check_server(conn)
        applied = list(_applied_now(conn, schema, line, lock_timeout, wait))
        if line is QUEUE:
            if number is not None:
                set_number(conn, schema, number, lock_timeout)
            _advance_sequences(conn, schema)
        return applied


@checks_options
async def amigrate(
    target: str | None = None,
    schema: str | None = None,
    *,
    lock_timeout: float = 5.0,
    wait: float = 60.0,
    line: Line = QUEUE,
    number: int | None = None,
) -> list[Migration]:
    """`migrate` for asyncio, in a thread and on a connection of its own: `target` is a DSN, or left out.

    If it is cancelled, the thread goes on to its end.

        await pgqueue.amigrate()
    """
    if not (target is None or isinstance(target, str)):
        raise InvalidOption(f"amigrate: target is a DSN, not {type(target).__qualname__}")
    return await asyncio.to_thread(
        migrate, target, schema, lock_timeout=lock_timeout, wait=wait, line=line, number=number
    )


def check(conn: Connection, schema: str, line: Line = QUEUE, *, needs: Needs | None = None) -> Standing:
    """Return which migrations the database has and lacks. Changes nothing.

    SchemaForeign: another pgqueue, or something else, has made the tables.
    Error: this role may not read them. It names the rights that the caller `needs`; None is those of a worker or relay.
    """
    with _reading(conn, schema, line, needs):
        applied = _read_ours(conn, schema, line)
    versions = {row.version for row in applied}
    newest = max((file.version for file in files(line)), default=0)
    return Standing(
        applied,
        pending=tuple(file for file in files(line) if file.version not in versions),
        unknown=tuple(row for row in applied if row.version > newest),
    )


def pending(conn: Connection, schema: str, line: Line = QUEUE) -> list[Migration]:
    """Return the files the database lacks."""
    return list(check(conn, schema, line).pending)


def require(conn: Connection, schema: str, line: Line = QUEUE, *, needs: Needs | None = None) -> Standing:
    """Return the database's standing if this pgqueue can work on it.

    Else it raises SchemaMissing, SchemaForeign, SchemaBehind or SchemaTooNew; the message says what to do. A newer
    schema is accepted if none of its unknown migrations is breaking, so that workers outlive a rolling deploy.
    UnsupportedServer: it is CockroachDB or YugabyteDB.
    """
    refuse_others(conn)
    _refuse_hidden_rows(conn, schema, line)
    standing = check(conn, schema, line, needs=needs)
    where = _where(conn, schema, line)
    if not standing.applied:
        _refuse_emptied(conn, schema, line)
        raise SchemaMissing(f"{where} is not there; run `{_command(schema, line)}`")
    breaking = [str(row) for row in standing.unknown if row.breaking]
    if breaking:
        raise SchemaTooNew(
            f"{where} has {', '.join(breaking)}, which this pgqueue does not know (its newest is {files(line)[-1]}) "
            "and cannot work with; upgrade pgqueue here"
        )
    if standing.pending:
        raise SchemaBehind(
            f"{where} is at version {standing.version} and lacks {named(standing.pending)}; "
            f"run `{_command(schema, line)}`"
        )
    return standing


def named(pending: Sequence[Migration]) -> str:
    """These migrations in a sentence: all of them up to three, else the first, how many more, and the last.

    >>> named(files()[:1])
    '0001_schema'
    """
    names = [str(file) for file in pending]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more up to {names[-1]}"


def as_sql(schema: str, from_version: int = 0, line: Line = QUEUE) -> str:
    """Return the files after `from_version` as one script, to apply them by hand.

    It has no BEGIN and no COMMIT: run it in one transaction, as `psql -1 -f` does. If a file is applied already, it
    fails. What asks the database first is `revisions`.
    """
    return "\n".join(f"-- {file}\n{in_schema(file.sql, schema)}" for file in files(line) if file.version > from_version)


def files(line: Line = QUEUE) -> tuple[Migration, ...]:
    """Every migration of the line that this pgqueue knows, in order."""
    return _files(sql_directory() / line.folder)


@cache
def _files(directory: Path) -> tuple[Migration, ...]:
    found = tuple(_file(path) for path in sorted(directory.glob("*.sql")))
    if [file.version for file in found] != list(range(1, len(found) + 1)):
        raise Error(f"{directory}: migrations must be numbered 0001, 0002, …, got {', '.join(map(str, found))}")
    return found


def _file(path: Path) -> Migration:
    sql = path.read_text(encoding="utf-8")
    name, header = _FILE.fullmatch(path.name), _HEADER.match(sql)
    if name is None or header is None:
        raise Error(
            f"{path}: a migration must be named NNNN_words.sql and begin with the line `-- breaking: no` or yes"
        )
    return Migration(int(name[1]), name[2], header[1] == "yes", sql)


def _refuse_hidden_rows(conn: Connection, schema: str, line: Line) -> None:
    """Raise Error if row level security hides rows of our tables from this role: they would look empty."""
    with conn.transaction(), plain_cursor(conn) as cursor:
        rows = cursor.execute(_HIDDEN, [schema, line is OUTBOX]).fetchall()
    if rows:
        tables = ", ".join(f"{schema}.{name}" for (name,) in rows)
        raise Error(
            f"row level security is on for {tables}, and hides their rows from role {conn.info.user!r}. pgqueue needs "
            "all rows: ALTER TABLE … DISABLE ROW LEVEL SECURITY for each, or ALTER ROLE … BYPASSRLS"
        )


_HIDDEN = """
SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relkind IN ('r', 'p') AND c.relrowsecurity AND pg_catalog.row_security_active(c.oid)
  AND (c.relname LIKE 'outbox%%') = %s
ORDER BY c.relname
"""


def _lacking(conn: Connection, schema: str, made: Iterable[Migration]) -> list[str] | None:
    """Which tables of these files the database lacks; None if it has none of them."""
    tables = set[str]()
    for file in made:
        tables = tables.union(_MAKES.findall(file.sql)).difference(_DROPS.findall(file.sql))
    with conn.transaction(), plain_cursor(conn) as cursor:
        there = {name for (name,) in cursor.execute(_TABLES, [schema]).fetchall()}
    return sorted(tables - there) if tables & there else None


_MAKES = re.compile(r"^CREATE TABLE pgqueue\.(\w+)", re.MULTILINE)
_DROPS = re.compile(r"^DROP TABLE (?:IF EXISTS )?pgqueue\.(\w+)", re.MULTILINE)
_TABLES = """
SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relkind IN ('r', 'p')
"""


def _in_part(conn: Connection, schema: str, line: Line, lacks: Sequence[str]) -> SchemaMissing:
    more = f" and {len(lacks) - 3} more tables" if len(lacks) > 3 else ""
    return SchemaMissing(
        f"{_where(conn, schema, line)} was made in part: it lacks {', '.join(lacks[:3])}{more}. Its script was stopped "
        "half-way, or one statement of it failed and the others went on. Nothing was changed. If a pgqueue before the "
        "first release made these tables, take another schema. Else, if no job is in it, drop its tables and run "
        f"`{_command(schema, line)}`; if jobs are in it, make what is missing as `{_command(schema, line)} --sql` "
        "does. Run a script in one transaction (psql -1 -v ON_ERROR_STOP=1)"
    )


def _refuse_emptied(conn: Connection, schema: str, line: Line) -> None:
    """Raise SchemaMissing if tables are there, and the table that says so is empty."""
    lacks = _lacking(conn, schema, files(line))
    # The tables may have been made just now, by another process: then its first file has entered itself.
    if lacks is None or check(conn, schema, line).applied:
        return
    if lacks:
        raise _in_part(conn, schema, line, lacks)
    rows = ", ".join(f"({file.version}, '{file.name}', {str(file.breaking).lower()})" for file in files(line))
    raise SchemaMissing(
        f"the tables of schema {schema!r} are there, but {schema}.{line.table} is empty: something has truncated it, "
        "such as a fixture that empties all tables. Leave that table out. If a pgqueue before the first release made "
        "these tables, take another schema. Else put the rows back, up to the version that the schema had: "
        f"{in_schema(line.enter, schema)} {rows}"
    )


def _applied_now(conn: Connection, schema: str, line: Line, lock_timeout: float, wait: float) -> Iterator[Migration]:
    _refuse_hidden_rows(conn, schema, line)
    if applied := check(conn, schema, line, needs="own").applied:
        versions = {row.version for row in applied}
        if lacks := _lacking(conn, schema, [file for file in files(line) if file.version in versions]):
            raise _in_part(conn, schema, line, lacks)
    else:
        _refuse_emptied(conn, schema, line)
    for file in pending(conn, schema, line):
        if _patiently(conn, schema, line, file, (lock_timeout, wait)):
            _log.info("applied %s to schema %s of database %s", file, schema, conn.info.dbname)
            yield file


def _advance_sequences(conn: Connection, schema: str) -> None:
    with conn.transaction(), plain_cursor(conn) as cursor:
        take_time(cursor)
        if cursor.execute(text("sequences_allowed", schema).encode()).fetchone() == (True,):
            statement = advancing(schema, whole=True)
            statement.read(cursor.execute(statement.sql.encode(), dict(statement.params)).fetchall())
            warn_of_others(cursor, schema)


def _patiently(conn: Connection, schema: str, line: Line, file: Migration, patience: tuple[float, float]) -> bool:
    """Apply one file; see `with_locks`. False if another process was faster."""
    lock_timeout, wait = patience
    try:
        return with_locks(
            conn,
            schema,
            f"migration {file}",
            lock_timeout,
            lambda: _apply(conn, schema, line, file, lock_timeout, wait),
        )
    except errors.InsufficientPrivilege as error:
        raise Error(_forbidden(conn, schema, line, file, error)) from error
    except psycopg.Error as error:
        if isinstance(error, psycopg.OperationalError) and conn.closed:
            raise
        raise Error(f"migration {file} failed and changed nothing: {error}") from error


def _apply(conn: Connection, schema: str, line: Line, file: Migration, lock_timeout: float, wait: float) -> bool:
    own_transaction = conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    with conn.transaction(), plain_cursor(conn) as cursor:
        if own_transaction:
            # With REPEATABLE READ as the role's default we would not see what the process before us has done.
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        take_time(cursor)
        set_local(cursor, lock_timeout=wait)
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [lock_name(schema)])
        if any(row.version == file.version for row in _read_ours(conn, schema, line)):
            return False
        set_local(cursor, lock_timeout=lock_timeout)
        conn.add_notice_handler(_pass_on)
        try:
            # Without parameters it is one message of many statements, and a % has no special meaning.
            cursor.execute(in_schema(file.sql, schema).encode(), prepare=False)
        finally:
            conn.remove_notice_handler(_pass_on)
        if Applied(file.version, file.name, file.breaking) not in _read(conn, schema, line):
            raise Error(
                f"migration {file} must end by entering itself in pgqueue.{line.table}: "
                f"version {file.version}, name '{file.name}', breaking {str(file.breaking).lower()}"
            )
    return True


def _pass_on(notice: errors.Diagnostic) -> None:
    """Log what a migration warns of: something was left as it was."""
    if notice.severity_nonlocalized == "WARNING":
        _log.warning("%s. %s", notice.message_primary, notice.message_hint or "")


def foreign(applied: Iterable[Applied], line: Line = QUEUE) -> str | None:
    """How these rows differ from the files of the same numbers, in words; None if they do not.

    >>> foreign([Applied(1, "initial", False), Applied(2, "transactions", False)])
    'migration 1 is 0001_initial there, and 0001_schema in this pgqueue'
    """
    ours = {file.version: file for file in files(line)}
    for row in applied:
        file = ours.get(row.version)
        if file is not None and file.name != row.name:
            return f"migration {row.version} is {row} there, and {file} in this pgqueue"
    return None


def _read_ours(conn: Connection, schema: str, line: Line) -> tuple[Applied, ...]:
    """The rows, or SchemaForeign if they are of another history."""
    applied = _read(conn, schema, line)
    if (how := foreign(applied, line)) is not None:
        raise SchemaForeign(
            f"{_where(conn, schema, line)} is not of this pgqueue: {how}. A pgqueue before the first release has made "
            f"it, or something else, or the rows of {schema}.{line.table} were restored from there. Nothing was "
            f"changed. Take another schema or database (`pgqueue migrate{line.option} --schema NAME`), and let the "
            "pgqueue that made these tables finish their jobs"
        )
    return applied


def _read(conn: Connection, schema: str, line: Line) -> tuple[Applied, ...]:
    with plain_cursor(conn) as cursor:
        # From the catalogs, which every role may read: to_regclass() fails if the role may not use the schema.
        there = cursor.execute(
            "SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s AND c.relkind = 'r'",
            [schema, line.table],
        ).fetchone()
        if there is None:
            return ()
        cursor.execute(in_schema(line.read, schema).encode())
        return tuple(Applied(*row) for row in cursor)


def _forbidden(conn: Connection, schema: str, line: Line, file: Migration, error: psycopg.Error) -> str:
    role, database = conn.info.user, conn.info.dbname
    return (
        f"migration {file}: role {role!r} may not change schema {schema!r} of database {database!r} "
        f"({error.diag.message_primary}). Run it as the schema's owner; to create the schema takes "
        f'GRANT CREATE ON DATABASE "{database}" TO "{role}". `{_command(schema, line)} --sql` prints '
        "what to apply by hand"
    )


@contextmanager
def _reading(conn: Connection, schema: str, line: Line, needs: Needs | None) -> Iterator[None]:
    """A transaction, or a savepoint in the caller's. If the role may not read, the error says what to do."""
    try:
        with conn.transaction():
            yield
    except errors.InsufficientPrivilege as error:
        needs = needs or ("relay_outbox" if line is OUTBOX else "work")
        raise Error(lacks(conn.info.user, f"read {schema}.{line.table}", needs)) from error


@contextmanager
def _connected(target: str | Connection) -> Iterator[Connection]:
    if isinstance(target, psycopg.Connection):
        yield target
        return
    if not isinstance(target, str):
        raise InvalidOption(f"migrate: target is a DSN or a connection of psycopg, not {type(target).__qualname__}")
    dsn = embedded.resolve(config.normalize(target))
    how: dict[str, Any] = {"autocommit": True, "application_name": "pgqueue migrate", "client_encoding": "utf8"}
    how |= connect_timeout(dsn)
    with primary.connect(psycopg.Connection, dsn, row_factory=tuple_row, **how) as conn:
        yield conn


def refuse_others(conn: Connection) -> None:
    """Raise UnsupportedServer if the server says that it is another product: its first messages do."""
    version = conn.info.parameter_status("server_version") or ""
    other = None
    if conn.info.parameter_status("crdb_version") is not None:
        other = "CockroachDB"
    elif "-YB-" in version:
        other = "YugabyteDB"
    if other is not None:
        raise UnsupportedServer(
            f"{conn.info.host}:{conn.info.port} is {other}; pgqueue needs PostgreSQL {OLDEST_POSTGRES} or newer, "
            "for its functions, partitions and locks"
        )


def _check_server(conn: Connection) -> None:
    refuse_others(conn)
    if conn.info.server_version < OLDEST_POSTGRES * 10_000:
        have = conn.info.parameter_status("server_version")
        raise Error(f"pgqueue needs PostgreSQL {OLDEST_POSTGRES} or newer, this server is {have}")
    if conn.info.parameter_status("server_encoding") != "UTF8":
        have = conn.info.parameter_status("server_encoding")
        raise Error(f"pgqueue needs a database with encoding UTF8, {conn.info.dbname} has {have}")
    with conn.transaction(), plain_cursor(conn) as cursor:
        if cursor.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
            raise Error(f"{conn.info.host} is a standby and cannot be written; migrate the primary")


def _where(conn: Connection, schema: str, line: Line) -> str:
    return f"{'the outbox in ' if line is OUTBOX else ''}schema {schema!r} of database {conn.info.dbname!r}"


def _command(schema: str, line: Line) -> str:
    command = f"pgqueue migrate{line.option}"
    return command if schema == "pgqueue" else f"{command} --schema {schema}"
