"""Shared by `restart`, `quiet` and `scale`: which supervisors get the order, and waiting until it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgqueue.cli.database import connected
from pgqueue.cli.exit_codes import NO

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


def tell(kind: Kind, *, host: str | None, supervisor: int | None, wait: bool, size: int | None = None) -> None:
    """Give the order, and print which supervisors got it. With `wait`, wait for its result and print it."""
    from pgqueue.admin import workers

    with connected(kind) as conn:
        told = workers.tell(conn, kind, size=size, host=host, supervisor=supervisor)
        if not told:
            click.echo("no supervisor fits: `pgqueue work … --processes N` starts one", err=True)
            raise click.exceptions.Exit(NO)
        for one in told:
            click.echo(f"{_name(one)}: ordered to {kind}")
        if wait:
            _wait(told, lambda orders: workers.answers(conn, orders))


def _wait(told: Sequence[Told], look: Callable[[list[int]], list[Answer]]) -> None:
    left, failed = {one.order: one for one in told}, False
    while left:
        answers = {answer.order: answer for answer in look(list(left))}
        for order, one in list(left.items()):
            answer = answers.get(order)
            if answer is not None and not answer.done and answer.alive:
                continue
            del left[order]
            problem = "it is gone" if answer is None or not answer.done else answer.problem
            failed = failed or problem is not None
            click.echo(f"{_name(one)}: {problem or 'done'}", err=problem is not None)
        if left:
            time.sleep(LOOK_SECONDS)
    if failed:
        raise click.exceptions.Exit(NO)


def _name(one: Told) -> str:
    return f"supervisor {one.supervisor} ({one.host}:{one.pid})"
