"""What a handler sets on the client's side of its connection: it goes with the handler, as the session's settings do.

Used by `handler_connection`, whose `lend` notes what is there before a handler gets a connection, and whose `tidy`
restores that afterwards. The server knows nothing of these: adapters of psycopg, factories of rows and cursors, what
hears notices and notifications, notifications that were not read, when statements are prepared, attributes of the
application's own, what stands in the place of a method.

1. Adapters are changed in place, so their map goes. At its next use psycopg copies `psycopg.adapters`, which are the
   application's for all connections, for the next one.
2. Lists are changed in place, too: each handler gets new ones.
3. Prepared statements stay: they are the session's, and the next job may use them.
4. A connection in the middle of something, as a block of `transaction()` in a generator that was not read to its end,
   cannot be restored (`is_left_inside`): what ends the block would write in the transaction of another job.

Not chosen: a new connection around the same session for each job, as an attempt that failed leaves one (`heir`). That
takes 9 µs, this 2.4 µs, of which 1.0 µs are psycopg's copy of its adapters at their next use. And psycopg would no
longer know what is prepared there.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import Any

VALUES = (
    "row_factory",
    "cursor_factory",
    "server_cursor_factory",
    "_autocommit",
    "_isolation_level",
    "_read_only",
    "_deferrable",
    "_begin_statement",
)
"""Attributes whose values do not change in themselves."""


class AsLent:
    """What a connection was when a handler got it."""

    __slots__ = ("_hears", "_number", "_prepares", "_values", "names")

    def __init__(self, conn: Any, later: frozenset[str]) -> None:
        state = vars(conn)
        self.names: frozenset[str] = later.union(state)
        """Of what may be there: what is, and what the worker notes `later`."""
        self._number = len(state)
        self._values = {name: state[name] for name in VALUES} | {"_adapters": None}
        self._prepares = conn.prepare_threshold, conn.prepared_max
        self._hears = conn.pgconn.notice_handler, conn.pgconn.notify_handler

    def of_heir(self, heir: Any) -> AsLent:
        """The same for a new connection to the session, which hears what the server says."""
        made = copy(self)
        made._hears = heir.pgconn.notice_handler, heir.pgconn.notify_handler
        return made

    def is_of(self, conn: Any) -> bool:
        """Whether nothing was noted at this connection since."""
        return len(vars(conn)) == self._number

    def restore(self, conn: Any) -> None:
        """Nothing of the handler is left on this connection."""
        state = vars(conn)
        state.update(self._values)
        state["_notice_handlers"], state["_notify_handlers"], state["_notifies_backlog"] = [], [], deque()
        if len(state) != self._number:
            for name in state.keys() - self.names:
                del state[name]
        conn.prepare_threshold, conn.prepared_max = self._prepares
        pgconn = conn.pgconn
        pgconn.notice_handler, pgconn.notify_handler = self._hears


def is_left_inside(conn: Any) -> bool:
    """Whether a block of the handler's that begins and ends something there was not left."""
    return bool(conn._num_transactions or conn._pipeline or conn._tpc)
