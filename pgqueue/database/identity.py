"""Which database a connection has led to, whatever it is called: two names may mean one.

Asked by the commands for several databases, before they do anything with them. A copy of a server's files has its
identifier, too: a standby that was promoted, or a restored backup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from pgqueue.database.statements import text


@dataclass(frozen=True, slots=True)
class DatabaseIdentity:
    """The identifier of a server, that of a database there, and the number of its job ids."""

    system: int
    oid: int
    number: int

    def clash(self, other: DatabaseIdentity) -> str | None:
        """What is wrong if this is to be another database than that one; None if they are two.

        >>> DatabaseIdentity(1, 5, 0).clash(DatabaseIdentity(1, 6, 0))
        'have one number, 0, so that they give the same job ids; run `pgqueue migrate --number K` for one of them'
        """
        if (self.system, self.oid) == (other.system, other.oid):
            return "are one database"
        if self.number == other.number:
            return (
                f"have one number, {self.number}, so that they give the same job ids; "
                "run `pgqueue migrate --number K` for one of them"
            )
        return None


def identity(conn: psycopg.Connection[Any], schema: str) -> DatabaseIdentity:
    """Which database this is. The schema must be there."""
    [row] = conn.cursor(row_factory=tuple_row).execute(text("identity_read", schema).encode()).fetchall()
    return DatabaseIdentity(*row)
