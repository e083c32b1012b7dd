"""The worker's row in table `worker`: inserted when the worker starts, removed again if the worker never began."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import psycopg

from pgqueue.database import alarms, migrations, primary, statements
from pgqueue.database.backoff import one_line
from pgqueue.database.dead_link import hang_up
from pgqueue.database.grants import needing
from pgqueue.database.sequences import advancing
from pgqueue.database.sessions import ROUND_TRIP_SECONDS, Link, options, transaction
from pgqueue.plain_text import plain
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")


TRIES = 3


def enter(state: WorkerState) -> int:
    """Check the schema, advance sequences that lag, and insert the row of a new worker with its tasks.

    Raises what `migrations.require` raises. The sequences come first: a worker's id is given by one of them. They may
    be set back in between, as by a restore that still goes on. Then all of it is tried again, `TRIES` times at most.
    """
    for _ in range(TRIES - 1):
        try:
            return _enter(state)
        except psycopg.errors.UniqueViolation as error:
            log.warning("the sequence of workers was set back again, a new id was taken: %s", one_line(error))
    return _enter(state)


def _enter(state: WorkerState) -> int:
    link, settings = state.link, state.settings
    with (
        primary.connect(psycopg.Connection, link.address(), **options(link, "pgqueue start")) as conn,
        needing(conn, "work"),
    ):
        with transaction(conn, link):
            migrations.require(conn, link.schema)
            restore_settings(conn, link.schema)
            sequences = advancing(link.schema, whole=False)
            sequences.read(conn.execute(sequences.sql.encode(), dict(sequences.params)).fetchall())
            worker_id = register(
                conn,
                link.schema,
                lease=settings.lease,
                concurrency=settings.concurrency,
                version_tag=settings.version_tag,
                queues=list(settings.queues),
                tasks=state.tasks,
                slots=list(settings.queues.values()),
                listens=settings.listen,
            )
        note_version(conn, link.schema, settings.version_tag)
        return worker_id


def note_version(conn: psycopg.Connection[Any], schema: str, version_tag: str) -> None:
    """Note when the first worker of this version started. A worker works without that: if it fails, the log says so.

    The connection is in autocommit mode. The row of the worker is committed: pages go by it until the next worker of
    this version starts.
    """
    try:
        with alarms.after(ROUND_TRIP_SECONDS, partial(hang_up, conn)):
            conn.execute(statements.text("registration_version", schema), {"version_tag": version_tag})
    except psycopg.Error as error:
        log.warning("the start of version %s was not noted: %s", plain(version_tag), one_line(error))


def restore_settings(conn: psycopg.Connection[Any], schema: str) -> None:
    """Put back the rows that pgqueue's tables of settings must have."""
    row = conn.execute(statements.text("registration_restore_settings", schema)).fetchone()
    if row is not None and row[0]:
        log.warning("something has emptied the tables ring or duty of schema %s: their rows are put back", schema)


async def entered(state: WorkerState) -> int:
    """`enter` from the event loop. If it is cancelled, it waits for the thread, which goes on, and leaves no row."""
    entering = asyncio.ensure_future(asyncio.to_thread(enter, state))
    try:
        return await asyncio.shield(entering)
    except asyncio.CancelledError:
        await asyncio.wait([entering])
        if not entering.cancelled() and entering.exception() is None:
            await asyncio.to_thread(withdraw, state.link, entering.result())
        raise


def withdraw(link: Link, worker_id: int) -> None:
    """Remove the row of a worker that never began. If that fails, other workers will declare it dead."""
    try:
        with (
            primary.connect(psycopg.Connection, link.address(), **options(link, "pgqueue start")) as conn,
            transaction(conn, link),
        ):
            conn.execute(statements.text("registration_leave", link.schema), {"worker_id": worker_id})
    except psycopg.Error as error:
        log.warning("could not sign off: %s", one_line(error))


def register(
    conn: psycopg.Connection[Any],
    schema: str,
    *,
    lease: float,
    concurrency: int,
    version_tag: str,
    queues: list[str],
    tasks: Iterable[str],
    slots: Sequence[int | None] = (),
    listens: bool = True,
) -> int:
    """Insert the row of a new worker; return its id, which was never used before and never will be again."""
    row = conn.execute(
        statements.text("registration_register", schema),
        {
            "lease": lease,
            "pid": os.getpid(),
            "concurrency": concurrency,
            "host": socket.gethostname(),
            "version_tag": version_tag,
            "queues": queues,
            "tasks": sorted(tasks),
            "slots": list(slots),
            "listens": listens,
        },
    ).fetchone()
    assert row is not None, "INSERT … RETURNING answers a row"
    return int(row[0])
