"""`pgqueue pause`: pause a queue or a task."""

from __future__ import annotations

import click

from pgqueue.cli.database import connected
from pgqueue.cli.json_document import document
from pgqueue.cli.options import actor, as_json, database, queue_or_task


@click.command("pause")
@click.argument("queue", required=False)
@click.option("--task", metavar="NAME", help="This task, in all queues, instead of a queue.")
@actor
@as_json
@database
def command(queue: str | None, task: str | None, as_json: bool) -> None:
    """Take no more jobs from a queue, or of a task.

    The pause is valid for every worker, at once, until `pgqueue resume`. Running jobs go on; new jobs wait. Pausing
    what is paused already changes nothing.

    \b
    Examples:
      pgqueue pause mail
      pgqueue pause --task mail.send
    """
    from pgqueue.admin import queues
    from pgqueue.cli import known_names

    what = queue_or_task(queue, task)
    with connected("pause") as conn:
        changed = queues.pause(conn, **what)
        known_names.warn(conn, **what)
    said = f"{' '.join(*what.items())} {'is paused' if changed else 'was paused already'}"
    click.echo(document([what | {"changed": changed}]) if as_json else said)
