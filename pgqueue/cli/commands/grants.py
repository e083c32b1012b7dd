"""`pgqueue grants`: give a role the rights it needs, and no more."""

from __future__ import annotations

from typing import cast

import click

from pgqueue.cli.database import connected, place
from pgqueue.cli.options import database
from pgqueue.config import config


@click.command("grants")
@click.argument("role")
@click.option(
    "--for", "kind", type=click.Choice(("enqueue", "work", "operate", "read")), required=True, help="What it will do."
)
@click.option("--sql", is_flag=True, help="Only print the GRANTs; needs no database.")
@database
def command(role: str, kind: str, sql: bool) -> None:
    """Give a role its least rights.

    Run it as the owner of the schema. All workers use one role, because rescue ends the sessions of dead workers.

    \b
    --for enqueue  insert jobs; sees no arguments and no results, deletes nothing
    --for work     run workers, which also rescue, prune, enqueue and read
    --for operate  cancel, retry, pause and resume by hand, and read
    --for read     status and jobs

    \b
    Examples:
      pgqueue grants shop --for enqueue
      pgqueue grants shop_worker --for work
      pgqueue grants grafana --for read --sql | psql shop
    """
    from pgqueue.database import grants

    schema = config().schema
    if sql:
        click.echo(grants.as_sql(role, cast(grants.Kind, kind), schema), nl=False)
        return
    with connected("grants") as conn:
        grants.grant(conn, role, cast(grants.Kind, kind), schema)
        click.echo(f"{role} may {kind} in schema {schema} of {place(conn)}")
