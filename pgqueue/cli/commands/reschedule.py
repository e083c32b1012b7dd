"""`pgqueue reschedule`: let jobs that wait start at another time."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from pgqueue.cli.database import connected
from pgqueue.cli.exit_codes import NO
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Moment, Whole, actor, as_json, database
from pgqueue.jobs.values import HIGHEST_ID


@click.command("reschedule")
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=Whole(1, HIGHEST_ID))
@click.option("--at", type=Moment(), metavar="TIME", help="At this moment, such as 2026-12-24T18:00+01:00.")
@click.option("--now", is_flag=True, help="At once.")
@actor
@as_json
@database
def command(ids: tuple[int, ...], at: datetime | None, now: bool, as_json: bool) -> None:
    """Give jobs that wait another time.

    Jobs that are scheduled, available or blocked wait for that time; a time that has come is now. A job that runs goes
    on, and one that has ended is for `pgqueue retry`. Exit code 1: a job with one of the IDs could not be rescheduled.

    \b
    Examples:
      pgqueue reschedule 4711 --at 2026-12-24T18:00+01:00
      pgqueue reschedule 4711 4712 --now
    """
    from pgqueue.admin import actions
    from pgqueue.admin.answers import sentence
    from pgqueue.database.steps import drive

    if (at is None) != now:
        raise click.UsageError("give --at TIME or --now")
    with connected("reschedule") as conn:
        # A time that has come is now by the clock of the database.
        answers = drive(conn, actions.rescheduling(ids, at or datetime.fromtimestamp(0, UTC), actions.By()))
    click.echo(document(answers) if as_json else "\n".join(map(sentence, answers)))
    if not all(answer.changed for answer in answers):
        raise click.exceptions.Exit(NO)
