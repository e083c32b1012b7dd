"""`pgqueue quiet`: finish running jobs, take no more."""

from __future__ import annotations

import click

from pgqueue.cli.options import actor, as_json, database
from pgqueue.cli.orders import targets, tell


@click.command("quiet")
@targets
@actor
@as_json
@database
def command(host: str | None, supervisor: int | None, wait: bool, as_json: bool) -> None:
    """Let workers finish their jobs and take no more.

    The worker processes leave when their last job has ended; --wait waits for that. The supervisors stay, and start no
    process until `pgqueue restart`. SIGUSR1 does the same.

    \b
    Examples:
      pgqueue quiet --wait
      pgqueue quiet --host web1
    """
    tell("quiet", host=host, supervisor=supervisor, wait=wait, as_json=as_json)
