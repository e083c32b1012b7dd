"""Finds out whether a COMMIT without an answer took place.

Used by the transactions of handlers (`transaction`). The old session is ended, if it is ours to end. Then the job's
running row is locked on a new connection, which waits while the old transaction has it locked, until that has ended.
Then what that transaction would have written is looked for, in a statement of its own, so that it is seen. The database
being away is waited out: until this is known the run is not over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import sleep
from typing import Any

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.rows import tuple_row

from pgqueue.database.backoff import Backoff, transient
from pgqueue.database.statements import Row, Statement
from pgqueue.worker.transactions.handler_pool import HandlerPool


def settle(error: psycopg.Error, lender: HandlerPool, questions: Sequence[Statement[Any]]) -> list[bool]:
    """Ask on a new connection: of each question whether it answers a row. Raises `error` if the worker ends first."""
    backoff = Backoff()
    while True:
        try:
            conn = lender.acquire(settles=True)
            try:
                return [send(conn, question).fetchone() is not None for question in questions]
            finally:
                lender.release(conn)
        except psycopg.Error as again:
            if lender.closed or not transient(again):
                raise error from again
            sleep(backoff.pause())


async def asettle(error: psycopg.Error, lender: HandlerPool, questions: Sequence[Statement[Any]]) -> list[bool]:
    """`settle` on the loop."""
    backoff = Backoff()
    while True:
        try:
            conn = await lender.aacquire(settles=True)
            try:
                return [await (await asend(conn, question)).fetchone() is not None for question in questions]
            finally:
                await lender.arelease(conn)
        except psycopg.Error as again:
            if lender.closed or not transient(again):
                raise error from again
            await asyncio.sleep(backoff.pause())


def send(conn: Connection[Any], statement: Statement[Any]) -> Cursor[Row]:
    """Send a statement; its rows are tuples, its parameters named, whatever the connection's owner likes."""
    cursor = Cursor(conn, row_factory=tuple_row)
    return cursor.execute(statement.sql, statement.params)


async def asend(conn: AsyncConnection[Any], statement: Statement[Any]) -> AsyncCursor[Row]:
    """`send` on the loop."""
    cursor = AsyncCursor(conn, row_factory=tuple_row)
    return await cursor.execute(statement.sql, statement.params)
