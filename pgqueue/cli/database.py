"""The connection of a command: opened once, checked, described without its password."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pgqueue.config import EMBEDDED, Config, config
from pgqueue.database.conninfo import connect_timeout, parts_of

if TYPE_CHECKING:
    import psycopg
    from psycopg.pq import Ping

    from pgqueue.database.grants import Needs

PROXY_SECONDS = 2.0
"""A proxy that knows no server closes a connection within this time."""
SSL_REQUEST = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"
"""What a client asks first; every PostgreSQL, and every pooler, answers it with one byte."""
ENCRYPTION, CLOSED = "encryption", "closed"
ASK_SECONDS = 10.0
"""A connection that a pooler has taken, and that gets no answer for so long, has no server."""
POOLER_WAITS = ("server_login_retry", "client_login_timeout", "query_wait_timeout")
"""The settings that PgBouncer names when it has no server for a client."""


@contextmanager
def connected(
    command: str, *, check: bool = True, needs: Needs = "operate", patience: float | None = None
) -> Iterator[psycopg.Connection[Any]]:
    """A connection in autocommit mode to the configured database. With `check` the schema must fit.

    If the role lacks a right, the error names the rights that the command `needs`. If the look at the schema takes
    longer than `patience`, the connection is given up, and Silent is raised.
    """
    import psycopg

    from pgqueue.database import primary

    settings = config()
    dsn = address(settings)
    how = connect_timeout(dsn) | {
        "autocommit": True,
        "client_encoding": "utf8",
        "application_name": f"pgqueue {command}",
    }
    with primary.connect(psycopg.Connection, dsn, **how) as conn:
        # Behind a transaction pooler a prepared statement may be sent to another session, which does not have it.
        conn.prepare_threshold = None
        try:
            if check:
                from pgqueue.database import migrations

                with nullcontext() if patience is None else _answered_within(patience, conn):
                    migrations.require(conn, settings.schema, needs=needs)
            yield conn
        except psycopg.errors.InsufficientPrivilege:
            from pgqueue.database.grants import needing  # only here: probes call `pgqueue health` often

            with needing(conn, needs):
                raise
        except psycopg.errors.ReadOnlySqlTransaction as error:
            if error.diag.sqlstate is not None:  # else no server has said it: a worker that starts waits
                primary.refuse_standby(conn, error)
            raise


@contextmanager
def reading(command: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection in one transaction that only reads. Each statement may take 30 s."""
    with connected(command, needs="read") as conn, conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ ONLY")
        # On an empty database the planner's price of a status is above jit_above_cost: compiling would take most time.
        conn.execute("SELECT set_config('statement_timeout', '30s', true), set_config('jit', 'off', true)")
        # What row level security would hide is refused: it would look as if it were not there.
        conn.execute("SET LOCAL row_security = off")
        yield conn


def clock(conn: psycopg.Connection[Any]) -> datetime:
    """The server's time: how long ago a row was written is told by the clock that wrote it, not by this machine's."""
    now: datetime
    [[now]] = conn.execute("SELECT clock_timestamp()")
    return now


def address(settings: Config) -> str:
    """The DSN for libpq. `embedded:` starts its server."""
    from psycopg.conninfo import make_conninfo

    dsn = settings.require_dsn()
    if dsn == EMBEDDED:
        from pgqueue.database import embedded

        dsn = embedded.resolve(dsn)
    return make_conninfo("", **parts_of(dsn))


def server_state() -> Ping:
    """Whether the configured server takes connections: `REJECT` while it is starting up, as in recovery."""
    from psycopg.pq import PGconn, Ping

    return Ping(PGconn.ping(_patient(address(config())).encode()))


def between_primaries() -> bool:
    """Whether the address may lead to a primary soon: something answers there, and nothing that can be written.

    1. A standby answers, though the DSN wants a server that can be written.
    2. A proxy takes the connection and closes it without a word, as it does while it knows no server.
    3. A pooler takes the connection, and has no server for it: it lets it wait, or says so.
    """
    import psycopg
    from psycopg.conninfo import make_conninfo

    dsn = _patient(address(config()))
    try:
        conn = psycopg.connect(make_conninfo(dsn, target_session_attrs="any"), autocommit=True)
    except psycopg.OperationalError as error:
        answers = {_first_word(host, port) for host, port in _places(dsn)}
        return CLOSED in answers or (ENCRYPTION in answers and _has_no_server(error))
    with conn:
        try:
            with _answered_within(ASK_SECONDS, conn):
                return conn.execute("SHOW transaction_read_only").fetchone() == ("on",)
        except psycopg.OperationalError:  # a session without a server
            return True


def _patient(dsn: str) -> str:
    """The DSN, with the time that a connection may take: for what has no other options."""
    from psycopg.conninfo import make_conninfo

    return make_conninfo(dsn, **connect_timeout(dsn))


def _has_no_server(error: psycopg.OperationalError) -> bool:
    """Whether a pooler lets a new connection wait, or says that it reaches no server."""
    from psycopg.errors import ConnectionTimeout

    return isinstance(error, ConnectionTimeout) or any(said in str(error) for said in POOLER_WAITS)


@contextmanager
def _answered_within(seconds: float, conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Break the connection if the block lasts longer than so many seconds, and raise Silent."""
    import psycopg

    from pgqueue.database import alarms
    from pgqueue.database.dead_link import hang_up
    from pgqueue.database.sessions import Silent

    over = False

    def give_up() -> None:
        nonlocal over
        over = True
        hang_up(conn)

    try:
        with alarms.after(seconds, give_up):
            yield
    except psycopg.OperationalError as error:
        if over:
            raise Silent(f"no answer within {seconds:g} s") from error
        raise


def _places(dsn: str) -> list[tuple[str, int]]:
    """The hosts and ports of an address, without sockets. libpq reads services and the environment, so it is asked: a
    connection knows them as soon as it begins."""
    from psycopg.pq import PGconn

    conn = PGconn.connect_start(dsn.encode())
    try:
        said = {each.keyword: (each.val or b"").decode() for each in conn.info}
    finally:
        conn.finish()
    hosts, ports = (said[b"hostaddr"] or said[b"host"]).split(","), said[b"port"].split(",")
    if len(ports) != len(hosts):
        ports = ports[:1] * len(hosts)
    places = [(host, int(port or 5432)) for host, port in zip(hosts, ports, strict=True)]
    return [(host, port) for host, port in places if host and not host.startswith(("/", "@"))]


def _first_word(host: str, port: int) -> str | None:
    """How a client is answered there: `ENCRYPTION`, `CLOSED` without a word, or None: nothing answers."""
    import socket

    try:
        conn = socket.create_connection((host, port), PROXY_SECONDS)
    except OSError:
        return None
    with conn:
        try:
            conn.sendall(SSL_REQUEST)
            return {b"N": ENCRYPTION, b"S": ENCRYPTION, b"": CLOSED}.get(conn.recv(1))
        except ConnectionError:
            return CLOSED
        except OSError:
            return None


def place(conn: psycopg.Connection[Any]) -> str:
    """The target of a connection, as host:port/database."""
    return f"{conn.info.host}:{conn.info.port}/{conn.info.dbname}"
