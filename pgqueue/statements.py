"""The named SQL statements of `sql/`, with the schema's name filled in.

Everything pgqueue says to the database is a file in `sql/`, read once. SQL is written for the schema `pgqueue`; another
schema is one checked substitution of that name. Data never becomes SQL text: it travels as parameters only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pgqueue.config import check_schema as check_schema

R = TypeVar("R")
Row = tuple[Any, ...]

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
# Wherever SQL of ours can name the schema. Not every `pgqueue`: a message that says "run `pgqueue migrate`" stays.
_SCHEMA_USE = re.compile(
    r"""(?<![\w$."])pgqueue(?=\.)                             # pgqueue.job, the channel 'pgqueue.' || queue
    |(?<=\bSCHEMA[ ])pgqueue\b|(?<=\bSCHEMA[ ]IF[ ]NOT[ ]EXISTS[ ])pgqueue\b
    |(?<=\bsearch_path[ ]=[ ])pgqueue\b|(?<=\bsearch_path[ ]TO[ ])pgqueue\b
    |(?<=')pgqueue(?=')                                       # nspname = 'pgqueue'
    """,
    re.VERBOSE,
)


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


def in_schema(sql: str, schema: str) -> str:
    """Return `sql`, written for the schema `pgqueue`, for another one.

    A checked name is no reserved word and needs no quotes, so this is a change of one word and nothing else.
    """
    return _SCHEMA_USE.sub(check_schema(schema), sql)


@cache
def text(name: str, schema: str) -> str:
    """Return the named statement of `sql/*.sql` for this schema, in psycopg's `%(name)s` style."""
    # Named by the file it is in, but for a few: a command that says one thing reads one file.
    file = _file(name.partition("_")[0])
    return in_schema(_bare(file[name] if name in file else _all()[name]), schema)


def integers(values: Iterable[int]) -> str:
    """The array literal of some integers, as one parameter: psycopg's dumper of lists costs more than a statement."""
    return "{" + ",".join([str(value) for value in values]) + "}"


def texts(values: Iterable[str]) -> str:
    r"""The same of some texts, each in quotes.

    >>> print(texts(["a", 'say "b"', "back\\slash"]))
    {"a","say \"b\"","back\\slash"}
    """
    return "{" + ",".join(['"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values]) + "}"


def names() -> list[str]:
    """All statement names, for the tests that EXPLAIN every one of them."""
    return list(_all())


@cache
def _all() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(sql_directory().glob("*.sql")):
        statements = _file(path.stem)
        if twice := found.keys() & statements.keys():
            raise ValueError(f"{path.name}: statement {min(twice)!r} is defined twice")
        found |= statements
    return found


@cache
def _file(stem: str) -> dict[str, str]:
    """The statements of one file of `sql/`; none if there is no such file."""
    path = sql_directory() / f"{stem}.sql"
    if not path.is_file():
        return {}
    found: dict[str, str] = {}
    for name, body in _split(path.read_text(encoding="utf-8")):
        if name in found:
            raise ValueError(f"{path.name}: statement {name!r} is defined twice")
        found[name] = body
    return found


def _split(source: str) -> list[tuple[str, str]]:
    pieces = _NAME.split(source)
    return list(zip(pieces[1::2], pieces[2::2], strict=True))


def _bare(body: str) -> str:
    """The statement without its comment lines: what the server needs, short enough to read in pg_stat_activity."""
    return "\n".join(line for line in body.splitlines() if line and not line.lstrip().startswith("--"))
