"""The application's side, in a process of its own: enqueues through pgqueue, and runs the floors.

    python -m bench.client DSN

One connection in autocommit mode, made before anything is measured.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from time import monotonic, process_time, sleep
from typing import Any

import click
import psycopg

import pgqueue
from bench import claims, floors
from bench.processes import serve
from bench.tasks import keyed, noop, numbered, stamp

Connection = psycopg.Connection[Any]


@click.command()
@click.argument("dsn")
def main(dsn: str) -> None:
    """Serve commands until standard input ends."""
    with psycopg.connect(dsn, autocommit=True, application_name="bench client") as conn:
        serve(
            {
                "warm": partial(warm, conn),
                "drain": partial(floors.drain, conn),
                "commit": partial(floors.commit, conn),
                "copy": partial(floors.copy, conn),
                "enqueue": partial(enqueue, conn),
                "enqueue_many": partial(enqueue_many, conn, conn),
                "stage_many": partial(enqueue_many, pgqueue.Outbox(conn), conn),
                "enqueue_numbered": partial(enqueue_numbered, conn),
                "pace": partial(pace, conn),
                "pace_keyed": partial(pace_keyed, conn),
                "claim": lambda **options: asyncio.run(claims.claim(dsn, **options)),
            }
        )


def warm(conn: Connection) -> dict[str, float]:
    """A floor's connection does once what it does at its first use: on the twin table, with a twin statement."""
    floors.fill(conn, 3 * floors.BATCH, "warm")
    return floors.drain(conn, "warm")


def enqueue(conn: Connection, jobs: int) -> dict[str, float]:
    """One job in one transaction, `jobs` times."""
    started, cpu = monotonic(), process_time()
    for _ in range(jobs):
        with conn.transaction():
            pgqueue.enqueue(conn, noop)
    return {"jobs": jobs, "started": started, "ended": monotonic(), "cpu": process_time() - cpu}


def enqueue_many(into: object, conn: Connection, jobs: int, batch: int) -> dict[str, float]:
    """`batch` jobs in one call and one transaction, until there are `jobs`. Making and checking them is included.
    `into` is the connection, or the outbox of it."""
    started, cpu = monotonic(), process_time()
    for _ in range(0, jobs, batch):
        with conn.transaction():
            pgqueue.enqueue_many(into, [noop.new() for _ in range(batch)])
    return {"jobs": jobs, "started": started, "ended": monotonic(), "cpu": process_time() - cpu}


def enqueue_numbered(conn: Connection, jobs: int, batch: int, first: int, keyed: bool) -> dict[str, float]:
    """As `enqueue_many`, each job with a number of its own, from `first` on; with a unique key each, or without."""
    task = numbered.using(unique="bench:{n}") if keyed else numbered
    handles: list[pgqueue.JobHandle[Any]] = []
    started, cpu = monotonic(), process_time()
    for start in range(first, first + jobs, batch):
        with conn.transaction():
            handles = pgqueue.enqueue_many(conn, [task.new(n) for n in range(start, start + batch)])
    ended = monotonic()
    if not all(handle.created for handle in handles):
        raise RuntimeError("a key was taken already: this would measure duplicates")
    return {"jobs": jobs, "started": started, "ended": ended, "cpu": process_time() - cpu}


def pace(conn: Connection, rate: float, seconds: float, together: int = 1) -> dict[str, Any]:
    """`rate` jobs a second, `together` per transaction, with the times before COMMIT was sent and after it
    returned for each."""
    events: list[tuple[int, float, float]] = []
    for _ in paced(rate / together, seconds):
        with conn.transaction():
            if together == 1:
                handles = [pgqueue.enqueue(conn, stamp)]
            else:
                handles = pgqueue.enqueue_many(conn, [stamp.new() for _ in range(together)])
            sent = monotonic()
        returned = monotonic()
        events += [(job.id, sent, returned) for job in handles]
    return {"events": events}


def pace_keyed(conn: Connection, rate: float, seconds: float, together: int, keys: int) -> dict[str, Any]:
    """`rate` jobs a second, `together` per transaction, on so many lock ids in turn; how many and the last one's id."""
    ids = cycle([keyed.using(lock=f"account:{key}") for key in range(keys)])
    jobs, last = 0, 0
    for _ in paced(rate / together, seconds):
        with conn.transaction():
            handles = pgqueue.enqueue_many(conn, [task.new() for task in islice(ids, together)])
        jobs, last = jobs + together, handles[-1].id
    return {"jobs": jobs, "last": last}


def paced(rate: float, seconds: float) -> Iterator[None]:
    """So often a second, for so long.

    The gaps are random (half to one and a half of the mean), so that no poll and no clock stays in step with them.
    """
    due = started = monotonic()
    while due < started + seconds:
        sleep(max(0.0, due - monotonic()))
        yield
        due += random.uniform(0.5, 1.5) / rate


if __name__ == "__main__":
    main()
