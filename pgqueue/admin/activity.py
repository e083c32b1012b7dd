"""Whether something has changed in the queue: a mark to compare, and the channels of the hints.

Called by the dashboard, for pages that are open. Only reads, inside the caller's transaction.

A notification is only a hint: it tells of new jobs and of changes by hand, and not of jobs that start and end. So the
mark is looked at behind it, every second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection

from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.asking import named
from pgqueue.database.statements import Row

FIXED = (":scheduled", ":control", ":orders", ":ordered", ":outbox", "default")
"""The channels that belong to no queue, and that of the queue which needs no name. Each is `schema.name`."""


@dataclass(frozen=True, slots=True)
class Channels:
    """Whether LISTEN is of use on this connection, and on which channels."""

    useful: bool
    names: tuple[str, ...]


async def amark(conn: object) -> str:
    """A text that is another one if jobs, queues or workers have changed since."""
    return await drivers.arun(conn, named("activity_mark", lambda rows: str(rows[0][0])))


async def achannels(conn: AsyncConnection[Any]) -> Channels:
    """The channels of the queues that are known now, and of all that belongs to no queue."""
    schema, _ = client()

    def read(rows: list[Row]) -> Channels:
        [(useful, queues)] = rows
        return Channels(useful, tuple(f"{schema}.{name}" for name in (*FIXED, *queues)))

    return await drivers.arun(conn, named("activity_channels", read, pid=conn.info.backend_pid))
