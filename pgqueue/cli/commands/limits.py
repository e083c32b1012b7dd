"""`pgqueue limits`: show limits and rates with the jobs that run and wait. `pgqueue limits set NAME VALUE` sets one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from pgqueue.cli.database import connected, reading
from pgqueue.cli.groups import Group
from pgqueue.cli.json_document import document
from pgqueue.cli.options import actor, as_json, database
from pgqueue.cli.tables import cut_line, fitting, span, table
from pgqueue.jobs.values import digits
from pgqueue.plain_text import plain, plural

if TYPE_CHECKING:
    from pgqueue.admin.bounded import Bounded
    from pgqueue.admin.limits import LimitInfo, Pace, RateInfo, Setting

Shown = TypeVar("Shown", bound="LimitInfo | RateInfo")

SHOWN_MOST = 100
DECLARED = "default"
UNDECLARED = "undeclared"


@click.group("limits", cls=Group, invoke_without_command=True)
@click.option("--begins", metavar="TEXT", default="", help="Only limits and rates whose names begin with this text.")
@as_json
@database
@click.pass_context
def command(ctx: click.Context, begins: str, as_json: bool) -> None:
    """Show limits and rates: what each allows, and which jobs wait.

    AT ONCE is how many jobs of a limit may run at once, STARTS how many jobs of a rate may start in a period. `20
    (code: 10)` means: set by hand to 20, while the code says 10. If a limit or rate is `undeclared`, jobs wait until a
    worker declares it; these come first.

    HELD is the number of jobs that have the limit and do not run: they wait for a slot, a rate or their retry. WAITED
    is how long the first waiting job has waited. LINES is the number of a rate's keys that jobs wait for. Of the limits
    and of the keys of rates that jobs wait for, the first 1,000 by name are looked at. If there may be others, the
    command says so, and JSON has `cut_at`.

    \b
    Examples:
      pgqueue limits
      pgqueue limits --begins warehouse
      pgqueue limits --json | jq '.items[] | select(.undeclared) | .name'
      pgqueue limits set warehouse 20
    """
    if ctx.invoked_subcommand is not None:
        return
    from pgqueue.admin import limits

    with reading("limits") as conn:
        found, paces = limits.bounded_limits(conn, begins=begins), limits.bounded_rates(conn, begins=begins)
    if as_json:
        click.echo(document([*found.rows, *paces.rows], cut_at=found.cut_at or paces.cut_at))
    elif found.rows or paces.rows:
        screens = [
            *([[*_screen(found.rows), *_cut(found, "limits")]] if found.rows else []),
            *([[*_rates(paces.rows), *_cut(paces, "keys of rates")]] if paces.rows else []),
        ]
        click.echo("\n\n".join("\n".join(screen) for screen in screens))
    elif begins:
        click.echo(f"There is no limit and no rate whose name begins with {plain(begins)}.")
    else:
        click.echo("There is no limit and no rate.")


@command.command("set")
@click.argument("name")
@click.argument("value")
@actor
@as_json
@database
def change(name: str, value: str, as_json: bool) -> None:
    """Set what the limit or rate NAME allows.

    From now on VALUE jobs of that limit may run at once, or jobs may start at the rate VALUE.

    The value is valid for all workers until it is set again; the number in the code does not count. `default` sets a
    limit and a rate of that name back to the code's values.

    After a larger number waiting jobs start at once. A smaller number stops no job; no job starts until enough have
    ended. With 0 no job starts. Exit code 1 if no limit or rate has this name.

    \b
    Examples:
      pgqueue limits set warehouse 20
      pgqueue limits set mail.api 50/minute
      pgqueue limits set warehouse default
    """
    from pgqueue.admin import limits

    with connected("limits") as conn:
        done: Sequence[Setting | Pace]
        if value == DECLARED:
            done = _given_back(conn, name)
        elif "/" in value:
            done = [limits.change_rate(conn, name, value)]
        else:
            done = [limits.change(conn, name, _number(value))]
    click.echo(document(done) if as_json else "\n".join(map(_said, done)))


def _given_back(conn: object, name: str) -> list[Setting | Pace]:
    """Set the limit of this name, the rate, or both back to what the code says."""
    from pgqueue.admin import limits
    from pgqueue.errors import LimitNotFound

    done: list[Setting | Pace] = []
    try:
        done.append(limits.change_rate(conn, name, None))
    except LimitNotFound:
        return [limits.change(conn, name, None)]
    try:
        done.insert(0, limits.change(conn, name, None))
    except LimitNotFound:
        return done
    return done


def _number(value: str) -> int:
    if (number := digits(value, 1_000)) is None:
        raise click.BadParameter(
            f"{value!r:.80} is neither a whole number, nor a rate such as 50/minute, nor {DECLARED!r}",
            param_hint="VALUE",
        )
    return number


def _said(done: Setting | Pace) -> str:
    from pgqueue.admin.limits import Pace

    why = "set by hand" if done.by_hand else "as the code says"
    if done.by_hand and done.declared is not None:
        why += f"; the code says {done.declared}"
    return f"{plain(done.name)}: {done.rate if isinstance(done, Pace) else f'{done.n} at once'} ({why})"


def _screen(found: Sequence[LimitInfo]) -> Iterator[str]:
    shown, rest = fitting(_urgent(found), SHOWN_MOST)
    rows = [
        [each.name, _allowed(each), each.running, each.held, _count(each.waiting), span(each.waited)] for each in shown
    ]
    heads = ["LIMIT", "AT ONCE", "RUNNING", "HELD", "WAITING", "WAITED"]
    yield from table(heads, rows, right="RUNNING HELD WAITING WAITED", gives="LIMIT")
    if rest:
        yield f"… and {plural(rest, 'more limit', 'more limits')}; --json prints all"


def _rates(found: Sequence[RateInfo]) -> Iterator[str]:
    shown, rest = fitting(_urgent(found), SHOWN_MOST)
    rows = [
        [each.name, _pace(each), each.burst or "-", each.lines, _count(each.waiting), span(each.waited)]
        for each in shown
    ]
    heads = ["RATE", "STARTS", "BURST", "LINES", "WAITING", "WAITED"]
    yield from table(heads, rows, right="BURST LINES WAITING WAITED", gives="RATE")
    if rest:
        yield f"… and {plural(rest, 'more rate', 'more rates')}; --json prints all"


def _cut(found: Bounded[Shown], what: str) -> list[str]:
    return cut_line(found.cut_at, f"{what} that jobs wait for,", "by name,", "--begins")


def _urgent(found: Sequence[Shown]) -> list[Shown]:
    """Sorted by name; those that need an operator come first."""
    return sorted(found, key=lambda each: (not each.undeclared, each.name))


def _pace(rate: RateInfo) -> str:
    if rate.rate is None:
        return UNDECLARED
    if not rate.by_hand:
        return rate.rate
    return f"{rate.rate} (by hand)" if rate.declared is None else f"{rate.rate} (code: {rate.declared})"


def _allowed(limit: LimitInfo) -> str:
    if limit.n is None:
        return UNDECLARED
    if not limit.by_hand:
        return str(limit.n)
    return f"{limit.n} (by hand)" if limit.declared is None else f"{limit.n} (code: {limit.declared})"


def _count(number: int) -> str:
    return "10000+" if number > 10_000 else str(number)
