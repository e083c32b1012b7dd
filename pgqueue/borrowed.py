"""The connections that handlers get, of both kinds: whose transaction only the worker begins and ends.

BEGIN, and the end of a transaction that completes its job, go straight through libpq: for a transactional job they are
two of three messages, and whatever a cursor or a block of `conn.transaction()` does for everybody else costs more there
than the round trip itself.

The end is one message, a pipeline: the completion, COMMIT, and what clears the session. The server leaves out whatever
follows an error in a pipeline. So COMMIT runs only if the completion has, as if a client had waited for each answer;
what clears runs only after a COMMIT that took place, so no advisory lock is let go before; and nothing is sent twice:
if any of the answers does not come, it is an unknown COMMIT, the connection is closed, and `settling` finds out.

Where the next job is at hand, BEGIN for it follows *ahead* in the same message, behind a sync of its own: so it is not
in one transaction with what clears, and a handler whose transaction is there already waits for one message less. A
transaction takes no snapshot and no lock before its first statement; only `now()` is its BEGIN's. So nobody gets it
whose claim had not been answered when it was sent (his `now()` would lie before what led to him), nor later than
`AHEAD_SECONDS` after: then it is begun anew, in one message. Nor does a second transaction of one job get it. A session
that has died in that time is found out by the handler's first statement, and costs an attempt.

The completion is prepared when the connection is made, under a name of ours. Handlers can drop it. psycopg does so for
them: after a DROP, an ALTER or a rollback to a savepoint it drops all statements of the session. We are told
(`_deallocate`), and from there on this connection ends its transactions with one statement after another, which needs
no name, until it has ended a few undisturbed and prepares again. Whoever drops it unseen, by a DEALLOCATE inside a
function, aborts the transaction: nothing was committed, so the job runs again as after any abort of the database, and
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
    OperationalError,
    ProgrammingError,
)
from psycopg.errors import SerializationFailure, error_from_result
from psycopg.pq import ConnStatus, TransactionStatus

from pgqueue.prepared import ANEW, BEGIN, CLEAR, COMMIT, OK, ROLLBACK, Prepared, answers
from pgqueue.statements import Statement

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

# So old a transaction that was begun ahead may be when a handler gets it: so much less than the start of his job its
# now() may say.
AHEAD_SECONDS = 0.05
# After so long a connection goes back to its pool, which looks after it, before a transaction is begun on it again.
OUT_SECONDS = 60.0
# So many transactions a connection ends without the names it lost before it prepares again: who rolls back to a
# savepoint in every job would pay for that each time.
UNDISTURBED = 5
UNKNOWN = "26000"
"""The SQLSTATE of a name that no statement has (any more)."""
DROPPED = (
    "the completion of the job is not prepared any more: its handler has dropped it, by a DEALLOCATE of its own; "
    "nothing was committed, and the next run does without"
)


class Ahead:
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
    ahead: Ahead | None = None
    """The transaction that it is in, if nobody's job is."""
    out_since = 0.0
    """When its pool gave it away."""

    def can_complete(self, statement: Statement[Any]) -> bool:
        """Whether `complete` can be called with this statement. Not in a failed transaction: the server says why."""
        there = self.ready and self.prepared is not None and self.prepared.completes(statement)
        return there and self.pgconn.transaction_status == TransactionStatus.INTRANS

    def _due(self) -> bool:
        """Whether to prepare before the next transaction begins."""
        again = self.number == 0 or self.undisturbed >= UNDISTURBED
        return not self.ready and again and self.prepared is not None and self.prepared.usable

    def _next(self, settled: int | None) -> Ahead | None:
        """What to begin with the end of this one, where a job is at hand."""
        return None if settled is None or monotonic() - self.out_since > OUT_SECONDS else Ahead(settled)

    def _beginning(self, claim: int) -> bytes | None:
        """What to say to have a transaction for a job of this claim; None if it is there."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return BEGIN
        there = ahead.suits(claim) and self.pgconn.transaction_status == TransactionStatus.INTRANS
        return None if there else ANEW

    def _drop(self) -> None:
        self.ready, self.undisturbed = False, 0

    def _heed(self, found: list[PGresult]) -> bool:
        """Raise what prevented the commit; whether the session is clear, and what was to begin has begun."""
        completed, committed, *followed = found
        for answer in (completed, committed):
            if answer.status not in OK:
                error = error_from_result(answer, self.info.encoding)
                if error.sqlstate == UNKNOWN and answer is completed and self.prepared is not None:
                    self.prepared.usable = False
                    raise SerializationFailure(DROPPED) from error
                raise error
        if committed.command_status != COMMIT:
            raise InternalError(f"the server said {committed.command_status!r} to a COMMIT")
        return all(answer.status in OK for answer in followed)


class Borrowed(_Both, Connection[Any]):
    """A connection whose transaction only the worker begins and ends: `commit` and `rollback` raise meanwhile."""

    def leave(self) -> None:
        """Undo a transaction that was begun ahead and that nobody wants."""
        self.ahead = None
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

    def end(self) -> None:
        """Commit it. Raises OperationalError if there was no answer, and what the server says."""
        _check(self)
        self.kept = False
        self._say(CLEAR if self.own else COMMIT)
        self.undisturbed += 1

    def complete(self, statement: Statement[Any], settled: int | None = None) -> None:
        """Complete the job and commit, in one message; raises what `end` does. May leave the connection closed.

        With `settled`, the claims that have been answered, the next transaction begins with it.
        """
        _check(self)
        self.kept = False
        ahead = self._next(settled)
        if self._heed(self._complete(statement, ahead is not None)):
            self.ahead = ahead
        else:
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

    def _complete(self, statement: Statement[Any], ahead: bool) -> list[PGresult]:
        assert self.prepared is not None
        params = self.prepared.params(statement, self.info)
        with self.lock, answered(self):
            self.prepared.complete(self.pgconn, self.number, params, ahead=ahead)
            return self.wait(answers(self.pgconn, 1 + ahead))

    def _prepare(self) -> None:
        assert self.prepared is not None
        self.number += 1
        with self.lock, answered(self):
            self.prepared.prepare(self.pgconn, self.number)
            found = self.wait(answers(self.pgconn, 1))
        self.ready = _all_well(found, self)

    def _deallocate(self, name: bytes | None) -> Any:
        if name is None:
            self._drop()
        return super()._deallocate(name)


class AsyncBorrowed(_Both, AsyncConnection[Any]):
    """The same for the loop."""

    async def leave(self) -> None:
        """Undo a transaction that was begun ahead and that nobody wants."""
        self.ahead = None
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

    async def end(self) -> None:
        """Commit it."""
        _check(self)
        self.kept = False
        await self._say(CLEAR if self.own else COMMIT)
        self.undisturbed += 1

    async def complete(self, statement: Statement[Any], settled: int | None = None) -> None:
        """Complete the job and commit, in one message."""
        _check(self)
        self.kept = False
        ahead = self._next(settled)
        if self._heed(await self._complete(statement, ahead is not None)):
            self.ahead = ahead
        else:
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
                found = await self.wait(answers(self.pgconn))
        _all_well(found, self)

    async def _complete(self, statement: Statement[Any], ahead: bool) -> list[PGresult]:
        assert self.prepared is not None
        params = self.prepared.params(statement, self.info)
        async with self.lock:
            with answered(self):
                self.prepared.complete(self.pgconn, self.number, params, ahead=ahead)
                return await self.wait(answers(self.pgconn, 1 + ahead))

    async def _prepare(self) -> None:
        assert self.prepared is not None
        self.number += 1
        async with self.lock:
            with answered(self):
                self.prepared.prepare(self.pgconn, self.number)
                found = await self.wait(answers(self.pgconn, 1))
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
