"""`pgqueue resume`: end the pause of a queue or a task."""

from __future__ import annotations

import click

from pgqueue.cli.database import connected
from pgqueue.cli.json_document import document
from pgqueue.cli.options import actor, as_json, database, queue_or_task


@click.command("resume")
@click.argument("queue", required=False)
@click.option("--task", metavar="NAME", help="This task, in all queues, instead of a queue.")
@actor
@as_json
@database
def command(queue: str | None, task: str | None, as_json: bool) -> None:
    """Take jobs from a paused queue, or of a paused task, again.

    Workers look for jobs at once. Resuming what is not paused changes nothing.

    \b
    Examples:
      pgqueue resume mail
      pgqueue resume --task mail.send
    """
    from pgqueue.admin import queues
    from pgqueue.cli import known_names

    what = queue_or_task(queue, task)
    with connected("resume") as conn:
        changed = queues.resume(conn, **what)
        if not changed:
            known_names.warn(conn, **what)
    said = f"{' '.join(*what.items())} {'is open again' if changed else 'was not paused'}"
    click.echo(document([what | {"changed": changed}]) if as_json else said)
