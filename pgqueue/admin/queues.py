"""What people do to queues by hand: `pause` them, and `resume`.

Called by applications and by the CLI. A pause is a row that every claim reads, so it needs no NOTIFY and outlives every
worker. Everything happens inside the caller's transaction, and with its COMMIT or not at all.
"""

from __future__ import annotations

from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.statements import Statement, text
from pgqueue.jobs.validation import check_queue


def pause(conn: object, queue: str) -> bool:
    """Stop a queue: once this is committed no worker takes a job from it. False if it was paused already.

    What has been taken goes on, also the few jobs that wait in a worker for their turn; enqueuing goes on as well. It
    holds until `resume`, whatever restarts in the meantime.

        pgqueue.pause(conn, "mail")
    """
    return drivers.run(conn, _pausing(queue))


async def apause(conn: object, queue: str) -> bool:
    """`pause` for async connections."""
    return await drivers.arun(conn, _pausing(queue))


def resume(conn: object, queue: str) -> bool:
    """Open a paused queue again; its workers look at once. False if it was not paused."""
    return drivers.run(conn, _resuming(queue))


async def aresume(conn: object, queue: str) -> bool:
    """`resume` for async connections."""
    return await drivers.arun(conn, _resuming(queue))


def _pausing(queue: str) -> Statement[bool]:
    schema, _ = client()
    return Statement(text("queues_pause", schema), {"queue": check_queue(queue)}, bool)


def _resuming(queue: str) -> Statement[bool]:
    schema, notify = client()
    return Statement(text("queues_resume", schema), {"queue": check_queue(queue), "notify": notify}, bool)
