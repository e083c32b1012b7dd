"""`pgqueue schedules`: list, add, pause, resume, run and remove schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from pgqueue.cli.commands.enqueue import arguments_of
from pgqueue.cli.database import connected, reading
from pgqueue.cli.groups import Group
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Duration, actor, as_json, database
from pgqueue.cli.tables import table
from pgqueue.plain_text import plain

if TYPE_CHECKING:
    from pgqueue.client.schedules import ScheduleInfo


@click.group("schedules", cls=Group, invoke_without_command=True)
@as_json
@database
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Show the schedules: their cron lines, tasks, and times.

    NEXT and LAST are UTC. Only active schedules tick. STATE is one of these:

    \b
      active
      paused
      refused   its cron line or options are wrong; the reason is below
      orphaned  no live worker has declared it for ten minutes
      over      it has no time to come

    \b
    Examples:
      pgqueue schedules
      pgqueue schedules add nightly report.daily --cron '0 3 * * *'
      pgqueue schedules run nightly
    """
    if ctx.invoked_subcommand is None:
        _list(as_json)


@command.command("list")
@as_json
@database
def list_(as_json: bool) -> None:
    """Show the schedules, as `pgqueue schedules` does."""
    _list(as_json)


@command.command("add")
@click.argument("name")
@click.argument("task")
@click.argument("arguments", metavar="[JSON]", default="{}")
@click.option("--cron", "expr", metavar="LINE", help="Five fields, or six with the seconds first.")
@click.option("--tz", metavar="ZONE", help="The time zone of --cron [UTC].")
@click.option("--every", "seconds", type=Duration(least=1.0), help="The interval, counted from 1970: 30s, 15m, 2h.")
@click.option(
    "--catch-up",
    type=click.Choice(("latest", "all", "none")),
    default="latest",
    show_default=True,
    help="Which of the missed ticks are made.",
)
@click.option("--queue", default="default", show_default=True, help="The queue of its jobs.")
@click.option("--priority", type=int, default=5, show_default=True, help="0 (first) to 9.")
@click.option("--lock", metavar="KEY", help="At most one job of this key runs at a time.")
@actor
@as_json
@database
def add(
    name: str,
    task: str,
    arguments: str,
    expr: str | None,
    tz: str | None,
    seconds: float | None,
    catch_up: str,
    queue: str,
    priority: int,
    lock: str | None,
    as_json: bool,
) -> None:
    """Add a schedule, or change an added one.

    Each tick enqueues a job of TASK with these arguments (JSON, by name; `-` reads it from stdin). The task's code is
    not needed here. Therefore names and types of arguments are checked when a job runs. A schedule that code declares
    is changed in the code.

    \b
    Examples:
      pgqueue schedules add nightly report.daily --cron '0 3 * * *'
      pgqueue schedules add poll:7 feed.poll '{"feed": 7}' --every 5m --catch-up none
    """
    import pgqueue
    from pgqueue.client import schedules
    from pgqueue.jobs.cron import Cron, Every

    if (expr is None) == (seconds is None):
        raise click.UsageError("give --cron or --every, and not both")
    if seconds is not None and tz is not None:
        raise click.UsageError("--tz belongs to --cron")
    when = Every(seconds, catch_up) if seconds else Cron(str(expr), tz or "UTC", catch_up)  # type: ignore[arg-type]
    remote = pgqueue.remote(task, queue=queue, priority=priority)
    if lock is not None:
        remote = remote.using(lock=lambda **arguments: lock)
    with connected("schedules") as conn:
        new = schedules.add(conn, name, when, remote, **arguments_of(arguments))
    _say(name, "added" if new else "changed", as_json, created=new)


@command.command("pause")
@click.argument("name")
@actor
@as_json
@database
def pause(name: str, as_json: bool) -> None:
    """Pause a schedule until it is resumed.

    The jobs that it has made already are not changed.
    """
    from pgqueue.client import schedules

    with connected("schedules") as conn:
        changed = schedules.pause(conn, name)
    _say(name, "is paused" if changed else "was paused already", as_json, changed=changed)


@command.command("resume")
@click.argument("name")
@actor
@as_json
@database
def resume(name: str, as_json: bool) -> None:
    """Let a schedule tick again.

    Its catch_up decides about the ticks it has missed. A refused schedule is tried again.
    """
    from pgqueue.client import schedules

    with connected("schedules") as conn:
        changed = schedules.resume(conn, name)
    _say(name, "ticks again" if changed else "was not paused", as_json, changed=changed)


@command.command("run")
@click.argument("name")
@actor
@as_json
@database
def run(name: str, as_json: bool) -> None:
    """Enqueue one job now and print its id.

    The schedule may be in any state. Its next tick does not change.
    """
    from pgqueue.client import schedules

    with connected("schedules") as conn:
        job = schedules.run(conn, name)
    click.echo(document([{"id": job.id, "created": job.created}]) if as_json else job.id)


@command.command("remove")
@click.argument("name")
@actor
@as_json
@database
def remove(name: str, as_json: bool) -> None:
    """Delete a schedule.

    Exit code 1 if live workers declare it, because it would be back at once.
    """
    from pgqueue.client import schedules

    with connected("schedules") as conn:
        schedules.remove(conn, name)
    _say(name, "removed", as_json, changed=True)


def _say(name: str, what: str, as_json: bool, **facts: bool) -> None:
    click.echo(document([{"name": name} | facts]) if as_json else f"schedule {plain(name)} {what}")


def _list(as_json: bool) -> None:
    from pgqueue.client import schedules

    with reading("schedules") as conn:
        found = schedules.schedules(conn)
    if as_json:
        click.echo(document(found))
    elif found:
        click.echo("\n".join(_screen(found)))
    else:
        click.echo("There is no schedule.")


def _screen(found: Sequence[ScheduleInfo]) -> Iterator[str]:
    rows = [
        [
            each.name,
            each.line if each.tz == "UTC" else f"{each.line} {each.tz}",
            each.task,
            each.state,
            _short(each.next_at),
            _short(each.last_at),
        ]
        for each in found
    ]
    yield from table(["NAME", "LINE", "TASK", "STATE", "NEXT", "LAST"], rows, gives="TASK NAME LINE")
    for each in found:
        if each.refused:
            yield f"{plain(each.name)}: {plain(each.refused)}"


def _short(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%m-%d %H:%M:%SZ}"
