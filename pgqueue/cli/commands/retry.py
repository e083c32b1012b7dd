"""`pgqueue retry`: dead jobs by id, or all that fit."""

from __future__ import annotations

from functools import partial

import click

from pgqueue.cli.job_filter import act, filters
from pgqueue.cli.options import as_json, database

DEAD = ("failed", "cancelled")


@click.command("retry")
@filters((*DEAD, "completed"))
@click.option("--again", is_flag=True, help="Completed ones, too, as new jobs.")
@as_json
@database
def command(
    ids: tuple[int, ...],
    state: str | None,
    queue: str | None,
    task: str | None,
    limit: int | None,
    yes: bool,
    again: bool,
    as_json: bool,
) -> None:
    """Run failed or cancelled jobs again.

    By ID, or all that fit --state, --queue and --task; then you are asked first. They are available at once, and
    their attempts count on, with at least one more. A completed job is run with --again only, as a new job: its
    headers name the old. Exit code 1: one of the IDs could not be retried, or you said no.

    \b
    Examples:
      pgqueue retry 4711 4712
      pgqueue retry --state failed --task mail.send
      pgqueue retry 4713 --again
    """
    from pgqueue.admin import actions

    if bool(ids) == bool(state or queue or task) or (ids and limit):
        raise click.UsageError("give IDs, or choose with --state, --queue, --task")
    if state == "completed" and not again:
        raise click.UsageError("completed jobs are run with --again only")
    states = (state,) if state else DEAD
    steps = partial(actions.retrying, again=again)
    act("retry", ids, states=states, queue=queue, task=task, limit=limit, yes=yes, as_json=as_json, steps=steps)
