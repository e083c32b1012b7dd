"""The server that can be written: it is found behind a standby, and all connections leave the one before together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from servers import Server
from standby import Pair, frozen_second, pair
from workers import until

from pgqueue.database import migrations, primary
from pgqueue.database.primary import LEFT_SECONDS, NAMED_MOST, SEARCH_MOST, SEARCH_SECONDS, Left, Primary
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


@pytest.mark.promise("F469")
def test_the_search_of_all_hosts_has_an_end_that_leaves_each_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: an end that a few frozen hosts use up. Then the one behind them is never found."""

    def most(dsn: str, **options: Any) -> float:
        return primary._search_seconds(dsn, primary._searching(dsn, options))

    assert most("host=db.example") == most("host=a,b") == SEARCH_MOST > 2 * SEARCH_SECONDS
    assert most("host=a,b,c,d,e") == 5 * SEARCH_SECONDS + 1
    assert most("host=a,b connect_timeout=20", autocommit=True) == 41
    assert most("host=a,b connect_timeout=20", connect_timeout=5) == 11
    assert most("host=a connect_timeout=0") == NAMED_MOST + 1
    monkeypatch.setenv("PGHOST", "a,b,c,d")
    assert most("dbname=x") == 4 * SEARCH_SECONDS + 1


@pytest.mark.promise("F469")
@pytest.mark.parametrize("late", ["the addresses", "the name"])
async def test_a_name_that_leads_nowhere_for_long_leaves_the_first_connection(
    dsn: str, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """It has forty addresses that say nothing, or takes long to be resolved. Naive: each of them is waited for."""
    monkeypatch.setattr(primary, "SEARCH_MOST", 1.0)
    monkeypatch.setattr(primary, "SEARCH_SECONDS", 2)
    loop = asyncio.get_running_loop()
    real, looked = loop.getaddrinfo, asyncio.Event()

    async def many(host: str, *more: Any, **named: Any) -> Any:
        if host != "many.example":
            return await real(host, *more, **named)
        if looked.is_set():  # in the search
            await asyncio.sleep(80 if late == "the name" else 0)
        looked.set()
        return [(None, None, None, "", ("127.0.0.1", 0))] * 40

    monkeypatch.setattr(loop, "getaddrinfo", many)
    with frozen_second(dsn) as address:
        began = monotonic()
        async with await primary.aconnect(psycopg.AsyncConnection, renamed(address), autocommit=True) as conn:
            assert looked.is_set() and await (await conn.execute("SHOW transaction_read_only")).fetchone() == ("on",)
        assert monotonic() - began < 60
    [search] = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
    search.cancel()  # the test need not wait for its end


def renamed(address: str) -> str:
    """The address with another name for its second host."""
    hosts = str(conninfo_to_dict(address)["host"]).split(",")
    return make_conninfo(address, host=f"{hosts[0]},many.example")


class Late:
    """As a class of connections: the first one is to a standby, the second one comes when it may."""

    made: ClassVar[list[Any]] = []
    searches = False
    may = asyncio.Event()

    def __init__(self) -> None:
        self.finished = self.closed = False
        self.pgconn = self

    def finish(self) -> None:
        self.finished = True

    async def close(self) -> None:
        self.closed = True

    async def execute(self, *_: Any, **__: Any) -> Any:
        return self

    async def fetchone(self) -> tuple[str]:
        return ("on",)

    @classmethod
    async def connect(cls, *_: Any, **__: Any) -> Any:
        if cls.made:
            cls.searches = True
            await cls.may.wait()
        cls.made.append(cls())
        return cls.made[-1]


@pytest.mark.promise("F469")
@pytest.mark.parametrize("ends", ["given up", "cancelled"])
async def test_a_search_that_comes_to_its_end_late_leaves_no_connection(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the search is cancelled half-way, and its socket stays open; or what it finds is nobody's."""
    monkeypatch.setattr(primary, "_search_seconds", lambda *_: 0.01 if ends == "given up" else 60.0)
    monkeypatch.setattr(Late, "made", [])
    monkeypatch.setattr(Late, "may", asyncio.Event())
    monkeypatch.setattr(Late, "searches", False)
    kind: Any = Late
    asked = asyncio.create_task(primary.aconnect(kind, "host=a,b"))
    if ends == "cancelled":
        await until(lambda: Late.made and Late.searches)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert Late.made[0].closed
    else:
        assert await asked is Late.made[0] and not Late.made[0].closed
    Late.may.set()
    await until(lambda: len(Late.made) == 2 and Late.made[1].finished)


@pytest.mark.promise("F337")
def test_if_none_can_be_written_the_connection_to_the_standby_stays(both: Pair) -> None:
    both.caught_up()
    both.crash()
    with primary.connect(psycopg.Connection, standby_first(both), autocommit=True) as conn:
        assert conn.execute("SHOW transaction_read_only").fetchone() == ("on",)
