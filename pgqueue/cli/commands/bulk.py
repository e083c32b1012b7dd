"""`pgqueue bulk`: cancel, retry, discard or reschedule all jobs that fit a filter, however many; list and stop that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgqueue.cli.bulk_progress import Progress, follow, summary
from pgqueue.cli.database import connected, reading
from pgqueue.cli.exit_codes import NO
from pgqueue.cli.groups import Group
from pgqueue.cli.job_filter import ask, choosing, read
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Duration, Moment, Whole, actor, as_json, database
from pgqueue.cli.tables import span, table
from pgqueue.jobs.states import DEAD, DONE, ENDED, LIVE, RETRYING, WAITING
from pgqueue.jobs.values import HIGHEST_ID
from pgqueue.plain_text import plain, plural

if TYPE_CHECKING:
    from pgqueue.admin.bulk.operations import Bulk, BulkPreview

F = TypeVar("F", bound=Callable[..., Any])
IDS_MOST = 10
ID = Whole(1, HIGHEST_ID)


@click.group("bulk", cls=Group, invoke_without_command=True)
@as_json
@database
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Show operations on all jobs that fit a filter.

    An operation is done in steps of 1,000 jobs, by the command that began it or by a worker. It goes on if that process
    dies, and looks only at ids that had been given when it began. It shows first how many jobs fit, and asks.

    \b
    Examples:
      pgqueue bulk
      pgqueue bulk retry --state failed --task mail.send --pace 50/s
      pgqueue bulk stop 7
    """
    if ctx.invoked_subcommand is None:
        _list(as_json)


@command.command("list")
@as_json
@database
def list_(as_json: bool) -> None:
    """Show the newest operations, as `pgqueue bulk` does."""
    _list(as_json)


@command.command("show")
@click.argument("id", type=ID)
@click.option("--wait", is_flag=True, help="Until it is over; take part if no worker does.")
@as_json
@database
def show(id: int, wait: bool, as_json: bool) -> None:
    """Show how far an operation is, and jobs of each reason.

    The reasons are those of docs/operations.md. `--json` has the first 1,000 jobs of each.
    """
    from pgqueue.admin.bulk import operations

    with connected("bulk", needs="operate" if wait else "read") as conn:
        found = follow(conn, id, Progress()) if wait else operations.get_bulk(conn, id)
    _print(found, as_json)


@command.command("stop")
@click.argument("id", type=ID)
@actor
@as_json
@database
def stop(id: int, as_json: bool) -> None:
    """Stop an operation, and say what it has done.

    What it has done stays done. Exit code 1: it was over already, or is not there.
    """
    from pgqueue.admin.bulk import operations

    with connected("bulk") as conn:
        stopped = operations.stop_bulk(conn, id)
        found = stopped or operations.get_bulk(conn, id)
    _print(found, as_json)
    if stopped is None:
        raise click.exceptions.Exit(NO)


# The actions ---------------------------------------------------------------------------------------------------------


def filtering(states: Sequence[str], *, ended: bool) -> Callable[[F], F]:
    """Add the options of an action: those that choose jobs, and how it is done."""

    def add(command: F) -> F:
        options = [
            click.option("--detach", is_flag=True, help="Begin it, and let a worker do it."),
            click.option("--yes", is_flag=True, help="Do not ask."),
            click.option("--note", help="Why, for the record."),
            click.option("--pace", metavar="N/s", help="Jobs a second at most, such as 50/s, 300/minute."),
            click.option("--error-type", metavar="NAME", help="All with an attempt that failed with this exception."),
            choosing(states, flow=False),
        ]
        if ended:
            options.insert(
                4, click.option("--older-than", type=Duration(), metavar="TIME", help="Ended longer ago: 2h.")
            )
        for option in (database, as_json, actor, *options):
            command = option(command)
        return command

    return add


@command.command("cancel")
@filtering((*LIVE, RETRYING), ended=False)
@click.option("--reason", help="Kept with the jobs [cancelled by hand].")
def cancel(**given: Any) -> None:
    """Cancel all jobs that fit.

    Waiting jobs end at once. If a job runs, its worker is asked to stop it.
    """
    _act("cancel", given)


@command.command("retry")
@filtering((*DEAD, *DONE), ended=True)
@click.option("--again", is_flag=True, help="Run completed jobs, too, as new jobs.")
def retry(**given: Any) -> None:
    """Run all failed or cancelled jobs that fit again.

    Jobs that fail again meanwhile are not retried again. Completed jobs need --again and their --state.
    """
    _act("retry", given)


@command.command("discard")
@filtering(ENDED, ended=True)
def discard(**given: Any) -> None:
    """Delete all jobs that have ended and fit."""
    _act("discard", given)


@command.command("reschedule")
@filtering((*WAITING, RETRYING), ended=False)
@click.option("--at", type=Moment(), metavar="TIME", help="At this moment, such as 2026-12-24T18:00+01:00.")
@click.option("--now", is_flag=True, help="At once.")
def reschedule(at: datetime | None, now: bool, **given: Any) -> None:
    """Give all jobs that wait and fit another time."""
    if (at is None) != now:
        raise click.UsageError("give --at TIME or --now")
    _act("reschedule", given | {"at": at or datetime.fromtimestamp(0, UTC)})


def _act(action: str, given: dict[str, Any]) -> None:
    """Say how many jobs fit, ask, begin, and do it or wait for it."""
    from pgqueue.admin.bulk import operations
    from pgqueue.cli import known_names
    from pgqueue.database.primary import refuse_standby

    as_json, yes, detach = (given.pop(name) for name in ("as_json", "yes", "detach"))
    chosen = read(given)
    if not chosen:
        raise click.UsageError("choose with --state, --queue, --task, --error-type")
    how = {name: value for name, value in given.items() if value is not None and value is not False}
    with connected("bulk") as conn:
        refuse_standby(conn)  # also if no job fits there, and before it is asked
        found = operations.preview_bulk(conn, action, again="again" in how, **chosen)
        if not found.count.n:
            if queue := chosen.get("queue"):
                known_names.warn(conn, queue, chosen.get("task"))
            click.echo(document(()) if as_json else "No job fits.")
            return
        if not yes:
            ask(_question(action, found, chosen))
        begun = operations.bulk(conn, action, up_to=found.up_to, **chosen, **how)
        if not as_json:
            click.echo(f"operation {begun.id} has begun", err=True)
        _print(begun if detach else follow(conn, begun.id, Progress(found.count)), as_json)


def _question(action: str, found: BulkPreview, chosen: dict[str, Any]) -> str:
    parts = [f"of task {plain(chosen['task'])}"] if "task" in chosen else []
    parts += [f"in queue {plain(chosen['queue'])}"] if "queue" in chosen else []
    parts += [f"with {plain(chosen['error_type'])}"] if "error_type" in chosen else []
    parts += [f"now {' or '.join(chosen['state'])}"] if "state" in chosen else []
    parts += [f"that ended more than {span(chosen['older_than'])} ago"] if "older_than" in chosen else []
    ids = ", ".join(map(str, found.ids)) + (" …" if found.count.n > len(found.ids) else "")
    jobs = plural(found.count.n, "job", "jobs", str(found.count))
    return f"{action.capitalize()} {jobs} {', '.join(parts)} (such as {ids})?"


# On the screen -------------------------------------------------------------------------------------------------------


def _list(as_json: bool) -> None:
    from pgqueue.admin.bulk import operations

    with reading("bulk") as conn:
        found = operations.bulks(conn)
    click.echo(document(found) if as_json else "\n".join(_screen(found)))


def _screen(found: Sequence[Bulk]) -> list[str]:
    if not found:
        return ["There is no operation."]
    rows = [
        [
            each.id,
            f"{each.started_at:%m-%d %H:%M:%SZ}",
            each.action,
            each.state,
            f"{each.changed:,}",
            f"{each.left_out:,}",
            each.actor,
            "; ".join(f"{name} {_said(value)}" for name, value in each.target.items()),
        ]
        for each in found
    ]
    heads = ["ID", "STARTED", "ACTION", "STATE", "CHANGED", "LEFT", "BY", "ON"]
    return table(heads, rows, right="ID CHANGED LEFT", gives="ON BY")


def _said(value: Any) -> str:
    return plain("+".join(value) if isinstance(value, list) else str(value))


def _print(found: Bulk, as_json: bool) -> None:
    if as_json:
        click.echo(document([found]))
        return
    click.echo(summary(found))
    for reason, ids in found.ids.items():
        count = found.counts[reason]
        shown = ", ".join(map(str, ids[:IDS_MOST]))
        click.echo(f"  {count:,} {reason}: {shown}{' …' if count > IDS_MOST else ''}")
