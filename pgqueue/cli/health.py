"""`pgqueue health`: for probes."""

from __future__ import annotations

import socket

import click

from pgqueue.cli.database import connected
from pgqueue.cli.exits import NO
from pgqueue.cli.options import database


@click.command("health")
@click.option("--ready", is_flag=True, help="Whether one takes jobs, too.")
@click.option("--host", metavar="NAME", help="Of another host [this one].")
@database
def command(ready: bool, host: str | None) -> None:
    """Tell whether a worker of this host lives.

    Exit code 0, else 1. It lives while it has given a sign of life within its lease. With --ready it must take jobs:
    started, connected, its tasks imported, not quiet. A supervisor whose workers were all told to be quiet is well,
    and not ready. One row is read.

    \b
    Examples:
      pgqueue health
      pgqueue health --ready
    """
    from pgqueue import supervisors

    name = host or socket.gethostname()
    with connected("health", check=False) as conn:
        well = supervisors.healthy(conn, name, ready=ready)
    if not well:
        click.echo(f"no worker of {name} {'takes jobs' if ready else 'has given a sign of life'}", err=True)
        raise click.exceptions.Exit(NO)
    click.echo("ready" if ready else "well")
