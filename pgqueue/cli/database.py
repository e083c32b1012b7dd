"""The connection of a command: opened once, checked, described without its password."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pgqueue.config import EMBEDDED, Config, config
from pgqueue.database.conninfo import parts_of

if TYPE_CHECKING:
    import psycopg
    from psycopg.pq import Ping

    from pgqueue.database.grants import Needs

CONNECT_SECONDS = 10


@contextmanager
def connected(command: str, *, check: bool = True, needs: Needs = "operate") -> Iterator[psycopg.Connection[Any]]:
    """A connection in autocommit mode to the configured database. With `check` the schema must fit.

    If the role lacks a right, the error names the rights that the command `needs`.
    """
    import psycopg

    from pgqueue.database import primary

    settings = config()
    how: dict[str, Any] = {"autocommit": True, "client_encoding": "utf8"}
    with primary.connect(psycopg.Connection, conninfo(settings), application_name=f"pgqueue {command}", **how) as conn:
        # Behind a transaction pooler a prepared statement may be sent to another session, which does not have it.
        conn.prepare_threshold = None
        try:
            if check:
                from pgqueue.database import migrations

                migrations.require(conn, settings.schema, needs=needs)
            yield conn
        except psycopg.errors.InsufficientPrivilege:
            from pgqueue.database.grants import needing  # only here: probes call `pgqueue health` often

            with needing(conn, needs):
                raise
        except psycopg.errors.ReadOnlySqlTransaction as error:
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


def conninfo(settings: Config) -> str:
    """The DSN for libpq. A connect gives up after 10 s unless the DSN says otherwise. `embedded:` starts its server."""
    from psycopg.conninfo import make_conninfo

    dsn = settings.require_dsn()
    if dsn == EMBEDDED:
        from pgqueue.database import embedded

        dsn = embedded.resolve(dsn)
    parts = parts_of(dsn)
    patience = {} if "PGCONNECT_TIMEOUT" in os.environ else {"connect_timeout": CONNECT_SECONDS}
    return make_conninfo("", **(patience | parts))


def server_state() -> Ping:
    """Whether the configured server takes connections: `REJECT` while it is starting up, as in recovery."""
    from psycopg.pq import PGconn, Ping

    return Ping(PGconn.ping(conninfo(config()).encode()))


def place(conn: psycopg.Connection[Any]) -> str:
    """The target of a connection, as host:port/database."""
    return f"{conn.info.host}:{conn.info.port}/{conn.info.dbname}"
