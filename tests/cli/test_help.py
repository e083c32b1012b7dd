"""`--help` of each command says what the command does, and what each of its options does."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import click
import pytest

from pgqueue.cli import main

COLUMNS = 60
"""For the text of an option beside its name."""


def commands(group: click.Group, path: str = "pgqueue") -> Iterator[tuple[str, click.Command]]:
    """Each command with its whole name, those of the groups, too."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


COMMANDS = dict(commands(main))


def wrong(command: click.Command) -> list[str]:
    """What its help lacks: a sentence of its own, and a sentence of at most two lines of each option."""
    found = (
        [] if command.help and command.help.splitlines()[0].endswith((".", ":")) else ["the command has no sentence"]
    )
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            text = option.help or ""
            if not text.endswith(".") or len(textwrap.wrap(text, COLUMNS)) > 2:
                found.append(f"{option.opts[-1]}: {text!r}")
    return found


@pytest.mark.promise("F436")
@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_says_what_it_does(name: str) -> None:
    assert wrong(COMMANDS[name]) == []


def test_an_option_without_a_sentence_is_found() -> None:
    options: list[click.Parameter] = [
        click.Option(["--none"]),
        click.Option(["--no-stop"], help="What it does"),
        click.Option(["--long"], help=f"{'long ' * 40}."),
        click.Option(["--good"], help="Do it."),
        click.Option(["--inner"], hidden=True),
    ]
    found = wrong(click.Command("each", params=options, help="Do it."))
    assert [each.partition(":")[0] for each in found] == ["--none", "--no-stop", "--long"]
    assert wrong(click.Command("each")) == ["the command has no sentence"]
    assert {"pgqueue work", "pgqueue locks release", "pgqueue schedules list"} <= COMMANDS.keys()
