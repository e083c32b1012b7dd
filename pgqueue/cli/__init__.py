"""The command `pgqueue`: one module per command, imported when the command is called.

The outermost layer: it parses the command line, calls the layer below and prints. Everything that a command does, the
library can do, too. An error becomes one line and an exit code (`exit_codes.py`). Only commands that need psycopg and
the worker import them, so that `--help` comes at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from pgqueue.cli.exit_codes import exit_codes
from pgqueue.cli.groups import Group
from pgqueue.cli.json_document import failure
from pgqueue.plain_text import plain_lines

_JSON = "pgqueue.cli.json"
_NO_TEXT = "pgqueue.cli.no_text"

COMMANDS = (
    "migrate",
    "work",
    "dev",
    "enqueue",
    "status",
    "queues",
    "tasks",
    "jobs",
    "flows",
    "why",
    "stack",
    "doctor",
    "cancel",
    "retry",
    "reschedule",
    "discard",
    "bulk",
    "pause",
    "resume",
    "audit",
    "locks",
    "limits",
    "history",
    "errors",
    "workers",
    "restart",
    "quiet",
    "scale",
    "health",
    "systemd",
    "schedules",
    "prune",
    "grants",
    "relay",
    "web",
    "demo",
    "version",
)


class Commands(Group):
    """Finds a command as `command` in the module of its name. Gives every error its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(f"pgqueue.cli.commands.{cmd_name}").command
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Looked for here, because an error may come before the command has read its options.
        options = args[: args.index("--")] if "--" in args else args
        ctx.meta[_JSON] = "--json" in options
        ctx.meta[_NO_TEXT] = next((each for each in args if not _is_text(each)), None)
        try:
            return super().parse_args(ctx, args)
        except click.ClickException as error:
            _tell(ctx, error)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with exit_codes():
                try:
                    return super().invoke(ctx)
                except UnicodeEncodeError:
                    if ctx.meta[_NO_TEXT] is None:
                        raise
                    raise click.UsageError(f"{ctx.meta[_NO_TEXT]!a:.80} is no text in UTF-8") from None
        except click.ClickException as error:
            _tell(ctx, error)
            raise


def _tell(ctx: click.Context, error: click.ClickException) -> None:
    """Print the error as a document if --json was given; what it quotes of an argument is made plain."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # its message is our help
        return
    error.message = plain_lines(error.message)  # type: ignore[misc]  # Final, and each error has its own
    if ctx.meta[_JSON]:
        click.echo(failure(error.format_message(), error.exit_code))


def _is_text(argument: str) -> bool:
    """Whether the bytes of an argument were UTF-8. A path need not be; a text for the database must."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _version(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked:
        from importlib import metadata

        from pgqueue import distribution

        click.echo(f"pgqueue {metadata.version(distribution.NAME)}")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "The database is named by --dsn or PGQUEUE_DSN; `embedded:` is a server in the directory .pgqueue, made "
        "there at the first use.\n\n"
        "Exit codes: 0 done; 1 the answer is no; 2 usage, or no database named; 3 database unreachable or refused; "
        "4 schema missing, behind or too new; 5 shutdown deadline passed; 6 the worker must be replaced; "
        "130 interrupted, or second signal; 143 SIGTERM while it started."
    ),
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
def main() -> None:
    """The job queue that lives entirely in PostgreSQL.

    \b
    Examples:
      pgqueue migrate                      make or update the tables
      pgqueue work myapp.tasks             run jobs
      pgqueue enqueue mail.send '{"to": "a@example.com"}'
      pgqueue status                       jobs, queues and workers
    """
