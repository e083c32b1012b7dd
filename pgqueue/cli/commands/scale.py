"""`pgqueue scale N`: set the number of processes."""

from __future__ import annotations

import click

from pgqueue.cli.options import Whole, actor, as_json, database
from pgqueue.cli.orders import targets, tell


@click.command("scale")
@click.argument("size", metavar="N", type=Whole(1, 1000))
@targets
@actor
@as_json
@database
def command(size: int, host: str | None, supervisor: int | None, wait: bool, as_json: bool) -> None:
    """Let each supervisor keep N worker processes.

    Missing processes are started; surplus ones finish their jobs and leave. The number is valid until the supervisor
    ends; a new supervisor takes --processes again. SIGTTIN is one more process, SIGTTOU one less.

    \b
    Examples:
      pgqueue scale 8 --wait
      pgqueue scale 2 --host web1
    """
    tell("scale", size=size, host=host, supervisor=supervisor, wait=wait, as_json=as_json)
