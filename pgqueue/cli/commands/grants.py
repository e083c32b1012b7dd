"""`pgqueue grants`: give a role the rights it needs, and no more."""

from __future__ import annotations

from typing import cast

import click

from pgqueue.cli.database import connected, place
from pgqueue.cli.json_document import document
from pgqueue.cli.options import as_json, database
from pgqueue.config import config


@click.command("grants")
@click.argument("role")
@click.option(
    "--for",
    "kind",
    type=click.Choice(("enqueue", "work", "operate", "read", "stage", "relay")),
    required=True,
    help="What it will do.",
)
@click.option("--outbox", is_flag=True, help="With --for relay: in the outbox's database.")
@click.option("--sql", is_flag=True, help="Only print the GRANTs; needs no database.")
@as_json
@database
def command(role: str, kind: str, outbox: bool, sql: bool, as_json: bool) -> None:
    """Give a role its least rights.

    Run it as the owner of the schema. All workers use one role, because rescue ends the sessions of dead workers.

    \b
    --for enqueue  insert jobs; sees no arguments and no results, deletes nothing
    --for work     run workers, which also rescue, prune, enqueue and read
    --for operate  cancel, retry, pause and resume by hand, and read
    --for read     status and jobs
    --for stage    stage jobs in the outbox of an application's database
    --for relay    run a relay; with --outbox the rights in the other database

    \b
    Examples:
      pgqueue grants shop --for enqueue
      pgqueue grants shop_worker --for work
      pgqueue grants grafana --for read --sql | psql shop
    """
    from pgqueue.database import grants, migrations

    if outbox and kind != "relay":
        raise click.UsageError("--outbox goes with --for relay; --for stage is for the outbox in any case")
    schema = config().schema
    rights = cast(grants.Kind, "relay_outbox" if outbox else kind)
    if sql:
        printed = grants.as_sql(role, rights, schema)
        click.echo(document([{"sql": printed}]) if as_json else printed, nl=as_json)
        return
    with connected("grants", check=rights not in grants.OUTBOX_KINDS, needs="own") as conn:
        if rights in grants.OUTBOX_KINDS:
            migrations.require(conn, schema, migrations.OUTBOX, needs="own")
        grants.grant(conn, role, rights, schema)
        done = {"role": role, "for": kind, "schema": schema, "database": place(conn)}
        said = f"{role} may {kind} in schema {schema} of {place(conn)}"
        click.echo(document([done]) if as_json else said)
