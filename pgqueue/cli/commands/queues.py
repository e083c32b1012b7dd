"""`pgqueue queues`: every queue, its jobs and its workers; and which of them modules declare."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import click

from pgqueue.admin.bounded import cut_at
from pgqueue.cli.database import reading
from pgqueue.cli.json_document import document
from pgqueue.cli.options import app_dir, as_json, database
from pgqueue.cli.queue_table import counted, pauses, queue_table
from pgqueue.cli.tables import cut_line


@click.command("queues")
@click.argument("modules", metavar="[MODULE]...", nargs=-1)
@app_dir
@as_json
@database
def command(modules: tuple[str, ...], app_dir: str, as_json: bool) -> None:
    """Show the queues, with their jobs and workers.

    With MODULE, HERE is the number of tasks that it declares for each queue, and the queues that only it names are
    shown, too. Numbers are those of `pgqueue status`. A line for each PAUSED queue says since when, and by which actor.

    \b
    Examples:
      pgqueue queues
      pgqueue queues myapp.tasks
      pgqueue queues --json | jq '.items[] | select(.workers == 0)'
    """
    from pgqueue.admin import depth
    from pgqueue.cli.task_modules import declared_in
    from pgqueue.config import config
    from pgqueue.database import shown, steps

    declared = declared_in(modules, app_dir)
    here = None if declared is None else dict(Counter(task.queue for task in declared))
    with reading("queues") as conn:
        measured = steps.drive(conn, depth.measured(config().schema), {})
    found, now = depth.queue_list(measured), shown.at(measured.now)
    cut = cut_at(found, depth.QUEUES_MOST)
    names = {queue.name for queue in found}
    none = depth.Count(0)
    for name in sorted((here or {}).keys() - names):
        found.append(depth.QueueInfo(name, none, none, none, none, None, 0, None))
    if as_json:
        click.echo(document((asdict(each) | _here(each.name, here) for each in found), cut_at=cut))
    elif found:
        paused = [("queue", each.name, each.paused_at, each.paused_by) for each in found]
        age = counted(shown.at(measured.counted_at), now)
        click.echo(
            "\n".join([*queue_table(found, here), *cut_line(cut, "queues", "by name"), *age, *pauses(paused, now)])
        )
    else:
        click.echo("No queue has jobs or workers.")


def _here(name: str, here: dict[str, int] | None) -> dict[str, int]:
    return {} if here is None else {"here": here.get(name, 0)}
