"""`pgqueue health`: for probes, which run every few seconds on every host. A test limits what it may import."""

from __future__ import annotations

import socket
from dataclasses import asdict

import click

from pgqueue.cli.database import connected
from pgqueue.cli.exit_codes import NO
from pgqueue.cli.json_document import document
from pgqueue.cli.options import as_json, database


@click.command("health")
@click.option("--ready", is_flag=True, help="Whether a worker takes jobs, too.")
@click.option("--host", metavar="NAME", help="Ask about another host [this one].")
@as_json
@database
def command(ready: bool, host: str | None, as_json: bool) -> None:
    """Check whether a worker of this host lives.

    Exit code 0 if it does, else 1. A worker lives if it has sent a heartbeat within its lease. With --ready it must
    also take jobs: started, connected, its tasks imported, not quiet. If all workers of a supervisor were ordered to be
    quiet, the host is well and not ready. While the database is read only by order, it is not ready, and after a lease
    not well: no heartbeat can be written. Heartbeats from before a restart of this host or container do not count.

    \b
    Examples:
      pgqueue health
      pgqueue health --ready
      pgqueue health --json
    """
    from pgqueue.admin.health import health, up

    with connected("health", check=False, needs="read") as conn:
        found = health(conn, host) if host else health(conn, socket.gethostname(), since=up())
    good = found.ready if ready else found.well
    if as_json:
        click.echo(document([asdict(found)]))
    elif good:
        click.echo("ready" if ready else "well")
    else:
        why = ": the database is read only (default_transaction_read_only)" if found.read_only else ""
        said = "takes jobs" if ready else "has given a sign of life"
        click.echo(f"no worker of {found.host} {said}{why}", err=True)
    if not good:
        raise click.exceptions.Exit(NO)
