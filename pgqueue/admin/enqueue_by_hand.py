"""Enqueue by hand: one job, as an application enqueues it, and its row of the record.

Called by the dashboard, inside a transaction of its own. The job comes to the queue itself, also where an application
stages its jobs in an outbox.
"""

from __future__ import annotations

from typing import Any

from pgqueue.client import unique_enqueue
from pgqueue.client.enqueue import many
from pgqueue.client.handle import JobHandle
from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.asking import named
from pgqueue.jobs.actors import actor_of
from pgqueue.jobs.job import NewJob


async def aenqueue_by_hand(conn: object, new: NewJob[Any], *, actor: str | None = None) -> JobHandle[Any]:
    """Enqueue this job, and record it by `actor`. If a job has its unique key, return that one and record nothing.

    The connection must be in a transaction: the job and its row of the record are two statements. Raises DuplicateJob
    if the task says that a duplicate is an error.
    """
    schema, notify = client()
    if new.keys is None:
        [handle] = await drivers.arun(conn, many([new], schema=schema, notify=notify))
    else:
        [handle] = await unique_enqueue.aenqueue(conn, [new])
    if handle.created or handle.replaced:
        about = {"task": new.task, "queue": new.queue, "id": handle.id}
        await drivers.arun(conn, named("enqueue_by_hand_record", **about, actor=actor_of(actor)))
    return handle
