"""`pgqueue demo`: see pgqueue work, with nothing but this package installed."""

from __future__ import annotations

import click

from pgqueue.cli.options import Duration


@click.command("demo")
@click.option("--seconds", type=Duration(least=1.0), default="8s", show_default=True, help="How long it enqueues.")
@click.option("--directory", type=click.Path(file_okay=False), help="Keep the embedded server here [a temporary one].")
@click.option("--json", "as_json", is_flag=True, help='Print the final account as JSON: {"items": [...]}.')
def command(seconds: float, directory: str | None, as_json: bool) -> None:
    """Watch pgqueue work on an embedded PostgreSQL.

    A small shop: transactions enqueue jobs, some of them roll back. Two workers run the jobs, one worker is killed. At
    the end comes the account: committed, rolled back, run, lost. Exit code 1 if it does not balance.

    \b
    Examples:
      pgqueue demo
      pgqueue demo --seconds 30 --directory /tmp/pgqueue-demo
    """
    from pgqueue.cli.demo import run

    raise click.exceptions.Exit(run(seconds=seconds, directory=directory, json=as_json))
