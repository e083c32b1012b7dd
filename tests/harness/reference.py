"""The reference as the code says it: every public name, and every command with its options, as Markdown.

As a program (`.venv/bin/python tests/harness/reference.py`) it writes the pages, and a test says that they are what
the code says. What a name is for, its units and its errors stand in its docstring, and nowhere else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import pgqueue
from pgqueue.cli import main

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
_NAME_LINE = re.compile(r"^from pgqueue\.([\w.]+) import \w+ as (\w+)$", re.MULTILINE)
_FIRST_ITEM = re.compile(r"(?<=:)\n- ")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def pages() -> dict[Path, str]:
    """The text of each page of the reference."""
    return {
        DOCS / "reference.md": "\n".join(_names()) + "\n",
        DOCS / "reference-commands.md": "\n".join(_commands()) + "\n",
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
    else:
        yield f"```text\n{name}{_signature(value)}\n```\n"
    said = vars(value).get("__doc__") or ""
    yield from _said("" if said.startswith(f"{name}(") else said)
    rows = [(each, _first(member)) for each, member in sorted(vars(value).items()) if _is_public(each, member)]
    if rows:
        yield "| | |\n|---|---|"
        yield from (f"| `{each}` | {said} |" for each, said in rows)
        yield ""


def _is_public(name: str, member: Any) -> bool:
    member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    return (
        not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property))
        and bool(member.__doc__)
    )


def _first(member: Any) -> str:
    """The first paragraph of a method's docstring, in one cell of a table."""
    member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    return " ".join(inspect.cleandoc(member.__doc__).split("\n\n", 1)[0].split()).replace("|", "\\|")


def _twin_of(name: str) -> str | None:
    """What a twin says: it is made by a function, and has no docstring of its own."""
    plain = name[1:]
    if name.startswith("a") and name not in ("acting", "audit") and hasattr(pgqueue, plain):
        return f"`{plain}` for async connections: `await` it. See [{plain}](#{plain})."
    return None


def _signature(value: Callable[..., Any]) -> str:
    """The signature on one line if it is short, else a parameter a line."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    given = [
        each.replace(annotation=_Plain(each.annotation)) if isinstance(each.annotation, str) else each
        for each in signature.parameters.values()
    ]
    answer = signature.return_annotation
    signature = inspect.Signature(given, return_annotation=_Plain(answer) if isinstance(answer, str) else answer)
    line = _ADDRESS.sub("", str(signature))
    if len(line) < 90 or not given:
        return line
    end = "" if answer is inspect.Signature.empty else f" -> {answer}"
    return "(\n    " + ",\n    ".join(_ADDRESS.sub("", str(each)) for each in given) + f",\n){end}"


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


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
