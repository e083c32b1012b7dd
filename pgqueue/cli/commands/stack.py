"""`pgqueue stack`: where the handler of a running job stands just now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from pgqueue.cli.database import connected
from pgqueue.cli.exit_codes import NO, Refusal
from pgqueue.cli.json_document import document
from pgqueue.cli.options import Duration, Whole, as_json, database
from pgqueue.errors import ResultTimeout
from pgqueue.plain_text import plain, plural

if TYPE_CHECKING:
    from pgqueue.admin.stack import Stack


@click.command("stack")
@click.argument("id", type=Whole(1))
@click.option("--timeout", type=Duration(0.1), help="Wait so long [default: a third of the worker's lease and 5s].")
@as_json
@database
def command(id: int, timeout: float | None, as_json: bool) -> None:
    """Print where the handler of running job ID stands.

    Its worker is asked, and answers with its next heartbeat at the latest, also if its event loop is blocked. Files,
    lines and functions are shown, the innermost last; no values. The job goes on undisturbed. Exit code 1: the job does
    not run, or its worker has not answered.

    \b
    Examples:
      pgqueue stack 4711
      pgqueue stack 4711 --json | jq -r '.items[].file'
    """
    from pgqueue.admin.stack import stack

    with connected("stack") as conn:
        try:
            found = stack(conn, id, timeout)
        except ResultTimeout as error:
            raise Refusal(plain(str(error)), NO) from None
    if as_json:
        about = {"job": found.job, "worker": found.worker, "process": found.process}
        click.echo(document(found.frames, **about, where=found.where, left_out=found.left_out))
    else:
        click.echo("\n".join(_lines(found)))


def _lines(found: Stack) -> Iterator[str]:
    process = f" ({found.process})" if found.process else ""
    if found.where == "waiting":
        yield plain(f"Job {found.job} waits in worker {found.worker}{process}; its handler does not run just now.")
        return
    yield plain(f"Job {found.job} in worker {found.worker}{process}, its handler's {found.where}, innermost call last:")
    if found.left_out:
        yield f"  … {plural(found.left_out, 'outer call', 'outer calls')}"
    for frame in found.frames:
        yield plain(f"  {frame}")
