"""Several databases of one fleet: what they are called, and to which one what runs now belongs.

Said by `--database NAME=DSN`, or by PGQUEUE_DATABASES. `config` asks `current` first: in a worker of one of these
databases, and in its handlers, the configured database is that one. Never connects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from pgqueue.errors import InvalidOption

VARIABLE = "PGQUEUE_DATABASES"
_HARMLESS = re.compile(r"[\w-]{1,40}")
_KEYWORDS = frozenset(
    (
        "host",
        "hostaddr",
        "port",
        "dbname",
        "user",
        "password",
        "passfile",
        "service",
        "options",
        "sslmode",
        "sslpassword",
    )
)
"""What stands before `=` in a DSN of key words: no names of databases."""
_URL = re.compile(r"[a-z0-9+]+://|embedded:$")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
NUMBER_BITS = 43
"""The ids of a database's jobs begin at its number times 2 to this power, plus one (`migrate --number`)."""


_PATHS = frozenset(("login", "logout", "metrics", "static", "events"))
"""What the dashboard has below its own path: no names of databases, because its public URL may end in `/db`."""


@dataclass(frozen=True, slots=True)
class Database:
    """A database by the name that the fleet has for it."""

    name: str
    dsn: str = field(repr=False)


current: ContextVar[Database | None] = ContextVar("pgqueue_database", default=None)
"""The database of the worker to which this task, thread or handler belongs; None if the process has one database."""


@contextmanager
def within(database: Database | None) -> Iterator[None]:
    """Within this block the current database is this one; None changes nothing."""
    if database is None:
        yield
        return
    before = current.set(database)
    try:
        yield
    finally:
        current.reset(before)


def named(texts: Iterable[str]) -> tuple[Database, ...]:
    """The databases that these texts name, each `NAME=DSN`. Raises InvalidOption.

    >>> named(["a=postgresql:///shop_a"])
    (Database(name='a'),)
    """
    found: dict[str, Database] = {}
    for text in texts:
        name, separator, dsn = text.partition("=")
        if not separator or _NAME.fullmatch(name) is None or name in _KEYWORDS or not dsn.strip():
            shown = f" {name!r}" if _HARMLESS.fullmatch(name) else ""  # else it may be a DSN with a password
            raise InvalidOption(
                f"database{shown}: write NAME=DSN, such as a=postgresql:///shop_a; a name has 1 to 40 lower-case "
                "letters, digits, _ or -"
            )
        if name in _PATHS:
            raise InvalidOption(f"database {name!r}: the dashboard has a path of this name; choose another name")
        if name in found:
            raise InvalidOption(f"database {name!r} is named twice; each has a name of its own")
        found[name] = Database(name, dsn)
    return tuple(found.values())


def check_name(name: object, what: str) -> str:
    """The name, if a database can have it; else InvalidOption."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidOption(f"{what}: {name!r:.60} can be no name of a database, such as 'a'")
    return name


def only(databases: tuple[Database, ...], name: str) -> Database:
    """The database of this name. Raises InvalidOption, which lists the names."""
    for each in databases:
        if each.name == name:
            return each
    names = ", ".join(each.name for each in databases)
    raise InvalidOption(f"--only {name!r}: no database has this name; there are: {names}")


def of_environment() -> tuple[Database, ...]:
    """The databases of PGQUEUE_DATABASES, which have blanks or line ends between them; none if it is not set.

    So each DSN there is a URL, or `embedded:`. Another one raises InvalidOption, and is not shown.
    """
    found = named(os.environ.get(VARIABLE, "").split())
    for each in found:
        if _URL.match(each.dsn) is None:
            raise InvalidOption(
                f"{VARIABLE}: the DSN of database {each.name!r} is no URL. Blanks stand between databases, so write "
                "NAME=postgresql://user@host/dbname; a DSN of key words goes with --database"
            )
    return found


def number_in(id: int) -> int:
    """The number of the database in which the job of this id is.

    >>> number_in(5), number_in(2**43 + 1)
    (0, 1)
    """
    return (id - 1) >> NUMBER_BITS


def without_databases(environment: Mapping[str, str]) -> dict[str, str]:
    """This environment for a process that has one database, which PGQUEUE_DSN names."""
    return {name: value for name, value in environment.items() if name not in (VARIABLE, "PGQUEUE_LISTEN_DSN")}
