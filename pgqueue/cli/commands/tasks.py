"""`pgqueue tasks`: the tasks that workers know and that jobs have; and which of them modules declare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from pgqueue.admin.bounded import cut_at
from pgqueue.cli.database import clock, reading
from pgqueue.cli.json_document import document
from pgqueue.cli.options import app_dir, as_json, database
from pgqueue.cli.tables import cut_line, short, span, table, width

if TYPE_CHECKING:
    from pgqueue.admin.tasks import TaskInfo


ACTOR_MOST = 12


@click.command("tasks")
@click.argument("modules", metavar="[MODULE]...", nargs=-1)
@app_dir
@as_json
@database
def command(modules: tuple[str, ...], app_dir: str, as_json: bool) -> None:
    """Show the tasks of live workers, and those that jobs name.

    JOBS wait or run, in these QUEUES. A task is UNKNOWN if jobs of it are in a queue whose live workers do not know it.
    A PAUSED task says since when, and by which actor. With MODULE, HERE is the queue that it declares for each task.
    Tasks that no live worker knows, and those that are not here, are marked.

    \b
    Examples:
      pgqueue tasks
      pgqueue tasks myapp.tasks
      pgqueue tasks --json | jq '.items[] | select(.unknown) | .name'
    """
    from pgqueue.admin import tasks
    from pgqueue.admin.depth import Count
    from pgqueue.cli.task_modules import declared_in

    declared = declared_in(modules, app_dir)
    here = None if declared is None else {name: task.queue for task in declared for name in (task.name, *task.aliases)}
    with reading("tasks") as conn:
        found = tasks.tasks(conn)
        now = clock(conn)
    cut, known = cut_at(found, tasks.TASKS_MOST), {task.name for task in found}
    none = Count(0)
    found += [tasks.TaskInfo(name, 0, none, (), False) for name in here or () if name not in known]
    found.sort(key=lambda task: (not task.unknown, task.paused_at is None, task.name))
    if as_json:
        click.echo(document((asdict(each) | _here(each, here) for each in found), cut_at=cut))
    elif found:
        click.echo("\n".join([*_screen(found, here, now), *cut_line(cut, "tasks", "by name")]))
    else:
        click.echo("No worker knows a task, and no job is there.")


def _here(task: TaskInfo, here: dict[str, str] | None) -> dict[str, Any]:
    return {} if here is None else {"here": here.get(task.name)}


def _screen(found: Sequence[TaskInfo], here: dict[str, str] | None, now: datetime) -> Iterator[str]:
    rows = [
        [
            task.name,
            *([] if here is None else [here.get(task.name, "-")]),
            task.workers,
            task.jobs,
            ",".join(task.queues),
            _note(task, here, now),
        ]
        for task in found
    ]
    heads = ["TASK", *([] if here is None else ["HERE"]), "WORKERS", "JOBS", "QUEUES", "NOTE"]
    yield from table(heads, rows, right="WORKERS JOBS", gives="QUEUES TASK")


def _note(task: TaskInfo, here: dict[str, str] | None, now: datetime) -> str:
    if task.paused_at is not None:
        by = f" by {short(task.paused_by, ACTOR_MOST) if width() else task.paused_by}" if task.paused_by else ""
        return f"{'UNKNOWN, ' * task.unknown}PAUSED {span(now - task.paused_at)}{by}"
    if task.unknown:
        return "UNKNOWN"
    if here is None:
        return ""
    return "not here" if task.name not in here else "no worker" if not task.workers else ""
