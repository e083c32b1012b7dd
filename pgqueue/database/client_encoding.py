"""The application's connection may have SQL_ASCII as its client encoding: then psycopg answers texts as bytes.

PGCLIENTENCODING says so, or a default of the database that an old application needs. Our databases are UTF-8, and
under SQL_ASCII the server converts nothing: it sends and takes UTF-8. Our own connections are opened with UTF-8.
"""

from __future__ import annotations

from typing import Any

TEXTS = ("text", "varchar", "bpchar", "name", '"char"')


class Utf8:
    """A loader of psycopg: the text of these bytes."""

    format = 0

    def __init__(self, oid: int, context: object = None) -> None:
        pass

    def load(self, data: Any) -> str:
        return bytes(data).decode()


def utf8(cursor: Any, sql: str) -> Any:
    """The statement as this cursor of psycopg may send it. It will answer texts, whatever the client encoding is."""
    if cursor.connection.pgconn.parameter_status(b"client_encoding") != b"SQL_ASCII":
        return sql
    for name in TEXTS:
        cursor.adapters.register_loader(name, Utf8)
    return sql.encode()
