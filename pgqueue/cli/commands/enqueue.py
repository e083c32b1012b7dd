"""`pgqueue enqueue`: enqueue one job from the shell, in a transaction of its own."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any

import click

from pgqueue.cli.database import connected
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Duration, Moment, as_json, database


@click.command("enqueue")
@click.argument("name")
@click.argument("arguments", metavar="[JSON]", default="{}")
@click.option("--queue", default="default", show_default=True, help="The job's queue.")
@click.option("--priority", type=int, default=5, show_default=True, help="0 (first) to 9.")
@click.option("--delay", type=Duration(), help="Start after this time: 30s, 5m, 2h.")
@click.option("--lock", metavar="KEY", help="At most one job of this key runs at a time.")
@click.option("--unique", metavar="KEY", help="If a job with this key lives, print its id and enqueue none.")
@click.option("--idempotency-key", metavar="KEY", help="The same, until 24 hours after that job's end.")
@click.option("--at", "run_at", type=Moment(), help="Start at this time: 2026-12-24T18:00+01:00.")
@as_json
@database
def command(
    name: str,
    arguments: str,
    queue: str,
    priority: int,
    delay: float | None,
    lock: str | None,
    unique: str | None,
    idempotency_key: str | None,
    run_at: datetime | None,
    as_json: bool,
) -> None:
    """Enqueue one job and print its id.

    NAME is the task, JSON an object with its arguments by name; `-` reads it from stdin. The task's code is not needed
    here. Therefore names and types of arguments are checked when the job runs. If workers live, and none of them knows
    the queue or the task, a warning on stderr says so.

    \b
    Examples:
      pgqueue enqueue mail.send '{"to": "a@example.com"}'
      pgqueue enqueue billing.charge '{"account": 7}' --lock account:7
      pgqueue enqueue billing.charge '{"account": 7}' --idempotency-key order-4711
      pgqueue enqueue report.daily --queue slow --at 2026-12-24T06:00Z
      jq -c .order order.json | pgqueue enqueue billing.charge -
    """
    import pgqueue
    from pgqueue.cli import known_names

    if delay is not None and run_at is not None:
        raise click.UsageError("--delay and --at exclude each other")
    task = pgqueue.remote(name, queue=queue, priority=priority).using(delay=delay, run_at=run_at)
    if lock is not None:
        task = task.using(lock=lambda **arguments: lock)
    if unique is not None:
        task = task.using(unique=lambda **arguments: unique)
    task = task.using(idempotency_key=idempotency_key)
    new = task.new(**arguments_of(arguments))
    with connected("enqueue", check=False, needs="enqueue") as conn:
        [handle] = pgqueue.enqueue_many(conn, [new])
        known_names.warn(conn, queue, name)
    click.echo(document([{"id": handle.id, "created": handle.created}]) if as_json else handle.id)
    if not handle.created:
        click.echo(f"enqueue: nothing was enqueued: job {handle.id} has this key", err=True)


def arguments_of(arguments: str) -> dict[str, Any]:
    """The arguments of a job, from the command line or stdin."""
    source = sys.stdin.read() if arguments == "-" else arguments
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"is not JSON: {error}", param_hint="JSON") from None
    if not isinstance(value, dict):
        raise click.BadParameter('must be an object of the arguments by name, such as {"order": 7}', param_hint="JSON")
    return value
