"""The connections that handlers get, of both kinds: whose transaction only the worker begins and ends.

BEGIN, and the end of a transaction that completes its job, go straight through libpq: for a transactional job they are
two of three messages, and whatever a cursor or a block of `conn.transaction()` does for everybody else costs more there
than the round trip itself.

The end is one message, a pipeline: the completion, COMMIT, and what clears the session. The server leaves out whatever
follows an error in a pipeline. So COMMIT runs only if the completion has, as if a client had waited for each answer;
what clears runs only after a COMMIT that took place, so no advisory lock is let go before; and nothing is sent twice:
if any of the answers does not come, it is an unknown COMMIT, the connection is closed, and `settling` finds out.

The completion is prepared when the connection is made, under a name of ours. Handlers can drop it. psycopg does so for
them: after a DROP, an ALTER or a rollback to a savepoint it drops all statements of the session. We are told
(`_deallocate`), and from there on this connection ends its transactions with one statement after another, which needs
no name, until it has ended a few undisturbed and prepares again. Whoever drops it unseen, by a DEALLOCATE inside a
function, aborts the transaction: nothing was committed, so the job runs again as after any abort of the database, and
this worker's connections use no such names any more.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from psycopg import (
    AsyncConnection,
    Connection,
    ConnectionInfo,
    InternalError,
    OperationalError,
    ProgrammingError,
)
from psycopg.errors import SerializationFailure, error_from_result
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.waiting import Ready, Wait

from pgqueue.connections import placed
from pgqueue.statements import Statement, text

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

# Longer than this no handler waits for a row lock that somebody holds, unless it says so itself (SET LOCAL).
LOCK_SECONDS = 10

BEGIN = f"BEGIN; SET LOCAL lock_timeout = '{LOCK_SECONDS}s'".encode()
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
# So many transactions a connection ends without the names it lost before it prepares again: who rolls back to a
# savepoint in every job would pay for that each time.
UNDISTURBED = 5
UNKNOWN = "26000"
"""The SQLSTATE of a name that no statement has (any more)."""
DROPPED = (
    "the completion of the job is not prepared any more: its handler has dropped it, by a DEALLOCATE of its own; "
    "nothing was committed, and the next run does without"
)
OK = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)

Answers = Generator[Wait, Ready | int, "list[PGresult]"]


class Prepared:
    """The statements that end a transaction, as all connections of one worker prepare them."""

    def __init__(self, schema: str) -> None:
        self.source = text("complete_within", schema)
        sql, self.names = placed(self.source)
        self.statements = (sql.encode(), *CLEARING)
        self.usable = True
        """Whether nobody has dropped them unseen."""

    def complete(self, pgconn: PGconn, number: int, params: Sequence[bytes | None]) -> None:
        """Put the end of a transaction on its way: nothing of it is read here."""
        pgconn.enter_pipeline_mode()
        pgconn.send_query_prepared(name(number, 0), params)
        pgconn.send_query_params(COMMIT, None)
        for index in range(1, len(self.statements)):
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

    def params(self, statement: Statement[Any], conn: Borrowed | AsyncBorrowed) -> list[bytes | None]:
        """The parameters of a completion, in its order, as text."""
        return [encoded(statement.params[each], conn) for each in self.names]


def name(number: int, index: int) -> bytes:
    """What the `number`th preparing on a connection calls its statements."""
    return b"pgqueue_%d_%d" % (number, index)


def encoded(value: object, conn: Borrowed | AsyncBorrowed) -> bytes | None:
    """A parameter as the text that the server reads on this connection: its handler may have changed the encoding."""
    if isinstance(value, str):
        return value.encode() if value.isascii() else value.encode(conn.info.encoding)
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int):
        return b"%d" % value
    assert value is None, f"no parameter of a completion is a {type(value).__name__}"
    return None


def answers(pgconn: PGconn, *, pipeline: bool) -> Answers:
    """Wait for the answers to what was sent: those of a whole pipeline, or those of one message. For `conn.wait`."""
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
            pgconn.exit_pipeline_mode()
            return found
        else:
            found.append(answer)


class _Both:
    """What both kinds have in common."""

    pgconn: PGconn
    info: ConnectionInfo

    own = False
    """Whether its session is nobody else's."""
    kept = False
    prepared: Prepared | None = None
    """What completes a job in one message; None behind a pooler, and where nothing is prepared."""
    number = 0
    """How many times that was prepared here."""
    ready = False
    """Whether it is there."""
    undisturbed = 0
    """How many transactions were ended while it was not."""

    def can_complete(self, statement: Statement[Any]) -> bool:
        """Whether `complete` can be called with this statement. Not in a failed transaction: the server says why."""
        there = self.ready and self.prepared is not None and self.prepared.completes(statement)
        return there and self.pgconn.transaction_status == TransactionStatus.INTRANS

    def _due(self) -> bool:
        """Whether to prepare before the next transaction begins."""
        again = self.number == 0 or self.undisturbed >= UNDISTURBED
        return not self.ready and again and self.prepared is not None and self.prepared.usable

    def _drop(self) -> None:
        self.ready, self.undisturbed = False, 0

    def _heed(self, found: list[PGresult]) -> bool:
        """Raise what prevented the commit; whether the session is clear."""
        completed, committed, *cleared = found
        for answer in (completed, committed):
            if answer.status not in OK:
                error = error_from_result(answer, self.info.encoding)
                if error.sqlstate == UNKNOWN and answer is completed and self.prepared is not None:
                    self.prepared.usable = False
                    raise SerializationFailure(DROPPED) from error
                raise error
        if committed.command_status != COMMIT:
            raise InternalError(f"the server said {committed.command_status!r} to a COMMIT")
        return all(answer.status in OK for answer in cleared)


class Borrowed(_Both, Connection[Any]):
    """A connection whose transaction only the worker begins and ends: `commit` and `rollback` raise meanwhile."""

    def begin(self) -> None:
        """Begin the transaction."""
        if self._due():
            self._prepare()
        self._say(BEGIN)
        self.kept = True

    def end(self) -> None:
        """Commit it. Raises OperationalError if there was no answer, and what the server says."""
        _check(self)
        self.kept = False
        self._say(CLEAR if self.own else COMMIT)
        self.undisturbed += 1

    def complete(self, statement: Statement[Any]) -> None:
        """Complete the job and commit, in one message; raises what `end` does. May leave the connection closed."""
        _check(self)
        self.kept = False
        if not self._heed(self._complete(statement)):
            self.close()

    def commit(self) -> None:
        _refuse(self, "commit")
        super().commit()

    def rollback(self) -> None:
        _refuse(self, "rollback")
        super().rollback()

    def _say(self, command: bytes) -> None:
        with self.lock:
            result = self.pgconn.exec_(command)
        if self.pgconn.status != ConnStatus.OK:
            raise OperationalError(self.pgconn.get_error_message() or "the connection is lost")
        if result.status not in OK:
            raise error_from_result(result, self.info.encoding)

    def _complete(self, statement: Statement[Any]) -> list[PGresult]:
        assert self.prepared is not None
        params = self.prepared.params(statement, self)
        with self.lock, answered(self):
            self.prepared.complete(self.pgconn, self.number, params)
            return self.wait(answers(self.pgconn, pipeline=True))

    def _prepare(self) -> None:
        assert self.prepared is not None
        self.number += 1
        with self.lock, answered(self):
            self.prepared.prepare(self.pgconn, self.number)
            found = self.wait(answers(self.pgconn, pipeline=True))
        self.ready = _all_well(found, self)

    def _deallocate(self, name: bytes | None) -> Any:
        if name is None:
            self._drop()
        return super()._deallocate(name)


class AsyncBorrowed(_Both, AsyncConnection[Any]):
    """The same for the loop."""

    async def begin(self) -> None:
        """Begin the transaction."""
        if self._due():
            await self._prepare()
        await self._say(BEGIN)
        self.kept = True

    async def end(self) -> None:
        """Commit it."""
        _check(self)
        self.kept = False
        await self._say(CLEAR if self.own else COMMIT)
        self.undisturbed += 1

    async def complete(self, statement: Statement[Any]) -> None:
        """Complete the job and commit, in one message."""
        _check(self)
        self.kept = False
        if not self._heed(await self._complete(statement)):
            await self.close()

    async def commit(self) -> None:
        _refuse(self, "commit")
        await super().commit()

    async def rollback(self) -> None:
        _refuse(self, "rollback")
        await super().rollback()

    async def _say(self, command: bytes) -> None:
        async with self.lock:
            with answered(self):
                self.pgconn.send_query(command)
                found = await self.wait(answers(self.pgconn, pipeline=False))
        _all_well(found, self)

    async def _complete(self, statement: Statement[Any]) -> list[PGresult]:
        assert self.prepared is not None
        params = self.prepared.params(statement, self)
        async with self.lock:
            with answered(self):
                self.prepared.complete(self.pgconn, self.number, params)
                return await self.wait(answers(self.pgconn, pipeline=True))

    async def _prepare(self) -> None:
        assert self.prepared is not None
        self.number += 1
        async with self.lock:
            with answered(self):
                self.prepared.prepare(self.pgconn, self.number)
                found = await self.wait(answers(self.pgconn, pipeline=True))
        self.ready = _all_well(found, self)

    def _deallocate(self, name: bytes | None) -> Any:
        if name is None:
            self._drop()
        return super()._deallocate(name)


class answered:
    """Closes the connection where not everything was answered that was sent: nobody knows what the server has done."""

    __slots__ = ("_conn",)

    def __init__(self, conn: Borrowed | AsyncBorrowed) -> None:
        self._conn = conn

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._conn.pgconn.finish()


def _all_well(found: list[PGresult], conn: Borrowed | AsyncBorrowed) -> bool:
    for answer in found:
        if answer.status not in OK:
            raise error_from_result(answer, conn.info.encoding)
    return True


def _refuse(conn: Borrowed | AsyncBorrowed, what: str) -> None:
    if conn.kept:
        raise ProgrammingError(
            f"explicit {what}() forbidden: the worker ends this transaction, together with the job; "
            "for a part of it use `with conn.transaction():`"
        )


def _check(conn: Borrowed | AsyncBorrowed) -> None:
    status = conn.info.transaction_status
    if status != TransactionStatus.INTRANS:  # a COMMIT after a failed statement is a ROLLBACK
        raise InternalError(f"there is nothing to commit: the transaction is {status.name}")
