"""`pgqueue migrate`: make the tables, or bring them up to date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from pgqueue.cli.database import connected, place
from pgqueue.cli.exit_codes import NO
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Whole, as_json, database
from pgqueue.config import config

if TYPE_CHECKING:
    from pgqueue.database.migrations import Line


@click.command("migrate")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a migration is missing.")
@click.option("--sql", is_flag=True, help="Print the SQL of all migrations; needs no database. Apply with psql -1 -f.")
@click.option("--from", "from_version", type=Whole(0), default=0, help="With --sql: leave out up to this one.")
@click.option("--outbox", is_flag=True, help="The outbox of an application's database, instead of the queue.")
@click.option(
    "--number", type=Whole(0, 1023), help="Job ids begin at this times 2^43: unique over databases [as it is]."
)
@as_json
@database
def command(check: bool, sql: bool, from_version: int, outbox: bool, number: int | None, as_json: bool) -> None:
    """Make or update the tables.

    Safe while workers work, and from several processes at once. If no migration is missing, nothing is changed.
    With --number the ids of new jobs are unlike those of each database with another number. It can only be raised.

    \b
    Examples:
      pgqueue migrate --dsn postgresql://app@db/shop
      pgqueue migrate --check || echo "migrate first"
      pgqueue migrate --sql > pgqueue.sql && psql -1 -f pgqueue.sql shop
      pgqueue migrate --outbox --dsn postgresql://app@db/shop
      pgqueue migrate --number 7 --dsn postgresql://app@db/tenant7
    """
    if check and sql:
        raise click.UsageError("--check and --sql exclude each other")
    if number is not None and (check or sql or outbox):
        raise click.UsageError("--number goes with none of --check, --sql, --outbox")
    from pgqueue.database import migrations

    line = migrations.OUTBOX if outbox else migrations.QUEUE
    if sql:
        _print(line, from_version, as_json)
    elif check:
        _check(line, as_json)
    else:
        _migrate(line, as_json, number)


def _print(line: Line, from_version: int, as_json: bool) -> None:
    from pgqueue.database import migrations

    newest = migrations.files(line)[-1].version
    if from_version > newest:
        raise click.UsageError(
            f"--from {from_version}: no migration has this number, the newest of this pgqueue is {newest}"
        )
    printed = migrations.as_sql(config().schema, from_version, line)
    click.echo(document([{"sql": printed}]) if as_json else printed, nl=as_json)


def _check(line: Line, as_json: bool, applied: Sequence[object] = ()) -> None:
    from pgqueue.database import migrations
    from pgqueue.database.number import number_of

    with connected("migrate", check=False, needs="read") as conn:
        standing = migrations.check(conn, config().schema, line, needs=None if line.option else "read")
        database = place(conn)
        number = None if line.option or standing.pending else number_of(conn, config().schema)
    where = f"{'the outbox in ' if line.option else ''}schema {config().schema} of {database}"
    if as_json:
        now = {"database": database, "schema": config().schema, "version": standing.version, "number": number}
        lists = {"applied": applied, "pending": standing.pending, "unknown": standing.unknown}
        click.echo(document([now | {name: list(map(str, each)) for name, each in lists.items()}]))
    elif standing.pending:
        click.echo(f"{where} is at version {standing.version} and lacks {migrations.named(standing.pending)}")
    else:
        newer = f"; {len(standing.unknown)} newer than this pgqueue" if standing.unknown else ""
        newer += ", which cannot work with them" if any(row.breaking for row in standing.unknown) else ""
        nothing = "" if applied else ": nothing to do"
        numbered = f", number {number}" if number else ""
        click.echo(f"{where} is at version {standing.version}{numbered}{nothing}{newer}")
    if standing.pending:
        raise click.exceptions.Exit(NO)


def _migrate(line: Line, as_json: bool, number: int | None) -> None:
    from pgqueue.database import migrations

    with connected("migrate", check=False, needs="own") as conn:
        applied = migrations.migrate(conn, line=line, number=number)
    for file in [] if as_json else applied:
        click.echo(f"applied {file}")
    _check(line, as_json, applied)
