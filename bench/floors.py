"""What PostgreSQL gives to somebody who writes the SQL by hand: the floors pgqueue is measured against.

They do the least that can be called a queue, with the same driver, durability and server as the other side. They keep
no history, know no priorities, queues, retries or dead workers. Each returns the seconds and the CPU it used, measured
around the loop: connecting, preparing and filling are done before.
"""

from __future__ import annotations

from time import monotonic, process_time
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]

BATCH = 1000
# Without ORDER BY any thousand will do: a bag, not a queue, and the cheapest there is, so it is the floor. Measured, in
# server CPU per job: 5.7 µs; in order 6.5 by walking the index, 12 as the planner would have it (see ORDERED).
CLAIM = """
UPDATE {table} SET state = 1
WHERE id IN (SELECT id FROM {table} WHERE state = 0 {order} FOR UPDATE SKIP LOCKED LIMIT 1000)
RETURNING id, args
"""
# Left alone, the planner reads and sorts the rest of the table for each thousand.
ORDERED = b"SET enable_seqscan = off; SET enable_sort = off"
DELETE = "DELETE FROM {table} WHERE id = ANY (%s)"


def fill(conn: Connection, rows: int, table: str = "minimal") -> None:
    """Put jobs into a floor's table, in one transaction. Not measured."""
    conn.execute(
        f"INSERT INTO {table} SELECT n, 0, '{{}}' FROM generate_series(1, %s) n".encode(),  # noqa: S608
        [rows],
    )


def drain(conn: Connection, table: str = "minimal", ordered: bool = False) -> dict[str, float]:
    """*claim*: take a thousand, delete them by their ids, each a transaction of its own, until nothing is left."""
    if ordered:
        conn.execute(ORDERED)
    claim = CLAIM.format(table=table, order="ORDER BY id" if ordered else "").encode()
    delete = DELETE.format(table=table).encode()
    jobs, started, cpu = 0, monotonic(), process_time()
    while taken := conn.execute(claim, prepare=True).fetchall():
        conn.execute(delete, [[id for id, _ in taken]], prepare=True)
        jobs += len(taken)
    ended = monotonic()
    return {"jobs": jobs, "started": started, "ended": ended, "cpu": process_time() - cpu}


def commit(conn: Connection, jobs: int, first: int) -> dict[str, float]:
    """*commit*: one row in one transaction, `jobs` times."""
    insert = b"INSERT INTO minimal (id, state, args) VALUES (%s, 0, %s)"
    started, cpu = monotonic(), process_time()
    for id in range(first, first + jobs):
        with conn.transaction():
            conn.execute(insert, [id, "{}"])
    return {"jobs": jobs, "started": started, "ended": monotonic(), "cpu": process_time() - cpu}


def copy(conn: Connection, jobs: int, batch: int, first: int) -> dict[str, float]:
    """*copy*: `batch` rows in one COPY and one transaction, until there are `jobs`."""
    started, cpu = monotonic(), process_time()
    for low in range(first, first + jobs, batch):
        with (
            conn.transaction(),
            conn.cursor() as cursor,
            cursor.copy("COPY minimal (id, state, args) FROM STDIN") as rows,
        ):
            for id in range(low, low + batch):
                rows.write_row((id, 0, "{}"))
    return {"jobs": jobs, "started": started, "ended": monotonic(), "cpu": process_time() - cpu}
