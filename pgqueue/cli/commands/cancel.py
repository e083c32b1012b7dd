"""`pgqueue cancel`: cancel jobs by id, or all that fit a filter."""

from __future__ import annotations

from typing import Any

import click

from pgqueue.cli.job_filter import act, ids_or_filter
from pgqueue.cli.options import actor, as_json, database
from pgqueue.jobs.states import LIVE, RETRYING


@click.command("cancel")
@ids_or_filter((*LIVE, RETRYING))
@click.option("--reason", default="cancelled by hand", show_default=True, help="Kept with the job.")
@actor
@as_json
@database
def command(reason: str, **given: Any) -> None:
    """Cancel jobs by ID, or all that fit.

    Waiting jobs end at once. If a job runs, its worker is asked to stop the handler, which may still complete first.
    Without an ID, --state, --queue and --task choose the jobs, and you are asked before anything is done. `retrying`
    are the scheduled jobs that wait for another attempt. Exit code 1: a job with one of the IDs could not be
    cancelled, or you said no.

    \b
    Examples:
      pgqueue cancel 4711 4712
      pgqueue cancel --queue mail --task mail.send
      pgqueue cancel --state scheduled --task report.daily --yes
      pgqueue cancel --state retrying --queue mail
    """
    from pgqueue.admin import actions

    act("cancel", given, lambda ids, by: actions.cancelling(ids, reason, by))
