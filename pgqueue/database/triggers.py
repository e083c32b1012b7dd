"""Errors that a function of the application has raised: a trigger that stands on one of pgqueue's tables.

Such an error says nothing of pgqueue's own tables, nor of the row that was to be written. Its SQLSTATE is whatever the
trigger chose, or met: 42P01, because a table of the application is missing, or 23514, because the trigger refuses the
row. The server names the functions that it was in, as the context of the error. Knows no connection.
"""

from __future__ import annotations

import re
from functools import cache

from pgqueue.config import config
from pgqueue.database.foreign_errors import attribute, wrapped
from pgqueue.database.statements import sql_directory

# A line of the context: `PL/pgSQL function public.refuses() line 3 at RAISE`, in the language of the server.
# The schema is left out where the search_path has it. A line that quotes something first (`SQL statement "…"`,
# `JSON data, line 1: …`) is no such line: what it quotes may look like one.
_FRAME_MOST = 400  # characters: more than the first words, a schema and a function take
_FRAME = re.compile(r"[^\"':,{\[(]*?\bPL/\w+.*?(?:([\w$\"]+)\.)?([\w$\"]+)\((\)?)")
_MADE = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION pgqueue\.(\w+)\((\)?)(.*?)(?:\$\w*\$|;)", re.DOTALL)


def trigger_of(error: BaseException) -> str | None:
    """The function of the application in which the server met this error; None if it met it in a statement of ours."""
    for each in wrapped(error):
        context = attribute(attribute(each, "diag"), "context") or attribute(each, "context")
        for line in str(context or "").splitlines():
            frame = _FRAME.match(line[:_FRAME_MOST])
            if frame is None:
                continue
            schema, function, bare = (frame[1] or "").strip('"'), frame[2].strip('"'), bool(frame[3])
            ours = function in _ours() if schema == config().schema else not schema and (function, bare) in _nameless()
            if not ours:
                return function
    return None


@cache
def _made() -> tuple[tuple[str, str, str], ...]:
    """The functions that migrations make: the name, whether there are no arguments, and what follows."""
    files = sorted((sql_directory() / "migrations").glob("*.sql"))
    return tuple(made for file in files for made in _MADE.findall(file.read_text(encoding="utf-8")))


@cache
def _ours() -> frozenset[str]:
    """The names of the functions that migrations make."""
    return frozenset(name for name, _, _ in _made())


@cache
def _nameless() -> frozenset[tuple[str, bool]]:
    """Our functions that the server may name without a schema, each with whether it has no arguments.

    A trigger function has no arguments. If the application has one that is named like a function of ours in a schema
    of the search_path, it is told from ours by that. A function of ours with a search_path of its own is always named
    with the schema. `refuse_update` is left: a trigger function of that name counts as ours.
    """
    return frozenset((name, bool(bare)) for name, bare, rest in _made() if not (bare and "SET search_path" in rest))
