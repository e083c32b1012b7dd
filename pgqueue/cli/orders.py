"""Shared by `restart`, `quiet` and `scale`: which supervisors get the order, and waiting until it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgqueue.cli.database import connected
from pgqueue.cli.exit_codes import NO, No
from pgqueue.cli.json_document import document

if TYPE_CHECKING:
    from pgqueue.admin.workers import Answer, Kind, Told

F = TypeVar("F", bound=Callable[..., Any])

LOOK_SECONDS = 0.2


def targets(command: F) -> F:
    """Add --host, --supervisor and --wait."""
    command = click.option("--wait", is_flag=True, help="Until it is done; exit code 1 if it cannot be.")(command)
    command = click.option("--supervisor", metavar="ID", type=int, help="Only this one; `pgqueue workers` shows them.")(
        command
    )
    return click.option("--host", metavar="NAME", help="Only those of this host.")(command)


def tell(
    kind: Kind, *, host: str | None, supervisor: int | None, wait: bool, as_json: bool, size: int | None = None
) -> None:
    """Give the order, and print which supervisors got it. With `wait`, wait for its result and print it."""
    from pgqueue.admin import workers

    with connected(kind) as conn:
        told = workers.tell(conn, kind, size=size, host=host, supervisor=supervisor)
        if not told:
            raise No("no supervisor fits: `pgqueue work … --processes N` starts one")
        say: Callable[..., None] = _silent if as_json else click.echo
        for one in told:
            say(f"{_name(one)}: ordered to {kind}")
        problems = _wait(told, lambda orders: workers.answers(conn, orders), say) if wait else {}
    if as_json:
        waited = ({"problem": problems.get(one.order)} if wait else {} for one in told)
        click.echo(document(asdict(one) | more for one, more in zip(told, waited, strict=True)))
    if any(problems.values()):
        raise click.exceptions.Exit(NO)


def _wait(
    told: Sequence[Told], look: Callable[[list[int]], list[Answer]], say: Callable[..., None]
) -> dict[int, str | None]:
    """Wait until all orders are carried out or cannot be; return the problem of each."""
    left, problems = {one.order: one for one in told}, dict[int, str | None]()
    while left:
        answers = {answer.order: answer for answer in look(list(left))}
        for order, one in list(left.items()):
            answer = answers.get(order)
            if answer is not None and not answer.done and answer.alive:
                continue
            del left[order]
            problem = "it is gone" if answer is None or not answer.done else answer.problem
            problems[order] = problem
            say(f"{_name(one)}: {problem or 'done'}", err=problem is not None)
        if left:
            time.sleep(LOOK_SECONDS)
    return problems


def _silent(text: str, err: bool = False) -> None:
    """With --json nothing is said before the end."""


def _name(one: Told) -> str:
    return f"supervisor {one.supervisor} ({one.host}:{one.pid})"
