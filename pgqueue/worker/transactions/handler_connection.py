"""The connections that handlers get, of both kinds: only the worker begins and ends their transactions.

BEGIN and the end of a transaction go straight through libpq: for a transactional job they are two of three messages,
and whatever a cursor or a block of `conn.transaction()` does for general use costs more there than the round trip.

The end is one message of several statements: the completion, COMMIT, and what clears the session. The server leaves out
whatever follows an error in a message. So COMMIT runs only if the completion has, as if a client had waited for each
answer; what clears runs only after a COMMIT that took place, so no advisory lock is let go before; and nothing is sent
twice. Only the last answer is looked at. If it is good, all were, and COMMIT was no ROLLBACK: the transaction had not
failed when the message was sent, which is looked at under the lock of the connection. If it is an error, it may be that
of the completion, of COMMIT or of what follows a COMMIT that took place; some errors only the first two can say
(`REFUSALS`), then nothing is committed. Whatever else is said, or if nothing is, it is an unknown COMMIT: the
connection is closed, and `in_doubt` finds out.

Where the next job is at hand, BEGIN for it is the *ahead* part of the same message: behind a COMMIT of what clears, for
that must not be undone with it. If its transaction is there already, a handler waits for one message less. A
transaction takes no snapshot and no lock before its first statement, and nothing is prepared in it; only its `now()`
is older: that of the message's arrival, for all of the message. So a job gets it only if its claim had been answered
when the message was sent (else `now()` would lie before what led to the job), and not later than `AHEAD_SECONDS` after
it was sent. Otherwise the transaction is begun anew, in one message. A second transaction of one job never gets it. A
session that has died in that time is found out by the handler's first statement, and costs an attempt.

The completion is prepared when the connection is made, under a name of ours. Handlers can drop it. psycopg does so for
them: after a DROP, an ALTER or a rollback to a savepoint it drops all statements of the session. We are told
(`_deallocate`), and from there on this connection sends the completion by itself, which needs no name, until it has
ended a few transactions undisturbed and prepares again. If it is dropped unseen, by a DEALLOCATE inside a function,
the completion that needs it fails: nothing was committed, so the job runs again as after any abort of the database, and
this worker's connections use no such names any more.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from psycopg import (
    AsyncConnection,
    Connection,
    ConnectionInfo,
    Error,
    InternalError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
)
from psycopg.errors import SerializationFailure, error_from_result
from psycopg.pq import ConnStatus, DiagnosticField, TransactionStatus

from pgqueue.database.sessions import hang_up
from pgqueue.database.statements import Statement
from pgqueue.worker.transactions.commit_message import (
    ANEW,
    BEGIN,
    COMMIT,
    OK,
    ROLLBACK,
    CommitMessage,
    answers,
    ending,
    name,
)

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

# So old a transaction that was begun ahead may be when a handler gets it: so long before the start of the job its now()
# may lie.
AHEAD_SECONDS = 0.05
# After so long a connection goes back to its pool, which looks after it, before a transaction is begun on it again.
OUT_SECONDS = 60.0
# So many transactions a connection ends without the names it lost before it prepares again: handlers that roll back to
# a savepoint in every job would pay for that each time.
UNDISTURBED = 5
UNKNOWN = "26000"
"""The SQLSTATE of a name that no statement has (any more)."""
REFUSALS = ("PGQ01", "23", "40001")
"""So begin the SQLSTATEs that nothing after a COMMIT that took place can raise: a completion that found no row of this
run, constraints, serialization. What else a deferred trigger raises is settled; that only takes longer."""
DROPPED = (
    "what ends the job is not prepared any more: its handler has dropped it, by a DEALLOCATE of its own; "
    "from now on this worker does without"
)


class BegunEarly:
    """A transaction that was begun ahead: when, and which claims had been answered by then (all up to `settled`)."""

    __slots__ = ("at", "settled")

    def __init__(self, settled: int) -> None:
        self.at = monotonic()
        self.settled = settled

    def suits(self, claim: int) -> bool:
        """Whether a job of this claim can have it."""
        return claim <= self.settled and monotonic() - self.at < AHEAD_SECONDS


class _Both:
    """What both kinds have in common."""

    pgconn: PGconn
    info: ConnectionInfo

    own = False
    """Whether its session is ours alone."""
    kept = False
    prepared: CommitMessage | None = None
    """What completes a job in one message; None behind a pooler, and where nothing is prepared."""
    number = 0
    """How many times that was prepared here."""
    ready = False
    """Whether it is there."""
    undisturbed = 0
    """How many transactions were ended while it was not."""
    early: BegunEarly | None = None
    """The transaction that it is in, if that was begun ahead and no job has it yet."""
    out_since = 0.0
    """When its pool gave it away."""
    permit: object | None = None
    """Of those there are for handlers, if they are fewer than slots, the one it has (`permits`)."""
    forsaken = False
    """Whether it is only the handler's that its job was taken from."""

    def can_take(self, statement: Statement[Any]) -> bool:
        """Whether `end` can take this statement along. Not in a failed transaction: the server says why."""
        there = self.ready and self.prepared is not None and self.prepared.completes(statement)
        return there and self.pgconn.transaction_status == TransactionStatus.INTRANS

    def _due(self) -> bool:
        """Whether to prepare before the next transaction begins."""
        again = self.number == 0 or self.undisturbed >= UNDISTURBED
        return not self.ready and again and self._can_prepare() and self.early is None

    def _can_prepare(self) -> bool:
        """Whether names are used on this connection, and none was dropped unseen."""
        return self.prepared is not None and self.prepared.usable

    def _next(self, settled: int | None) -> BegunEarly | None:
        """What to begin with the end of this one, where a job is at hand."""
        prepares = not self.ready and self._can_prepare()  # soon, in no transaction
        if settled is None or not self.own or prepares or monotonic() - self.out_since > OUT_SECONDS:
            return None
        return BegunEarly(settled)

    def _beginning(self, claim: int) -> bytes | None:
        """What to say to have a transaction for a job of this claim; None if it is there."""
        ahead, self.early = self.early, None
        if ahead is None:
            return BEGIN
        there = ahead.suits(claim) and self.pgconn.transaction_status == TransactionStatus.INTRANS
        return None if there else ANEW

    def _drop(self) -> None:
        self.ready, self.undisturbed = False, 0

    def _ending(self, statement: Statement[Any] | None, ahead: bool) -> bytes:
        """The message that commits, after this completion, if any."""
        if not self.own:
            return COMMIT
        commit = ending(self.number if self.ready and self._can_prepare() else None, ahead)
        if statement is None:
            self.undisturbed += 1
            return commit
        assert self.prepared is not None
        return self.prepared.completion(self.number, statement, self.pgconn, self.info) + b"; " + commit

    def _heed(self, answer: PGresult) -> None:
        """Raise what was said last, if it was no good; the connection is closed if it may have been committed."""
        if answer.status in OK:
            return
        code = (answer.error_field(DiagnosticField.SQLSTATE) or b"").decode()
        encoding = _encoding(self.info)
        if self.own and not code.startswith(REFUSALS):
            self.pgconn.finish()  # else COMMIT was the last of the message, or did not take place
        error = error_from_result(answer, encoding)
        if error.sqlstate == UNKNOWN and self.prepared is not None:
            self.prepared.usable = False
            raise SerializationFailure(DROPPED) from error
        raise error


class HandlerConnection(_Both, Connection[Any]):
    """A connection on which only the worker begins and ends a transaction: `commit` and `rollback` raise meanwhile."""

    def leave(self) -> None:
        """Undo a transaction that was begun ahead and that no job wants."""
        self.early = None
        try:
            self._say(ROLLBACK)
        except Error:
            self.close()

    def begin(self, claim: int) -> None:
        """Begin the transaction of a job of this claim."""
        if self._due():
            self._prepare()
        if (said := self._beginning(claim)) is not None:
            self._say(said)
        self.kept = True

    def end(self, statement: Statement[Any] | None = None, settled: int | None = None) -> None:
        """Commit, after this completion of the job, in one message. May leave the connection closed.

        Raises what the server says; OperationalError if there was no answer. With `settled`, the claims that have been
        answered, the next transaction begins with it.
        """
        self.kept = False
        ahead = self._next(settled)
        self._finish(self._ending(statement, ahead is not None))
        self.early = ahead

    def commit(self) -> None:
        _refuse(self, "commit")
        super().commit()

    def rollback(self) -> None:
        _refuse(self, "rollback")
        super().rollback()

    def close(self) -> None:
        """Close it, from any thread; a thread that waits for an answer gets an OperationalError.

        libpq waits in `exec_` without the interpreter: what it reads must not be freed before it has come back.
        """
        if not self.lock.acquire(blocking=False):
            hang_up(self)  # only then: the server logs a client that goes without a word in a transaction
            self.lock.acquire()
        try:
            super().close()
        finally:
            self.lock.release()

    def _say(self, command: bytes) -> None:
        with self.lock:
            answer = self._last(command)
        _raise(answer, self.info)

    def _finish(self, message: bytes) -> None:
        with self.lock:
            _check(self)
            answer = self._last(message)
        self._heed(answer)

    def _last(self, message: bytes) -> PGresult:
        """The last answer to a message: the error, if there is one."""
        with answered(self):
            answer = self.pgconn.exec_(message)
            if self.pgconn.status != ConnStatus.OK:
                raise OperationalError(self.pgconn.get_error_message() or "the connection is lost")
            return answer

    def _prepare(self) -> None:
        assert self.prepared is not None
        self.number += 1
        with self.lock, answered(self):
            numbered = enumerate(self.prepared.statements)
            found = [self.pgconn.prepare(name(self.number, index), statement) for index, statement in numbered]
            if self.pgconn.status != ConnStatus.OK:
                raise OperationalError(self.pgconn.get_error_message() or "the connection is lost")
        for answer in found:
            _raise(answer, self.info)
        self.ready = True

    def _deallocate(self, name: bytes | None) -> Any:
        if name is None:
            self._drop()
        return super()._deallocate(name)


class AsyncHandlerConnection(_Both, AsyncConnection[Any]):
    """The same for the loop."""

    async def leave(self) -> None:
        """Undo a transaction that was begun ahead and that no job wants."""
        self.early = None
        try:
            await self._say(ROLLBACK)
        except Error:
            await self.close()

    async def begin(self, claim: int) -> None:
        """Begin the transaction of a job of this claim."""
        if self._due():
            await self._prepare()
        if (said := self._beginning(claim)) is not None:
            await self._say(said)
        self.kept = True

    async def end(self, statement: Statement[Any] | None = None, settled: int | None = None) -> None:
        """Commit, after this completion of the job, in one message."""
        self.kept = False
        ahead = self._next(settled)
        await self._finish(self._ending(statement, ahead is not None))
        self.early = ahead

    async def commit(self) -> None:
        _refuse(self, "commit")
        await super().commit()

    async def rollback(self) -> None:
        _refuse(self, "rollback")
        await super().rollback()

    async def _say(self, command: bytes) -> None:
        async with self.lock:
            answer = await self._last(command)
        _raise(answer, self.info)

    async def _finish(self, message: bytes) -> None:
        async with self.lock:
            _check(self)
            answer = await self._last(message)
        self._heed(answer)

    async def _last(self, message: bytes) -> PGresult:
        with answered(self):
            self.pgconn.send_query(message)
            return (await self.wait(answers(self.pgconn)))[-1]

    async def _prepare(self) -> None:
        assert self.prepared is not None
        self.number += 1
        found: list[PGresult] = []
        async with self.lock:
            with answered(self):
                for index, statement in enumerate(self.prepared.statements):
                    self.pgconn.send_prepare(name(self.number, index), statement)
                    found += await self.wait(answers(self.pgconn))
        for answer in found:
            _raise(answer, self.info)
        self.ready = True

    def _deallocate(self, name: bytes | None) -> Any:
        if name is None:
            self._drop()
        return super()._deallocate(name)


class answered:
    """Closes the connection where not everything was answered that was sent: what the server has done is unknown."""

    __slots__ = ("_conn",)

    def __init__(self, conn: HandlerConnection | AsyncHandlerConnection) -> None:
        self._conn = conn

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._conn.pgconn.finish()


def _raise(answer: PGresult, info: ConnectionInfo) -> None:
    if answer.status not in OK:
        raise error_from_result(answer, _encoding(info))


def _encoding(info: ConnectionInfo) -> str:
    """That of what the server says; of one that psycopg does not know the ASCII is read all the same."""
    try:
        return info.encoding
    except NotSupportedError:
        return "ascii"


def _refuse(conn: HandlerConnection | AsyncHandlerConnection, what: str) -> None:
    if conn.kept:
        raise ProgrammingError(
            f"explicit {what}() forbidden: the worker ends this transaction, together with the job; "
            "for a part of it use `with conn.transaction():`"
        )


def _check(conn: HandlerConnection | AsyncHandlerConnection) -> None:
    status = conn.pgconn.transaction_status
    if status != TransactionStatus.INTRANS:  # a COMMIT after a failed statement is a ROLLBACK
        raise InternalError(f"there is nothing to commit: the transaction is {TransactionStatus(status).name}")
