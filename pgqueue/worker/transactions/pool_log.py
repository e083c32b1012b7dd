"""What psycopg's pool logs of the connections for handlers, without what is no news.

The worker closes each connection whose transaction did not commit, and says itself that the database is lost. The pool
warns of each such connection, and of each try to connect. Pools of the application log as before.
"""

from __future__ import annotations

import logging

from pgqueue.database.outage import SAID_SECONDS
from pgqueue.steady_clock import monotonic
from pgqueue.worker.transactions.handler_connection import AsyncHandlerConnection, HandlerConnection

NAME = "pgqueue job"
"""The name of the pools for handlers."""


class PoolLog(logging.Filter):
    """Drops what the pool says of a connection that is closed; passes each warning of a pool of ours once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._said_at: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        if any(isinstance(arg, HandlerConnection | AsyncHandlerConnection) and arg.closed for arg in args):
            return False
        if record.levelno < logging.WARNING or NAME not in args:
            return True
        now, said_at = monotonic(), self._said_at.get(record.msg)
        if said_at is not None and now - said_at < SAID_SECONDS:
            return False
        self._said_at[record.msg] = now
        return True


_filter = PoolLog()


def quieten() -> None:
    """Filter the log of psycopg's pools in this process; again, it changes nothing."""
    logging.getLogger("psycopg.pool").addFilter(_filter)
