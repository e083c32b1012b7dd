"""`pgqueue restart`: new processes first, then the old ones finish and leave."""

from __future__ import annotations

import click

from pgqueue.cli.options import actor, as_json, database
from pgqueue.cli.orders import targets, tell


@click.command("restart")
@targets
@actor
@as_json
@database
def command(host: str | None, supervisor: int | None, wait: bool, as_json: bool) -> None:
    """Replace the worker processes, new ones first.

    Each supervisor starts new processes, with the code as it is now. When all of them have announced themselves, the
    old ones take no more jobs, finish those they have, however long that takes, and leave. If a new one fails to
    start, the restart is taken back and the old ones go on. The option --wait does not wait for the old ones to leave.
    SIGHUP does the same.

    \b
    Examples:
      pgqueue restart --wait
      pgqueue restart --host web1
    """
    tell("restart", host=host, supervisor=supervisor, wait=wait, as_json=as_json)
