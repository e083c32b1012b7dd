"""pgqueue's statements are read and written with adapters of its own, on whatever connection of psycopg they are sent.

Used by `drivers`, on the application's connections, and by the worker's transactions, on those of handlers. Adapters
make Python values of what the server sends, and the reverse. An application may change them for a connection
(`conn.adapters.register_loader`), or for all of psycopg. Naive: our statements are read with those. A step whose name
comes back as another text is not found, and runs twice.

1. A cursor reads and writes with the adapters it has. So a cursor of ours gets these before it sends anything.
2. They are psycopg's defaults, made anew: `psycopg.adapters` may have been changed before this module was imported.
3. Nothing is registered with them later. So all cursors of all threads share them.

The application's connection may have SQL_ASCII as its client encoding: then psycopg answers texts as bytes.
PGCLIENTENCODING says so, or a default of the database that an old application needs. Our databases are UTF-8, and
under SQL_ASCII the server converts nothing: it sends and takes UTF-8. Our own connections are opened with UTF-8.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cache
from typing import Any

TEXTS = ("text", "varchar", "bpchar", "name", '"char"')


class Utf8:
    """A loader of psycopg: the text of these bytes."""

    format = 0

    def __init__(self, oid: int, context: object = None) -> None:
        pass

    def load(self, data: Any) -> str:
        return bytes(data).decode()


def adapted(cursor: Any, sql: str) -> Any:
    """Give this cursor of psycopg pgqueue's adapters; the statement as it may send it. It will answer texts, whatever
    the client encoding is."""
    of_bytes = cursor.connection.pgconn.parameter_status(b"client_encoding") == b"SQL_ASCII"
    cursor._adapters = _adapters(of_bytes)
    return sql.encode() if of_bytes else sql


@cache
def _adapters(of_bytes: bool) -> Any:
    """Psycopg's defaults; `of_bytes` if psycopg would answer texts as bytes."""
    from psycopg import postgres  # here: `drivers` imports no library that the application has not brought
    from psycopg.adapt import AdaptersMap, PyFormat
    from psycopg.types import TypesRegistry
    from psycopg.types.array import register_all_arrays

    types = TypesRegistry()
    postgres.register_default_types(types)
    made: Any = AdaptersMap(types=types)
    postgres.register_default_adapters(made)
    register_all_arrays(made)
    for name in TEXTS if of_bytes else ():
        made.register_loader(name, Utf8)
    for each in (datetime, timedelta):  # found by their names at first, and two threads may do that at once
        made.get_dumper(each, PyFormat.AUTO)
    return made
