"""Finds out whether a COMMIT without an answer took place.

Used by `commit`, on a connection of its own:

1. The old session is ended, if it is the worker's to end.
2. The job's running row is locked. While the old transaction has it locked, that waits. Afterwards the old transaction
   has ended.
3. What the old transaction would have written is looked for, in a statement of its own: so it is seen if it is there.

While the database is away, or read only, this waits and tries again: until the answer is known the run is not over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import sleep
from typing import Any

import psycopg

from pgqueue.database.backoff import Backoff, transient
from pgqueue.database.statements import Row, Statement
from pgqueue.worker.transactions.handler_pool import Side


async def settle(error: psycopg.Error, side: Side[Any], questions: Sequence[Statement[Any]]) -> list[list[Row]]:
    """The rows that each question answers. Raises `error` if the worker ends before there is an answer."""
    backoff = Backoff()
    while True:
        try:
            conn = await side.acquire(settles=True)
            try:
                return [await side.rows(conn, question) for question in questions]
            except psycopg.errors.ReadOnlySqlTransaction:
                await side.close(conn)  # it keeps what it began with; another session may write
                raise
            finally:
                await side.release(conn)
        except psycopg.Error as again:
            if side.pools.closed or not transient(again):
                raise error from again
            await side.wait((asyncio.sleep if side.is_async else sleep)(backoff.pause()))
