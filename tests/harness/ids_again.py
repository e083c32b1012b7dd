"""A fault: the database gives numbers again that it has given before. Nothing else is changed."""

from __future__ import annotations

from typing import Literal

import psycopg

Again = Literal["truncated", "lagging"]

SEQUENCES = """
SELECT c.oid::regclass::text FROM pg_class c
WHERE c.relkind = 'S' AND c.relnamespace = 'pgqueue'::regnamespace ORDER BY 1
"""


def ids_again(dsn: str, how: Again) -> None:
    """Have the next job get the first id again.

    - `truncated`: the jobs are gone, and their sequences begin anew; the tables beside `job` stay.
    - `lagging`: every row stays, and every sequence begins anew. This is what a restore of data only leaves, and a
      switchover to a server that was fed by logical replication.
    """
    with psycopg.connect(dsn) as conn:
        if how == "truncated":
            conn.execute("TRUNCATE pgqueue.job RESTART IDENTITY")
            return
        for (sequence,) in conn.execute(SEQUENCES).fetchall():
            conn.execute("SELECT setval(%s::regclass, 1, false)", [sequence])
