"""`pgqueue pause`: pause a queue."""

from __future__ import annotations

import click

from pgqueue.cli.database import connected
from pgqueue.cli.json_document import document
from pgqueue.cli.options import as_json, database


@click.command("pause")
@click.argument("queue")
@as_json
@database
def command(queue: str, as_json: bool) -> None:
    """Take no more jobs from a queue.

    The pause is valid for every worker, at once, until `pgqueue resume`. Running jobs go on; new jobs wait. Pausing a
    queue that is paused already changes nothing.

    \b
    Examples:
      pgqueue pause mail
    """
    from pgqueue.admin import queues
    from pgqueue.cli import known_names

    with connected("pause") as conn:
        changed = queues.pause(conn, queue)
        known_names.warn(conn, queue)
    said = f"queue {queue} {'is paused' if changed else 'was paused already'}"
    click.echo(document([{"queue": queue, "changed": changed}]) if as_json else said)
