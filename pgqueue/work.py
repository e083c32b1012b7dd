"""The transaction of one attempt: begun when its handler first asks for it, ended by one message, or undone.

When the handler has returned, deferred constraints are checked, the completion deletes the running row by its fence,
and COMMIT follows, all in one round trip.

Why the effect happens once. The completion is a statement of the same transaction as the writes, so both are
committed or neither is. It deletes the row of `job_running` that only this run's fence (id, worker, claim) names: if
rescue has given the job to others it finds none and raises, and a transaction in which a statement has failed cannot
commit, whatever this process does next. Two runs of one job cannot both commit: both would have to delete the same
row. What is left is a COMMIT whose answer was lost: it is settled by locking the row on a new connection, which waits
for the old transaction to end. The row is gone: it was committed (history says so; else the job was given to others).
The row is there: it was not committed, nor ever will be, and the attempt has failed like any other. Until that is
known the run is not over, so nobody writes another outcome.

One attempt may have several transactions, one after another: `keep` commits what was written so far and the job goes on
(see `iterate`, which says why that is right).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

from pgqueue import orm
from pgqueue.asks import Cancel, Fail, Retry, Snooze
from pgqueue.endings import Ending, Endings
from pgqueue.errors import JobLost
from pgqueue.job import Job
from pgqueue.lending import Lender
from pgqueue.logs import fields
from pgqueue.outcome import WRITTEN, Completed, Outcome, given
from pgqueue.retry import RetryPolicy
from pgqueue.sessions import hang_up
from pgqueue.settling import asend, asettle, send, settle, to_its_end
from pgqueue.statements import Row, Statement, text

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

log = logging.getLogger("pgqueue")

LOST = "PGQ01"
"""The SQLSTATE of a completion that found no row of this run (sql/migrations/0002)."""
LONG_SECONDS = 5.0
CHECK = "SET CONSTRAINTS ALL IMMEDIATE"
_OPEN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


@dataclass(frozen=True, slots=True)
class Around:
    """What the transactions of one worker have in common. `seal` and `aseal` are the executor's: from there on nobody
    stops the job, or, with `reopens`, not until `unseal`; they raise if somebody has."""

    lender: Lender
    endings: Endings
    worker_id: Callable[[], int]
    seal: Callable[..., None]
    aseal: Callable[..., Awaitable[None]]
    unseal: Callable[[Job], None]


class _Attempt:
    """What both kinds of transactions have in common: the decisions. The two below differ in how they wait."""

    def __init__(self, home: Around, job: Job, *, lent: bool = False) -> None:
        self.lent = lent
        """It is there for an iteration only: the task is not transactional."""
        self._conn: Any = None
        self._home = home
        self._job = job
        self._began = 0.0

    @property
    def begun(self) -> bool:
        """Whether there is a transaction now."""
        return self._conn is not None

    def _outcome(self, retry: RetryPolicy, what: object) -> tuple[Outcome, bool]:
        """What was returned becomes an outcome; and whether the writes are committed with it."""
        outcome = given(self._job, retry, what)
        return outcome, isinstance(outcome, Completed) or isinstance(what, Snooze | Retry | Cancel | Fail)

    def _within(self, done: Completed) -> list[Statement[Any]]:
        return self._home.endings.within(self._job, done, self._home.worker_id())

    def _ending(self, outcome: Outcome) -> Ending:
        return self._home.endings.one(self._job, outcome, self._home.worker_id())

    def statement(self, name: str, **params: object) -> Statement[list[Row]]:
        """The named statement, with this run's fence."""
        fence = {"id": self._job.id, "claim": self._job.claim, "worker_id": self._home.worker_id()}
        return Statement(text(name, self._home.endings.schema), fence | params, list)

    def _settled(self) -> Statement[list[Row]]:
        attempts = [self._job.attempt]
        return self._home.endings.about("complete_settled", [self._job], self._home.worker_id(), attempts=attempts)

    def _look_at_the_clock(self) -> None:
        took = monotonic() - self._began
        if took > LONG_SECONDS:
            log.warning(
                "job %d (%s) had its transaction open for %.1f s, so long it held its row locks and held up vacuum; "
                "do what is slow before job.connection is first asked for",
                self._job.id,
                self._job.task,
                took,
                extra=fields(self._job, seconds=took),
            )

    def _ended(self, error: psycopg.Error, _: bool, mine: bool, done: bool) -> None:
        """After an unknown COMMIT that completes: it took place, or this raises why not."""
        if mine:
            raise error
        if not done:
            raise lost(self._job) from error

    def _kept(self, error: psycopg.Error, _: bool, mine: bool, done: bool) -> None:
        """After an unknown COMMIT after which the job goes on, the same: now the row is there in either case."""
        if not mine:
            raise lost(self._job) from error
        if not done:
            raise error

    def _known(self, error: psycopg.Error, conn: Connection[Any] | AsyncConnection[Any]) -> None:
        """Raise what prevented the commit, if that is known."""
        if error.sqlstate == LOST:
            raise lost(self._job) from error
        if not conn.closed:
            raise error  # the server has said no: nothing is committed

    def _questions(
        self, conn: Connection[Any] | AsyncConnection[Any], error: BaseException, done: Statement[Any]
    ) -> list[Statement[Any]]:
        """What to ask after a COMMIT without an answer: whether the job is still this run's; whether it is `done`."""
        log.warning(
            "job %d (%s): the answer to its COMMIT was lost (%s); finding out whether it was committed",
            self._job.id,
            self._job.task,
            str(error).strip() or type(error).__name__,
            extra=fields(self._job),
        )
        pid, backend_start = self._home.lender.identity(conn) or (None, None)
        end = self.statement("transactions_end_session", pid=pid, backend_start=backend_start)
        return [end, self.statement("complete_mine"), done]


class Work(_Attempt):
    """The transaction of one attempt in a thread: begun when first asked for."""

    _conn: Connection[Any] | None
    _block: Any = None
    _session: Session | None = None

    def connection(self) -> Connection[Any]:
        """The connection; begins the transaction at the first call."""
        if self._conn is None:
            self._begin()
        assert self._conn is not None
        return self._conn

    def session(self) -> Session:
        """A SQLAlchemy session on that connection, the same at every call."""
        if self._session is None:
            self._session = orm.session(self.connection())
        return self._session

    def end(self, retry: RetryPolicy, what: object) -> Outcome:
        """Commit with what the handler returned. Raises what prevents it; then nothing is committed."""
        outcome, kept = self._outcome(retry, what)
        if self._conn is None or not kept:
            return outcome
        if self._session is not None:
            self._session.flush()
        self._home.seal(self._job)
        try:
            self._commit(self._conn, outcome)
        except psycopg.Error as error:
            self._known(error, self._conn)
            self._ended(error, *settle(error, self._home.lender, self._questions(self._conn, error, self._settled())))
        self._job.ended = outcome
        return WRITTEN

    def keep(self, statements: Sequence[Statement[Any]], kept: Statement[Any]) -> None:
        """Commit what was written, with these statements; the job goes on, and can be stopped again.

        The first raises LOST if the job is not this run's any more; `kept` answers a row if they were committed.
        """
        conn = self.connection()
        if self._session is not None:
            self._session.flush()
        self._home.seal(self._job, reopens=True)
        try:
            self._commit_with(conn, statements)
        except psycopg.Error as error:
            self._known(error, conn)
            self._kept(error, *settle(error, self._home.lender, self._questions(conn, error, kept)))
        finally:
            self.undo()  # after the commit it only gives the connection back
            self._home.unseal(self._job)

    def undo(self) -> None:
        """Roll back what was not committed, and give the connection back. In every case the last step."""
        conn, self._conn, block, self._block = self._conn, None, self._block, None
        session, self._session = self._session, None
        if conn is None:
            return
        try:
            if session is not None:
                session.close()
            if block is not None and conn.info.transaction_status in _OPEN:
                block.__exit__(psycopg.Rollback, psycopg.Rollback(), None)
            elif conn.info.transaction_status in _OPEN:
                conn.rollback()
        except psycopg.Error as error:
            log.debug("job %d: rollback: %s; its connection is closed", self._job.id, error)
            conn.close()
        finally:
            if conn.info.transaction_status != TransactionStatus.IDLE:
                conn.close()  # stopped in the middle of a statement
            self._home.lender.give(conn)
            self._look_at_the_clock()

    def cut(self) -> None:
        """End the session of the transaction there is now, from any thread; whoever uses it gets an error."""
        conn = self._conn
        if conn is not None:
            hang_up(conn)

    def _begin(self) -> None:
        while True:
            conn = self._home.lender.take()
            try:
                self._block = block = conn.transaction()
                block.__enter__()
                if first := self._home.lender.set_up(conn):
                    conn.execute(first)
            except BaseException as error:
                conn.close()
                self._home.lender.give(conn)
                if isinstance(error, psycopg.OperationalError):
                    continue  # it was dead in the pool; with the database away, `take` raises
                raise
            self._conn, self._began = conn, monotonic()
            return

    def _commit(self, conn: Connection[Any], outcome: Outcome) -> None:
        if isinstance(outcome, Completed):
            self._commit_with(conn, self._within(outcome))
            return
        block, self._block = self._block, None
        conn.execute(CHECK)
        ending = self._ending(outcome)
        if ending.read(send(conn, ending).fetchall()) is not None:
            raise lost(self._job)
        block.__exit__(None, None, None)

    def _commit_with(self, conn: Connection[Any], statements: Sequence[Statement[Any]]) -> None:
        block, self._block = self._block, None
        with conn.pipeline():
            conn.execute(CHECK)
            for statement in statements:
                send(conn, statement)
            block.__exit__(None, None, None)


class AsyncWork(_Attempt):
    """The transaction of one attempt on the loop."""

    _conn: AsyncConnection[Any] | None
    _block: Any = None

    async def connection(self) -> AsyncConnection[Any]:
        """The connection; begins the transaction at the first call."""
        if self._conn is None:
            await self._begin()
        assert self._conn is not None
        return self._conn

    async def end(self, retry: RetryPolicy, what: object) -> Outcome:
        """Commit with what the handler returned. Raises what prevents it; then nothing is committed."""
        outcome, kept = self._outcome(retry, what)
        if self._conn is None or not kept:
            return outcome
        await self._home.aseal(self._job)
        try:
            await self._commit(self._conn, outcome)
        except psycopg.Error as error:
            self._known(error, self._conn)
            questions = self._questions(self._conn, error, self._settled())
            self._ended(error, *await asettle(error, self._home.lender, questions))
        self._job.ended = outcome
        return WRITTEN

    async def keep(self, statements: Sequence[Statement[Any]], kept: Statement[Any]) -> None:
        """`Work.keep`. Nor does a cancellation of the handler's own, of a timeout around the loop, break into it."""
        conn = await self.connection()
        await self._home.aseal(self._job, reopens=True)
        try:
            await to_its_end(self._keep(conn, statements, kept))
        finally:
            self._home.unseal(self._job)

    async def undo(self) -> None:
        """Roll back what was not committed, and give the connection back. In every case the last step."""
        if left := self.leave():
            await left

    def leave(self) -> Coroutine[Any, Any, None] | None:
        """`undo` in two steps: from now on nobody sees this transaction; what is returned undoes it."""
        conn, self._conn, block, self._block = self._conn, None, self._block, None
        return None if conn is None else self._undo(conn, block)

    async def _undo(self, conn: AsyncConnection[Any], block: Any) -> None:
        try:
            if block is not None and conn.info.transaction_status in _OPEN:
                await block.__aexit__(psycopg.Rollback, psycopg.Rollback(), None)
            elif conn.info.transaction_status in _OPEN:
                await conn.rollback()
        except psycopg.Error as error:
            log.debug("job %d: rollback: %s; its connection is closed", self._job.id, error)
        finally:
            if conn.info.transaction_status != TransactionStatus.IDLE:
                await conn.close()
            await self._home.lender.agive(conn)
            self._look_at_the_clock()

    async def _begin(self) -> None:
        while True:
            conn = await self._home.lender.atake()
            try:
                self._block = block = conn.transaction()
                await block.__aenter__()
                if first := self._home.lender.set_up(conn):
                    await conn.execute(first)
            except BaseException as error:
                await conn.close()
                await self._home.lender.agive(conn)
                if isinstance(error, psycopg.OperationalError):
                    continue
                raise
            self._conn, self._began = conn, monotonic()
            return

    async def _commit(self, conn: AsyncConnection[Any], outcome: Outcome) -> None:
        if isinstance(outcome, Completed):
            await self._commit_with(conn, self._within(outcome))
            return
        block, self._block = self._block, None
        await conn.execute(CHECK)
        ending = self._ending(outcome)
        if ending.read(await (await asend(conn, ending)).fetchall()) is not None:
            raise lost(self._job)
        await block.__aexit__(None, None, None)

    async def _commit_with(self, conn: AsyncConnection[Any], statements: Sequence[Statement[Any]]) -> None:
        block, self._block = self._block, None
        async with conn.pipeline():
            await conn.execute(CHECK)
            for statement in statements:
                await asend(conn, statement)
            await block.__aexit__(None, None, None)

    async def _keep(
        self, conn: AsyncConnection[Any], statements: Sequence[Statement[Any]], kept: Statement[Any]
    ) -> None:
        try:
            await self._commit_with(conn, statements)
        except psycopg.Error as error:
            self._known(error, conn)
            self._kept(error, *await asettle(error, self._home.lender, self._questions(conn, error, kept)))
        finally:
            await self.undo()


def lost(job: Job) -> JobLost:
    """What is raised in a run whose job is somebody else's by now."""
    return JobLost(
        f"job {job.id} ({job.task}) was given to another worker meanwhile; nothing of this attempt was committed",
        job_id=job.id,
    )
