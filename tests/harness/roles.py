"""Roles of the test's server, with the rights that `pgqueue grants` gives."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.conninfo import make_conninfo

from pgqueue.database import grants

Role = Callable[[grants.Kind], str]


@pytest.fixture
def role(dsn: str) -> Iterator[Role]:
    """Make a login role with the rights of a kind; the DSN it connects with."""
    made: list[str] = []

    def make(kind: grants.Kind) -> str:
        name = create_role(dsn)
        made.append(name)
        with psycopg.connect(dsn) as conn:
            # As a database has it whose default privileges give PUBLIC nothing: what a role needs is granted by name.
            conn.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pgqueue FROM PUBLIC")
            grants.grant(conn, name, kind, "pgqueue")
        return make_conninfo(dsn, user=name, password="secret")

    yield make
    with psycopg.connect(dsn, autocommit=True) as conn:
        for name in made:
            drop_role(conn, name)


def create_role(dsn: str, name: str | None = None) -> str:
    name = name or f"pgqueue_test_{secrets.token_hex(6)}"
    with psycopg.connect(dsn) as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'secret'").format(sql.Identifier(name)))
    return name


def drop_role(conn: psycopg.Connection[Any], name: str) -> None:
    for command in ("DROP OWNED BY {}", "DROP ROLE {}"):
        conn.execute(sql.SQL(command).format(sql.Identifier(name)))


def refused(dsn: str, *statements: str) -> None:
    for statement in statements:
        with psycopg.connect(dsn) as conn, pytest.raises(errors.InsufficientPrivilege):
            conn.execute(statement.encode())
