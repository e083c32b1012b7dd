"""`pgqueue limits`: how many jobs of each limit may run at once, and do; `pgqueue limits set NAME VALUE`: change it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from pgqueue.cli.database import connected, reading
from pgqueue.cli.options import as_json, database
from pgqueue.cli.tables import plain, span, table

if TYPE_CHECKING:
    from pgqueue.limits import LimitInfo, Setting

SHOWN_MOST = 100
DECLARED = "default"


@click.group("limits", invoke_without_command=True)
@as_json
@database
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Show how many jobs of each limit may run at once, and do.

    AT ONCE is what holds now: `20 (code: 10)` was set by hand where the code says 10; `none yet`: jobs wait for a limit
    that no worker has declared. HELD jobs have the limit and do not run: they wait for a slot, a rate or their retry.
    WAITED is how long the first in line has waited.

    \b
    Examples:
      pgqueue limits
      pgqueue limits --json | jq '.[] | select(.waiting > 100) | .name'
      pgqueue limits set warehouse 20
    """
    if ctx.invoked_subcommand is not None:
        return
    from pgqueue import limits

    with reading("limits") as conn:
        found = limits.limits(conn)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found]))
    elif found:
        click.echo("\n".join(_screen(found)))
    else:
        click.echo("There is no limit.")


@command.command("set")
@click.argument("name")
@click.argument("value")
@as_json
@database
def change(name: str, value: str, as_json: bool) -> None:
    """Let VALUE jobs of limit NAME run at once from now on.

    It holds for all workers, whatever their code declares, until it is set again; `default` gives it back to the code.
    A larger number lets those in that wait at once; a smaller one stops nobody, and lets nobody in until enough have
    ended; 0 lets nobody in. Exit code 1 if there is no such limit.

    \b
    Examples:
      pgqueue limits set warehouse 20
      pgqueue limits set warehouse default
    """
    from pgqueue import limits

    with connected("limits") as conn:
        done = limits.change(conn, name, _number(value))
    click.echo(json.dumps(asdict(done)) if as_json else _said(done))


def _number(value: str) -> int | None:
    if value == DECLARED:
        return None
    if not value.isascii() or not value.isdigit():
        raise click.BadParameter(f"{value!r} is neither a whole number nor {DECLARED!r}", param_hint="VALUE")
    return int(value)


def _said(done: Setting) -> str:
    why = "set by hand" if done.by_hand else "as the code says"
    if done.by_hand and done.declared is not None:
        why += f"; the code says {done.declared}"
    return f"{plain(done.name)}: {done.n} at once ({why})"


def _screen(found: Sequence[LimitInfo]) -> Iterator[str]:
    rows = [
        [each.name, _allowed(each), each.running, each.held, _count(each.waiting), span(each.waited)]
        for each in found[:SHOWN_MOST]
    ]
    heads = ["LIMIT", "AT ONCE", "RUNNING", "HELD", "WAITING", "WAITED"]
    yield from table(heads, rows, right="RUNNING HELD WAITING WAITED", gives="LIMIT")
    if len(found) > SHOWN_MOST:
        yield f"… and {len(found) - SHOWN_MOST} more limits; --json prints all"


def _allowed(limit: LimitInfo) -> str:
    if limit.n is None:
        return "none yet"
    if not limit.by_hand:
        return str(limit.n)
    return f"{limit.n} (by hand)" if limit.declared is None else f"{limit.n} (code: {limit.declared})"


def _count(number: int) -> str:
    return "10000+" if number > 10_000 else str(number)
