"""What changes a schema while others use it: waits for its locks for a limited time, and names their holders.

`migrations` and `number` call it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.rows import tuple_row

from pgqueue.database.own_adapters import adapted
from pgqueue.errors import Error

ATTEMPTS = 5  # for one change, if its locks are held by others

Connection = psycopg.Connection[Any]
T = TypeVar("T")

_log = logging.getLogger(__name__)


def lock_name(schema: str) -> str:
    """What the advisory lock of migrations of this schema is made of."""
    return f"pgqueue migrate {schema}"


def with_locks(conn: Connection, schema: str, what: str, lock_timeout: float, act: Callable[[], T]) -> T:
    """What this returns. While others hold its locks, roll back and try again."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return act()
        except (errors.LockNotAvailable, errors.DeadlockDetected) as error:
            held = holders(conn, schema, lock_timeout)
            if attempt == ATTEMPTS:
                raise Error(
                    f"{what}: no lock within {lock_timeout:g} s, tried {ATTEMPTS} times. {held}. "
                    "Nothing was changed; end that session (SELECT pg_terminate_backend(pid)) or try later"
                ) from error
            _log.warning("%s: no lock within %g s, trying again. %s", what, lock_timeout, held)
            # Meanwhile the sessions that queued behind us get the lock.
            time.sleep(lock_timeout / 10 * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


# Sessions that hold a lock on a table of the schema, or the lock of another migration. They have been in a transaction
# at least as long as we waited. This is asked after our own wait ended: a session may have gone meanwhile.
_HOLDERS = """
SELECT coalesce('pid ' || a.pid, 'a prepared transaction (see pg_prepared_xacts)')
       || coalesce(' (' || nullif(a.application_name, '') || ', ' || a.usename || ', ' || a.state || ' since '
                   || date_trunc('second', a.state_change) || ')', '')
       || ' holds ' || string_agg(DISTINCT coalesce(c.relname, 'the migration lock'), ', ')
       || coalesce(': ' || left(a.query, 200), '')
FROM pg_catalog.pg_locks l
LEFT JOIN pg_catalog.pg_class c ON c.oid = l.relation
LEFT JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
CROSS JOIN hashtextextended(%(lock)s, 0) AS key
WHERE l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
  AND (n.nspname = %(schema)s
       OR l.locktype = 'advisory' AND l.objsubid = 1
          AND l.classid::bigint = (key >> 32) & 4294967295 AND l.objid::bigint = key & 4294967295)
  AND (a.pid IS NULL OR a.xact_start <= clock_timestamp() - make_interval(secs => %(seconds)s::float8))
GROUP BY a.pid, a.application_name, a.usename, a.state, a.state_change, a.query
ORDER BY 1
"""


def holders(conn: Connection, schema: str, seconds: float) -> str:
    """The holders of the schema's locks, in words for the operator."""
    parameters = {"schema": schema, "lock": lock_name(schema), "seconds": seconds}
    with conn.transaction(), plain_cursor(conn) as cursor:
        found = [str(held) for (held,) in cursor.execute(_HOLDERS, parameters)]
    return "; ".join(found) or "Its holder has gone since"


def plain_cursor(conn: Connection) -> psycopg.Cursor[tuple[Any, ...]]:
    """A plain cursor, even if the caller's connection makes other kinds of rows and cursors."""
    cursor = psycopg.Cursor(conn, row_factory=tuple_row)
    adapted(cursor, "")
    return cursor


def take_time(cursor: psycopg.Cursor[tuple[Any, ...]]) -> None:
    """Lift, for this transaction, the timeouts of statements and transactions that role or database have."""
    set_local(cursor, statement_timeout=0)
    if cursor.connection.info.server_version >= 170_000:
        set_local(cursor, transaction_timeout=0)


def set_local(cursor: psycopg.Cursor[tuple[Any, ...]], **seconds: float) -> None:
    for name, value in seconds.items():
        cursor.execute("SELECT set_config(%s, %s, true)", [name, f"{value * 1000:.0f}ms"])
