"""The jobs a command acts on: given by ids, or by a filter. They are changed in batches, one transaction each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgqueue.cli.database import connected
from pgqueue.cli.exit_codes import NO, No
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Whole
from pgqueue.cli.tables import span
from pgqueue.options import HIGHEST_ID
from pgqueue.plain_text import plain, plural

if TYPE_CHECKING:
    from pgqueue.admin.actions import Answer, By
    from pgqueue.database.steps import Steps

F = TypeVar("F", bound=Callable[..., Any])
Changing = Callable[[Iterable[int], "By"], "Steps[list[Answer]]"]
"""What is done to the jobs of these ids, and what the record says of it."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The jobs that the command line names: by `ids`, or all that fit. `filters` gives the fields."""

    ids: tuple[int, ...]
    state: tuple[str, ...]
    queue: str | None
    task: str | None
    limit: int | None
    yes: bool
    older_than: float | None = None

    def __post_init__(self) -> None:
        named = bool(self.state or self.queue or self.task or self.older_than is not None)
        if bool(self.ids) == named or (self.ids and self.limit):
            raise click.UsageError("give IDs, or choose with --state, --queue, --task")


def filters(states: Sequence[str]) -> Callable[[F], F]:
    """Add ID… and the options that choose jobs in these states."""

    def add(command: F) -> F:
        for option in (
            click.option("--yes", is_flag=True, help="Do not ask."),
            click.option("--limit", type=Whole(1), help="Only this many, the oldest ones."),
            click.option("--task", help="All of this task."),
            click.option("--queue", help="All of this queue."),
            click.option(
                "--state",
                type=click.Choice(tuple(states)),
                metavar="STATE",
                multiple=True,
                help=f"All of these, repeatable: {', '.join(states)}.",
            ),
            click.argument("ids", metavar="[ID]...", nargs=-1, type=Whole(1, HIGHEST_ID)),
        ):
            command = option(command)
        return command

    return add


def act(verb: str, chosen: Chosen, states: Sequence[str], steps: Changing, *, as_json: bool) -> None:
    """Find the jobs, ask before acting on a filter, act, and print what was done.

    If the filter names no state, jobs of these `states` are meant. Exit code 1 if a job that was given by id could not
    be changed.
    """
    from pgqueue.admin import actions
    from pgqueue.admin.filters import Filter, finding
    from pgqueue.cli import known_names
    from pgqueue.database.steps import drive

    states, ids = chosen.state or tuple(states), list(chosen.ids)
    with connected(verb) as conn:  # in autocommit mode: each statement is a transaction
        asked = Filter(states, chosen.queue, chosen.task, chosen.limit, chosen.older_than)
        found = ids or drive(conn, finding(asked))
        if not found and chosen.queue:
            known_names.warn(conn, chosen.queue, chosen.task)
        if found and not ids and not chosen.yes:
            ask(f"{verb.capitalize()} {_jobs(len(found))}{_of(chosen)}, now {' or '.join(states)}?")
        answers = drive(conn, steps(found, actions.By(None if ids else asked)))
    refused = [answer for answer in answers if answer.did in actions.REFUSALS]
    if as_json:
        click.echo(document(answers))
    elif ids:
        click.echo("\n".join(map(actions.sentence, answers)))
    else:
        click.echo(_summary(answers))
    if ids and refused:
        raise click.exceptions.Exit(NO)


def ask(question: str) -> None:
    """Go on if the answer is yes; else the command ends."""
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:  # no terminal, no answer
        click.echo("", err=True)
        agreed = False
    if not agreed:
        raise No("Nothing was done; --yes acts without asking.")


def _summary(answers: Sequence[Answer]) -> str:
    counts = Counter(answer.did for answer in answers)
    return ", ".join(f"{count:,} {did}" for did, count in sorted(counts.items())) or "No job fits."


def _jobs(count: int) -> str:
    return plural(count, "job", "jobs")


def _of(chosen: Chosen) -> str:
    task = f" of task {plain(chosen.task)}" if chosen.task else ""
    queue = f" in queue {plain(chosen.queue)}" if chosen.queue else ""
    return task + queue + ("" if chosen.older_than is None else f" that ended more than {span(chosen.older_than)} ago")
