"""The transaction of one attempt: begun when its handler first asks for it, committed with the job's end, or undone.

When the handler has returned, the completion deletes the running row by its fence, and COMMIT follows, in the same
message if it can (`handler_connection`, which says why that changes nothing here: COMMIT runs only if the completion
has).

Why the effect happens once. The completion is a statement of the same transaction as the writes, so both are
committed or neither is. It deletes the row of `job_running` that only this run's fence (id, worker, claim) names: if
rescue has given the job to others it finds none and raises, and a transaction in which a statement has failed cannot
commit, whatever this process does next. Two runs of one job cannot both commit: both would have to delete the same
row. What is left is a COMMIT without an answer: it is settled by locking the row on a new connection, which waits
for the old transaction to end. The row is gone: it was committed (history says so; else the job was given to others).
The row is there: it was not committed, nor ever will be, and the attempt has failed like any other. Until that is
known the run is not over, so no other outcome is written.

One attempt may have several transactions, one after another: `keep` commits what was written so far and the job goes on
(see `iteration`, which says why that is right).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus

from pgqueue.database.sessions import ROUND_TRIP_SECONDS, hang_up
from pgqueue.database.statements import Row, Statement, text
from pgqueue.errors import Error, JobLost
from pgqueue.jobs.job import Job, fields
from pgqueue.jobs.outcomes import WRITTEN, Cancel, Completed, Fail, Outcome, Retry, Snooze, given
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.complete.outcome_sql import LOST, OutcomeSql, OutcomeStatement
from pgqueue.worker.run.running_jobs import RunningJobs
from pgqueue.worker.state import WorkerState
from pgqueue.worker.transactions import sqlalchemy
from pgqueue.worker.transactions.handler_connection import AsyncHandlerConnection, HandlerConnection
from pgqueue.worker.transactions.handler_pool import HandlerPool
from pgqueue.worker.transactions.in_doubt import send, settle

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

log = logging.getLogger("pgqueue")


LONG_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class TransactionServices:
    """What the transactions of one worker have in common."""

    pool: HandlerPool
    outcome_sql: OutcomeSql
    state: WorkerState
    running: RunningJobs
    begin_early: Callable[[bool], int | None] = lambda is_async: None
    """Whether a transaction should begin for the next job, in a thread or on the loop, with the end of this one: the
    claims that have been answered, all up to this one; else None."""


class AnyTransaction:
    """What both kinds of transactions have in common: the decisions. `Transaction` and `AsyncTransaction` differ in how
    they wait."""

    def __init__(self, home: TransactionServices, job: Job, *, lent: bool = False) -> None:
        self.for_iteration = lent
        """It is there for an iteration only: the task is not transactional."""
        self.ending = 0.0
        """When it began to commit, by this process's clock; 0 if it does not."""
        self.over = False
        """The run is over, so no transaction begins any more: nothing would end it."""
        self._conn: Any = None
        self._first = True
        """Whether no transaction has begun yet."""
        self._committing = self._committed = False
        self._home = home
        self._job = job
        self._worker_id = home.state.id
        """Of this run's fence, also when the worker has been taken for dead since and has another: what was committed
        under this one is not to be found under that."""
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
        return self._home.outcome_sql.within(self._job, done, self._worker_id)

    def _ending(self, outcome: Outcome) -> OutcomeStatement:
        return self._home.outcome_sql.one(self._job, outcome, self._worker_id)

    def statement(self, name: str, **params: object) -> Statement[list[Row]]:
        """The named statement, with this run's fence."""
        fence = {"id": self._job.id, "claim": self._job.claim, "worker_id": self._worker_id}
        return Statement(text(name, self._home.outcome_sql.schema), fence | params, list)

    def _settled(self) -> Statement[list[Row]]:
        attempts = [self._job.attempt]
        return self._home.outcome_sql.about("complete_settled", [self._job], self._worker_id, attempts=attempts)

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

    def check(self) -> None:
        """Raise if the handler ended the transaction itself."""
        if self._conn is not None and not self._committing and not self._conn.closed:
            self._open(self._conn)

    def _open(self, conn: HandlerConnection | AsyncHandlerConnection) -> None:
        """Raise if there is no transaction any more that could be committed with the end."""
        if conn.closed:
            raise psycopg.OperationalError("job.connection is closed: nothing of this attempt is kept")
        if conn.pgconn.transaction_status == TransactionStatus.IDLE:
            raise Fail(
                f"the handler of job {self._job.id} ({self._job.task}) ended the transaction by itself, by a COMMIT or "
                "ROLLBACK in its SQL: what it wrote is not undone, and running it again could do it twice"
            )

    def _look(self) -> None:
        """While it waits for a connection; on the loop also with one: raise if there is no use in it any more."""
        if self.over:
            raise ended_before(self._job)
        self._home.running.checkpoint(self._job)

    def overdue(self) -> bool:
        """Whether its last messages wait over a dead link."""
        return 0.0 < self.ending < monotonic() - ROUND_TRIP_SECONDS

    def cut(self) -> None:
        """End the session of the transaction there is now, from any thread; what uses it gets an error."""
        conn = self._conn
        if conn is not None:
            hang_up(conn)

    def _known(self, error: psycopg.Error, conn: HandlerConnection | AsyncHandlerConnection) -> None:
        """Raise what prevented the commit, if that is known."""
        if error.sqlstate == LOST:
            raise lost(self._job) from error
        if not conn.closed:
            raise error  # the server has said no: nothing is committed

    def _questions(
        self, conn: HandlerConnection | AsyncHandlerConnection, error: BaseException, done: Statement[Any]
    ) -> list[Statement[Any]]:
        """What to ask after a COMMIT without an answer: whether the job is still this run's; whether it is `done`."""
        log.warning(
            "job %d (%s): no answer says whether its COMMIT took place (%s); finding out whether it was committed",
            self._job.id,
            self._job.task,
            str(error).strip() or type(error).__name__,
            extra=fields(self._job),
        )
        pid, backend_start = self._home.pool.identity(conn) or (None, None)
        end = self.statement("transactions_end_session", pid=pid, backend_start=backend_start)
        return [end, self.statement("complete_mine"), done]


class Transaction(AnyTransaction):
    """The transaction of one attempt in a thread: begun when first asked for."""

    _conn: HandlerConnection | None
    _session: Any = None

    def __init__(self, home: TransactionServices, job: Job, *, lent: bool = False) -> None:
        super().__init__(home, job, lent=lent)
        self._beginning, self._having = Lock(), Lock()
        self._finished = False

    def connection(self) -> HandlerConnection:
        """The connection; begins the transaction at the first call, whichever of the handler's threads that is."""
        conn = self._conn
        if conn is None:
            with self._home.running.shield(self._job), self._beginning:
                conn = self._conn or self._begin()
        return conn

    def session(self) -> Session:
        """A SQLAlchemy session on that connection, the same at every call."""
        if self._session is None:
            self._session = sqlalchemy.session(self.connection())
        session: Session = self._session
        return session

    def end(self, retry: RetryPolicy, what: object) -> Outcome:
        """Commit with what the handler returned. Raises what prevents it; then nothing is committed."""
        outcome, kept = self._outcome(retry, what)
        conn = self._conn
        if conn is None or not kept:
            return outcome
        self._open(conn)
        if self._session is not None:
            self._session.finish()
        self._home.running.uninterruptible(self._job)
        self.ending = monotonic()
        try:
            self._commit(conn, outcome)
        except psycopg.Error as error:
            self._known(error, conn)
            self._ended(error, *self._settle(conn, error, self._settled()))
        self._job.ended = outcome
        return WRITTEN

    def look(self, statement: Statement[Any]) -> list[Row]:
        """The rows of a statement that only reads, in a transaction of its own."""
        conn = self.connection()
        rows = send(conn, statement).fetchall()
        self._home.running.uninterruptible(self._job, reopens=True)
        self.ending = monotonic()
        try:
            self._commit_with(conn, [])
        finally:
            self.undo()
            self._home.running.interruptible(self._job)
        return rows

    def keep(self, statements: Sequence[Statement[Any]], kept: Statement[Any]) -> None:
        """Commit what was written, with these statements; the job goes on, and can be stopped again.

        The first raises LOST if the job is not this run's any more; `kept` answers a row if they were committed.
        """
        conn = self.connection()
        self._open(conn)
        if self._session is not None:
            self._session.finish()
        self._home.running.uninterruptible(self._job, reopens=True)
        self.ending = monotonic()
        try:
            self._commit_with(conn, statements)
        except psycopg.Error as error:
            self._known(error, conn)
            self._kept(error, *self._settle(conn, error, kept))
        finally:
            self.undo()  # after the commit it only gives the connection back
            self._home.running.interruptible(self._job)

    def _settle(self, conn: HandlerConnection, error: psycopg.Error, done: Statement[Any]) -> list[bool]:
        questions = self._questions(conn, error, done)
        with self._home.pool.kept(conn):  # the run cannot be stopped now: its questions must not wait for others
            self.undo()  # its room in the pool is needed to ask
            return settle(error, self._home.pool, questions)

    def discard(self) -> None:
        """`cut` for good: the job was taken from its handler. On the loop; `over` before."""
        with self._having:
            conn = self._conn
            if conn is not None:
                hang_up(conn)
                self._home.pool.discard(conn)

    def finish(self) -> None:
        """`undo` for good. A thread of the handler's that is just asking for a connection gets none."""
        self.over = True
        if not self._finished:
            self.undo()
            self._finished = True  # a thread that asks after that sees that it is over

    def undo(self) -> None:
        """Give the connection back: after a commit as it is, else closed. In every case the last step; safe to repeat.

        Closed, and not rolled back: whatever the handler left behind that still has it writes nowhere any more.
        """
        with self._home.running.shield(self._job, leaving=True):
            with self._having:
                conn, session, committed = self._conn, self._session, self._committed
                self._conn, self._session, self._committing, self._committed = None, None, False, False
                self.ending = 0.0
            if conn is None:
                return
            try:
                if session is not None:
                    session.leave()
            finally:
                try:
                    if not committed:
                        conn.close()
                finally:
                    self._home.pool.release(conn)
            self._look_at_the_clock()

    def _begin(self) -> HandlerConnection:
        while True:
            conn = self._home.pool.acquire(begun=self._first, look=self._look)
            try:
                conn.begin(self._job.claim)
            except BaseException as error:
                dead = conn.closed
                conn.close()
                self._home.pool.release(conn)
                if dead and isinstance(error, psycopg.OperationalError):
                    continue  # it was dead in the pool; with the database away, `take` raises
                raise
            with self._having:  # the run ends before, and we see it; or after, and it sees the connection
                if not self.over:
                    self._conn, self._began, self._first = conn, monotonic(), False
                    return conn
            conn.close()
            self._home.pool.release(conn)
            raise ended_before(self._job)

    def _commit(self, conn: HandlerConnection, outcome: Outcome) -> None:
        if isinstance(outcome, Completed):
            self._commit_with(conn, self._within(outcome), completes=True)
            return
        send(conn, self.statement("complete_mine"))  # waits while the row is locked; the next statement would not
        ending = self._ending(outcome)
        if ending.read(send(conn, ending).fetchall()) is not None:
            raise lost(self._job)
        self._commit_with(conn, [])

    def _commit_with(
        self, conn: HandlerConnection, statements: Sequence[Statement[Any]], completes: bool = False
    ) -> None:
        settled = self._home.begin_early(False) if completes else None
        along = statements[0] if len(statements) == 1 and conn.can_take(statements[0]) else None
        for statement in statements if along is None else ():
            send(conn, statement)
        self._committing = True
        conn.end(along, settled)
        self._committed = True


def ended_before(job: Job) -> Error:
    """What is raised in a thread or task that a run has left behind, and that asks for its connection."""
    return Error(
        f"job {job.id} ({job.task}): its run is over, and so is its transaction; "
        "wait for your threads and tasks before the handler returns",
        job_id=job.id,
    )


def lost(job: Job) -> JobLost:
    """What is raised in a run if its job was given to another worker meanwhile."""
    return JobLost(
        f"job {job.id} ({job.task}) was given to another worker meanwhile; nothing of this attempt was committed",
        job_id=job.id,
    )
