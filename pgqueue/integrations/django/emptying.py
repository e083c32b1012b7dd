"""Brings the queue of one database back to what its migrations have made: between tests that commit.

Jobs, keys, limits, schedules, pauses, workers and history are removed. Ids go on. By DELETE: a TRUNCATE of 60 tables
would take longer than most tests.
"""

from __future__ import annotations

from typing import Any

from pgqueue.config import config
from pgqueue.database.statements import text


def empty(conn: Any) -> None:
    """Empty the queue in the database of this connection of Django, if there is one."""
    if conn.vendor != "postgresql":
        return
    with conn.cursor() as cursor:
        cursor.execute(text("emptying_deletes", config().schema))
        (deletes,) = cursor.fetchone()
        if deletes is not None:
            cursor.execute(deletes)
