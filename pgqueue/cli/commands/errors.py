"""`pgqueue errors`: what fails, grouped by task, type of error and place in the application."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from pgqueue.cli.database import clock, reading
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Moment, Whole, as_json, database
from pgqueue.cli.tables import span, table

if TYPE_CHECKING:
    from pgqueue.admin.error_groups import ErrorGroup


@click.command("errors")
@click.option("--since", type=Moment(ago=True), help="That occurred at this time or later: 2h, 3d, an ISO time.")
@click.option("--queue", "-q", metavar="NAME", help="Only of this queue.")
@click.option("--task", "-t", metavar="NAME", help="Only of this task.")
@click.option("--limit", type=Whole(1, 2_000), default=20, show_default=True, help="How many groups at most.")
@as_json
@database
def command(since: datetime | None, queue: str | None, task: str | None, limit: int, as_json: bool) -> None:
    """Show what fails, grouped by task, type and place.

    PLACE is the application's innermost function. LAST is how long ago the last one was, JOB one of the jobs. The group
    that has occurred last comes first. A new failure is counted here about two minutes later; until then it is among
    the jobs that have failed or are retried.

    \b
    Examples:
      pgqueue errors
      pgqueue errors --task mail.send --since 1d
      pgqueue jobs --state failed --state retrying
      pgqueue errors --json | jq '.items[] | [.count, .error_type, .job_ids]'
    """
    from pgqueue.admin import error_groups

    with reading("errors") as conn:
        found = error_groups.error_groups(conn, queue=queue, task=task, since=since, limit=limit)
        now = clock(conn)
    if as_json:
        click.echo(document(found))
    elif found:
        click.echo("\n".join(_screen(found, now)))
    else:
        click.echo("Nothing is counted as failed in this time. A failure is counted here about two minutes after it.")
        click.echo("Until then it is among the jobs: pgqueue jobs --state failed --state retrying")


def _screen(found: Sequence[ErrorGroup], now: datetime) -> list[str]:
    rows = [
        [
            group.count,
            span(now - group.last_at),
            group.task,
            group.error_type,
            group.place or "",
            max(group.job_ids, default=""),
        ]
        for group in found
    ]
    return table(["COUNT", "LAST", "TASK", "ERROR", "PLACE", "JOB"], rows, right="COUNT JOB", gives="PLACE TASK ERROR")
