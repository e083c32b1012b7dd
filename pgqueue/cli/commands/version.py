"""`pgqueue version`: the versions installed here, and those of the database if one is configured."""

from __future__ import annotations

import platform
from typing import Any

import click

from pgqueue import distribution
from pgqueue.cli.database import connected, place
from pgqueue.cli.json_document import document
from pgqueue.cli.options import as_json, database
from pgqueue.config import config
from pgqueue.errors import SchemaForeign


@click.command("version")
@click.option("--check", is_flag=True, help="Fail unless this pgqueue works with the database: exit code 4.")
@as_json
@database
def command(check: bool, as_json: bool) -> None:
    """Show versions, here and in the database.

    Here: pgqueue, Python and the driver. With a DSN also: the server and the schema.

    \b
    Examples:
      pgqueue version
      pgqueue version --check
      pgqueue version --json | jq -r '.items[0].pgqueue'
    """
    versions = _here()
    if check or config().dsn is not None:
        versions |= _there(check)
    if as_json:
        click.echo(document([versions]))
    else:
        click.echo("\n".join(f"{name.replace('_', ' ')} {value}" for name, value in versions.items()))


def _here() -> dict[str, Any]:
    from importlib import metadata

    import psycopg

    from pgqueue.database import migrations

    libpq = psycopg.pq.version_pretty(psycopg.pq.version())
    return {
        "pgqueue": metadata.version(distribution.NAME),
        "python": platform.python_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__}, libpq {libpq})",
        "newest_migration": max(file.version for file in migrations.files()),
    }


def _there(check: bool) -> dict[str, Any]:
    """The versions of the database. With `check` it raises what hinders this pgqueue there, and says what to do."""
    from pgqueue.database import migrations

    with connected("version", check=False, needs="read") as conn:
        standing = (migrations.require if check else migrations.check)(conn, config().schema, needs="read")
        if check and conn.info.server_version < migrations.OLDEST_POSTGRES * 10_000:
            raise SchemaForeign(f"PostgreSQL {migrations.OLDEST_POSTGRES} or newer is needed; {place(conn)} is older")
        return {
            "database": place(conn),
            "postgresql": conn.info.parameter_status("server_version"),
            "schema": config().schema,
            "schema_version": standing.version,
            **({"works": "yes"} if check else {}),
        }
