"""The named SQL statements of `sql/`, with the schema's name filled in.

Everything pgqueue says to the database is a file in `sql/`, read once. SQL is written for the schema `pgqueue`; another
schema is one checked substitution of that name. Data never becomes SQL text: it travels as parameters only.

What several statements have in common is a fragment of `sql/fragments.sql`: `{{job}}` stands for the fragment `job`. To
see a statement as the server gets it: `python -m pgqueue.database.statements fetch_claim`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pgqueue.config import check_schema as check_schema

R = TypeVar("R")
Row = tuple[Any, ...]

NO_STATEMENTS = ("migrations", "grants")
"""The folders of `sql/` with files that hold no named statements."""

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_USE = re.compile(r"\{\{(\w+)\}\}")
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
    package = Path(__file__).parent.parent
    packaged = package / "sql"
    return packaged if packaged.is_dir() else package.parent / "sql"


def in_schema(sql: str, schema: str) -> str:
    """Return `sql`, written for the schema `pgqueue`, for another one.

    A checked name is no reserved word and needs no quotes, so this is a change of one word and nothing else.
    """
    return _SCHEMA_USE.sub(check_schema(schema), sql)


@cache
def text(name: str, schema: str) -> str:
    """Return the named statement of `sql/` for this schema, in psycopg's `%(name)s` style."""
    file = _file(home(name))
    if name not in file:
        raise KeyError(f"no statement {name!r} in sql/")
    sql = _bare(file[name])
    return in_schema(_expanded(sql, _fragments()) if "{{" in sql else sql, schema)


def home(name: str) -> str:
    """The file of a statement: its stem is the statement's name, or what the name begins with; the longest one.

    >>> home("unique_enqueue_judge"), home("fetch_claim")
    ('unique_enqueue', 'fetch')
    """
    words = name.split("_")
    stems = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((stem for stem in stems if stem in _files()), "")


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
    return [name for stem in _files() for name in _file(stem)]


@cache
def _files() -> dict[str, Path]:
    """Every file of statements by its stem: listed, not read, for a command that says one thing reads one file."""
    found: dict[str, Path] = {}
    for path in sorted(sql_directory().glob("*/*.sql")):
        if path.parent.name in NO_STATEMENTS:
            continue
        if path.stem in found:
            raise ValueError(f"{path}: there is another {path.name}, in {found[path.stem].parent.name}/")
        found[path.stem] = path
    return found


@cache
def _file(stem: str) -> dict[str, str]:
    """The statements of the file with this stem; none if there is no such file."""
    if stem not in _files():
        return {}
    found: dict[str, str] = {}
    for name, body in _split(_files()[stem].read_text(encoding="utf-8")):
        if name in found:
            raise ValueError(f"{stem}.sql: statement {name!r} is defined twice")
        found[name] = body
    return found


@cache
def _fragments() -> dict[str, str]:
    """The fragments by name. One may use those that stand before it in the file, so none can use itself."""
    path = sql_directory() / "fragments.sql"
    found: dict[str, str] = {}
    for name, body in _split(path.read_text(encoding="utf-8")):
        if name in found:
            raise ValueError(f"{path.name}: fragment {name!r} is defined twice")
        found[name] = _expanded(_bare(body), found)
    return found


def _expanded(sql: str, fragments: Mapping[str, str]) -> str:
    """The SQL with the text of a fragment wherever it is named, indented as the line that names it."""

    def put(line: str) -> str:
        indent = line[: len(line) - len(line.lstrip())]
        return _USE.sub(lambda use: _fragment(use[1], fragments).replace("\n", "\n" + indent), line)

    return "\n".join(map(put, sql.splitlines()))


def _fragment(name: str, fragments: Mapping[str, str]) -> str:
    if name not in fragments:
        raise KeyError(f"no fragment {name!r} in sql/fragments.sql, or it stands behind the fragment that uses it")
    return fragments[name]


def _split(source: str) -> list[tuple[str, str]]:
    pieces = _NAME.split(source)
    return list(zip(pieces[1::2], pieces[2::2], strict=True))


def _bare(body: str) -> str:
    """The statement without its comment lines: what the server needs, short enough to read in pg_stat_activity."""
    return "\n".join(line for line in body.splitlines() if line and not line.lstrip().startswith("--"))


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        print(text(asked, "pgqueue"))
