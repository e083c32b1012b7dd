"""The server that can be written, of several that an address leads to: found, preferred, and left for another one.

Used by whatever writes: the sessions of workers and relays, the pools of handlers, the commands, the dashboard. Waits
for a result use it, too. An address leads to several servers if it names several hosts, or a name with several
addresses, or a proxy that follows the primary. It may, if only libpq knows its hosts: it names a service. What it does
not name, the environment of libpq does.

How a connection finds the primary (`connect`):

1. It is opened as the DSN says. Without `target_session_attrs` libpq takes the first server that answers.
2. The server is asked whether it only reads. A pooler may report what was true of another server.
3. If it does, all hosts and addresses are tried for one that can be written.
4. If there is none, the first connection is kept. Its user finds it read only, says so, and tries again later.
5. A frozen server takes a connection and says nothing. So each server has `SEARCH_SECONDS` in step 3, unless the DSN or
   the environment says how long a connection may take. Naive: whatever waits for step 3 waits for two minutes.
6. A name may have many addresses, and resolving it may take long. So on a loop step 3 has an end, too: `SEARCH_MOST`,
   or what the hosts may take that are named. Less would never come to the last one.

How a primary is left that does not answer (`Primary`). Naive: each session waits until its own message is overdue, so
those of a frozen server wait for 45 s, long after a standby was promoted.

1. While a message is overdue, a new connection looks which server answers there now (`sessions.look`).
2. A server is known by the time it began. A promoted standby is another one, and so is a server after a restart.
3. When any connection of this worker comes to another server, all that lead to the one before are broken. What waits
   on them gets an error at once, as if the server had died.
4. A server that was left is not used again for a while. So two servers that both can be written do not take turns.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection, Connection, OperationalError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue.database import alarms
from pgqueue.database.conninfo import connect_timeout_at_most, names
from pgqueue.database.dead_link import hang_up, opened
from pgqueue.errors import Error
from pgqueue.steady_clock import monotonic

After = Callable[[float, Callable[[], object]], AbstractContextManager[None]]
AnyConnection = Connection[Any] | AsyncConnection[Any]
C = TypeVar("C", bound=Connection[Any])
A = TypeVar("A", bound=AsyncConnection[Any])

ONLY_READS = "SHOW transaction_read_only"
ASK_SECONDS = 10.0
"""Without an answer for so long the new connection is given up."""
SEARCH_SECONDS, SEARCH_MOST = 3, 10.0
"""So long each server may take to be connected with, while one is looked for that can be written; and all together."""
NAMED_MOST = 130
"""psycopg takes as much for a DSN that says that a connection may take for ever."""
LEFT_SECONDS = 60.0
"""So long a server that was left for another one is not used again."""
_VARIABLES = {"host": "PGHOST", "hostaddr": "PGHOSTADDR", "port": "PGPORT", "load_balance_hosts": "PGLOADBALANCEHOSTS"}


class Left(OperationalError):
    """The connection leads to a server that was left for another one. Nothing was done on it."""


def connect(
    kind: type[C], dsn: str, *, patience: float = ASK_SECONDS, after: After = alarms.after, **options: Any
) -> C:
    """Open a connection of this kind in autocommit mode, to a server that can be written if there is one.

    Without an answer within `patience` the new connection is given up; `after` calls what does that.
    """
    conn = kind.connect(dsn, **options)
    other = elsewhere(dsn)
    if other is None:
        return conn
    try:
        with after(patience, partial(hang_up, conn)):
            [only_reads] = conn.execute(ONLY_READS, prepare=False).fetchone() or ("off",)
    except BaseException:
        conn.close()
        raise
    with suppress(OperationalError):
        if only_reads == "on":
            primary = kind.connect(other, **_searching(dsn, options))
            conn.close()
            return primary
    return conn


async def aconnect(kind: type[A], dsn: str, *, patience: float = ASK_SECONDS, **options: Any) -> A:
    """`connect` on the loop."""
    conn = await kind.connect(dsn, **options)
    other = elsewhere(dsn)
    if other is None:
        return conn
    try:
        timer = asyncio.get_running_loop().call_later(patience, hang_up, conn)
        try:
            [only_reads] = await (await conn.execute(ONLY_READS, prepare=False)).fetchone() or ("off",)
        finally:
            timer.cancel()
        if only_reads == "on":
            how = _searching(dsn, options)
            with suppress(OperationalError):
                primary = await opened(kind.connect(other, **how), _search_seconds(other, how))
                await conn.close()
                return primary
    except BaseException:
        await conn.close()
        raise
    return conn


def elsewhere(dsn: str) -> str | None:
    """The DSN for a server that can be written. None if the DSN leads to one place, or says itself which it wants.

    >>> elsewhere("host=a,b dbname=shop")
    'dbname=shop host=a,b target_session_attrs=read-write'
    >>> elsewhere("host=10.0.0.7 dbname=shop")
    """
    if names(dsn, "target_session_attrs") or _one_place(dsn):
        return None
    return make_conninfo(dsn, target_session_attrs="read-write")


def refuse_standby(conn: Connection[Any], cause: BaseException | None = None) -> None:
    """Raise Error if this connection leads to a standby. `cause` is what could not be written there."""
    if conn.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
        raise Error(f"{conn.info.host} is a standby and cannot be written; name the primary") from cause


def is_local(dsn: str) -> bool:
    """Whether the DSN names one socket of this machine: whatever happens, it leads to the same server."""
    host = _hosts(dsn)
    return host is not None and "," not in host and host.startswith(("/", "@"))


def named_hosts(dsn: str) -> int:
    """How many hosts the DSN or the environment names. Only libpq knows those of a service: it counts as one.

    >>> named_hosts("host=a,b,c dbname=shop"), named_hosts("dbname=shop")
    (3, 1)
    """
    return (_hosts(dsn) or "").count(",") + 1


def first(dsn: str, host: str, port: int) -> str:
    """The DSN with this host before the others that it names.

    >>> first("host=a,b port=5432,5433 dbname=shop", "b", 5433)
    'dbname=shop host=b,a port=5433,5432'
    """
    parts = conninfo_to_dict(dsn)
    hosts, ports = str(parts.get("host", "")).split(","), _said(parts, "port").split(",")
    random = _said(parts, "load_balance_hosts") == "random"
    if len(hosts) == 1 or random or names(dsn, "hostaddr") or names(dsn, "service"):
        return dsn
    if len(ports) == 1:
        return make_conninfo(dsn, host=",".join(sorted(hosts, key=lambda each: each != host)))
    places = sorted(zip(hosts, ports, strict=True), key=lambda each: each != (host, str(port)))
    return make_conninfo(dsn, host=",".join(name for name, _ in places), port=",".join(number for _, number in places))


class Primary:
    """The server that the connections of one worker lead to. From any thread; `clock` is for tests."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.looking = threading.Lock()
        """Held by the one that looks which server answers."""
        self._clock = clock
        self._lock = threading.Lock()
        self._server: str | None = None
        self._place: tuple[str, int] | None = None
        self._at: WeakKeyDictionary[AnyConnection, str] = WeakKeyDictionary()
        self._left: dict[str, float] = {}

    def address(self, dsn: str) -> str:
        """The DSN, with the host first that was connected with last: another one may not answer for long."""
        return dsn if self._place is None else first(dsn, *self._place)

    def met(self, conn: AnyConnection, server: str) -> None:
        """This connection leads to the server of this name, which can be written. Breaks all that lead to another one.

        Raises Left if this server was left for another one a short time ago.
        """
        with self._lock:
            now = self._clock()
            if now - self._left.get(server, -LEFT_SECONDS) < LEFT_SECONDS:
                raise Left("this server was left for another one that can be written")
            before, self._server, self._place = self._server, server, (conn.info.host, conn.info.port)
            self._at[conn] = server
            if before is None or before == server:
                return
            self._left = {name: at for name, at in self._left.items() if now - at < LEFT_SECONDS} | {before: now}
            old = [each for each, at in self._at.items() if at != server]
        for each in old:
            hang_up(each)

    def succeed(self, conn: AnyConnection, heir: AnyConnection) -> None:
        """The session of this connection goes on in another one."""
        with self._lock:
            if conn in self._at:
                self._at[heir] = self._at[conn]


def _searching(dsn: str, options: dict[str, Any]) -> dict[str, Any]:
    """These options, for the search for a server that can be written."""
    if names(dsn, "connect_timeout"):
        return options
    return options | {"connect_timeout": min(options.get("connect_timeout", SEARCH_SECONDS), SEARCH_SECONDS)}


def _search_seconds(dsn: str, options: dict[str, Any]) -> float:
    """So long the search may take in all. A second more than the hosts: what the last one says is to be heard."""
    limit = options if "connect_timeout" in options else connect_timeout_at_most(dsn, NAMED_MOST)
    return max(SEARCH_MOST, 1.0 + named_hosts(dsn) * float(limit.get("connect_timeout", NAMED_MOST)))


def _one_place(dsn: str) -> bool:
    host = _hosts(dsn)
    if host is None or "," in host:
        return False
    if host.startswith(("/", "@")):
        return True
    try:
        ip_address(host)
    except ValueError:
        return not host
    return True


def _hosts(dsn: str) -> str | None:
    """What is connected with; empty: the default socket. None: a service says it, which only libpq can read."""
    if names(dsn, "service"):
        return None
    parts = conninfo_to_dict(dsn)
    return _said(parts, "hostaddr") or _said(parts, "host")


def _said(parts: dict[str, Any], name: str) -> str:
    """This parameter of a DSN, or what the environment of libpq has for it."""
    return str(parts[name]) if name in parts else os.environ.get(_VARIABLES[name], "")
