"""PgBouncer itself, in transaction mode on loopback, in front of a server of the tests (Debian: `pgbouncer`)."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from workers import wait_until

from pgqueue.database.embedded import server_account

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
WHY = "pgbouncer is not installed: apt-get install pgbouncer"
needs_pgbouncer = pytest.mark.skipif(PROGRAM is None, reason=WHY)

SETTINGS = """\
[databases]
* = {target}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 500
"""


class PgBouncer:
    """`dsn` leads through it, to at most `size` sessions of the server for each database. `port` stays the same.

    `more` are lines of its settings.
    """

    def __init__(self, dsn: str, size: int, more: str = "") -> None:
        assert PROGRAM is not None, WHY
        self._ends = ExitStack()
        directory = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="pgqueue-bouncer-")))
        directory.chmod(0o755)  # as root it runs under the account of the embedded server
        self._file, self._log = directory / "pgbouncer.ini", directory / "log"
        server = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
        target = " ".join(f"{name}={server[name]}" for name in ("host", "port", "user", "password") if name in server)
        self._file.write_text(SETTINGS.format(target=target, port=(port := free_port()), size=size) + more)
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> PgBouncer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._ends.close()

    def start(self, *, is_alone: bool = False) -> None:
        """Start it; return when it answers. If it `is_alone`, without a server, it only accepts connections."""
        assert PROGRAM is not None
        user, group = server_account() or (None, None)  # it refuses to run as root, as PostgreSQL does
        with self._log.open("ab") as log:
            program = [PROGRAM, str(self._file)]
            self._process = subprocess.Popen(program, stdout=log, stderr=log, user=user, group=group)
        wait_until(self._accepts if is_alone else self._answers)

    def stop(self) -> None:
        """SIGTERM: it ends at once, with all connections of its clients."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None

    def written(self) -> str:
        return self._log.read_text()

    def _accepts(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", int(str(conninfo_to_dict(self.dsn)["port"]))), 1.0).close()
        except OSError:
            return False
        return True

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.written()
        try:
            psycopg.connect(self.dsn, prepare_threshold=None).close()
        except psycopg.OperationalError:
            return False
        return True


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
