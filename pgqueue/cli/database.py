"""The connection of a command: opened once, checked, described without its password."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pgqueue.config import EMBEDDED, Config, config, safe
from pgqueue.errors import InvalidOption

if TYPE_CHECKING:
    import psycopg

CONNECT_SECONDS = 10


@contextmanager
def connected(command: str, *, check: bool = True) -> Iterator[psycopg.Connection[Any]]:
    """A connection in autocommit mode to the configured database; `check` refuses a schema that does not fit."""
    import psycopg

    settings = config()
    with psycopg.connect(conninfo(settings), autocommit=True, application_name=f"pgqueue {command}") as conn:
        # Behind a transaction pooler statements prepared by name may land on another session.
        conn.prepare_threshold = None
        if check:
            from pgqueue.database import migrations

            migrations.require(conn, settings.schema)
        yield conn


@contextmanager
def reading(command: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection in one transaction that only reads and may take 30 s, whatever state the tables are in."""
    with connected(command) as conn, conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ ONLY")
        # On an empty database the planner prices a status at twice jit_above_cost: compiling would be most of it.
        conn.execute("SELECT set_config('statement_timeout', '30s', true), set_config('jit', 'off', true)")
        yield conn


def conninfo(settings: Config) -> str:
    """The DSN as libpq wants it, giving up after 10 s unless it says otherwise. `embedded:` starts that server."""
    from psycopg.conninfo import make_conninfo

    dsn = settings.require_dsn()
    if dsn == EMBEDDED:
        from pgqueue.database import embedded

        dsn = embedded.resolve(dsn)
    parts = parts_of(dsn)
    patience = {} if "PGCONNECT_TIMEOUT" in os.environ else {"connect_timeout": CONNECT_SECONDS}
    return make_conninfo("", **(patience | parts))


def place(conn: psycopg.Connection[Any]) -> str:
    """Where a connection goes, as host:port/database."""
    return f"{conn.info.host}:{conn.info.port}/{conn.info.dbname}"


def parts_of(dsn: str) -> dict[str, Any]:
    """The parameters of a DSN; InvalidOption, without its password, if libpq cannot read it."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq's own message may quote the part it could not read, and that may be the password.
        raise InvalidOption(f"libpq cannot read the DSN {safe(dsn)!r}") from None
