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


@click.command("version")
@as_json
@database
def command(as_json: bool) -> None:
    """Show versions, here and in the database.

    Here: pgqueue, Python and the driver. With a DSN also: the server and the schema.

    \b
    Examples:
      pgqueue version
      pgqueue version --json | jq -r '.items[0].pgqueue'
    """
    versions = _here()
    if config().dsn is not None:
        versions |= _there()
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


def _there() -> dict[str, Any]:
    from pgqueue.database import migrations

    with connected("version", check=False, needs="read") as conn:
        standing = migrations.check(conn, config().schema, needs="read")
        return {
            "database": place(conn),
            "postgresql": conn.info.parameter_status("server_version"),
            "schema": config().schema,
            "schema_version": standing.version,
        }
