"""Where the tests' PostgreSQL comes from: PGQUEUE_TEST_DSN, else a container where Docker answers, else embedded.

PGQUEUE_TEST_PG chooses the version: 18 (default) or 16 from the wheel, 15 (or any other) from /usr/lib/postgresql. The
data lies in a temporary directory and goes with the server, even if the test run is killed. Used by conftest only.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from psycopg.conninfo import conninfo_to_dict

from pgqueue.config import normalize
from pgqueue.database import embedded

VERSION = os.environ.get("PGQUEUE_TEST_PG", "18")

# A copy of the migrated template is 650 files: 10 to 30 ms in memory, 110 to 490 ms on this kind of disk (measured).
MEMORY = Path("/dev/shm")
MEMORY_NEEDED = 4 << 30  # bytes free

# Many workers at once, two-phase commit, nothing worth a flush: the data does not outlive the run.
SETTINGS = {
    "max_connections": "500",
    "max_prepared_transactions": "10",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "log_line_prefix": "%m [%p] %a ",
}


@dataclass(frozen=True, slots=True)
class Server:
    """A PostgreSQL the tests may fill; `stop`, `start`, `restart` are for tests that have it to themselves."""

    dsn: Callable[[str], str]
    end: Callable[[], None]
    cluster: embedded.Cluster | None = None

    @property
    def copy_strategy(self) -> str:
        """How CREATE DATABASE copies: files where nothing is flushed (11 against 17 ms), else through the WAL."""
        return "wal_log" if self.cluster is None else "file_copy"

    @property
    def bin_path(self) -> Path:
        """Where its psql and pg_dump may be."""
        return self._own().bin_path

    def stop(self, mode: str = "fast") -> None:
        """Stop it, `immediate` for a crash; connections of the tests die."""
        self._own().stop(mode)

    def start(self) -> None:
        self._own().start()

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def _own(self) -> embedded.Cluster:
        if self.cluster is None:
            raise RuntimeError("this server is not ours to stop: use the fixture own_server")
        return self.cluster


def shared_server() -> Server:
    """The server of the whole run."""
    dsn = os.environ.get("PGQUEUE_TEST_DSN")
    if dsn:
        return Server(lambda database: url(dsn, database), lambda: None)
    return container() or embedded_server()


def embedded_server(**settings: str) -> Server:
    """A fresh server of its own in a temporary directory (0.5 s), with more `settings` than the usual."""
    directory = tempfile.mkdtemp(prefix="pgqueue-test-", dir=memory())
    started = embedded.start(directory, bin_path=binaries(), settings=SETTINGS | settings, keep=False)
    return Server(started.cluster.dsn, started.stop, started.cluster)


def container() -> Server | None:
    """A container of the official image, if a Docker engine answers at its socket within a second."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not host.startswith("unix://") or not _answers(host.removeprefix("unix://")):
        return None
    from testcontainers.community.postgres import PostgresContainer

    settings = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items() if " " not in value)
    postgres = PostgresContainer(f"postgres:{VERSION}", username="postgres", password="postgres", driver=None)
    postgres.with_command(f"postgres {settings}").start()
    address = f"{postgres.get_container_host_ip()}:{postgres.get_exposed_port(5432)}"
    return Server(lambda name: f"postgresql://postgres:postgres@{address}/{quote(name, safe='')}", postgres.stop)


def url(dsn: str, database: str) -> str:
    """`dsn`, for another database, as a URL that every driver reads."""
    values = {name: str(value) for name, value in conninfo_to_dict(normalize(dsn)).items() if value is not None}
    user, password = quote(values.pop("user", ""), safe=""), quote(values.pop("password", ""), safe="")
    rest = urlencode({name: value for name, value in values.items() if name != "dbname"}, quote_via=quote, safe="/,:")
    return f"postgresql://{user}{password and f':{password}'}@/{quote(database, safe='')}?{rest}"


def binaries() -> Path:
    """The server programs of the version asked for: the wheel's 16 and 18, the others where Debian puts them."""
    if VERSION in {"16", "18"}:
        return embedded.wheel_binaries(int(VERSION))
    found = Path("/usr/lib/postgresql") / VERSION / "bin"
    if not (found / "postgres").exists():
        have = sorted(glob.glob("/usr/lib/postgresql/*/bin"))
        raise RuntimeError(f"PGQUEUE_TEST_PG={VERSION}: the wheel has 16 and 18, this machine {have}")
    return found


def memory() -> Path | None:
    """Where files live in memory, if there is room for a test run."""
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_NEEDED else None


@contextmanager
def server_home() -> Iterator[Path]:
    """A directory where a command of the test may start its own server; its path is short enough for a socket.

    Not `tmp_path`: the server's account must pass each directory above. pytest keeps other accounts out of
    /tmp/pytest-of-root, and each run of pytest that begins does so again, also while this test uses it.
    """
    with tempfile.TemporaryDirectory(prefix="pgqueue-test-", dir=memory()) as directory:
        home = Path(directory)
        home.chmod(0o755)
        yield home


def _answers(path: str) -> bool:
    """Whether an engine listens there; a missing, forbidden or dead socket is a plain no."""
    with socket.socket(socket.AF_UNIX) as engine:
        engine.settimeout(1)
        try:
            engine.connect(path)
            engine.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b"200 OK" in engine.recv(64)
        except OSError:
            return False
