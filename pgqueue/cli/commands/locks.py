"""`pgqueue locks`: show which jobs hold a key, and how many wait for it. `pgqueue locks release KEY` takes it away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from pgqueue.cli.database import connected, reading
from pgqueue.cli.exit_codes import NO
from pgqueue.cli.groups import Group
from pgqueue.cli.job_filter import ask
from pgqueue.cli.json_document import document
from pgqueue.cli.options import actor, as_json, database
from pgqueue.cli.tables import fitting, span, table
from pgqueue.plain_text import plain, plural

if TYPE_CHECKING:
    from pgqueue.admin.locks import Holder, LockInfo, Released

SHOWN_MOST = 100


@click.group("locks", cls=Group, invoke_without_command=True)
@click.option("--begins", metavar="TEXT", default="", help="Only keys that begin with this text.")
@as_json
@database
@click.pass_context
def command(ctx: click.Context, begins: str, as_json: bool) -> None:
    """Show the keys that are held or waited for.

    Keys with the most waiting jobs come first. HOLDER is the job that holds the key, or the first of several.
    `granted` means: the job has the key and waits for a slot. AGE is how long the holder has run, WAITED how long the
    first waiting job has waited. Of the keys that jobs wait for, the first 1,000 by name are looked at. If there may be
    others, the command says so, and JSON has `cut_at`.

    \b
    Examples:
      pgqueue locks
      pgqueue locks --begins account:
      pgqueue locks --json | jq '.items[] | select(.waiting > 100) | .key'
      pgqueue locks release account:7 --yes
    """
    if ctx.invoked_subcommand is not None:
        return
    from pgqueue.admin import locks

    with reading("locks") as conn:
        found = locks.bounded_locks(conn, begins=begins)
    if as_json:
        click.echo(document(found.rows, cut_at=found.cut_at))
    elif found.rows:
        click.echo("\n".join([*_screen(found.rows), *_cut(found.cut_at)]))
    elif begins:
        click.echo(f"No key that begins with {plain(begins)} is held, and no job waits for one.")
    else:
        click.echo("No key is held, and no job waits for one.")


@command.command("release")
@click.argument("key")
@click.option("--yes", is_flag=True, help="Do not ask.")
@actor
@as_json
@database
def release(key: str, yes: bool, as_json: bool) -> None:
    """Take KEY from jobs that hold it and do not run.

    This is safe. If a granted job loses the key, it waits for it again, before the others. If a job keeps the key until
    its next attempt (hold_on_retry), it waits for that attempt without the key. The next waiting job gets the key in
    the usual way. A running job keeps its key until it ends, unless its worker is known to be dead. Then the job is
    named, and the exit code is 1.

    \b
    Examples:
      pgqueue locks release account:7
      pgqueue locks release account:7 --yes
    """
    from pgqueue.admin import locks

    if not yes:
        ask(f"Take {plain(key)} from the jobs that hold it and do not run?")
    with connected("locks") as conn:
        done = locks.release(conn, key)
    if as_json:
        click.echo(document([done]))
    else:
        click.echo("\n".join(_said(key, done, [locks.sentence(job) for job in done.running])))
    if done.running:
        raise click.exceptions.Exit(NO)


def _cut(cut_at: int | None) -> list[str]:
    """Holders are not read by name, so the line names no order and no number."""
    return [] if cut_at is None else ["Not all keys were looked at. There may be others: --begins finds them."]


def _said(key: str, done: Released, kept: Sequence[str]) -> Iterator[str]:
    if done.ids:
        yield f"{plain(key)}: taken from job {', '.join(map(str, done.ids))}"
    elif not kept:
        yield f"{plain(key)}: no job holds it"
    yield from map(plain, kept)


def _screen(found: Sequence[LockInfo]) -> Iterator[str]:
    shown, rest = fitting(found, SHOWN_MOST)
    rows = [
        [
            lock.key,
            _holder(lock.holders[0]) + (f" +{len(lock.holders) - 1}" if lock.holders[1:] else "")
            if lock.holders
            else "",
            span(lock.holders[0].age) if lock.holders else "",
            "10000+" if lock.waiting > 10_000 else lock.waiting,
            span(lock.waited),
        ]
        for lock in shown
    ]
    yield from table(
        ["KEY", "HOLDER", "AGE", "WAITING", "WAITED"], rows, right="AGE WAITING WAITED", gives="HOLDER KEY"
    )
    if rest:
        yield f"… and {plural(rest, 'more key', 'more keys')}; --json prints all"


def _holder(holder: Holder) -> str:
    state = {"available": "granted", "scheduled": "retries later"}.get(holder.state, holder.process or holder.state)
    return f"{holder.id} {holder.task} ({state})"
