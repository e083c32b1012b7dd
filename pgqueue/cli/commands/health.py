"""`pgqueue health`: for probes, which ask every few seconds, on every host. What it may import is held by a test."""

from __future__ import annotations

import json
import socket

import click

from pgqueue.cli.database import connected
from pgqueue.cli.exit_codes import NO
from pgqueue.cli.options import as_json, database


@click.command("health")
@click.option("--ready", is_flag=True, help="Whether one takes jobs, too.")
@click.option("--host", metavar="NAME", help="Of another host [this one].")
@as_json
@database
def command(ready: bool, host: str | None, as_json: bool) -> None:
    """Tell whether a worker of this host lives.

    Exit code 0, else 1. It lives while it has given a sign of life within its lease. With --ready it must take jobs:
    started, connected, its tasks imported, not quiet. If all its workers were told to be quiet, a supervisor is well
    and not ready. What this host or container did before it was started anew does not count. One row is read.

    \b
    Examples:
      pgqueue health
      pgqueue health --ready
      pgqueue health --json
    """
    from pgqueue.admin.health import health, up

    with connected("health", check=False) as conn:
        found = health(conn, host) if host else health(conn, socket.gethostname(), since=up())
    good = found.ready if ready else found.well
    if as_json:
        click.echo(json.dumps({"host": found.host, "well": found.well, "ready": found.ready}))
    elif good:
        click.echo("ready" if ready else "well")
    else:
        click.echo(f"no worker of {found.host} {'takes jobs' if ready else 'has given a sign of life'}", err=True)
    if not good:
        raise click.exceptions.Exit(NO)
