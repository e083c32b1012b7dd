"""`pgqueue retry`: run failed or cancelled jobs again, by id or all that fit a filter."""

from __future__ import annotations

from typing import Any

import click

from pgqueue.cli.job_filter import act, ids_or_filter
from pgqueue.cli.options import actor, as_json, database
from pgqueue.jobs.states import DEAD


@click.command("retry")
@ids_or_filter((*DEAD, "completed"))
@click.option("--again", is_flag=True, help="Run completed jobs, too, as new jobs.")
@actor
@as_json
@database
def command(again: bool, **given: Any) -> None:
    """Run failed or cancelled jobs again.

    Give IDs, or choose jobs with --state, --queue and --task; then you are asked first. The jobs are available at once,
    and may make at least one more attempt. A completed job is run with --again only, as a new job: its headers name the
    old one. Exit code 1: a job with one of the IDs could not be retried, or you said no.

    \b
    Examples:
      pgqueue retry 4711 4712
      pgqueue retry --state failed --task mail.send
      pgqueue retry 4713 --again
    """
    from pgqueue.admin import actions

    if "completed" in given["state"] and not again:
        raise click.UsageError("completed jobs are run with --again only")
    act("retry", given, lambda ids, by: actions.retrying(ids, again, by), again=again)
