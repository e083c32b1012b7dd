"""`pgqueue history`: what happened to jobs, by minute or by hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from pgqueue.cli.database import reading
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Moment, as_json, database
from pgqueue.cli.tables import NARROWEST, fits, fitting, span, table, width
from pgqueue.plain_text import plural

if TYPE_CHECKING:
    from pgqueue.admin.history import By, HistoryRow, Step

SHOWN_MOST = 100
NUMBERS = {
    "all": "STARTED DONE FAILED RETRIED OTHER WAIT RUN WAITING OLDEST",
    "queue": "STARTED DONE FAILED RETRIED OTHER WAIT RUN WAITING OLDEST",
    "task": "STARTED DONE FAILED RETRIED OTHER WAIT RUN",
}
"""The columns behind the names."""
LESS_WANTED = frozenset({"RETRIED", "OTHER"})
"""Left out on a terminal that is too narrow: else the times would be cut."""
NOT_COUNTED = "?"
"""The number of a minute that is not counted yet."""
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@click.command("history")
@click.option("--hours", is_flag=True, help="By hour, of the last 30 days at most; else by minute, of the last day.")
@click.option("--since", type=Moment(ago=True), help="From this time on: 2h, 3d, an ISO time [1h; --hours: 1d].")
@click.option("--until", type=Moment(ago=True), help="Before this time.")
@click.option("--queue", "-q", metavar="NAME", help="Only of this queue.")
@click.option("--task", "-t", metavar="NAME", help="Only of this task.")
@click.option(
    "--by", type=click.Choice(["task", "queue", "all"]), default="all", show_default=True, help="What stands in a row."
)
@as_json
@database
def command(
    hours: bool,
    since: datetime | None,
    until: datetime | None,
    queue: str | None,
    task: str | None,
    by: By,
    as_json: bool,
) -> None:
    """Show how many jobs began and ended, and how long they took.

    Times are UTC. WAIT and RUN are the times that 95 % have not exceeded, estimated. WAITING are available and blocked
    jobs, and OLDEST is for how long the first one could have run; an hour has the largest of its minutes. They are not
    known by task. A minute in which nothing happened and no job waited has no row. A minute is counted about two
    minutes later; until then its numbers are `?`, and null in `--json`, which has all of them, with p50, p95 and p99.

    \b
    Examples:
      pgqueue history
      pgqueue history --by task --since 10m
      pgqueue history --hours --task mail.send --since 7d
      pgqueue history --json | jq '.items[] | [.at, .completed, .run_p95]'
    """
    from pgqueue.admin import history

    step: Step = "hour" if hours else "minute"
    with reading("history") as conn:
        found = history.history(conn, since=since, until=until, queue=queue, task=task, step=step, by=by)
    if as_json:
        click.echo(document([_item(row) for row in found], step=step))
    elif found:
        click.echo("\n".join(_screen(found, by)))
    else:
        click.echo("Nothing is counted in this time. What happens is counted here about two minutes later.")


def _item(row: HistoryRow) -> dict[str, Any]:
    quantiles = {f"wait_{name}": row.wait_quantile(share) for name, share in SHARES.items()}
    quantiles |= {f"run_{name}": row.run_quantile(share) for name, share in SHARES.items()}
    return asdict(row) | quantiles


def _screen(found: Sequence[HistoryRow], by: str) -> list[str]:
    newest, more = fitting(found[::-1], SHOWN_MOST)
    heads = ["AT", *(["QUEUE"] if by != "all" else []), *(["TASK"] if by == "task" else [])]
    rows = [{"AT": f"{row.at.astimezone(UTC):%m-%d %H:%M}", **_cells(row)} for row in newest[::-1]]
    numbers = NUMBERS[by].split()
    if not fits([*(NARROWEST for _ in heads[1:]), *(_widest(head, rows) for head in ("AT", *numbers))]):
        numbers = [head for head in numbers if head not in LESS_WANTED]
    cells = [[row[head] for head in (*heads, *numbers)] for row in rows]
    lines = table([*heads, *numbers], cells, right=" ".join(numbers), gives=" ".join(heads[:0:-1]))
    return [*lines, f"… {plural(more, 'older one', 'older ones')}; --json shows all"] if more else lines


def _widest(head: str, rows: Sequence[dict[str, object]]) -> int:
    return max(len(str(cell)) for cell in (head, *(row[head] for row in rows)))


def _cells(row: HistoryRow) -> dict[str, object]:
    """What stands in each column that there may be."""
    others = (row.snoozed, row.cancelled, row.expired, row.skipped, row.interrupted, row.rescued)
    other = sum(n or 0 for n in others) if row.started is not None else None
    counts = {
        "STARTED": row.started,
        "DONE": row.completed,
        "FAILED": row.failed,
        "RETRIED": row.retried,
        "OTHER": other,
    }
    waiting = None if row.available is None or row.blocked is None else row.available + row.blocked
    oldest = max((row.oldest, row.longest_blocked), key=lambda age: age or 0.0)
    return {
        "QUEUE": row.queue,
        "TASK": row.task,
        **{name: _number(n) for name, n in counts.items()},
        "WAIT": span(row.wait_quantile(0.95)),
        "RUN": span(row.run_quantile(0.95)),
        "WAITING": "" if waiting is None else _number(waiting),
        "OLDEST": span(oldest),
    }


def _number(n: int | None) -> str:
    """A number of jobs; on a terminal in five characters at most."""
    if n is None:
        return NOT_COUNTED
    if width() is None or n < 100_000:
        return str(n)
    return f"{n // 1_000}k" if n < 10_000_000 else f"{n // 1_000_000}M"
