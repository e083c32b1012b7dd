"""A command for several databases: what looks goes over all of them, what changes is for one.

Every command with `--dsn` is called through `over`, which does nothing where there is one database.

1. A command that only looks, or migrates, is called for each database. Each line of a table has the name of its
   database first; each item of a document has it as `database`.
2. A database that is away is one line on stderr, or an entry of `errors`, and exit code 3. The others are shown. Else
   the exit code is that of the first database whose answer was not 0.
3. Ids of jobs find their database by its number. Each database gets its own.
4. All other commands need `--only NAME`. Those of `WITHOUT` name their database in another way.

The command itself knows nothing of it: it is called in a context in which its database is the configured one, and what
it prints is read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import click

from pgqueue.cli.exit_codes import DATABASE, DONE, NO, USAGE, Refusal, code_of, line_of
from pgqueue.config import safe
from pgqueue.databases import Database, current, named, number_in, of_environment, only
from pgqueue.errors import InvalidOption
from pgqueue.plain_text import plain_lines

ALL = frozenset(
    {
        *("audit", "bulk", "bulk list", "doctor", "errors", "flows", "health", "history", "jobs", "limits", "locks"),
        *("migrate", "queues", "schedules", "schedules list", "status", "tasks", "version", "workers"),
    }
)
"""The commands that go over all databases; of a group only these."""
BY_ID = {
    "jobs": "id",
    "why": "id",
    "stack": "id",
    "cancel": "ids",
    "retry": "ids",
    "discard": "ids",
    "reschedule": "ids",
}
"""The commands that may be given ids of jobs, and the name of that argument."""
ELSEWHERE = frozenset(("work", "web", "demo"))
"""Those that do something of their own with the databases, or nothing."""
WITHOUT = {"migrate": "sql", "relay": "target"}
"""With this option the databases of the environment do not count."""
ONE = {
    "migrate": ("number", "outbox"),
    "status": ("watch",),
    "flows": ("id", "before"),
    "jobs": ("after", "flow"),
}
"""With one of these options they are for one database."""


def over(
    ctx: click.Context, asked: Sequence[str], chosen: str | None, command: Callable[..., Any], params: dict[str, Any]
) -> Any:
    """Call the command for the databases of this command line. `asked` are the values of --database, `chosen` is that
    of --only."""
    name = ctx.command_path.partition(" ")[2]
    if name in ELSEWHERE or (params.get(WITHOUT.get(name, "")) and not asked and chosen is None):
        return command(**params)
    if name == "systemd" and (asked or chosen is not None):
        raise click.UsageError("a unit runs a supervisor, which works for one database: its environment file names it")
    databases = named(asked) or of_environment()
    if name == "systemd" or (not databases and chosen is None):
        return command(**params)
    if not databases:
        raise click.UsageError("--only is for several databases: name them by --database or PGQUEUE_DATABASES")
    if ctx.invoked_subcommand is not None:
        return None
    if chosen is not None:
        return _in(only(databases, chosen), command, params)
    calls = _calls(name, databases, params)
    if len(calls) == 1:
        return _in(calls[0][0], command, calls[0][1])
    show = _print_documents if params.get("as_json") else _print_lines
    answers: list[_Answer] = []
    for database, own in calls:
        try:
            answers.append(_answer(database, command, own))
        except Exception:
            if answers:  # what was done in these is said
                show(answers)
            raise
    show(answers)
    codes = [each.code for each in answers if each.code]
    if codes:
        raise click.exceptions.Exit(DATABASE if DATABASE in codes else codes[0])
    return None


def _calls(name: str, databases: Sequence[Database], params: dict[str, Any]) -> list[tuple[Database, dict[str, Any]]]:
    """For which databases the command is called, and with which parameters."""
    ids = params.get(BY_ID.get(name, ""))
    if ids:
        found = _by_number(databases, [ids] if isinstance(ids, int) else ids)
        one = isinstance(ids, int)
        return [(each, params | {BY_ID[name]: own[0] if one else own}) for each, own in found.items()]
    if len(databases) == 1 or (name in ALL and not any(map(params.get, ONE.get(name, ())))):
        return [(each, params) for each in databases]
    raise click.UsageError(f"this is for one database: say --only NAME, one of {_names(databases)}")


@dataclass(slots=True)
class _Answer:
    """What the command has printed for a database, and how it has ended there."""

    database: Database
    text: str = ""
    code: int = DONE
    error: str = ""
    printed: io.StringIO = field(default_factory=io.StringIO)


def _names(databases: Sequence[Database]) -> str:
    return ", ".join(each.name for each in databases)


def _in(database: Database, call: Callable[..., Any], params: dict[str, Any]) -> Any:
    """Call it where this database is the configured one."""
    context = copy_context()
    context.run(current.set, database)
    return context.run(lambda: call(**params))


def _answer(database: Database, command: Callable[..., None], params: dict[str, Any]) -> _Answer:
    answer = _Answer(database)
    try:
        with redirect_stdout(answer.printed):
            _in(database, command, params)
    except click.UsageError:
        raise
    except click.exceptions.Exit as ended:
        answer.code = ended.exit_code
    except click.ClickException as ended:
        answer.code, answer.error = ended.exit_code, ended.format_message()
    except Exception as error:
        code = code_of(error)
        if code is None or code == USAGE:
            raise
        answer.code, answer.error = code, safe(line_of(error))
    answer.text = answer.printed.getvalue()
    return answer


def _print_lines(answers: Sequence[_Answer]) -> None:
    width = max(len(each.database.name) for each in answers)
    for each in answers:
        name = each.database.name.ljust(width)
        for line in each.text.splitlines():
            click.echo(f"{name}  {line}".rstrip())
        if each.error:
            click.echo(f"{name}  Error: {plain_lines(each.error)}", err=True)


def _print_documents(answers: Sequence[_Answer]) -> None:
    """One document: the items of all, and for each database what its own document says beside them."""
    items: list[Any] = []
    of_each: dict[str, Any] = {}
    for each in answers:
        said = json.loads(each.text) if each.text else {"items": []}
        items += [_with(each, item) for item in said.pop("items")]
        of_each[each.database.name] = said
    errors = [
        {"database": each.database.name, "code": each.code, "message": each.error} for each in answers if each.error
    ]
    click.echo(json.dumps({"items": items, "databases": of_each, "errors": errors}))


def _with(answer: _Answer, item: dict[str, Any]) -> dict[str, Any]:
    """The item with the name of its database. What it had as `database` is its `place`."""
    return {"database": answer.database.name} | {("place" if key == "database" else key): item[key] for key in item}


def _by_number(databases: Sequence[Database], ids: Sequence[int]) -> dict[Database, tuple[int, ...]]:
    """The ids of each database, found by its number. Raises NO if none of those that answer has the number."""
    numbers, away = dict[int, Database](), list[str]()
    for each in databases:
        try:
            number = _in(each, _number, {})
        except Exception as error:
            if code_of(error) != DATABASE:
                raise
            away.append(f"{each.name}: {safe(line_of(error))}")
            continue
        if number in numbers:
            raise InvalidOption(
                f"databases {numbers[number].name!r} and {each.name!r} have one number, {number}: an id may mean a job "
                "of each. Run `pgqueue migrate --number K` for one of them, or say --only NAME"
            )
        numbers[number] = each
    found: dict[Database, tuple[int, ...]] = {}
    for id in ids:
        number = number_in(id)
        if number not in numbers:
            if away:
                raise Refusal(f"job {id} is in none of the databases that answer; away: {'; '.join(away)}", DATABASE)
            raise Refusal(f"no job {id}: none of these databases ({_names(databases)}) has number {number}", NO)
        found[numbers[number]] = (*found.get(numbers[number], ()), id)
    return found


def _number() -> int:
    from pgqueue.cli.database import connected
    from pgqueue.config import config
    from pgqueue.database.number import number_of

    with connected("number", needs="read") as conn:
        return number_of(conn, config().schema)
