"""What the fixtures promise to every other test."""

from __future__ import annotations

import json
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import psycopg
import pytest
import servers
from servers import Server

from pgqueue.database import migrations
from pgqueue.pytest_plugin import LINGER, Databases


def test_every_test_has_a_migrated_database_of_its_own(conn: psycopg.Connection, empty_dsn: str) -> None:
    assert migrations.require(conn, "pgqueue").pending == ()
    with psycopg.connect(empty_dsn) as other:
        assert other.info.dbname != conn.info.dbname
        assert other.execute("SELECT to_regnamespace('pgqueue')").fetchone() == (None,)


def test_databases_go_a_few_tests_later_and_all_in_the_end(server: Server) -> None:
    """At once, DROP DATABASE would wait 100 ms for the sessions that are ending."""
    databases = Databases(server.dsn("postgres"), server.copy_strategy)
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:

        def there() -> list[str]:
            pattern = f"{databases._prefix}_%"
            rows = conn.execute("SELECT datname FROM pg_database WHERE datname LIKE %s ORDER BY oid", [pattern])
            return [name for (name,) in rows.fetchall()]

        made = []
        for _ in range(LINGER + 3):
            with databases.copy("template0") as dsn:
                made.append(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
                assert there() == made[-LINGER - 1 :]
        databases.close()
        assert there() == []


@pytest.mark.parametrize("attempt", [1, 2])
def test_what_one_test_leaves_the_next_does_not_see(conn: psycopg.Connection, attempt: int) -> None:
    assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)
    conn.execute("INSERT INTO pgqueue.job (task) VALUES (%s::text)", [f"left.by_{attempt}"])
    conn.commit()


async def test_the_async_connection_is_to_the_same_database(aconn: psycopg.AsyncConnection, dsn: str) -> None:
    assert aconn.info.dbname == psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    assert not aconn.autocommit


@pytest.mark.second
def test_an_own_server_can_stop_and_crash_and_come_back(own_server: Server) -> None:
    with psycopg.connect(own_server.dsn("postgres"), autocommit=True) as conn:
        conn.execute("CREATE TABLE kept (n int)")
    for mode in ("fast", "immediate"):
        own_server.stop(mode)
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(own_server.dsn("postgres"))
        own_server.start()
        with psycopg.connect(own_server.dsn("postgres")) as conn:
            assert conn.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_no_other_run_of_pytest_closes_the_way_to_a_servers_home() -> None:
    """Naive is `tmp_path`: pytest makes /tmp/pytest-of-root private whenever a run begins."""
    with servers.server_home() as home:
        assert home.parent in {servers.MEMORY, Path(tempfile.gettempdir())}
        assert all(above.stat().st_mode & stat.S_IXOTH for above in [home, *home.parents])


def test_two_phase_commit_is_possible(conn: psycopg.Connection) -> None:
    assert conn.execute("SELECT current_setting('max_prepared_transactions')::int >= 10").fetchone() == (True,)


@pytest.mark.parametrize("engine", ["missing", "dead", "silent", "remote"])
def test_without_docker_there_is_soon_no_container(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1" if engine == "remote" else f"unix://{path}")
    began = time.monotonic()
    with socket.socket(socket.AF_UNIX) as listener:
        if engine in {"dead", "silent"}:
            listener.bind(str(path))
        if engine == "silent":
            listener.listen()
        assert servers.container() is None
    assert time.monotonic() - began < 15  # it asks for a second, and no more


class Engine(BaseHTTPRequestHandler):
    """A Docker engine that is there and has room for nobody."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer(200, {"ApiVersion": "1.44"})

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(500, {"message": "no room"})

    def _answer(self, status: int, answer: dict[str, str]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: there is no address to name."""


@contextmanager
def engine(path: Path) -> Iterator[list[dict[str, Any]]]:
    """A Docker engine at this socket; the containers it is asked for."""
    asked: list[dict[str, Any]] = []
    with ThreadingUnixStreamServer(str(path), type("Asked", (Engine,), {"asked": asked})) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join()


def test_where_docker_answers_the_official_image_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is a Docker or not, the library is one whose names and arguments we use."""
    from docker.errors import APIError
    from testcontainers.core.config import testcontainers_config

    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    monkeypatch.setattr(testcontainers_config, "ryuk_disabled", True)  # a container beside, that cleans up
    with engine(path) as asked, pytest.raises(APIError, match="no room"):
        servers.container()
    [container] = asked
    assert container["Image"] == f"postgres:{servers.VERSION}"
    assert container["Cmd"][:3] == ["postgres", "-c", "max_connections=500"]
    assert {"POSTGRES_USER=postgres", "POSTGRES_PASSWORD=postgres"} <= set(container["Env"])


def test_a_version_nobody_has_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "VERSION", "9")
    with pytest.raises(RuntimeError, match="PGQUEUE_TEST_PG=9: the wheel has 16 and 18, this machine"):
        servers.binaries()
