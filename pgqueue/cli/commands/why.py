"""`pgqueue why`: why a job does not run, is not finished, has ended, or is not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from pgqueue.cli.database import reading
from pgqueue.cli.exit_codes import NO
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Whole, as_json, database
from pgqueue.plain_text import plain, plain_lines

if TYPE_CHECKING:
    from pgqueue.admin.why.reasons import Holder, Reason, Session, Why


@click.command("why")
@click.argument("id", type=Whole(1))
@as_json
@database
def command(id: int, as_json: bool) -> None:
    """Say why job ID does not run, or is not finished.

    Of a job that waits, every rule that holds it back is named, in the order in which a claim asks: its time, a pause,
    workers, slots, jobs before it, its lock, its limit, its rate. Of a running job: for how long, its worker, what it
    waits for. Of a job that has ended: why. Exit code 1: no job has this ID.

    \b
    Examples:
      pgqueue why 4711
      pgqueue why 4711 --json | jq -r '.items[].code'
    """
    from pgqueue.admin.why.why import why

    with reading("why") as conn:
        found = why(conn, id)
    if as_json:
        click.echo(document(found.reasons, id=found.id, state=found.state, at=found.at))
    else:
        click.echo("\n".join(_lines(found)))
    if found.state is None:
        raise click.exceptions.Exit(NO)


def _lines(found: Why) -> Iterator[str]:
    if found.job is None:
        yield f"Job {found.id} is not there."
    else:
        yield plain(f"Job {found.id} ({found.job.task}) in queue {found.job.queue} is {found.state}.")
    for reason in found.reasons:
        yield ""
        yield f"{reason.code}: {plain_lines(reason.text)}"
        yield from _others(reason)
        yield f"  see {reason.page}"


def _others(reason: Reason) -> Iterator[str]:
    """The jobs and sessions behind a reason, if there are several."""
    others: list[Holder | Session] = [*reason.holders, *reason.sessions]
    for each in others if len(others) > 1 else ():
        since = f", since {each.since:%Y-%m-%d %H:%M:%S} UTC" if each.since else ""
        yield f"  {plain(str(each))}{since}"
