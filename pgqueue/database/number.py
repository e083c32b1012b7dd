"""The number of a database among several: where the ids of its jobs begin.

`migrate` sets it. Commands over several databases and `pgqueue migrate` read it.
"""

from __future__ import annotations

import logging
from typing import Any

import psycopg
from psycopg import errors

from pgqueue.database.schema_locks import plain_cursor, set_local, take_time, with_locks
from pgqueue.database.statements import text
from pgqueue.databases import NUMBER_BITS, number_in
from pgqueue.errors import Error, InvalidOption

NUMBER_MOST = 1023
"""The highest number of a database: the ids of its jobs stay below 2^53, which JavaScript reads exactly."""

Connection = psycopg.Connection[Any]

_log = logging.getLogger(__name__)


def number_of(conn: Connection, schema: str) -> int:
    """The number of this database among several, as `migrate` has set it; 0 if it has none."""
    with plain_cursor(conn) as cursor:
        [number] = cursor.execute(text("sequences_number", schema).encode()).fetchone() or (0,)
        return int(number)


def check_number(number: int) -> None:
    """Raise InvalidOption if no database can have this number."""
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= NUMBER_MOST:
        raise InvalidOption(f"number {number!r}: give a number from 0 to {NUMBER_MOST}")


def set_number(conn: Connection, schema: str, number: int, lock_timeout: float) -> None:
    """Let the ids of this database's new jobs begin as the number says. InvalidOption: higher ids were given."""

    def act() -> int | None:
        with conn.transaction(), plain_cursor(conn) as cursor:
            take_time(cursor)
            set_local(cursor, lock_timeout=lock_timeout)
            statement = text("sequences_set_number", schema).encode()
            [highest] = cursor.execute(statement, {"number": number}).fetchone() or (None,)
            return None if highest is None else int(highest)

    try:
        if number_of(conn, schema) == number:
            return
        highest = with_locks(conn, schema, f"number {number}", lock_timeout, act)
    except errors.InsufficientPrivilege as error:
        raise Error(f"number {number}: only the owner of schema {schema!r} may set it: {error}") from error
    if highest is not None:
        raise InvalidOption(
            f"number {number}: its ids begin at {(number << NUMBER_BITS) + 1}, and job ids up to {highest} were given. "
            f"Nothing was changed; the lowest number that fits is {highest >> NUMBER_BITS}"
        )
    _log.info("schema %s of database %s has number %d", schema, conn.info.dbname, number)


def warn_of_others(cursor: psycopg.Cursor[Any], schema: str) -> None:
    """Say if there are jobs of a higher number: rows that were copied here, without the sequence, or by hand."""
    [highest] = cursor.execute(text("sequences_highest", schema).encode()).fetchone() or (None,)
    [number] = cursor.execute(text("sequences_number", schema).encode()).fetchone() or (0,)
    if highest is not None and (theirs := number_in(int(highest))) > number:
        _log.warning(
            "schema %s has number %d, and a job with id %d, of number %d. If its rows were copied from the database of "
            "that number, and that one is gone, run `pgqueue migrate --number %d` before a job is enqueued here",
            *(schema, number, highest, theirs, theirs),
        )
