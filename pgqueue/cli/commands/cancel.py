"""`pgqueue cancel`: jobs by id, or all that fit."""

from __future__ import annotations

from functools import partial

import click

from pgqueue.cli.job_filter import act, filters
from pgqueue.cli.options import as_json, database

LIVE = ("available", "scheduled", "blocked", "running")


@click.command("cancel")
@filters(LIVE)
@click.option("--reason", default="cancelled by hand", show_default=True, help="Kept with the job.")
@as_json
@database
def command(
    ids: tuple[int, ...],
    state: str | None,
    queue: str | None,
    task: str | None,
    limit: int | None,
    yes: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Cancel jobs by ID, or all that fit.

    Waiting jobs end at once. Running ones are asked to: their worker stops the handler, which may still complete
    first. Without an ID, --state, --queue and --task choose, and you are asked before anything is done. Exit code
    1: one of the IDs could not be cancelled, or you said no.

    \b
    Examples:
      pgqueue cancel 4711 4712
      pgqueue cancel --queue mail --task mail.send
      pgqueue cancel --state scheduled --task report.daily --yes
    """
    from pgqueue.admin import actions

    if bool(ids) == bool(state or queue or task) or (ids and limit):
        raise click.UsageError("give IDs, or choose with --state, --queue, --task")
    states = (state,) if state else LIVE
    steps = partial(actions.cancelling, reason=reason)
    act("cancel", ids, states=states, queue=queue, task=task, limit=limit, yes=yes, as_json=as_json, steps=steps)
