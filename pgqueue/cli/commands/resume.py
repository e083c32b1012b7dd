"""`pgqueue resume`: end the pause of a queue."""

from __future__ import annotations

import click

from pgqueue.cli.database import connected
from pgqueue.cli.options import database


@click.command("resume")
@click.argument("queue")
@database
def command(queue: str) -> None:
    """Take jobs from a paused queue again.

    Workers look for jobs at once. Resuming a queue that is not paused changes nothing.

    \b
    Examples:
      pgqueue resume mail
    """
    from pgqueue.admin import queues

    with connected("resume") as conn:
        changed = queues.resume(conn, queue)
    click.echo(f"queue {queue} {'is open again' if changed else 'was not paused'}")
