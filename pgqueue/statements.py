"""The named SQL statements of `sql/`, with the schema's name filled in.

Everything pgqueue says to the database is a file in `sql/`, read once. SQL is written for the schema `pgqueue`; another
schema is one checked substitution of that name. Data never becomes SQL text: it travels as parameters only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pgqueue.errors import InvalidOption

R = TypeVar("R")
Row = tuple[Any, ...]

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_SCHEMA = re.compile(r"^[a-z_][a-z0-9_]{0,21}$")
_SCHEMA_USE = re.compile(r"\bpgqueue\b(?=\.)|(?<=SCHEMA )pgqueue\b|(?<=SCHEMA IF NOT EXISTS )pgqueue\b")


@dataclass(frozen=True, slots=True)
class Statement(Generic[R]):
    """One SQL statement, its parameters, and how to read its rows. Knows no connection."""

    sql: str
    params: Mapping[str, object]
    read: Callable[[list[Row]], R]


def sql_directory() -> Path:
    """Where the SQL files are: inside an installed package, beside the package in a checkout."""
    packaged = Path(__file__).parent / "sql"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "sql"


def check_schema(schema: str) -> str:
    """Return `schema` if it can name pgqueue's schema, else raise InvalidOption.

    At most 22 characters, so that a channel name `schema.queue` fits PostgreSQL's 63 bytes.
    """
    if _SCHEMA.match(schema) is None or schema.startswith("pg_"):
        raise InvalidOption(
            f"schema {schema!r}: use 1 to 22 lower-case letters, digits or _, not starting with a digit or pg_"
        )
    return schema


def in_schema(sql: str, schema: str) -> str:
    """Return `sql`, written for the schema `pgqueue`, for another one."""
    return _SCHEMA_USE.sub(check_schema(schema), sql)


@cache
def text(name: str, schema: str) -> str:
    """Return the named statement of `sql/*.sql` for this schema, in psycopg's `%(name)s` style."""
    return in_schema(_all()[name], schema)


def names() -> list[str]:
    """All statement names, for the tests that EXPLAIN every one of them."""
    return list(_all())


@cache
def _all() -> dict[str, str]:
    found: dict[str, str] = {}
    for file in sorted(sql_directory().glob("*.sql")):
        for name, body in _split(file.read_text(encoding="utf-8")):
            if name in found:
                raise ValueError(f"{file.name}: statement {name!r} is defined twice")
            found[name] = body
    return found


def _split(source: str) -> list[tuple[str, str]]:
    pieces = _NAME.split(source)
    return [(name, _bare(body)) for name, body in zip(pieces[1::2], pieces[2::2], strict=True)]


def _bare(body: str) -> str:
    """The statement without its comment lines: what the server needs, short enough to read in pg_stat_activity."""
    return "\n".join(line for line in body.splitlines() if line and not line.lstrip().startswith("--"))
