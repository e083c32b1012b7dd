"""`pgqueue discard`: delete jobs that have ended, by id or all that fit a filter."""

from __future__ import annotations

from typing import Any

import click

from pgqueue.cli.job_filter import act, ids_or_filter
from pgqueue.cli.options import Duration, actor, as_json, database
from pgqueue.jobs.states import ENDED


@click.command("discard")
@ids_or_filter(ENDED)
@click.option("--older-than", type=Duration(), metavar="TIME", help="All that ended longer ago, such as 2h, 30d.")
@actor
@as_json
@database
def command(**given: Any) -> None:
    """Delete jobs that have ended, with their attempts.

    Arguments, results and errors of the jobs are gone then: use it for private data, or for what is in the way. Give
    IDs, or choose jobs with --state, --queue, --task and --older-than; then you are asked first. A job that has not
    ended is not deleted: cancel it first. A unique or idempotency key that still holds answers on until it expires.
    Exit code 1: a job with one of the IDs could not be deleted, or you said no.

    \b
    Examples:
      pgqueue discard 4711 4712
      pgqueue discard --task mail.send --older-than 2h --yes
    """
    from pgqueue.admin import actions

    act("discard", given, actions.discarding)
