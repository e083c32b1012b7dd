"""`pgqueue relay`: take staged jobs from the outboxes of applications to the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC
from typing import TYPE_CHECKING, Any

import click

from pgqueue.admin.bounded import cut_at
from pgqueue.cli.database import place
from pgqueue.cli.exit_codes import NO
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Duration, Whole, as_json, database, log_options
from pgqueue.cli.tables import cut_line, table
from pgqueue.plain_text import plain, plural

if TYPE_CHECKING:
    import psycopg


@click.command("relay")
@click.option("--from", "sources", metavar="DSN", multiple=True, required=True, help="An application's database.")
@click.option("--to", "target", metavar="DSN", help="The database of the queue [--dsn, PGQUEUE_DSN].")
@click.option("--batch", type=Whole(1, 10_000), default=1_000, show_default=True, help="Most jobs at once.")
@click.option(
    "--memory",
    type=Duration(least=60.0),
    default="1h",
    show_default=True,
    help="How far an outbox may be set back without a job coming twice.",
)
@click.option("--once", is_flag=True, help="End when all is delivered that is staged now.")
@click.option("--adopt", is_flag=True, help="Take an outbox that is a copy, or belongs to another queue.")
@click.option("--list-refused", is_flag=True, help="Only show the rows that cannot be delivered as they are.")
@click.option("--retry-refused", is_flag=True, help="Only put these rows back, to be tried again.")
@log_options
@as_json
@database
def command(sources: Sequence[str], target: str | None, as_json: bool, **options: Any) -> None:
    """Take staged jobs from outboxes of applications to the queue.

    Start as many as you like: for each outbox one works, and another takes over within seconds. A source that is in
    trouble delays no other. SIGTERM or Ctrl-C ends it at any moment; nothing is lost and nothing comes twice.

    With --once it prints what it has delivered. Exit code 1 if another relay works on an outbox.

    \b
    Examples:
      pgqueue relay --from postgresql://app@db/shop --to postgresql://app@q/jobs
      pgqueue relay --from postgresql://app@db/shop --once
      pgqueue relay --from postgresql://app@db/shop --list-refused
    """
    if sum((options["once"], options["list_refused"], options["retry_refused"])) > 1:
        raise click.UsageError("--once, --list-refused and --retry-refused exclude each other")
    if options["list_refused"]:
        _list(sources, as_json)
    elif options["retry_refused"]:
        _retry(sources, as_json)
    else:
        _relay(sources, target, as_json, options)


def _relay(sources: Sequence[str], target: str | None, as_json: bool, options: dict[str, Any]) -> None:
    from pgqueue.cli import logs, relay_process
    from pgqueue.config import config
    from pgqueue.relay.relay import Relay

    logs.set_up(options["log_level"], options["log_format"])
    to = config(dsn=target).require_dsn()
    how = {name: options[name] for name in ("batch", "memory", "adopt")}
    relays = [Relay(source, to, **how) for source in sources]
    if not options["once"]:
        relay_process.serve(relays)
        return
    worked = relay_process.once(relays)
    results = [
        {"source": relay.name, "worked": did} | asdict(relay.counts) for relay, did in zip(relays, worked, strict=True)
    ]
    if as_json:
        click.echo(document(results))
    for each in [] if as_json else results:
        said = f"{each['delivered']} delivered, {each['refused']} refused" if each["worked"] else "another relay works"
        click.echo(f"{each['source']}: {said}")
    if not all(worked):
        raise click.exceptions.Exit(NO)


def _list(sources: Sequence[str], as_json: bool) -> None:
    from pgqueue.relay import refused

    found, cut = [], None
    for source in sources:
        with _outbox(source) as conn:
            rows = refused.refused(conn)
            cut = cut or cut_at(rows, refused.REFUSED_MOST)
            found += [{"source": place(conn)} | asdict(row) for row in rows]
        if as_json:
            continue
        if not rows:
            click.echo("No row is refused.")
        else:
            cells = [
                [row.id, row.task, f"{row.refused_at.astimezone(UTC):%Y-%m-%d %H:%MZ}", plain(row.reason)]
                for row in rows
            ]
            click.echo("\n".join(table(["ID", "TASK", "REFUSED", "REASON"], cells, right="ID", gives="REASON TASK")))
            for line in cut_line(cut_at(rows, refused.REFUSED_MOST), "rows", "that were refused"):
                click.echo(line)
            click.echo(
                "Mend the rows in outbox_refused, or the queue, and put them back by --retry-refused; or delete them."
            )
    if as_json:
        click.echo(document(found, cut_at=cut))


def _retry(sources: Sequence[str], as_json: bool) -> None:
    from pgqueue.database.primary import refuse_standby
    from pgqueue.relay import refused

    done = []
    for source in sources:
        with _outbox(source) as conn:
            refuse_standby(conn)
            number = refused.retry(conn)
            done.append({"source": place(conn), "retried": number})
        if not as_json:
            click.echo(f"{plural(number, 'row is', 'rows are')} tried again")
    if as_json:
        click.echo(document(done))


def _outbox(source: str) -> psycopg.Connection[Any]:
    """A connection in autocommit mode to a database that has an outbox."""
    import psycopg

    from pgqueue.cli.database import address
    from pgqueue.config import config
    from pgqueue.database import migrations, primary
    from pgqueue.database.conninfo import connect_timeout

    settings = config(dsn=source)
    dsn = address(settings)
    how = connect_timeout(dsn) | {"autocommit": True, "client_encoding": "utf8", "application_name": "pgqueue relay"}
    conn = primary.connect(psycopg.Connection, dsn, **how)
    conn.prepare_threshold = None
    migrations.require(conn, settings.schema, migrations.OUTBOX)
    return conn
