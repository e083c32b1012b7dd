"""`pgqueue resume`: end the pause of a queue."""

from __future__ import annotations

import click

from pgqueue.cli.database import connected
from pgqueue.cli.json_document import document
from pgqueue.cli.options import as_json, database


@click.command("resume")
@click.argument("queue")
@as_json
@database
def command(queue: str, as_json: bool) -> None:
    """Take jobs from a paused queue again.

    Workers look for jobs at once. Resuming a queue that is not paused changes nothing.

    \b
    Examples:
      pgqueue resume mail
    """
    from pgqueue.admin import queues
    from pgqueue.cli import known_names

    with connected("resume") as conn:
        changed = queues.resume(conn, queue)
        if not changed:
            known_names.warn(conn, queue)
    said = f"queue {queue} {'is open again' if changed else 'was not paused'}"
    click.echo(document([{"queue": queue, "changed": changed}]) if as_json else said)
