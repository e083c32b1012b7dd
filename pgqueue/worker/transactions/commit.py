"""The transaction of one attempt: begun when its handler first asks for it, committed with the job's end, or undone.

`Commit` has its state and its decisions: what is sent in which order, what an error means, when it is committed, what
is asked after a COMMIT without an answer. It is owned by a `Transaction` in a thread or an `AsyncTransaction` on the
loop, which know what may break in there.

When the handler has returned, the completion deletes the running row by its fence, and COMMIT follows, in the same
message if possible (`handler_connection` says why that is as safe).

Why the effect happens once:

1. The completion is a statement of the same transaction as the handler's writes. So both are committed, or neither is.
2. It deletes the row of `job_running` that only this run's fence (id, worker, claim) names. If rescue has given the job
   to another worker, it finds no row and raises.
3. A transaction in which a statement has failed cannot commit, whatever this process does next.
4. So two runs of one job cannot both commit: both would have to delete the same row.
5. A COMMIT without an answer is settled by locking the row on a new connection, which waits for the old transaction to
   end (`in_doubt`).
6. If the row is gone, the old transaction was committed, and history says so; or the job was given to another worker.
7. If the row is there, the old transaction was not committed and never will be. The job runs again, as after any abort
   by the database (`serialization_retries`), or the attempt has failed like any other.
8. Until that is known the run is not over. So no other outcome is written.

Why a completion ends the transaction that the worker has begun, and no other one:

1. BEGIN sets a mark in the transaction alone (SET LOCAL): a number that no other transaction of this connection has.
2. Whatever ends the transaction takes the mark away: COMMIT and ROLLBACK, also with AND CHAIN, also if a BEGIN follows.
   A rollback to a savepoint does not: the mark was set before any savepoint.
3. The statement that ends the job, or a batch, compares the mark in the same transaction, and raises if it is another
   one. So nothing is committed there, and the job has failed, as after a COMMIT that was seen.
4. A handler's RESET ALL takes the mark away, too. Its cursor sets it again (`handler_cursor`). Where it cannot, the job
   fails though nothing was lost: the message says so.

A handler may leave another role in effect (SET LOCAL ROLE, for row level security), which may not end the job:

1. The server tells of no role by itself, and to ask costs each job a round trip. So a job is ended without asking.
2. If that is refused for want of a right, nothing is committed. The task is noted, and the job runs again, as after any
   abort of the database. It finds the same refusal if the role was not the cause: then that counts as a failure.
3. From then on this worker ends jobs of that task in its own role. Before COMMIT it puts back the handler's: deferred
   triggers run there, and may trust in that role.

One attempt may have several transactions, one after another: `keep` commits what was written so far, and the job goes
on (`iteration` says why that is right).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from pgqueue.client.tasks import REQUIRED
from pgqueue.database.backoff import one_line
from pgqueue.database.dead_link import hang_up
from pgqueue.database.sessions import ROUND_TRIP_SECONDS, ReadOnly
from pgqueue.database.statements import Row, Statement, text
from pgqueue.errors import Error, JobLost
from pgqueue.jobs.job import Job, fields
from pgqueue.jobs.outcomes import UNCOVERED, WRITTEN, BatchEnds, Cancel, Completed, Fail, Outcome, Retry, Snooze, given
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.steady_clock import monotonic
from pgqueue.worker.complete.outcome_sql import ENDED, LOST, OutcomeSql
from pgqueue.worker.run.running_jobs import RunningJobs
from pgqueue.worker.state import WorkerState
from pgqueue.worker.transactions.handler_pool import HandlerPool, Side
from pgqueue.worker.transactions.in_doubt import settle

log = logging.getLogger("pgqueue")

SWALLOWED = (
    "the handler caught an error of its SQL and went on; the server keeps nothing of such a transaction. "
    "Put what may fail in `with conn.transaction():`, and catch the error around that"
)
"""A note at the error of a transaction that the server has given up while the handler went on."""
UNSEEN = (
    "ROLLBACK AND CHAIN, or a COMMIT or ROLLBACK inside a text of its SQL (a RESET ALL there looks the same): what it "
    "wrote before that is gone, or was committed"
)
"""How a handler ended its transaction if only the server has seen it."""
OTHER_ROLE = (
    "the job could not be ended for want of a right: it runs again, and if its handler leaves another role in effect, "
    "this worker ends the jobs of its task in its own role"
)
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
    told: set[str] = field(default_factory=set)
    """Tasks of which a handler has ended without asking for its connection; each is logged once."""
    roles: set[str] = field(default_factory=set)
    """Tasks whose jobs are ended in the worker's own role: a handler has left one in effect that may not end them."""


class Commit:
    """The state of one attempt's transaction, and what is decided about it. Its coroutines are bodies (`steps`)."""

    def __init__(
        self,
        around: TransactionServices,
        job: Job,
        side: Side[Any],
        having: AbstractContextManager[Any],
        for_iteration: bool,
    ) -> None:
        self.for_iteration = for_iteration
        """It is there for an iteration only: the task is not transactional."""
        self.sending_since = 0.0
        """When it began to commit, by this process's clock; 0 if it does not."""
        self.over = False
        """The run is over, so no transaction begins any more: nothing would end it."""
        self.conn: Any = None
        """The connection of the transaction there is now."""
        self.session: Any = None
        """A SQLAlchemy session on that connection, if the handler has asked for one: async for an async handler."""
        self.having = having
        """Held where the connection is set or taken away: another thread may end the run, or discard the job."""
        self._first = True
        """Whether no transaction has begun yet."""
        self._left_role: Row | None = None
        """The session's user and role that the handler has left in effect, if they are put back before COMMIT."""
        self._committing = self._committed = False
        self._around = around
        self._job = job
        self._side = side
        self._worker_id = around.state.id
        """Of this run's fence. If the worker was taken for dead it has another id since: what was committed under this
        one would not be found under that."""
        self._began = 0.0

    # What the handler returned ---------------------------------------------------------------------------------------

    def outcome(self, retry: RetryPolicy, what: object) -> tuple[Outcome, bool]:
        """The outcome of what the handler returned; and whether its writes are committed with it."""
        outcome = given(self._job, retry, what)
        if self._first and isinstance(outcome, Completed | BatchEnds):
            outcome = given(self._job, retry, self._uncovered() or what)
        return outcome, isinstance(outcome, Completed | BatchEnds) or isinstance(what, Snooze | Retry | Cancel | Fail)

    def _uncovered(self) -> Fail | None:
        """The handler has returned, and has not asked for its connection: what it wrote elsewhere may happen twice."""
        job = self._job
        if self._around.state.tasks[job.task].transactional == REQUIRED:
            return Fail(UNCOVERED)
        if job.task not in self._around.told:
            self._around.told.add(job.task)
            said = "job %d (%s): %s. This is said once for each task"
            log.warning(said, job.id, job.task, UNCOVERED, extra=fields(job))
        return None

    def statement(self, name: str, **params: object) -> Statement[list[Row]]:
        """The named statement, with this run's fence."""
        mark = None if self.conn is None else self.conn.mark
        fence = {"id": self._job.id, "claim": self._job.claim, "worker_id": self._worker_id, "mark": mark}
        return Statement(text(name, self._around.outcome_sql.schema), fence | params, list)

    def raised(self) -> None:
        """The handler has raised, or its COMMIT has. Raise if it ended the transaction itself; note a lost session."""
        conn = self.conn
        if conn is None or self._committing or self.over:
            return
        self._note(conn)
        if conn.ended_by_handler or not conn.closed:
            self.check_open(conn)

    def note_end(self) -> None:
        """Note at the job if the transaction there is has come to an end, and the worker has not ended it."""
        conn = self.conn
        if conn is not None and not self._committing:
            self._note(conn)

    def _note(self, conn: Any) -> None:
        """Note at the job how its transaction came to an end before the worker ended it.

        If the handler's SQL ended it, a second run could do twice what that committed. If the session ended from
        outside, nothing was kept. A handler that closed its connection itself has not lost it.
        """
        if conn.ended_by_handler:
            self._job.own_end = _ended_by_itself(self._job)
        elif conn.broken:
            self._lose()

    def _lose(self) -> None:
        """The session has ended, and nothing of the transaction was kept. An iteration's may be one of many."""
        self._job.session_lost = not self.for_iteration

    def check_open(self, conn: Any) -> None:
        """Raise if there is no transaction any more that could be committed with the end."""
        if conn.ended_by_handler or conn.pgconn.transaction_status == TransactionStatus.IDLE:
            raise _ended_by_itself(self._job)
        if conn.closed:
            raise psycopg.OperationalError("job.connection is closed: nothing of this attempt is kept")

    # From other threads ----------------------------------------------------------------------------------------------

    def overdue(self) -> bool:
        """Whether its last messages wait over a dead link."""
        return 0.0 < self.sending_since < monotonic() - ROUND_TRIP_SECONDS

    def cut(self) -> None:
        """End the session of the transaction there is now; what uses it gets an error."""
        conn = self.conn
        if conn is not None:
            hang_up(conn)

    def leave(self) -> Coroutine[Any, Any, None] | None:
        """`undo` in two steps: from now on this transaction is not seen any more; what is returned undoes it."""
        with self.having:
            conn, session, committed, committing = self.conn, self.session, self._committed, self._committing
            self.conn, self.session, self._committing, self._committed = None, None, False, False
            self.sending_since = 0.0
        if conn is None:
            return None
        if not committing:  # a batch of an iteration is undone before its error comes to the end of the handler
            self._note(conn)
        left = not committed and not self._around.running.stopping(self._job)
        return self._undo(conn, session, committed, self._began, left)

    # Bodies ----------------------------------------------------------------------------------------------------------

    async def begin(self) -> Any:
        """Begin a transaction; its connection."""
        asked = monotonic()
        while True:
            conn = await self._side.acquire(begun=self._first, look=self._look)
            try:
                if self._side.is_async:
                    self._look()  # Python 3.11's wait_for, in the pool, may swallow a cancellation
                await conn.begin(self._job.claim)
            except BaseException as error:
                dead, old = conn.closed, conn.made_at < asked
                await self._undo(conn)
                if dead and isinstance(error, psycopg.OperationalError):
                    continue  # it was dead in the pool; if the database is away, `acquire` raises
                if old and isinstance(error, ReadOnly):
                    continue  # it keeps what it began with; a new one may write by now
                raise
            with self.having:  # a run that ended before is seen here; one that ends afterwards sees the connection
                if not self.over:
                    self.conn, self._began, self._first = conn, monotonic(), False
                    self._job.session_lost = False  # that was another one, of which the handler knows
                    return conn
            await self._undo(conn)
            raise ended_before(self._job)

    async def check_left_open(self, conn: Any) -> None:
        """Raise if the handler has left something open on the connection: nothing can be sent there any more."""
        if await conn.left_open():
            raise left_open(self._job)

    async def end(self, conn: Any, outcome: Outcome) -> Outcome:
        """Commit, with this end of the job. Raises what prevents it; then nothing is committed."""
        self.sending_since = monotonic()
        try:
            with self._minding_role():
                await self._take_own_role(conn)
                await self._commit_end(conn, outcome)
        except psycopg.Error as error:
            if error.sqlstate == LOST:
                await self._note_given_away(conn, error, outcome)
            settled = self._around.outcome_sql.about("complete_settled", [self._job], self._worker_id)
            mine, done = await self._settle(conn, error, settled)
            if mine:
                raise
            if not done:
                await self._note_given_away(conn, error, outcome)
                raise lost(self._job) from error
        for job, ended in outcome.ends if isinstance(outcome, BatchEnds) else [(self._job, outcome)]:
            job.ended = ended
        return WRITTEN

    async def keep(self, conn: Any, statements: Sequence[Statement[Any]], kept: Statement[Any]) -> None:
        """Commit what was written, with these statements; the job goes on.

        The first raises LOST if the job is not this run's any more; `kept` answers a row if they were committed.
        """
        self.sending_since = monotonic()
        try:
            self.check_open(conn)
            with self._minding_role():
                await self._take_own_role(conn)
                await self._commit_with(conn, statements)
        except psycopg.Error as error:
            mine, done = await self._settle(conn, error, kept)
            if not mine:
                raise lost(self._job) from error
            if not done:
                raise
        finally:
            await self.undo()  # after the commit it only releases the connection

    async def end_reading(self, conn: Any) -> None:
        """Commit a transaction that has only read."""
        self.sending_since = monotonic()
        try:
            await self._commit_with(conn, [])
        finally:
            await self.undo()

    async def undo(self) -> None:
        """Release the connection. In every case the last step; safe to repeat.

        After a commit it goes back as it is. If the handler has left by itself, its session goes on in another one
        (`Side.undo`): what the handler left behind may still have this one. Else it is closed.
        """
        if left := self.leave():
            await left

    async def _commit_end(self, conn: Any, outcome: Outcome) -> None:
        """Write the job's end, or those of its batch, and commit."""
        sql = self._around.outcome_sql
        if isinstance(outcome, BatchEnds):
            await self._commit_batch(conn, outcome)
            return
        if isinstance(outcome, Completed):
            early = self._around.begin_early(self._side.is_async)
            statements = sql.within(self._job, outcome, self._worker_id, mark=conn.mark)
            await self._commit_with(conn, statements, early)
            return
        # This waits while the row is locked; the next statement would not.
        await self._side.send(conn, self.statement("complete_mine"))
        ending = sql.one(self._job, outcome, self._worker_id)
        if ending.read(await self._side.rows(conn, ending)) is not None:
            raise lost(self._job)
        await self._commit_with(conn, [])

    async def _commit_batch(self, conn: Any, batch: BatchEnds) -> None:
        """Write the end of each job of a batch, and commit."""
        sql, jobs = self._around.outcome_sql, [job for job, _ in batch.ends]
        mine = sql.about("complete_batch_mine", jobs, self._worker_id, id=self._job.id, mark=conn.mark)
        await self._side.send(conn, mine)  # this waits while a row is locked; the next ones would not
        endings, successors = sql.batch(batch.ends, self._worker_id)
        for ending in endings:
            if ending.read(await self._side.rows(conn, ending)) is not None:
                raise lost(self._job)
        await self._commit_with(conn, successors)

    async def _note_given_away(self, conn: Any, error: psycopg.Error, outcome: Outcome) -> None:
        """A batch could not be committed: find out which of its jobs are other workers'. They do not run again here."""
        if isinstance(outcome, BatchEnds):
            jobs = [job for job, _ in outcome.ends]
            missing = self._around.outcome_sql.about("complete_missing", jobs, self._worker_id)
            with self._side.kept(conn):
                await self.undo()  # its room in the pool is needed to ask
                [rows] = await settle(error, self._side, [missing])
            mine = {id for id, *_ in rows}
            self._around.running.given_away.update(job for job in jobs if job.id not in mine)

    async def _commit_with(self, conn: Any, statements: Sequence[Statement[Any]], early: int | None = None) -> None:
        """Send these statements, and COMMIT; a single one goes in one message with it, if possible."""
        alone = len(statements) == 1 and self._left_role is None
        along = statements[0] if alone and conn.can_take(statements[0]) else None
        for statement in statements if along is None else ():
            await self._side.send(conn, statement)
        if self._left_role is not None:
            session, role = self._left_role
            await self._side.send(conn, self.statement("transactions_put_back_role", session=session, role=role))
        self._committing = True
        await conn.end(along, early)
        self._committed = True

    @contextmanager
    def _minding_role(self) -> Iterator[None]:
        """If a right is wanting, note the task, and raise what lets the job run again: once."""
        try:
            yield
        except psycopg.errors.InsufficientPrivilege as error:
            if self._job.task in self._around.roles:
                raise
            self._around.roles.add(self._job.task)
            raise psycopg.errors.SerializationFailure(OTHER_ROLE) from error

    async def _take_own_role(self, conn: Any) -> None:
        """If handlers of this task leave another role in effect, end the job in the worker's own."""
        self._left_role = None
        if self._job.task in self._around.roles:
            [(*left, own)] = await self._side.rows(conn, self.statement("transactions_own_role"))
            self._left_role = tuple(left) if own != left else None

    async def _settle(self, conn: Any, error: psycopg.Error, done: Statement[Any]) -> tuple[bool, bool]:
        """After an error: whether the job is still this run's, and whether it is `done`. Raises the error if it says
        that nothing was committed."""
        if error.sqlstate == LOST:
            raise lost(self._job) from error
        if error.sqlstate == ENDED:
            self._job.own_end = ended = _ended_by_itself(self._job, UNSEEN)
            raise ended from error
        if not conn.closed:
            if isinstance(error, psycopg.errors.InFailedSqlTransaction):
                error.add_note(SWALLOWED)
            raise error  # the server has said no
        log.warning(
            "job %d (%s): no answer says whether its COMMIT took place (%s); finding out whether it was committed",
            self._job.id,
            self._job.task,
            one_line(error),
            extra=fields(self._job),
        )
        pid, backend_start = self._around.pool.identity(conn) or (None, None)
        end = self.statement("transactions_end_session", pid=pid, backend_start=backend_start)
        lasted = round(1000 * (monotonic() - self._began))
        too_long = self.statement("transactions_too_long", lasted=lasted)
        questions = [end, self.statement("complete_mine", mark=None), done, too_long]
        self._committing = True  # what the loss of this session means is found out here
        with self._side.kept(conn):  # the run cannot be stopped now: its questions must not wait for other jobs
            await self.undo()  # its room in the pool is needed to ask
            _, mine, was_done, was_too_long = map(bool, await settle(error, self._side, questions))
        if mine and not was_done and not was_too_long:
            self._lose()
        return mine, was_done

    async def _undo(
        self,
        conn: Any,
        session: Any = None,
        committed: bool = False,
        began: float | None = None,
        left: bool = False,
    ) -> None:
        try:
            if session is not None:
                leaving = session.leave()
                if self._side.is_async:
                    await leaving
        finally:
            try:
                if left:
                    conn = await self._side.undo(conn)
                elif not committed:
                    await self._side.close(conn)
            finally:
                await self._side.release(conn)
        if began is not None and (took := monotonic() - began) > LONG_SECONDS:
            log.warning(
                "job %d (%s) had its transaction open for %.1f s, so long it held its row locks and held up vacuum; "
                "do what is slow before job.connection is first asked for",
                self._job.id,
                self._job.task,
                took,
                extra=fields(self._job, seconds=took),
            )

    def _look(self) -> None:
        """Raise if a connection is of no use any more."""
        if self.over:
            raise ended_before(self._job)
        self._around.running.checkpoint(self._job)


def ended_before(job: Job) -> Error:
    """What is raised in a thread or task that a run has left behind, and that asks for its connection."""
    return Error(
        f"job {job.id} ({job.task}): its run is over, and so is its transaction; "
        "wait for your threads and tasks before the handler returns",
        job_id=job.id,
    )


def left_open(job: Job) -> Error:
    """What is raised in a run whose handler has left something open on the connection, and returned."""
    return Error(
        f"job {job.id} ({job.task}): its handler has left a COPY, a stream or notifies() open on its connection, so "
        "nothing of this attempt can be committed; leave the block, or close the iterator, before the handler returns",
        job_id=job.id,
    )


def lost(job: Job) -> JobLost:
    """What is raised in a run if its job was given to another worker meanwhile."""
    return JobLost(
        f"job {job.id} ({job.task}) was given to another worker meanwhile; nothing of this attempt was committed",
        job_id=job.id,
    )


def _ended_by_itself(job: Job, how: str = "a COMMIT or ROLLBACK in its SQL: what it wrote is not undone") -> Fail:
    return Fail(
        f"the handler of job {job.id} ({job.task}) ended the transaction by itself, by {how}, and running it again "
        "could do it twice"
    )
