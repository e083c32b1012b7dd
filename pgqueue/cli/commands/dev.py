"""`pgqueue dev`: all that a developer needs in one terminal: server, tables, a worker that reloads, the dashboard."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any

import click

from pgqueue.cli.options import Whole, app_dir, database, given

GRACE = "2s"
"""How long jobs may go on at the end: a developer waits for it."""


@click.command("dev")
@click.argument("modules", metavar="MODULE...", nargs=-1, required=True)
@click.option("-c", "--concurrency", type=Whole(1), default=10, show_default=True, help="Jobs at once.")
@click.option("--bind", metavar="HOST:PORT", default="127.0.0.1:8300", show_default=True, help="Of the dashboard.")
@click.option("--no-web", is_flag=True, help="No dashboard.")
@app_dir
@database
@click.pass_context
def command(
    ctx: click.Context, modules: Sequence[str], concurrency: int, bind: str, no_web: bool, app_dir: str
) -> None:
    """Run jobs while you write their tasks.

    Brings the tables up to date, serves the dashboard, and runs the jobs of the MODULEs. When a file of --app-dir
    changes, the worker starts again. Ctrl-C ends all.

    Without --dsn and PGQUEUE_DSN, PostgreSQL is a server in the directory .pgqueue, which keeps its jobs. A server that
    PGQUEUE_DSN names must be on this machine. For another one say --dsn.

    \b
    Examples:
      pgqueue dev myapp.tasks
      pgqueue dev myapp.tasks --bind 127.0.0.1:9000
      pgqueue dev myapp.tasks --dsn postgresql://app@db/dev
    """
    from pgqueue.cli.dev_processes import DevProcesses
    from pgqueue.config import config, safe
    from pgqueue.databases import without_databases

    name = safe(_database(ctx))
    dsn = _up_to_date()
    own = [sys.executable, "-P", "-m", "pgqueue"]
    commands = [[*own, "work", *modules, "--app-dir", app_dir, "--reload", "--grace", GRACE, "-c", str(concurrency)]]
    if no_web:
        dashboard = "not wanted"
    elif (lacks := _web_lacks()) is not None:
        dashboard = lacks
    else:
        dashboard = f"http://{bind}"
        commands.append([*own, "web", "--open", "--bind", bind, "--log-level", "warning"])
    click.echo(f"dashboard: {dashboard}\nenqueue:   export PGQUEUE_DSN={name}", err=True)
    own_database = {"PGQUEUE_DSN": dsn, "PGQUEUE_SCHEMA": config().schema}
    processes = DevProcesses(commands, without_databases(os.environ) | own_database)
    raise click.exceptions.Exit(processes.run())


def _database(ctx: click.Context) -> str:
    """The DSN as it was given; the embedded server if none was. Raises UsageError if it may not be meant."""
    from pgqueue.config import EMBEDDED, config, configure
    from pgqueue.database.conninfo import parts_of

    dsn = config().dsn
    if dsn is None:
        configure(dsn=EMBEDDED)
        return EMBEDDED
    if dsn != EMBEDDED and "dsn" not in given(ctx) and not _is_here(parts_of(dsn)):
        raise click.UsageError(
            "the configured database, of PGQUEUE_DSN or of a framework, is on another machine, and `dev` would change "
            "its tables and run its jobs. If it is meant, say --dsn; for a server of your own, unset PGQUEUE_DSN"
        )
    return dsn


def _is_here(parts: dict[str, Any]) -> bool:
    """Whether these parameters lead to a server on this machine; a service may lead anywhere."""
    if "service" in parts or "PGSERVICE" in os.environ:
        return False
    hosts = [
        str(parts.get(name) or os.environ.get(variable, ""))
        for name, variable in (("host", "PGHOST"), ("hostaddr", "PGHOSTADDR"))
    ]
    return all(map(_is_loopback, ",".join(hosts).split(",")))


def _is_loopback(host: str) -> bool:
    if not host or host[0] in "/@" or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _up_to_date() -> str:
    """Bring the tables up to date, and say where they are; the DSN for the processes."""
    from pgqueue.cli.database import address, connected, place
    from pgqueue.config import config
    from pgqueue.database import migrations

    with connected("dev", check=False, needs="own") as conn:
        applied = migrations.migrate(conn)
        click.echo(f"database:  {place(conn)}", err=True)
    for file in applied:
        click.echo(f"           applied {file}", err=True)
    return address(config())


def _web_lacks() -> str | None:
    """What to do for a dashboard, if its packages are not installed."""
    from pgqueue.distribution import install

    return None if all(map(find_spec, ("starlette", "jinja2", "uvicorn"))) else install("web")
