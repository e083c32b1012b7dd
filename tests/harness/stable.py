"""What stays in later versions, as it is now: names, methods and parameters, SQL functions, columns, commands and their
options, exit codes, codes of `why` and `doctor`, variables, fields of JSON.

As a program (`.venv/bin/python tests/harness/stable.py DSN`, an empty migrated database) it adds what is new to
`tests/project/stable.json`. It takes nothing away. That is done by hand, with a line in the changelog.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import psycopg
import reference
from commands import pgqueue as run

import pgqueue
from pgqueue.admin import doctor
from pgqueue.admin.why.reasons import CODES
from pgqueue.cli import main
from pgqueue.worker.liveness.watchdog import STUCK

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "project" / "stable.json"
FUNCTIONS = ("enqueue", "desired_workers", "now")
TABLES = ("job", "attempt")
ASKED = ("status", "queues", "tasks", "jobs", "jobs 1", "why 1", "workers", "limits", "schedules", "doctor", "version")
"""Commands whose fields are compared, in a database with one job."""

Stable = dict[str, dict[str, list[str]]]


def now(dsn: str) -> Stable:
    """What is there now; enqueues a job."""
    run("enqueue", "mail.send", '{"to": "a@example.com"}', dsn=dsn)
    with psycopg.connect(dsn) as conn:
        return {
            "python": {name: _parameters(getattr(pgqueue, name)) for name in sorted(pgqueue.__all__)},
            "functions": {name: _arguments(conn, name) for name in FUNCTIONS},
            "tables": {name: _columns(conn, name) for name in TABLES},
            "methods": {
                name: sorted(each for each, member in vars(value).items() if reference.is_public(each, member))
                for name in sorted(pgqueue.__all__)
                if inspect.isclass(value := getattr(pgqueue, name))
            },
            "commands": dict(_options("pgqueue", main)),
            "codes": {"why": sorted(CODES), "doctor": _findings()},
            "variables": {name: [] for name in sorted(reference.variables())},
            "exit codes": {
                name: [str(value)]
                for name, value in sorted({**vars(import_module("pgqueue.cli.exit_codes")), "STUCK": STUCK}.items())
                if name.isupper() and isinstance(value, int)
            },
            "json": {command: _fields(command, dsn) for command in ASKED},
        }


def recorded() -> tuple[str, Stable]:
    """For which version the list was written, and the list."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return found.pop("version"), found


def gone(was: Stable, there: Stable) -> list[str]:
    """What stood in the list and is not there.

    >>> gone({"python": {"get": ["conn", "id"]}}, {"python": {"get": ["conn"], "find": []}})
    ['python: get: id']
    """
    return [
        f"{part}: {name}: {each}" if each else f"{part}: {name}"
        for part, names in was.items()
        for name, members in names.items()
        for each in (members if name in there.get(part, {}) else [""])
        if each not in there.get(part, {}).get(name, [])
    ]


def version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def _parameters(value: Any) -> list[str]:
    """The names by which a caller may give something; of what cannot be called, none."""
    if not callable(value) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return []
    try:
        given = inspect.signature(value).parameters.values()
    except ValueError:  # of a class that Python itself makes
        return []
    return sorted(each.name for each in given if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))


def _options(path: str, command: click.Command) -> Iterator[tuple[str, list[str]]]:
    """Each command below this one, with its options as they are written."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _options(f"{path} {name}", below)
    else:
        shown = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
        yield path, sorted(name for each in shown for name in [*each.opts, *each.secondary_opts])


def _findings() -> list[str]:
    """The names of the findings of `doctor`, as its source has them."""
    return sorted(set(re.findall(r'\bFinding\(\s*"(\w+)"', inspect.getsource(doctor))))


def _arguments(conn: psycopg.Connection[Any], name: str) -> list[str]:
    rows = conn.execute(
        "SELECT coalesce(p.proargnames, '{}') FROM pg_proc p WHERE pronamespace = 'pgqueue'::regnamespace"
        " AND proname = %s",
        [name],
    ).fetchall()
    return sorted(str(each) for (names,) in rows for each in names)


def _columns(conn: psycopg.Connection[Any], name: str) -> list[str]:
    rows = conn.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
        [f"pgqueue.{name}"],
    ).fetchall()
    return sorted(str(column) for (column,) in rows)


def _fields(command: str, dsn: str) -> list[str]:
    """The fields of the document, and those of its first item as `items.NAME`."""
    document = json.loads(run(*command.split(), "--json", dsn=dsn).stdout)
    return sorted([*document, *(f"items.{name}" for item in document["items"][:1] for name in item)])


if __name__ == "__main__":
    _, was = recorded() if FILE.exists() else ("", {})
    there = now(sys.argv[1])
    both = {
        part: {
            name: sorted({*was.get(part, {}).get(name, []), *there.get(part, {}).get(name, [])})
            for name in sorted({*was.get(part, {}), *there.get(part, {})})
        }
        for part in there
    }
    FILE.write_text(json.dumps({"version": version(), **both}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
