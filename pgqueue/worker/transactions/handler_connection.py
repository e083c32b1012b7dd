"""The connections that handlers get, for threads and for the loop: only the worker begins and ends their transactions.

BEGIN and the end of a transaction go straight through libpq. For a transactional job they are two of three messages,
and what a cursor or `conn.transaction()` does for general use would cost more there than the round trip.

The end is one message of several statements: the completion, COMMIT, and what clears the session. Why that is as safe
as one message for each:

1. After an error the server leaves out the rest of a message. So COMMIT runs only if the completion has, as if a client
   had waited for each answer.
2. What clears the session runs only after a COMMIT that took place. So no advisory lock is released before, and nothing
   is sent twice.
3. Only the last answer is read. If it is good, all were good.
4. Then COMMIT was no ROLLBACK either: that the transaction has not failed is checked under the connection's lock, just
   before the message is sent.
5. If the last answer is an error, it may be that of the completion, of COMMIT, or of what follows a COMMIT that took
   place. Some errors only the first two can raise (`REFUSALS`): then nothing is committed.
6. After any other error, or without an answer, the COMMIT is unknown: the connection is closed, and `in_doubt` finds
   out whether it took place.

If the next job is at hand, BEGIN for it goes in the same message: that transaction is *begun early*. A handler that
gets it waits for one message less.

1. What clears the session must not be undone with the next transaction. So a COMMIT stands between them.
2. Before its first statement a transaction has no snapshot and no lock, and nothing is prepared in it. Only its `now()`
   is older: it is the moment the message arrived.
3. So a job gets it only if its claim was answered before the message was sent. Otherwise `now()` could lie before what
   led to the job.
4. And it gets it only within `EARLY_SECONDS` after the message was sent. Otherwise the transaction is begun anew, in
   one message.
5. A second transaction of one job is never one that was begun early.
6. If its session has died meanwhile, the handler's first statement fails, and the job runs again in place.

The completion is prepared when the session is new, or was cleared after a failed attempt, under a name of the worker's.
Handlers can drop it:

1. After a DROP, an ALTER or a rollback to a savepoint, psycopg drops all statements of the session, and says so
   (`_deallocate`). From there on this connection sends the completion by itself, which needs no name. When it has ended
   a few transactions undisturbed, it prepares again.
2. A DEALLOCATE inside a function drops it unseen. Then the message fails at the completion: nothing was committed, and
   the job runs again as after any abort of the database. From there on this worker's connections use no such names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from psycopg import (
    AsyncConnection,
    Connection,
    ConnectionInfo,
    InternalError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
    pq,
)
from psycopg.errors import SerializationFailure, error_from_result
from psycopg.pq import ConnStatus, DiagnosticField, TransactionStatus

from pgqueue.database import notify_queue
from pgqueue.database.dead_link import hang_up
from pgqueue.database.sessions import ReadOnly
from pgqueue.database.statements import Statement
from pgqueue.steady_clock import monotonic
from pgqueue.worker.transactions.as_lent import AsLent
from pgqueue.worker.transactions.commit_message import (
    ANEW,
    BEGIN,
    COMMIT,
    OK,
    ROLLBACK,
    CommitMessage,
    answers,
    ending,
    undoing,
)

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

# A transaction begun early may be this old when a handler gets it: its now() may lie so long before the job's start.
EARLY_SECONDS = 0.05
# A connection that is out for longer goes back to its pool, which looks after it, before the next transaction.
OUT_SECONDS = 60.0
# A connection that lost its names ends so many transactions without them before it prepares again. If a handler rolls
# back to a savepoint in every job, it would otherwise pay for that each time.
UNDISTURBED = 5
ASK = b"; SHOW transaction_read_only"
"""Behind a pooler the server tells nothing by itself."""
UNKNOWN = "26000"
"""The SQLSTATE of a name that no statement has (any more)."""
REFUSALS = ("PGQ01", "PGQ03", "23", "40001")
"""The beginnings of SQLSTATEs that nothing after a COMMIT that took place can raise: a completion that found no row of
this run, or no mark of this transaction, constraints, serialization. So is a full NOTIFY queue (`notify_queue`), for
what follows notifies nothing. Whatever else a deferred trigger raises is settled, which only takes longer."""
GONE = pq.PGconn.connect_start(b"port=none")
"""A connection of libpq that is closed: what a connection has that was dropped, or whose session went to its heir."""
GONE.finish()
LOOK_SECONDS, LOOKS = 0.05, 3
"""How often to look whether the lock of a connection is held where no call will release it, and how many times."""
DROPPED = (
    "what ends the job is not prepared any more: its handler has dropped it, by a DEALLOCATE of its own; "
    "from now on this worker does without"
)


class BegunEarly:
    """A transaction that was begun early: when, and which claims had been answered by then (all up to `settled`)."""

    __slots__ = ("at", "settled")

    def __init__(self, settled: int) -> None:
        self.at = monotonic()
        self.settled = settled

    def suits(self, claim: int) -> bool:
        """Whether a job of this claim can have it."""
        return claim <= self.settled and monotonic() - self.at < EARLY_SECONDS


class _Both:
    """What both kinds have in common. A base class, because psycopg makes the connections of a pool from one class.

    The coroutines are run in threads by `steps.run`. `_exchange` and `_answers_to_preparing` differ: how they hold the
    connection's lock, and how libpq is called.
    """

    pgconn: PGconn
    info: ConnectionInfo
    closed: bool
    _exchange: Callable[..., Awaitable[PGresult]]
    """The last answer to a message: the error, if there is one. If it `commits`, there must be something to commit."""
    left_open: Callable[[], Awaitable[bool]]
    """Whether the handler has left a block or an iterator of the driver open: COPY, `stream`, `notifies`. That holds
    the lock, and nothing will release it. A call of the handler's that is under way is waited for."""
    hand_over: Callable[[], Awaitable[bool]]
    """Undo the transaction, clear the session, and leave it to the `heir`: this connection is closed from then on.
    False if it is in the middle of something. Raises what prevents it; then the caller closes the connection."""

    own = False
    """Whether its session is the worker's alone."""
    kept = False
    """Whether it is in a transaction that only the worker may end."""
    ended_by_handler = False
    """Whether that one was ended by a COMMIT or ROLLBACK in the handler's SQL. Seen at an answer that leaves no
    transaction open, or before (`handler_cursor`); it stays, whatever the handler begins or closes afterwards. What is
    not seen here, the server finds by the `mark`."""
    mark = 0
    """Of the transaction that it is in: how many were begun here."""
    prepared: CommitMessage | None = None
    """What completes a job in one message; None behind a pooler, and where nothing is prepared."""
    number = 0
    """How many times that was prepared here."""
    ready = False
    """Whether it is there."""
    undisturbed = 0
    """How many transactions were ended while it was not."""
    early: BegunEarly | None = None
    """The transaction that it is in, if that was begun early and no job has it yet."""
    made_at = 0.0
    """When it was connected."""
    out_since = 0.0
    """When its pool gave it out."""
    permit: object | None = None
    """The permit it came with, if there are fewer connections than slots (`permits`)."""
    discarded = False
    """Whether its job was taken from the handler, which may have it for ever."""
    waits = False
    """Whether a call waits here for an answer: it has the lock, and will release it."""
    as_lent: AsLent | None = None
    """What it was when a handler got it."""

    def lend(self) -> None:
        """A handler gets this connection next."""
        if self.as_lent is None or not self.as_lent.is_of(self):
            self.as_lent = AsLent(self, OURS)

    def tidy(self) -> None:
        """The handler has left: nothing that it has set here is left. Not with a transaction that it may still use."""
        self.kept = False
        if self.as_lent is not None and not self.closed:
            self.as_lent.restore(self)

    async def begin(self, claim: int) -> None:
        """Begin the transaction of a job of this claim."""
        if self._due():
            await self._prepare()
        if (said := self._beginning(claim)) is not None:
            answer = await self._say(said if self.own else said + ASK)
            if self._only_reads(answer):
                raise ReadOnly
        self.kept, self.ended_by_handler = True, False

    def note_own_end(self) -> None:
        """The handler is about to send a COMMIT: whatever the answer is, it has ended the transaction."""
        if self.kept:
            self.ended_by_handler = True

    def _heard(self) -> None:
        """An answer has come: see whether the transaction is still there."""
        if self.kept and self.pgconn.transaction_status == TransactionStatus.IDLE:
            self.ended_by_handler = True

    async def end(self, statement: Statement[Any] | None = None, settled: int | None = None) -> None:
        """Commit, after this completion of the job, in one message. May leave the connection closed.

        Raises what the server says; OperationalError if there was no answer. With `settled`, up to which claims were
        answered, the next transaction begins in the same message.
        """
        self.kept = False
        early = self._next(settled)
        await self._finish(self._ending(statement, early is not None))
        self.early = early

    async def undo_early(self) -> None:
        """Undo a transaction that was begun early and that no job wants."""
        self.early = None
        await self._say(ROLLBACK)

    def _only_reads(self, begun: PGresult) -> bool:
        """Whether nothing may be written in the transaction that has begun just now."""
        if not self.own:
            return begun.get_value(0, 0) == b"on"
        status = self.pgconn.parameter_status  # the server tells of these by itself
        return b"on" in (status(b"default_transaction_read_only"), status(b"in_hot_standby"))

    async def _say(self, command: bytes) -> PGresult:
        answer = await self._exchange(command)
        _raise(answer, self.info)
        return answer

    async def _finish(self, message: bytes) -> None:
        self._heed(await self._exchange(message, commits=True))

    async def _prepare(self) -> None:
        assert self.prepared is not None
        self.number += 1
        await self._say(self.prepared.preparing(self.number))
        self.ready = True

    def heir(self) -> Any:
        """A new connection to the session of this one, which has it alone after `hand_over`.

        What the worker and its pool have noted here goes along; what a handler has set here does not.
        """
        made: Any = type(self)
        heir = made(self.pgconn)
        assert self.as_lent is not None
        noted = (self.as_lent.names | OURS) - vars(heir).keys()
        vars(heir).update({name: value for name, value in vars(self).items() if name in noted})
        heir._autocommit, heir.number, heir.undisturbed, heir.kept, heir.ended_by_handler = True, 1, 0, False, False
        heir.ready, heir.waits = self._can_prepare(), False
        heir.as_lent = self.as_lent.of_heir(heir)
        return heir

    def drop(self) -> None:
        """Close it while a thread or task is in the middle of it; a call that waits there gets an OperationalError.

        1. Such a call has a pointer to libpq's connection, and will use it when it goes on. If that were freed here,
           the process would crash, or the call would read from the next connection with the same file descriptor.
        2. So the link is broken, and libpq's connection is left to those that have it: the last of them frees it.
        3. This waits for none of them: a COPY that a handler has left open keeps the lock for ever.
        4. It counts as broken: the server may go on with a statement, so its session is ended as an orphan's.
        """
        hang_up(self)  # type: ignore[arg-type]
        self.pgconn = GONE

    def _handing_over(self) -> bytes | None:
        """The message for `hand_over`; None if the server waits for something else, or this side for an answer."""
        status = self.pgconn.transaction_status
        if self.pgconn.pipeline_status or status in (TransactionStatus.ACTIVE, TransactionStatus.UNKNOWN):
            return None
        again = self.prepared.preparing(1) if self.prepared is not None and self._can_prepare() else None
        return undoing(status != TransactionStatus.IDLE, again)

    def can_take(self, statement: Statement[Any]) -> bool:
        """Whether `end` can take this statement along. Not in a failed transaction: sent alone, it says why."""
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
        """What to begin with the end of this one, if a job is at hand."""
        prepares = not self.ready and self._can_prepare()  # soon, and outside of a transaction
        if settled is None or not self.own or prepares or monotonic() - self.out_since > OUT_SECONDS:
            return None
        return BegunEarly(settled)

    def _beginning(self, claim: int) -> bytes | None:
        """The message that begins a transaction for a job of this claim; None if it is there."""
        early, self.early = self.early, None
        if early is not None and early.suits(claim) and self.pgconn.transaction_status == TransactionStatus.INTRANS:
            return None
        return (BEGIN if early is None else ANEW) + self._next_mark()

    def _next_mark(self) -> bytes:
        self.mark += 1
        return b"%d" % self.mark

    def _deallocate(self, name: bytes | None) -> Any:
        """Psycopg's: what it drops."""
        if name is None:
            self.ready, self.undisturbed = False, 0
        return super()._deallocate(name)  # type: ignore[misc]

    def _ending(self, statement: Statement[Any] | None, early: bool) -> bytes:
        """The message that commits, after this completion if there is one; `early` begins the next transaction."""
        if not self.own:
            return COMMIT
        commit = ending(self.number if self.ready and self._can_prepare() else None, early)
        if early:
            commit += self._next_mark()
        if statement is None:
            self.undisturbed += 1
            return commit
        assert self.prepared is not None
        return self.prepared.completion(self.number, statement, self.pgconn, self.info) + b"; " + commit

    def _heed(self, answer: PGresult) -> None:
        """Raise the last answer if it is an error. The connection is closed if the COMMIT may have taken place."""
        if answer.status in OK:
            return
        code = (answer.error_field(DiagnosticField.SQLSTATE) or b"").decode()
        encoding = _encoding(self.info)
        error = error_from_result(answer, encoding)
        if self.own and not code.startswith(REFUSALS) and not notify_queue.is_full(error):
            self.drop()  # else COMMIT was the last of the message, or did not take place
        if error.sqlstate == UNKNOWN and self.prepared is not None:
            self.prepared.usable = False
            raise SerializationFailure(DROPPED) from error
        raise error


OURS = frozenset(name for name, value in vars(_Both).items() if not callable(value))
"""The worker's notes at a connection."""


class HandlerConnection(_Both, Connection[Any]):
    """A connection on which only the worker begins and ends a transaction: `commit` and `rollback` raise meanwhile."""

    def commit(self) -> None:
        _refuse(self, "commit")
        super().commit()

    def rollback(self) -> None:
        _refuse(self, "rollback")
        super().rollback()

    def wait(self, *what: Any, **options: Any) -> Any:
        self.waits = True
        try:
            return super().wait(*what, **options)
        finally:  # also after an error: it may be that of a statement behind a COMMIT in one text
            self.waits = False
            self._heard()

    def close(self) -> None:
        """Close it, from any thread, whatever another one does with it (`_Both.drop`)."""
        if not self.lock.acquire(blocking=False):
            self.drop()
            return
        try:
            super().close()
        finally:
            self.lock.release()

    async def left_open(self) -> bool:
        if free := self._acquire():
            self.lock.release()
        return not free

    def _acquire(self) -> bool:
        """Acquire the lock; False if it is held, and no call is under way."""
        looks = 0
        while not self.lock.acquire(timeout=LOOK_SECONDS):
            looks = 0 if self.waits else looks + 1
            if looks == LOOKS:
                return False
        return True

    async def _exchange(self, message: bytes, *, commits: bool = False) -> PGresult:
        with self.lock:
            if commits:
                _check(self)
            return self._last(message)

    def _last(self, message: bytes) -> PGresult:
        with answered(self):
            answer = self.pgconn.exec_(message)
            self._look_at_link()
            return answer

    async def hand_over(self) -> bool:
        if not self.lock.acquire(blocking=False):
            return False
        try:
            message = self._handing_over()
            if message is not None:
                _raise(self._last(message), self.info)
                self.pgconn = GONE
            return message is not None
        finally:
            self.lock.release()

    def _look_at_link(self) -> None:
        if self.pgconn.status != ConnStatus.OK:
            raise OperationalError(self.pgconn.get_error_message() or "the connection is lost")


class AsyncHandlerConnection(_Both, AsyncConnection[Any]):
    """The same for the loop."""

    async def close(self) -> None:
        """Close it, whatever another task does with it (`_Both.drop`)."""
        if self.lock.locked():
            self.drop()
        else:
            await super().close()

    async def commit(self) -> None:
        _refuse(self, "commit")
        await super().commit()

    async def rollback(self) -> None:
        _refuse(self, "rollback")
        await super().rollback()

    async def wait(self, *what: Any, **options: Any) -> Any:
        self.waits = True
        try:
            return await super().wait(*what, **options)
        finally:
            self.waits = False
            self._heard()

    async def left_open(self) -> bool:
        looks = 0
        while self.lock.locked() and looks < LOOKS:
            await asyncio.sleep(LOOK_SECONDS)
            looks = 0 if self.waits else looks + 1
        return self.lock.locked()

    async def _exchange(self, message: bytes, *, commits: bool = False) -> PGresult:
        async with self.lock:
            if commits:
                _check(self)
            return await self._last(message)

    async def _last(self, message: bytes) -> PGresult:
        with answered(self):
            self.pgconn.send_query(message)
            found: list[PGresult] = await self.wait(answers(self.pgconn))
            return found[-1]

    async def hand_over(self) -> bool:
        if self.lock.locked():
            return False
        async with self.lock:
            message = self._handing_over()
            if message is not None:
                _raise(await self._last(message), self.info)
                self.pgconn = GONE
            return message is not None


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
