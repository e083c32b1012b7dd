"""`pgqueue systemd`: print a unit file for a supervisor with these options."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import click

from pgqueue.cli.json_document import document
from pgqueue.cli.options import Duration, as_json, database, given

UNIT = """\
[Unit]
Description=pgqueue workers ({modules})
After=network-online.target postgresql.service
Wants=network-online.target

[Service]
Type=notify
NotifyAccess=main
{account}# Contains PGQUEUE_DSN=postgresql://…; the process list does not show it there.
EnvironmentFile={environment}
WorkingDirectory={directory}
ExecStart={command}
# Rolling restart: new processes first; the old ones finish their jobs, however long that takes.
ExecReload=/bin/kill -HUP $MAINPID
# Only the supervisor gets the signal. It stops its processes, which have --grace.
KillMode=mixed
TimeoutStopSec={stop:g}
TimeoutStartSec=180
WatchdogSec=30
Restart=on-failure
RestartSec=1

[Install]
WantedBy=multi-user.target
"""
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# After the grace the supervisor needs time to kill what is left and to remove its row; this is a little more.
MORE_SECONDS = 35.0


@click.command("systemd", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="MODULE... [OPTIONS OF WORK]", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--environment-file", default="/etc/pgqueue.env", show_default=True, help="Where PGQUEUE_DSN is set.")
@click.option("--directory", metavar="DIR", help="WorkingDirectory of the unit [this one].")
@click.option("--user", metavar="NAME", help="User that runs the workers [root].")
@click.option("--grace", type=Duration(), default="25s", show_default=True, help="How long running jobs may go on.")
@as_json
@database
@click.pass_context
def command(
    ctx: click.Context,
    arguments: tuple[str, ...],
    environment_file: str,
    directory: str | None,
    user: str | None,
    grace: float,
    as_json: bool,
) -> None:
    """Print a systemd unit that runs `pgqueue work`.

    The supervisor speaks systemd's protocol: it is ready when all its processes work, and reload is a rolling restart.
    If the supervisor hangs, systemd's watchdog ends it. Nothing is installed.

    \b
    Examples:
      pgqueue systemd shop.tasks --processes 4 --user shop > shop.service
      pgqueue systemd shop.tasks --processes 4 --memory-limit 500M --grace 60s
    """
    if user is not None and USER.fullmatch(user) is None:
        raise click.BadParameter(f"{user!r} is no name of a user", ctx, param_hint="--user")
    directory = str(Path.cwd()) if directory is None else directory
    if broken := [word for word in (*arguments, directory, environment_file) if not word.isprintable()]:
        raise click.UsageError(f"{broken[0]!r} has a character that a unit cannot hold")
    if "dsn" in given(ctx):
        raise click.UsageError("a unit file is no place for a DSN: write PGQUEUE_DSN into the environment file")
    schema = ["--schema", given(ctx)["schema"]] if "schema" in given(ctx) else []
    processes = [] if any(word.startswith("--processes") for word in arguments) else ["--processes", "1"]
    program = str(Path(sys.executable).with_name("pgqueue"))
    words = [program, "work", *arguments, *processes, "--grace", f"{grace:g}s", *schema]
    modules = [word for word in arguments[: next((i for i, w in enumerate(arguments) if w[:1] == "-"), len(arguments))]]
    unit = UNIT.format(
        modules=", ".join(modules).replace("%", "%%"),
        account="" if user is None else f"User={user}\n",
        environment=environment_file.replace("%", "%%"),
        directory=directory.replace("%", "%%"),
        command=shlex.join(words).replace("%", "%%").replace("$", "$$"),
        stop=grace + MORE_SECONDS,
    )
    click.echo(document([{"unit": unit}]) if as_json else unit, nl=as_json)
