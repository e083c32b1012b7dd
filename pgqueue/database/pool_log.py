"""What psycopg's pool logs of the connections of pgqueue, without what is no news.

Used by the pools for handlers, and by the dashboard's. The pool warns of each connection whose transaction did not
commit, and of each try to connect. The worker closes such a connection itself, and says that the database is lost. So
does the dashboard. Pools of the application log as before.
"""

from __future__ import annotations

import logging
import threading

from pgqueue.database.outage import SAID_SECONDS
from pgqueue.steady_clock import monotonic


class PoolLog(logging.Filter):
    """Passes each warning of the pool of this name once a minute; none of a `silent` one. Drops what a pool says of a
    closed connection of these kinds."""

    def __init__(self, pool: str, *kinds: type, silent: bool = False) -> None:
        super().__init__()
        self._silent = silent
        self._pool = pool
        self._kinds = kinds
        self._said_at: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        if any(isinstance(arg, self._kinds) and getattr(arg, "closed", False) for arg in args):
            return False
        if record.levelno < logging.WARNING or self._pool not in args:
            return True
        if self._silent:
            return False
        now, said_at = monotonic(), self._said_at.get(record.msg)
        if said_at is not None and now - said_at < SAID_SECONDS:
            return False
        self._said_at[record.msg] = now
        return True


_filters: dict[str, PoolLog] = {}
_adding = threading.Lock()


def quieten(pool: str, *kinds: type, silent: bool = False) -> None:
    """Filter what the pool of this name logs in this process; again, it changes nothing."""
    with _adding:
        if pool not in _filters:
            _filters[pool] = PoolLog(pool, *kinds, silent=silent)
    logging.getLogger("psycopg.pool").addFilter(_filters[pool])
