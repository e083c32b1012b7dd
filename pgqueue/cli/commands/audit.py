"""`pgqueue audit`: what was changed by hand, and by which actor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from pgqueue.cli.database import connected
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Moment, Whole, as_json, database
from pgqueue.cli.tables import table
from pgqueue.jobs.values import HIGHEST_ID
from pgqueue.plain_text import plain

if TYPE_CHECKING:
    from pgqueue.admin.audit import AuditEntry

IDS_MOST = 5


@click.command("audit")
@click.option("--job", metavar="ID", type=Whole(1, HIGHEST_ID), help="Only what changed this job.")
@click.option("--by", metavar="NAME", help="Only what this actor did.")
@click.option("--action", metavar="ACTION", help="Only this, such as cancel, pause, 'limits set'.")
@click.option("--since", type=Moment(ago=True), metavar="TIME", help="Only since then, also as 2h: 2 hours ago.")
@click.option("--limit", type=Whole(1, 10_000), default=50, show_default=True, help="So many, the newest.")
@as_json
@database
def command(
    job: int | None, by: str | None, action: str | None, since: datetime | None, limit: int, as_json: bool
) -> None:
    """Show what was changed by hand, the newest first.

    Every command and every Python function that changes jobs, queues, limits, schedules or workers by hand is recorded:
    by which actor (--actor, else the database role), what, on what, and how many jobs. The record is kept for 90 days.

    \b
    Examples:
      pgqueue audit --since 24h
      pgqueue audit --job 4711
      pgqueue audit --by ann --action cancel
    """
    from pgqueue.admin import audit

    if job is not None and (by or action or since):
        raise click.UsageError("give --job, or the other filters")
    with connected("audit", needs="read") as conn:
        found = audit.audit(conn, job=job, actor=by, action=action, since=since, limit=limit)
    click.echo(document(found) if as_json else "\n".join(_screen(found)))


def _screen(found: Sequence[AuditEntry]) -> list[str]:
    if not found:
        return ["Nothing was changed by hand."]
    rows = [
        [f"{each.at:%Y-%m-%d %H:%M:%S%z}", plain(each.actor), each.action, f"{each.count:,}", _on(each)]
        for each in found
    ]
    return table(["AT", "ACTOR", "ACTION", "COUNT", "ON"], rows, gives="ON")


def _on(entry: AuditEntry) -> str:
    """What was changed, in words."""
    parts = [f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in entry.target.items()]
    if entry.jobs and not entry.target:
        more = f" and {len(entry.jobs) - IDS_MOST:,} more" if len(entry.jobs) > IDS_MOST else ""
        parts.append("jobs " + ", ".join(map(str, entry.jobs[:IDS_MOST])) + more)
    parts += [f"{name} {value}" for name, value in entry.details.items() if name in ("reason", "n", "size")]
    return plain("; ".join(parts))
