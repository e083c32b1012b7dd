"""Do an operation by filter, or wait for the process that does it, and show how far it is.

If no other process works on it, this one takes part: an operation needs no worker. If the command is interrupted, the
operation goes on in a worker, if there is one.
"""

from __future__ import annotations

import os
import socket
import sys
from time import sleep
from typing import TYPE_CHECKING, Any

import click

from pgqueue.plain_text import plain, plural
from pgqueue.steady_clock import monotonic

if TYPE_CHECKING:
    import psycopg

    from pgqueue.admin.bulk.operations import Bulk
    from pgqueue.admin.bulk.steps import Steps
    from pgqueue.admin.depth import Count

SHOW_SECONDS = 0.5


class Progress:
    """A line on the terminal that is written anew; nothing if the errors go elsewhere."""

    def __init__(self, expected: Count | None = None) -> None:
        self._expected = expected
        self._shown = 0

    def show(self, found: Bulk) -> None:
        """Write how far the operation is."""
        if not sys.stderr.isatty():
            return
        done = sum(found.counts.values())
        jobs = plural(done, "job", "jobs") if self._expected is None else f"{done:,} of {self._expected} jobs"
        line = f"operation {found.id}: {jobs}; {_counts(found)}"[:79]
        click.echo(f"\r{line:<{self._shown}}", err=True, nl=False)
        self._shown = len(line)

    def end(self) -> None:
        """Go on in a new line."""
        if self._shown:
            click.echo("", err=True)
            self._shown = 0


def follow(conn: psycopg.Connection[Any], id: int, progress: Progress) -> Bulk:
    """Work on the operation, or wait for the process that does, until it is over; return it."""
    made: Steps | None = None
    due = monotonic()
    try:
        while True:
            if monotonic() >= due:
                made, pause = _turn(conn, id)
                due = monotonic() + pause
            found = _look(conn, id)
            progress.show(found)
            if found.state != "running":
                return found
            sleep(min(max(0.0, due - monotonic()), SHOW_SECONDS))
    except KeyboardInterrupt:
        progress.end()
        _leave(conn, made)
        click.echo(f"operation {id} goes on in a worker; `pgqueue bulk stop {id}` stops it", err=True)
        raise
    finally:
        progress.end()


def _turn(conn: psycopg.Connection[Any], id: int) -> tuple[Steps | None, float]:
    """Make steps for a moment, if no other process does; and the seconds until the next turn."""
    from pgqueue.admin.bulk import runner

    made = runner.take(conn, f"{socket.gethostname()}:{os.getpid()}", id)
    if made is None:
        return None, SHOW_SECONDS
    until = monotonic() + SHOW_SECONDS
    while made.open and made.pause <= 0 and monotonic() < until:
        runner.step(conn, made, _refused)
    return made, made.pause if made.open else 0.05


def _look(conn: psycopg.Connection[Any], id: int) -> Bulk:
    from pgqueue.admin.bulk import operations

    return operations.get_bulk(conn, id)


def _leave(conn: psycopg.Connection[Any], made: Steps | None) -> None:
    """Let a worker go on at once, if the connection can still say so: the interrupt may have come in a statement."""
    from pgqueue.admin.bulk import runner

    if made is not None and made.open and not conn.closed and conn.info.transaction_status == 0:
        runner.release(conn, made)


def _refused(job: int, error: Exception) -> None:
    from pgqueue.database.backoff import described

    click.echo(f"job {job} was left out: {plain(described(error))}", err=True)


def summary(found: Bulk) -> str:
    """What an operation has done, in words."""
    state = {"running": "is under way", "done": "is done", "stopped": f"was stopped by {plain(str(found.stopped_by))}"}
    return f"operation {found.id} {state[found.state]}: {_counts(found)}"


def _counts(found: Bulk) -> str:
    from pgqueue.admin.answers import counted

    return counted(found.counts) or "no job yet"
