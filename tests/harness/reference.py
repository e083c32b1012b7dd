"""The reference as the code says it: every public name, every command with its options, every setting, as Markdown.

As a program (`.venv/bin/python tests/harness/reference.py`) it writes the pages, and a test says that they are what
the code says. What a name is for, its units and its errors stand in its docstring, and nowhere else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

import pgqueue
from pgqueue.cli import main
from pgqueue.cli.options import Duration, Size
from pgqueue.config import Config

DOCS = Path(__file__).parents[2] / "docs"
REGENERATE = ".venv/bin/python tests/harness/reference.py"
WINGS = {
    "client": "Enqueue, wait, declare",
    "jobs": "What a job is and has",
    "worker": "Workers",
    "admin": "Look and change",
    "relay": "Outbox and relay",
    "database": "The database",
    "config": "The database",
    "errors": "Errors",
}
MADE_BY = {
    "FlowHandle": "`Flow.enqueue`",
    "Job": "a worker, for a handler",
    "JobHandle": "an enqueue",
    "Node": "`Flow.add`",
    "Task": "`@pgqueue.task` and `pgqueue.remote`",
}
"""Classes that an application meets, and does not call; by what an object of them is made."""
OTHER_VARIABLES = {
    "PGQUEUE_ACTOR": "by which name a command records what it changes. Default: the role of the database",
    "PGQUEUE_DATABASES": "several databases of one fleet, as `a=URL b=URL`: [growing.md](growing.md)",
    "PGQUEUE_DJANGO_DATABASE": "which alias of Django's `DATABASES` has the queue, a setting of the project",
    "PGQUEUE_TEST_DSN": "the server of tests: the pytest plugin makes databases there, and drops them",
    "PGQUEUE_WEB_OPERATOR": "`pgqueue web --auth`: the secret of visitors that may change, 20 characters at least",
    "PGQUEUE_WEB_READER": "`pgqueue web --auth`: the secret of visitors that only read, 20 characters at least",
}
"""What is read from the environment, or from the settings of a framework, beside what `configure` takes."""
TYPES = {
    "str | None": ("text", ""),
    "str": ("text", ""),
    "bool": ("on or off", ""),
    "int": ("whole number", ""),
    "int | None": ("whole number", ""),
    "Duration": ("duration", "seconds, a timedelta, or a text such as `30s`"),
    "Sequence[str] | None": ("list of texts", ""),
    "Iterable[Task[..., Any]] | None": ("list of tasks", ""),
}
"""What an annotation is called here, and the unit of its values."""
_BULLET = re.compile(r"^- ((?:`\w+`(?:, )?)+): (.+?)(?=^- |^$|\Z)", re.MULTILINE | re.DOTALL)
_NAME_LINE = re.compile(r"^from pgqueue\.([\w.]+) import \w+ as (\w+)$", re.MULTILINE)
_FIRST_ITEM = re.compile(r"(?<=:)\n- ")
_CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def pages() -> dict[Path, str]:
    """The text of each page of the reference."""
    return {
        DOCS / "reference.md": "\n".join(_names()) + "\n",
        DOCS / "reference-commands.md": "\n".join(_commands()) + "\n",
        DOCS / "reference-settings.md": "\n".join(_settings()) + "\n",
    }


# Names ---------------------------------------------------------------------------------------------------------------


def _names() -> Iterator[str]:
    yield "# Reference: names\n"
    yield f"*Written from the docstrings by `{REGENERATE}`: change those.*\n"
    yield "All are names of the module `pgqueue`. A name that begins with `a` beside one without is its async twin.\n"
    modules = dict(
        (name, module)
        for module, name in _NAME_LINE.findall((DOCS.parent / "pgqueue" / "names.py").read_text(encoding="utf-8"))
    )
    for title in dict.fromkeys(WINGS.values()):
        names = [each for each in sorted(modules, key=str.lower) if WINGS[modules[each].split(".")[0]] == title]
        yield f"## {title}\n"
        yield ", ".join(f"[{name}](#{name.lower()})" for name in names) + "\n"
        for name in names:
            yield from _name(name, getattr(pgqueue, name))


def _name(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if inspect.isclass(value):
        yield from _class(name, value)
        return
    if callable(value):
        yield f"```text\n{name}{_signature(value)}\n```\n"
    yield from _said(_twin_of(name) or value.__doc__)


def _class(name: str, value: type[Any]) -> Iterator[str]:
    if issubclass(value, BaseException):
        yield f"An exception: a `{value.__bases__[0].__name__}`.\n"
    elif name in MADE_BY:
        yield f"Made by {MADE_BY[name]}, never by a call of its class.\n"
    else:
        yield f"```text\n{name}{_signature(value)}\n```\n"
    said = vars(value).get("__doc__") or ""
    yield from _said("" if said.startswith(f"{name}(") else said)
    members = {each: member for each, member in sorted(vars(value).items()) if is_public(each, member)}
    rows = [(f"`{each}`", _type(member), _first(member)) for each, member in members.items() if _is_value(member)]
    if rows:
        yield from _table((name, "type", "is"), rows)
    for each, member in members.items():
        if not _is_value(member):
            method = _function(member)
            yield f"#### {name}.{each}\n"
            yield f"```text\n{each}{_signature(method, skips_first=not isinstance(member, staticmethod))}\n```\n"
            yield from _said(method.__doc__)


def is_public(name: str, member: Any) -> bool:
    member = _function(member)
    return not name.startswith("_") and (inspect.isfunction(member) or _is_value(member)) and bool(member.__doc__)


def _function(member: Any) -> Any:
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


def _is_value(member: Any) -> bool:
    return isinstance(member, property)


def _type(member: property) -> str:
    """What a property's annotation says."""
    return f"`{inspect.signature(member.fget).return_annotation}`" if member.fget is not None else ""


def _first(member: Any) -> str:
    """The first paragraph of a property's docstring, in one cell of a table."""
    return " ".join(inspect.cleandoc(member.__doc__).split("\n\n", 1)[0].split())


def _twin_of(name: str) -> str | None:
    """What a twin says: it is made by a function, and has no docstring of its own."""
    plain = name[1:]
    if name.startswith("a") and name not in ("acting", "audit") and hasattr(pgqueue, plain):
        return f"`{plain}` for async connections: `await` it. See [{plain}](#{plain})."
    return None


def _signature(value: Callable[..., Any], *, skips_first: bool = False) -> str:
    """The signature on one line if it is short, else a parameter a line; a method's without its object."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    given = [
        each.replace(annotation=_Plain(each.annotation)) if isinstance(each.annotation, str) else each
        for each in list(signature.parameters.values())[skips_first:]
    ]
    answer = signature.return_annotation
    signature = inspect.Signature(given, return_annotation=_Plain(answer) if isinstance(answer, str) else answer)
    line = _written(signature)
    if len(line) < 90 or not given:
        return line
    end = "" if answer is inspect.Signature.empty else f" -> {answer}"
    return "(\n    " + ",\n    ".join(map(_written, given)) + f",\n){end}"


def _written(signature: object) -> str:
    """As the code writes it: a class by its name, a default that is made for each object as an ellipsis."""
    return _CLASS.sub(r"\1", _ADDRESS.sub("", str(signature))).replace("<factory>", "…")


class _Plain(str):
    """An annotation that is a text, without its quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _said(docstring: str | None) -> Iterator[str]:
    """A docstring as Markdown: what is indented is a block of text."""
    for part in inspect.cleandoc(docstring or "").split("\n\n"):
        lines = part.split("\n")
        if lines[0].startswith((">>>", "    ")):
            yield "```text\n" + "\n".join(line.removeprefix("    ") for line in lines) + "\n```\n"
        elif part:
            yield _FIRST_ITEM.sub("\n\n- ", part) + "\n"


# Commands ------------------------------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    yield "# Reference: commands\n"
    yield f"*Written from the commands by `{REGENERATE}`: change those.*\n"
    yield "Each command also takes `-h`, `--help`. Exit codes and JSON: [operations.md](operations.md#commands).\n"
    context = click.Context(main, info_name="pgqueue")
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        if command is not None and not command.hidden:
            yield from _command(f"pgqueue {name}", command)


def _command(name: str, command: click.Command) -> Iterator[str]:
    arguments = [
        each.make_metavar(click.Context(command)) for each in command.params if isinstance(each, click.Argument)
    ]
    yield f"## {' '.join([name, *arguments])}\n"
    for part in inspect.cleandoc(command.help or "").split("\n\n"):
        if part.startswith("\b"):
            yield "```text\n" + part.removeprefix("\b\n") + "\n```\n"
        else:
            yield " ".join(part.split()) + "\n"
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if options:
        yield "| option | does |\n|---|---|"
        yield from map(_option, options)
        yield ""
    if isinstance(command, click.Group):
        for inner, each in sorted(command.commands.items()):
            yield from _command(f"{name} {inner}", each)


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{each}`" for each in [*option.opts, *option.secondary_opts] if each != "-h")
    said = " ".join((option.help or "").split()).replace("|", "\\|")
    return f"| {names} | {said} |"


# Settings ------------------------------------------------------------------------------------------------------------


def _settings() -> Iterator[str]:
    yield "# Reference: settings\n"
    yield f"*Written from the code by `{REGENERATE}`: change that.*\n"
    yield (
        "An argument of a call goes before `pgqueue.configure(…)`, that before the environment, "
        "that before the default.\n\nWhat a task takes is in [worker.md](worker.md), what one enqueue takes in "
        "[enqueue.md](enqueue.md#options-of-one-call).\n"
    )
    yield "## The process\n"
    yield "Options of `pgqueue.configure`. If it has not said an option, the variable of the environment counts.\n"
    read = variables()
    said = bullets(pgqueue.configure)
    rows = []
    for field in fields(Config):
        variable = f"PGQUEUE_{field.name.upper()}"
        kind, _ = TYPES[str(field.type)]
        rows.append(
            (
                f"`{field.name}`",
                f"`{variable}`" if variable in read else "",
                kind,
                _default(field.default),
                said[field.name],
            )
        )
    yield from _table(("option", "variable", "type", "default", "means"), rows)
    yield "## Other variables\n"
    yield from _table(("variable", "means"), [(f"`{name}`", means) for name, means in sorted(OTHER_VARIABLES.items())])
    yield "## A worker from the command line\n"
    yield "Options of `pgqueue work`. More of each: [operations.md](operations.md#pgqueue-work-module).\n"
    command = main.get_command(click.Context(main), "work")
    assert command is not None
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    yield from _table(("option", "type", "unit", "default", "means"), [_work_option(each) for each in options])
    yield "## A worker in an application\n"
    yield "Options of `pgqueue.Worker`.\n"
    said = bullets(pgqueue.Worker)
    rows = []
    for name, parameter in list(inspect.signature(pgqueue.Worker.__init__).parameters.items())[1:]:
        kind, unit = TYPES[str(parameter.annotation)]
        rows.append((f"`{name}`", kind, unit, _default(parameter.default), said[name]))
    yield from _table(("option", "type", "unit", "default", "means"), rows)


def variables() -> set[str]:
    """The names that the package reads from the environment, or from a framework's settings."""
    sources = (path.read_text(encoding="utf-8") for path in (DOCS.parent / "pgqueue").rglob("*.py"))
    return {name for source in sources for name in re.findall(r'"(PGQUEUE_[A-Z_]+)"', source)}


def bullets(value: Any) -> dict[str, str]:
    """What a docstring says of each option, in its list."""
    found: dict[str, str] = {}
    for names, said in _BULLET.findall(inspect.cleandoc(value.__doc__)):
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), " ".join(said.split()).rstrip("."))
    return found


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    yield from (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    yield ""


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _work_option(option: click.Option) -> tuple[str, ...]:
    names = ", ".join(f"`{each}`" for each in [*option.opts, *option.secondary_opts])
    said, _, default = " ".join((option.help or "").split()).removesuffix("].").removesuffix("]").partition(" [")
    kind, unit = _kind(option)
    known = isinstance(option.default, str | int | float)  # click has a value of its own for a default that is none
    given = "off" if option.is_flag else _default(option.default) if known else ""
    return names, kind, unit, default or given, said.rstrip(".")


def _kind(option: click.Option) -> tuple[str, str]:
    """The type of an option's value, and its unit."""
    match option.type:
        case _ if option.is_flag:
            return "flag", ""
        case Duration():
            return "duration", "`30s`, `5m`, `2h`, or seconds"
        case Size():
            return "size", "`500M`, `2G`, or bytes"
        case click.IntRange() as whole:
            least = "" if whole.min is None else f", {whole.min} at least"
            return f"whole number{least}{'' if whole.max is None else f', {whole.max} at most'}", ""
        case click.Choice() as words:
            return "one of " + ", ".join(f"`{each}`" for each in words.choices), ""
        case click.Path():
            return "path", ""
    return "text", ""


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
