"""The server that can be written: it is found behind a standby, and all connections leave the one before together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, cast

import psycopg
import pytest
from servers import Server
from standby import Pair, frozen_second, pair

from pgqueue.database import migrations, primary
from pgqueue.database.primary import LEFT_SECONDS, SEARCH_SECONDS, Left, Primary
from pgqueue.steady_clock import monotonic
from pgqueue.worker.worker import Worker


class Ended:
    """As a connection: its socket, of which the test has the other end."""

    def __init__(self, host: str = "a") -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.info = type("Info", (), {"host": host, "port": 5432})

    def fileno(self) -> int:
        return self.theirs.fileno()

    def broken(self) -> bool:
        try:
            return self.ours.recv(1) == b""
        except BlockingIOError:
            return False


class Seen:
    """A `Primary` with a clock, and connections that are kept alive."""

    def __init__(self) -> None:
        self.now = 100.0
        self.primary = Primary(lambda: self.now)
        self.kept: list[Ended] = []

    def met(self, server: str, host: str = "a") -> Ended:
        conn = Ended(host)
        self.kept.append(conn)
        self.primary.met(cast(Any, conn), server)
        return conn

    def close(self) -> None:
        for each in self.kept:
            each.ours.close()
            each.theirs.close()


@pytest.fixture
def seen() -> Iterator[Seen]:
    made = Seen()
    yield made
    made.close()


@pytest.mark.promise("F336")
def test_all_leave_a_server_when_one_has_met_another(seen: Seen) -> None:
    old = [seen.met("first"), seen.met("first")]
    heir = Ended()
    seen.kept.append(heir)
    seen.primary.succeed(cast(Any, old[0]), cast(Any, heir))
    new = seen.met("second", "b")
    assert [each.broken() for each in [*old, heir, new]] == [True, True, True, False]
    assert not seen.met("second", "b").broken() and not new.broken()
    assert seen.primary.address("host=a,b dbname=x") == "dbname=x host=b,a"


@pytest.mark.promise("F336")
def test_two_servers_that_can_both_be_written_do_not_take_turns(seen: Seen) -> None:
    """Naive: each connection to the one breaks all to the other, for ever."""
    seen.met("first")
    new = seen.met("second")
    with pytest.raises(Left):
        seen.met("first")
    assert not new.broken()
    seen.now += LEFT_SECONDS
    back = seen.met("first")
    assert new.broken() and not back.broken()


@pytest.mark.parametrize(
    ("dsn", "leads_on"),
    [
        ("host=a,b", True),
        ("host=db.example", True),
        ("host=/tmp,/run", True),
        ("host=/tmp", False),
        ("host=127.0.0.1", False),
        ("host=db hostaddr=10.0.0.1", False),
        ("host=a,b target_session_attrs=any", False),
        ("service=shop", True),
        ("service=shop host=/tmp", True),
        ("service=shop target_session_attrs=any", False),
        ("dbname=shop", False),
    ],
)
def test_where_an_address_leads(dsn: str, leads_on: bool) -> None:
    assert (primary.elsewhere(dsn) is not None) is leads_on


@pytest.mark.parametrize(
    ("variable", "said", "dsn", "leads_on"),
    [
        ("PGTARGETSESSIONATTRS", "any", "host=a,b", False),
        ("PGHOST", "a,b", "dbname=shop", True),
        ("PGHOST", "a,b", "host=/tmp", False),
        ("PGHOSTADDR", "10.0.0.1,10.0.0.2", "host=a,b", True),
        ("PGHOSTADDR", "10.0.0.1,10.0.0.2", "dbname=shop", True),
        ("PGHOSTADDR", "10.0.0.1", "host=db.example", False),
        ("PGSERVICE", "shop", "dbname=shop", True),
        ("PGSERVICE", "shop", "host=/tmp", True),
    ],
)
def test_where_an_address_leads_by_the_environment(
    variable: str, said: str, dsn: str, leads_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, said)
    assert (primary.elsewhere(dsn) is not None) is leads_on


def test_only_one_socket_of_this_machine_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    assert primary.is_local("host=/tmp")
    assert not any(map(primary.is_local, ["host=/tmp,/run", "host=/tmp service=shop", "host=db hostaddr=10.0.0.1"]))
    monkeypatch.setenv("PGHOSTADDR", "10.0.0.1")
    assert not primary.is_local("host=/tmp")


def test_the_host_that_was_connected_with_stands_first_with_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: the ports of the environment stay in their order, and each belongs to another host."""
    dsn = "host=a,b dbname=x"
    assert primary.first(dsn, "b", 5432) == "dbname=x host=b,a"
    monkeypatch.setenv("PGPORT", "5433")
    assert primary.first(dsn, "b", 5433) == "dbname=x host=b,a"
    monkeypatch.setenv("PGPORT", "5432,5433")
    assert primary.first(dsn, "b", 5433) == "dbname=x host=b,a port=5433,5432"
    assert primary.first(f"{dsn} service=shop", "b", 5433) == f"{dsn} service=shop"
    monkeypatch.setenv("PGHOSTADDR", "10.0.0.1,10.0.0.2")
    assert primary.first(dsn, "b", 5433) == dsn


@pytest.fixture
def both(own_server: Server) -> Iterator[Pair]:
    assert own_server.cluster is not None
    with pair(own_server.cluster, synchronous=False) as found:
        yield found


def standby_first(both: Pair) -> str:
    hosts = ",".join(str(cluster.sockets) for cluster in (both.standby, both.primary))
    return f"postgresql://postgres@/postgres?host={hosts}"


@pytest.mark.promise("F337")
async def test_a_standby_that_stands_first_is_passed_over(both: Pair) -> None:
    """Naive: libpq takes the first that answers, and a worker takes no job as long as that is a standby."""
    dsn, options = standby_first(both), dict[str, Any](autocommit=True)
    migrations.migrate(dsn)
    both.caught_up()
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
    with primary.connect(psycopg.Connection, dsn, **options) as conn:
        assert conn.execute("SELECT pg_is_in_recovery()").fetchone() == (False,)
    async with await primary.aconnect(psycopg.AsyncConnection, dsn, **options) as aconn:
        assert await (await aconn.execute("SELECT pg_is_in_recovery()")).fetchone() == (False,)
    with primary.connect(psycopg.Connection, f"{dsn}&target_session_attrs=any", **options) as conn:
        assert conn.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
    async with asyncio.timeout(30), Worker(dsn=dsn, tasks=[]) as worker:
        assert worker.worker_id > 0


@pytest.mark.promise("F337")
async def test_a_frozen_second_server_leaves_the_connection_to_the_first(dsn: str) -> None:
    """Naive: each attempt waits for two minutes. The limit is wide, because the machine may be busy."""
    began = monotonic()
    with frozen_second(dsn) as address:
        async with asyncio.timeout(60):
            async with await primary.aconnect(psycopg.AsyncConnection, address, autocommit=True) as aconn:
                assert await (await aconn.execute("SHOW transaction_read_only")).fetchone() == ("on",)
        with primary.connect(psycopg.Connection, address, autocommit=True) as conn:
            assert conn.execute("SHOW transaction_read_only").fetchone() == ("on",)
    assert monotonic() - began < 60


@pytest.mark.promise("F337")
def test_the_search_obeys_the_patience_of_the_address_and_the_shorter_one_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dsn = "host=a,b"
    assert primary._searching(dsn, {"autocommit": True}) == {"autocommit": True, "connect_timeout": SEARCH_SECONDS}
    assert primary._searching(dsn, {"connect_timeout": 10})["connect_timeout"] == SEARCH_SECONDS
    assert primary._searching(dsn, {"connect_timeout": 2})["connect_timeout"] == 2
    assert primary._searching(f"{dsn} connect_timeout=9", {}) == {}
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "9")
    assert primary._searching(dsn, {}) == {}


@pytest.mark.promise("F337")
def test_if_none_can_be_written_the_connection_to_the_standby_stays(both: Pair) -> None:
    both.caught_up()
    both.crash()
    with primary.connect(psycopg.Connection, standby_first(both), autocommit=True) as conn:
        assert conn.execute("SHOW transaction_read_only").fetchone() == ("on",)
