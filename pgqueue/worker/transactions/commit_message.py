"""The messages that begin and end a transaction of a handler: as few as can be, in threads one call of libpq each.

Used by the connections of `handler_connection`, which send them; why their statements may go together stands there.

1. A message is text with several statements. libpq has one call that sends it and waits for all its answers, and that
   releases the interpreter once.
2. A pipeline is some forty calls, each of which may hand the interpreter to another thread. With ten threads that took
   more CPU than the rest.
3. Text has no parameters. So only the worker's own numbers and flags go that way, and its version tag, quoted by libpq.
   A job's result is data, and has a message of its own.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from psycopg import OperationalError
from psycopg.pq import ConnStatus, Escaping, ExecStatus
from psycopg.waiting import Ready, Wait

from pgqueue.database.drivers import placed
from pgqueue.database.statements import Statement, text

if TYPE_CHECKING:
    from psycopg import ConnectionInfo
    from psycopg.pq.abc import PGconn, PGresult

# No handler waits longer than this for a row lock of another session, unless it says so itself (SET LOCAL).
LOCK_SECONDS = 10

# The mark of a transaction follows: a number. The statement that ends the job asks for it (`not_marked`).
MARK = b"SET LOCAL pgqueue_job.mark = "
SHOW = b"SHOW pgqueue_job.mark"
BEGIN = b"BEGIN; SET LOCAL lock_timeout = '%ds'; " % LOCK_SECONDS + MARK
ROLLBACK = b"ROLLBACK"
ANEW = b"; ".join((ROLLBACK, BEGIN))
COMMIT = b"COMMIT"
# After the end, in a transaction of its own. Should it fail, the job has ended all the same: its row is gone.
CLEARING = (
    b"RESET SESSION AUTHORIZATION",
    b"RESET ROLE",
    b"RESET ALL",
    b"CLOSE ALL",
    b"UNLISTEN *",
    b"DISCARD TEMP",
    b"DISCARD SEQUENCES",
)
UNLOCK = b"SELECT pg_catalog.pg_advisory_unlock_all()"
OK = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)

Answers = Generator[Wait, Ready | int, "list[PGresult]"]


class CommitMessage:
    """What all connections of one worker prepare: the completion of a job; and `UNLOCK`, as a SELECT is planned."""

    def __init__(self, schema: str) -> None:
        self.source = text("complete_within", schema)
        sql, self.names = placed(self.source)
        self.statements = (sql.encode(), UNLOCK)
        self.usable = True
        """Whether none of them was dropped unseen."""

    def completes(self, statement: Statement[Any]) -> bool:
        """Whether this is the prepared statement, with parameters that can go as text."""
        return self.usable and statement.sql == self.source and statement.params["result"] is None

    def preparing(self, number: int) -> bytes:
        """What prepares them, for the `number`th time on a connection."""
        named = [b"PREPARE %b AS %b" % (name(number, index), each) for index, each in enumerate(self.statements)]
        return b"; ".join(named)

    def completion(self, number: int, statement: Statement[Any], pgconn: PGconn, info: ConnectionInfo) -> bytes:
        """The statement, as the `number`th preparing on this connection has it."""
        values = [literal(statement.params[each], pgconn, info) for each in self.names]
        return b"EXECUTE %b(%b)" % (name(number, 0), b", ".join(values))


@lru_cache(64)
def ending(number: int | None, early: bool) -> bytes:
    """COMMIT, and what clears the session, with what the `number`th preparing has for it. If `early`, the next begins,
    whose mark follows."""
    unlock = UNLOCK if number is None else b"EXECUTE " + name(number, 1)
    if early:  # what clears must not be undone with what follows
        return b"; ".join((COMMIT, b"BEGIN", *CLEARING, unlock, COMMIT, BEGIN))
    return b"; ".join((COMMIT, *CLEARING, unlock))


def undoing(begun: bool, preparing: bytes | None) -> bytes:
    """ROLLBACK if a transaction has `begun`, and what clears the session, also of all that was prepared; then it is
    prepared anew."""
    first, last = ((ROLLBACK,) if begun else ()), ((preparing,) if preparing else ())
    return b"; ".join((*first, *CLEARING, b"DEALLOCATE ALL", *last, UNLOCK))


@lru_cache(64)
def name(number: int, index: int) -> bytes:
    """What the `number`th preparing on a connection calls its statements."""
    return b"pgqueue_%d_%d" % (number, index)


def literal(value: object, pgconn: PGconn, info: ConnectionInfo) -> bytes:
    """A value as the server reads it on this connection: its handler may have changed the encoding, and what quotes."""
    if value is None:
        return b"NULL"
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, int):
        return b"%d" % value
    assert isinstance(value, str), f"no parameter of a completion is a {type(value).__name__}"
    encoded = value.encode() if value.isascii() else value.encode(info.encoding)
    return bytes(Escaping(pgconn).escape_literal(encoded))


def answers(pgconn: PGconn) -> Answers:
    """Wait for the answers to one message. For `conn.wait`."""
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            pgconn.consume_input()
    found: list[PGresult] = []
    while True:
        while pgconn.is_busy():
            if (yield Wait.R):
                pgconn.consume_input()
        answer = pgconn.get_result()
        if answer is None:
            if pgconn.status != ConnStatus.OK:
                raise OperationalError(pgconn.get_error_message() or "the connection is lost")
            return found
        found.append(answer)
