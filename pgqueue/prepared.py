"""The messages about a transaction that completes its job, straight through libpq: prepared, sent, answered.

Used by `borrowed`, whose connections send them; why they may go together stands there.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from psycopg import OperationalError
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.waiting import Ready, Wait

from pgqueue.connections import placed
from pgqueue.statements import Statement, text

if TYPE_CHECKING:
    from psycopg import ConnectionInfo
    from psycopg.pq.abc import PGconn, PGresult

# Longer than this no handler waits for a row lock that somebody holds, unless it says so itself (SET LOCAL).
LOCK_SECONDS = 10

BEGINNING = (b"BEGIN", b"SET LOCAL lock_timeout = '%ds'" % LOCK_SECONDS)
BEGIN = b"; ".join(BEGINNING)
ROLLBACK = b"ROLLBACK"
ANEW = b"; ".join((ROLLBACK, *BEGINNING))
COMMIT = b"COMMIT"
# After the COMMIT, in a transaction of its own. Should it fail, the job has ended all the same: its row is gone.
CLEARING = (
    b"RESET SESSION AUTHORIZATION",
    b"RESET ROLE",
    b"RESET ALL",
    b"CLOSE ALL",
    b"UNLISTEN *",
    b"DISCARD TEMP",
    b"DISCARD SEQUENCES",
    b"SELECT pg_catalog.pg_advisory_unlock_all()",
)
CLEAR = b"; ".join((COMMIT, *CLEARING))
OK = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)

Answers = Generator[Wait, Ready | int, "list[PGresult]"]


class Prepared:
    """The statements that end a transaction, as all connections of one worker prepare them."""

    def __init__(self, schema: str) -> None:
        self.source = text("complete_within", schema)
        sql, self.names = placed(self.source)
        self.statements = (sql.encode(), *CLEARING, *BEGINNING)
        self.usable = True
        """Whether nobody has dropped them unseen."""

    def complete(self, pgconn: PGconn, number: int, params: Sequence[bytes | None], *, ahead: bool) -> None:
        """Put the end of a transaction on its way, and the begin of the next: nothing of it is read here."""
        pgconn.enter_pipeline_mode()
        pgconn.send_query_prepared(name(number, 0), params)
        pgconn.send_query_params(COMMIT, None)
        begins = len(self.statements) - len(BEGINNING)
        for index in range(1, begins):
            pgconn.send_query_prepared(name(number, index), None)
        pgconn.pipeline_sync()
        if ahead:
            for index in range(begins, len(self.statements)):
                pgconn.send_query_prepared(name(number, index), None)
            pgconn.pipeline_sync()

    def prepare(self, pgconn: PGconn, number: int) -> None:
        """Put the preparing on its way."""
        pgconn.enter_pipeline_mode()
        for index, statement in enumerate(self.statements):
            pgconn.send_prepare(name(number, index), statement)
        pgconn.pipeline_sync()

    def completes(self, statement: Statement[Any]) -> bool:
        """Whether this is the statement that was prepared, and can be relied on."""
        return self.usable and statement.sql == self.source

    def params(self, statement: Statement[Any], info: ConnectionInfo) -> list[bytes | None]:
        """The parameters of a completion, in its order, as text."""
        return [encoded(statement.params[each], info) for each in self.names]


@cache
def name(number: int, index: int) -> bytes:
    """What the `number`th preparing on a connection calls its statements."""
    return b"pgqueue_%d_%d" % (number, index)


def encoded(value: object, info: ConnectionInfo) -> bytes | None:
    """A parameter as the text that the server reads on this connection: its handler may have changed the encoding."""
    if isinstance(value, str):
        return value.encode() if value.isascii() else value.encode(info.encoding)
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int):
        return b"%d" % value
    assert value is None, f"no parameter of a completion is a {type(value).__name__}"
    return None


def answers(pgconn: PGconn, syncs: int = 0) -> Answers:
    """Wait for the answers to what was sent: those of a pipeline up to its last sync; without any, of one message. For
    `conn.wait`."""
    pipeline = syncs > 0
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            pgconn.consume_input()
    found: list[PGresult] = []
    while True:
        while pgconn.is_busy():
            if (yield Wait.R):
                pgconn.consume_input()
        answer = pgconn.get_result()
        if answer is None:  # so ends each statement's; and each try, once the connection is lost
            if pgconn.status != ConnStatus.OK:
                raise OperationalError(pgconn.get_error_message() or "the connection is lost")
            if not pipeline:
                return found
        elif answer.status == ExecStatus.PIPELINE_SYNC:
            syncs -= 1
            if not syncs:
                pgconn.exit_pipeline_mode()
                return found
        else:
            found.append(answer)
