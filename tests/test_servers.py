"""What the fixtures promise to every other test."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import psycopg
import pytest
import servers
from servers import Server

from pgqueue import migrations


def test_every_test_has_a_migrated_database_of_its_own(conn: psycopg.Connection, empty_dsn: str) -> None:
    assert migrations.require(conn, "pgqueue").pending == ()
    with psycopg.connect(empty_dsn) as other:
        assert other.info.dbname != conn.info.dbname
        assert other.execute("SELECT to_regnamespace('pgqueue')").fetchone() == (None,)


@pytest.mark.parametrize("attempt", [1, 2])
def test_what_one_test_leaves_the_next_does_not_see(conn: psycopg.Connection, attempt: int) -> None:
    assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)
    conn.execute("INSERT INTO pgqueue.job (task) VALUES (%s::text)", [f"left.by_{attempt}"])
    conn.commit()


async def test_the_async_connection_is_to_the_same_database(aconn: psycopg.AsyncConnection, dsn: str) -> None:
    assert aconn.info.dbname == psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    assert not aconn.autocommit


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


def test_a_version_nobody_has_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "VERSION", "9")
    with pytest.raises(RuntimeError, match="PGQUEUE_TEST_PG=9: the wheel has 16 and 18, this machine"):
        servers.binaries()
