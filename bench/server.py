"""The PostgreSQL under the measurements: started for the run, durable as in production, one fresh database per sample.

`Lab` also reads what the server has done: its CPU, and the buffers one session has touched. Never measures on a server
that somebody else uses.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib import metadata
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, LiteralString

import psutil
import psycopg
import psycopg.sql

import pgqueue
from pgqueue import distribution
from pgqueue.database import embedded, migrations, statements

# Real durability. The last three are for measuring: no checkpoint by the clock in the middle of a sample, the server's
# own time of every commit (both sides pay for it, about 0.1 µs a transaction), and no wait for other people's disks.
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "max_connections": "500",
    "checkpoint_timeout": "30min",
    "track_commit_timestamp": "on",
}
# What a floor works on. `warm` is its twin, for what a connection does once: prepare, fill its caches.
MINIMAL = """
CREATE TABLE minimal (id bigint PRIMARY KEY, state integer NOT NULL, args jsonb NOT NULL);
CREATE TABLE warm (LIKE minimal INCLUDING ALL);
CREATE TABLE bench_effect (job bigint NOT NULL);
"""
TEMPLATE = "bench_template"


class Lab:
    """A server of our own, and a template database: the migrated schema and the floors' table."""

    def __init__(self, version: int, directory: Path | None = None) -> None:
        self._directory = directory
        home = tempfile.mkdtemp(prefix="pgqueue-bench-", dir=directory)
        self._server = embedded.start(home, version=version, settings=SETTINGS, keep=False)
        self._admin = psycopg.connect(self._server.dsn, autocommit=True)
        self._numbers = count(1)
        self._admin.execute(f"CREATE DATABASE {TEMPLATE}".encode())
        template = self._server.cluster.dsn(TEMPLATE)
        migrations.migrate(template)
        with psycopg.connect(template) as conn:
            conn.execute(MINIMAL.encode())

    def close(self) -> None:
        self._admin.close()
        self._server.stop()

    @contextmanager
    def twin(self) -> Iterator[Lab]:
        """Another server like this one, for what must share nothing with it but the machine."""
        other = Lab(self.version, self._directory)
        try:
            yield other
        finally:
            other.close()

    @property
    def bin_path(self) -> Path:
        """Where pgbench is."""
        return self._server.bin_path

    @property
    def version(self) -> int:
        """The server's major version."""
        return self._admin.info.server_version // 10_000

    def make_template(self, name: str) -> str:
        """The DSN of a new and empty database, to be copied by `database(name)` when nothing is connected to it."""
        self._admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())
        self._admin.execute(f"CREATE DATABASE {name} TEMPLATE template0".encode())
        return self._server.cluster.dsn(name)

    @contextmanager
    def database(self, template: str = TEMPLATE) -> Iterator[str]:
        """The DSN of a fresh copy of the template; gone afterwards, with whatever a sample left behind.

        Copied as files, which checkpoints before and after: every sample begins with a clean log, and no page it fills
        itself has to be written to the log as a whole.
        """
        name = f"bench_{next(self._numbers)}"
        self._admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy".encode())
        try:
            yield self._server.cluster.dsn(name)
        finally:
            self._admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())

    def crash(self) -> float:
        """Have the server crash, and start it again; when it accepted connections, by the machine's monotonic clock."""
        self._admin.close()
        self._server.cluster.stop("immediate")
        self._server.cluster.start()
        accepted = monotonic()
        self._admin = psycopg.connect(self._server.dsn, autocommit=True)
        return accepted

    @contextmanager
    def away(self) -> Iterator[None]:
        """While this lasts the server is away: it is shut down, and started again at the end."""
        self._admin.close()
        self._server.cluster.stop()
        try:
            yield
        finally:
            self._server.cluster.start()
            self._admin = psycopg.connect(self._server.dsn, autocommit=True)

    @contextmanager
    def without_autovacuum(self) -> Iterator[None]:
        """While transactions are counted: autovacuum's visits are some, even where there is nothing to do."""
        self._configure("ALTER SYSTEM SET autovacuum TO off")
        try:
            yield
        finally:
            self._configure("ALTER SYSTEM RESET autovacuum")

    @contextmanager
    def logged(self, dsn: str) -> Iterator[Path]:
        """While this lasts, each statement of a session that begins in this database is logged; the file of the log."""
        change = psycopg.sql.SQL("ALTER DATABASE {} SET {} TO {}")
        database = psycopg.sql.Identifier(_database(dsn))
        for name, value in (("log_parameter_max_length", "0"), ("log_statement", "all")):
            self._admin.execute(change.format(database, psycopg.sql.Identifier(name), value))
        try:
            yield self._server.cluster.directory / "log"
        finally:
            self._admin.execute(psycopg.sql.SQL("ALTER DATABASE {} RESET log_statement").format(database))

    def _configure(self, change: LiteralString) -> None:
        self._admin.execute(change)
        self._admin.execute("SELECT pg_reload_conf()")

    def cpu(self, *, without: int | None = None) -> float:
        """CPU seconds all server processes have used so far (10 ms steps): sessions, log writer, vacuum, the lot.

        Those that ended are in the postmaster's account; read again if one ended meanwhile, else it would be in
        neither. `without`: the pid of the session that only observes.
        """
        postmaster = psutil.Process(self._server.cluster.postmaster())
        while True:
            ended = _ended(postmaster)
            living = sum(_cpu(process) for process in postmaster.children() if process.pid != without)
            if _ended(postmaster) == ended:
                return ended + living

    def wal(self) -> int:
        """How many bytes of WAL have been written so far, in all databases."""
        return self._number("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")

    def transactions(self, dsn: str) -> int:
        """How many transactions have ended in this database, as far as the sessions have reported (within 10 s)."""
        return self._number(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s", _database(dsn)
        )

    def connections(self, dsn: str) -> int:
        """How many clients are connected to this database."""
        return self._number(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'",
            _database(dsn),
        )

    def _number(self, query: str, *params: object) -> int:
        row = self._admin.execute(query.encode(), params).fetchone()
        return int(row[0]) if row else 0

    def about(self) -> dict[str, Any]:
        """Versions and settings, to stand beside every figure."""
        (server,) = self._admin.execute("SELECT version()").fetchone() or ("?",)
        return {
            "server": server,
            "settings": {name: self._setting(name) for name in SETTINGS},
            "python": platform.python_version(),
            "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
            "uvloop": metadata.version("uvloop"),
            "pgqueue": metadata.version(distribution.NAME),
            "code": code(Path(pgqueue.__file__).parent, statements.sql_directory()),
            "machine": f"{psutil.cpu_count()} CPUs, {platform.system()} {platform.release()}",
            "load": [round(one, 2) for one in psutil.getloadavg()],
        }

    def _setting(self, name: str) -> str:
        row = self._admin.execute("SELECT current_setting(%s)", [name]).fetchone()
        return str(row[0]) if row else "?"


def code(*folders: Path) -> str:
    """Tells the code in these folders from another state of it: a digest of the names and the texts of its files."""
    digest = sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                text = file.read_bytes()
                digest.update(f"{file.relative_to(folder).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]


def buffers(conn: psycopg.Connection[Any], application_name: str) -> int | None:
    """Buffers (found or read) the sessions of this name have touched so far; None before PostgreSQL 18.

    The server counts them per session and publishes them at most once a second: read it when the session has been
    quiet, or rather only polling, for two.
    """
    if conn.info.server_version < 180000:
        return None
    row = conn.execute(
        "SELECT coalesce(sum(io.hits + io.reads), 0)::bigint FROM pg_stat_activity a, pg_stat_get_backend_io(a.pid) io "
        "WHERE a.datname = current_database() AND a.application_name = %s AND io.object = 'relation'",
        [application_name],
    ).fetchone()
    return row[0] if row else None


def _database(dsn: str) -> str:
    return psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]  # type: ignore[return-value]


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:  # it ended just now: the postmaster has its time from now on
        return 0.0
    return float(times.user + times.system)


def _ended(postmaster: psutil.Process) -> float:
    """CPU seconds of the processes that have ended."""
    times = postmaster.cpu_times()
    return float(times.children_user + times.children_system)


def register(dsn: str, queues: list[str]) -> int:
    """A worker's row, with a lease of an hour, for what is no whole worker; its id."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        parameters = {"lease": 3600, "pid": 0, "concurrency": 1, "host": "bench", "version_tag": "", "queues": queues}
        parameters |= {"tasks": ["bench.noop"], "slots": [], "listens": False}
        row = conn.execute(statements.text("registration_register", "pgqueue").encode(), parameters).fetchone()
        assert row is not None
        return int(row[0])
