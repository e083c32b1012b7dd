"""What people do to queues by hand: `pause` and `resume` them.

Called by applications and by the CLI. A pause is a row that every claim reads: it needs no NOTIFY and outlives every
worker. Everything happens inside the caller's transaction, and with its COMMIT or not at all.
"""

from __future__ import annotations

from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.statements import Statement, text
from pgqueue.jobs.validation import check_queue


def pause(conn: object, queue: str) -> bool:
    """Pause a queue: once this is committed, no worker takes a job from it. False if it was paused already.

    Jobs that a worker has taken go on, also the few that wait there for a slot. Enqueuing goes on, too. The pause holds
    until `resume`, also when workers or the server restart.

        pgqueue.pause(conn, "mail")
    """
    return drivers.run(conn, _pausing(queue))


async def apause(conn: object, queue: str) -> bool:
    """`pause` for async connections."""
    return await drivers.arun(conn, _pausing(queue))


def resume(conn: object, queue: str) -> bool:
    """End the pause of a queue; its workers look for jobs at once. False if it was not paused."""
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
