"""`pgqueue pause`: pause a queue."""

from __future__ import annotations

import click

from pgqueue.cli.database import connected
from pgqueue.cli.options import database


@click.command("pause")
@click.argument("queue")
@database
def command(queue: str) -> None:
    """Take no more jobs from a queue.

    The pause is valid for every worker, at once, until `pgqueue resume`. Running jobs go on; new jobs wait. Pausing a
    queue that is paused already changes nothing.

    \b
    Examples:
      pgqueue pause mail
    """
    from pgqueue.admin import queues

    with connected("pause") as conn:
        changed = queues.pause(conn, queue)
    click.echo(f"queue {queue} {'is paused' if changed else 'was paused already'}")
