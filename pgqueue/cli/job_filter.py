"""The jobs of a command line: given by ids, or by a filter. All commands with a filter read it here.

Those of `cancel`, `retry` and `discard` are changed in batches, one transaction each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgqueue.cli.database import connected
from pgqueue.cli.exit_codes import NO, No
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Whole
from pgqueue.cli.tables import span
from pgqueue.jobs.nodes import FLOW_HIGHEST
from pgqueue.jobs.values import HIGHEST_ID
from pgqueue.plain_text import plain, plural

if TYPE_CHECKING:
    from pgqueue.admin.actions import By
    from pgqueue.admin.answers import Answer
    from pgqueue.admin.filters import Filter
    from pgqueue.database.steps import Steps

F = TypeVar("F", bound=Callable[..., Any])
Changing = Callable[[Iterable[int], "By"], "Steps[list[Answer]]"]
"""What is done to the jobs of these ids, and what the record says of it."""


def choosing(states: Sequence[str], *, only: bool = False, flow: bool = True) -> Callable[[F], F]:
    """Add --state, one or several of these, --queue, --task and, if asked, --flow. `only`: they leave out jobs of a
    list."""
    these, of = ("Only these", "Only of") if only else ("All of these", "All of")
    state = click.Choice(tuple(states))
    said = f"{these}, repeatable: {', '.join(states)}."

    def add(command: F) -> F:
        if flow:
            command = click.option(
                "--flow", metavar="ID", type=Whole(1, FLOW_HIGHEST), help=f"{of} this flow, see pgqueue flows."
            )(command)
        command = click.option("--task", help=f"{of} this task.")(command)
        command = click.option("--queue", help=f"{of} this queue.")(command)
        return click.option("--state", type=state, metavar="STATE", multiple=True, help=said)(command)

    return add


def ids_or_filter(states: Sequence[str]) -> Callable[[F], F]:
    """Add ID… and the options that choose jobs in these states."""

    def add(command: F) -> F:
        command = click.option("--yes", is_flag=True, help="Do not ask.")(command)
        command = click.option("--limit", type=Whole(1), help="Only this many, the oldest ones.")(command)
        command = choosing(states)(command)
        return click.argument("ids", metavar="[ID]...", nargs=-1, type=Whole(1, HIGHEST_ID))(command)

    return add


def read(given: dict[str, Any]) -> dict[str, Any]:
    """Take the parts of a filter from the values of a command line; what was not said is not among them."""
    from pgqueue.admin.filters import Criteria

    parts = {name: given.pop(name) for name in (*Criteria.__annotations__, "older_than") if name in given}
    return {name: value for name, value in parts.items() if value not in (None, ())}


def act(verb: str, given: dict[str, Any], steps: Changing, *, again: bool = False) -> None:
    """Find the jobs, ask before acting on a filter, act, and print what was done.

    Exit code 1 if a job that was given by id could not be changed.
    """
    from pgqueue.admin import actions
    from pgqueue.admin.answers import counted, sentence
    from pgqueue.admin.bulk.operations import STATES
    from pgqueue.admin.filters import filtered, finding
    from pgqueue.cli import known_names
    from pgqueue.database.primary import refuse_standby
    from pgqueue.database.steps import drive

    ids, chosen = list(given["ids"]), read(given)
    if bool(ids) is bool(chosen.keys() - {"limit"}) or (ids and chosen):
        raise click.UsageError("give IDs, or choose with --state, --queue, --task, --flow")
    states, others = STATES[verb]
    asked = filtered(ids, states, others if again or verb != "retry" else (), **chosen)
    with connected(verb) as conn:  # in autocommit mode: each statement is a transaction
        refuse_standby(conn)  # also if no job fits there, and before it is asked
        found = ids if asked is None else drive(conn, finding(asked))
        if asked is not None and not found and asked.queue:
            known_names.warn(conn, asked.queue, asked.task)
        if asked is not None and found and not given["yes"]:
            ask(f"{verb.capitalize()} {_jobs(len(found))}{_of(asked)}, now {' or '.join(asked.states)}?")
        answers = drive(conn, steps(found, actions.By(asked)))
    if given["as_json"]:
        click.echo(document(answers))
    elif ids:
        click.echo("\n".join(map(sentence, answers)))
    else:
        click.echo(counted(Counter(answer.did for answer in answers)) or "No job fits.")
    if ids and not all(answer.changed for answer in answers):
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


def _jobs(count: int) -> str:
    return plural(count, "job", "jobs")


def _of(asked: Filter) -> str:
    task = f" of task {plain(asked.task)}" if asked.task else ""
    queue = f" in queue {plain(asked.queue)}" if asked.queue else ""
    flow = "" if asked.flow is None else f" of flow {asked.flow}"
    return (
        task
        + queue
        + flow
        + ("" if asked.older_than is None else f" that ended more than {span(asked.older_than)} ago")
    )
