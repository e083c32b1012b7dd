"""Staging: jobs become rows of the outbox in the application's own database, as part of its transaction.

Called by `enqueue` if it is given an `Outbox`, or after `configure(outbox=True)`. The same checks, one statement. The
job exists exactly if that transaction commits; a relay (`pgqueue.relay`) delivers it to the database of the queue. This
module knows nothing of the relay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pgqueue.client.handle import JobHandle
from pgqueue.client.job_parameters import column, lines
from pgqueue.config import client, stages
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.keys import check_key
from pgqueue.jobs.staged import options_of
from pgqueue.options import names_options


@names_options
@dataclass(frozen=True, slots=True)
class Outbox:
    """A connection to the application's own database: `enqueue` on it stages jobs in the outbox there.

        with psycopg.connect(app_dsn) as conn:
            conn.execute("INSERT INTO orders (id) VALUES (7)")
            handle = pgqueue.enqueue(pgqueue.Outbox(conn), send_receipt, order_id=7)

    `handle.staged_id` is the number of the row; `handle.id` is None, because the job has none before it is delivered.

    With `order_by`, a text of 1 to 500 bytes, jobs of transactions that do not overlap arrive in their order. A job
    that is refused, or has to wait, holds back the later jobs with the same text, and no others. Workers run what has
    arrived side by side; if jobs must also run one after another, give them a `lock`.
    """

    conn: object
    order_by: str | None = None

    def __post_init__(self) -> None:
        if self.order_by is not None:
            check_key(self.order_by, "order_by")


def staged(conn: object) -> bool:
    """Whether jobs that are enqueued on this connection are to be staged."""
    return isinstance(conn, Outbox) or stages()


def stage(conn: object, jobs: Sequence[NewJob[Any]]) -> list[JobHandle[Any]]:
    """Stage these jobs, at least one; return handles in their order."""
    return drivers.run(bare(conn), _staging(jobs, _order_key(conn)))


async def astage(conn: object, jobs: Sequence[NewJob[Any]]) -> list[JobHandle[Any]]:
    """`stage` on an async connection."""
    return await drivers.arun(bare(conn), _staging(jobs, _order_key(conn)))


def bare(conn: object) -> object:
    """The connection itself."""
    return conn.conn if isinstance(conn, Outbox) else conn


def _order_key(conn: object) -> str | None:
    return conn.order_by if isinstance(conn, Outbox) else None


def _staging(jobs: Sequence[NewJob[Any]], order_key: str | None) -> Statement[list[JobHandle[Any]]]:
    schema, notify = client()
    params: dict[str, object] = {
        "task": column([job.task for job in jobs]),
        "args": lines([job.args for job in jobs]),
        "options": column([options_of(job) for job in jobs]),
        "order_key": order_key,
        "notify": notify,
    }
    return Statement(text("outbox_stage", schema), params, _handles)


def _handles(rows: list[Row]) -> list[JobHandle[Any]]:
    return [JobHandle(None, staged_id=id) for id in rows[0][0]]  # type: ignore[arg-type]  # no id before the delivery
