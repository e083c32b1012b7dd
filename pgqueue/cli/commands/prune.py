"""`pgqueue prune`: throw away the oldest history now, as the leading worker does by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from pgqueue.cli.database import connected
from pgqueue.cli.exit_codes import NO
from pgqueue.cli.json_document import document
from pgqueue.cli.options import actor, as_json, database
from pgqueue.cli.tables import span, table
from pgqueue.config import config
from pgqueue.plain_text import plain

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True, slots=True)
class Ring:
    """One ring of history leaves. Times are in seconds; `age` is that of the leaf being written."""

    kind: str
    leaves: int
    bin: int
    retention: float
    age: float
    due: bool


@click.command("prune")
@click.option("--all", "everything", is_flag=True, help="Advance every ring by one leaf, due or not.")
@actor
@as_json
@database
def command(everything: bool, as_json: bool) -> None:
    """Throw away the oldest history that is due.

    History is kept in rings of leaves. Each ring that is due empties its oldest leaf and goes on there. The leading
    worker does this by itself: use this command for a database without workers, or to make room now. If --all is
    repeated, it may remove history younger than its retention. Exit code 1: a reader of history prevented one,
    or the server refused it.

    \b
    Examples:
      pgqueue prune
      pgqueue prune --all
    """
    from pgqueue.database.primary import refuse_standby

    with connected("prune", needs="work") as conn:
        refuse_standby(conn)  # there it would find nothing due, day after day
        results = [(ring, _advance(conn, ring, everything)) for ring in _rings(conn)]
    if as_json:
        click.echo(document(asdict(ring) | {"result": result} for ring, result in results))
    else:
        click.echo("\n".join(_screen(results)))
    if any(result.startswith(("prevented", "refused")) for _, result in results):
        raise click.exceptions.Exit(NO)


def _screen(results: Sequence[tuple[Ring, str]]) -> list[str]:
    rows = [
        [ring.kind, f"{ring.bin + 1} of {ring.leaves}", span(ring.age), span(ring.retention), result]
        for ring, result in results
    ]
    return table(["HISTORY", "LEAF", "AGE", "KEPT FOR", "RESULT"], rows, gives="RESULT")


def _rings(conn: psycopg.Connection[Any]) -> Iterator[Ring]:
    from pgqueue.database.statements import text

    for row in conn.execute(text("pruner_rings", config().schema)).fetchall():
        yield Ring(*row)


def _advance(conn: psycopg.Connection[Any], ring: Ring, forced: bool) -> str:
    """Advance one ring in one transaction: the next leaf is emptied and begun, or neither. Return a text for people."""

    import psycopg

    from pgqueue.database.backoff import described, is_loss
    from pgqueue.database.statements import text
    from pgqueue.database.triggers import trigger_of
    from pgqueue.jobs.actors import actor_of

    if not (ring.due or forced):
        return f"not due for {span(ring.retention / (ring.leaves - 2) - ring.age)}"
    asked = {"kind": ring.kind, "forced": forced, "actor": actor_of(None)}
    try:
        row = conn.execute(text("prune_advance", config().schema), asked).fetchone()
    except psycopg.Error as error:
        if is_loss(error) or (isinstance(error, psycopg.errors.InsufficientPrivilege) and trigger_of(error) is None):
            raise
        return f"refused: {described(error)}"
    if row == (None,):
        for reader in _readers(conn, ring.kind):
            click.echo(f"{ring.kind}: {reader}", err=True)
        return "prevented: a reader holds the oldest leaf; try again"
    return "advanced" if row == (True,) else "prevented: another session is advancing it"


def _readers(conn: psycopg.Connection[Any], kind: str) -> Iterator[str]:
    from pgqueue.database.statements import text

    for pid, name, role, state, age in conn.execute(text("prune_readers", config().schema), {"kind": kind}):
        yield f"pid {pid} ({plain(name)}, {plain(role)}, {state}, for {span(age)}) holds the oldest leaf"
