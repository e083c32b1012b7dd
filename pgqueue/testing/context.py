"""What a drain gives to handlers that are transactional or iterate: the test's own connection, inside a savepoint.

The test sees what a handler writes, and its rollback undoes that. commit() and rollback() on the connection raise, as
in a worker. A sync handler needs a sync psycopg connection below the connection of the drain, an async handler an async
psycopg connection. Only for a session it is enough that the drain has one of SQLAlchemy, on any driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from psycopg import AsyncConnection, Connection, Rollback
from psycopg.pq import TransactionStatus

from pgqueue.client import observers
from pgqueue.client.tasks import REQUIRED, Task
from pgqueue.config import config
from pgqueue.database import drivers
from pgqueue.database.statements import Statement
from pgqueue.errors import Error
from pgqueue.jobs.context import AnySource, JobContext, Source
from pgqueue.jobs.job import Job, NewJob
from pgqueue.jobs.outcomes import ASKS, UNCOVERED, Fail
from pgqueue.testing.batches import Batches
from pgqueue.worker.complete.outcome_sql import LOST, OutcomeSql
from pgqueue.worker.context import check_own, own_end
from pgqueue.worker.run.node_results import aresults, refuse_async, refuse_sync, results
from pgqueue.worker.run.serialization_retries import sqlstate
from pgqueue.worker.transactions import sqlalchemy
from pgqueue.worker.transactions.durable_steps import DurableSteps
from pgqueue.worker.transactions.iteration import Iterations


class DrainContext(JobContext):
    """The context of one job in a drain. `end` or `aend` is called when its handler is done."""

    def __init__(
        self, task: Task[..., Any], conn: object, worker_id: int, *, alone: bool, resources: Any = None
    ) -> None:
        super().__init__(resources)
        self.worker_id = worker_id
        self.alone = alone
        """Whether the drain has opened its connection itself."""
        self.iterating = self.spoilt = False
        """Whether an iteration uses the connection; whether one has left a batch that is to be undone."""
        self._outcome_sql = OutcomeSql(config().schema, "testing", notify=False, array=list)
        batches = Batches(self)
        self._steps = DurableSteps(batches, self._outcome_sql)
        self._iterations = Iterations(batches, self._outcome_sql, lambda job: None)
        self._task = task
        self._given = conn
        # That of the test itself, if it is async: a sync drain in it runs sync handlers in the thread of that loop.
        self._loop = drivers.running_loop()
        self._conn: Any = None
        self._block: Any = None
        self._session: Any = None

    @property
    def begun(self) -> bool:
        """Whether the connection was asked for, and what was written there is neither kept nor undone yet."""
        return self._block is not None and not self.spoilt

    def connection(self, job: Job) -> Any:
        if self._block is None:
            conn = _below(self._given)
            if not ((self._task.transactional or self.iterating) and isinstance(conn, Connection)):
                raise self._refusal(job, "connection")
            if conn.info.transaction_status == TransactionStatus.IDLE:
                conn.execute("SELECT 1")  # begins the transaction: the block becomes a savepoint, and the drain commits
            self._block = conn.transaction()
            self._block.__enter__()
            self._conn = conn
        return self._conn

    async def aconnection(self, job: Job) -> Any:
        if self.spoilt:
            await self.aend(kept=False)
        if self._block is None:
            conn = await _abelow(self._given)
            if not ((self._task.transactional or self.iterating) and isinstance(conn, AsyncConnection)):
                raise self._refusal(job, "aconnection()")
            if conn.info.transaction_status == TransactionStatus.IDLE:
                await conn.execute("SELECT 1")
            self._block = conn.transaction()
            await self._block.__aenter__()
            self._conn = conn
        return self._conn

    def covered(self, what: object) -> object:
        """What the handler has returned; Fail if it had to ask for its connection, and has not."""
        asked = self._conn is not None or isinstance(what, ASKS)
        return what if asked or self._task.transactional != REQUIRED else Fail(UNCOVERED)

    def successor(self, new: NewJob[Any]) -> NewJob[Any]:
        return observers.successor(new)

    def session(self, job: Job) -> Any:
        if self._session is None:
            fresh = self._block is None and self._task.transactional
            foreign = fresh and not isinstance(_below(self._given), Connection)
            if foreign and (conn := _of_sqlalchemy(self._given)) is not None:
                self._block, self._conn = conn.begin_nested(), conn
                self._session = sqlalchemy.within(conn)
            else:
                self._session = sqlalchemy.session(self.connection(job))
        return self._session

    async def asession(self, job: Job) -> Any:
        if self._session is None:
            fresh = self._block is None and self._task.transactional
            foreign = fresh and not isinstance(await _abelow(self._given), AsyncConnection)
            if foreign and (conn := await _aof_sqlalchemy(self._given)) is not None:
                self._block, self._conn = await conn.begin_nested(), conn
                self._session = sqlalchemy.awithin(conn)
            else:
                self._session = await sqlalchemy.asession(await self.aconnection(job))
        return self._session

    def results(self, job: Job, name: str) -> Iterator[Any]:
        loop = drivers.running_loop()
        refuse_async(job, here=loop is not None and (self._task.is_async or loop is not self._loop))
        return results(job, name, self._outcome_sql.schema, lambda asked: drivers.run(self._given, asked))

    def aresults(self, job: Job, name: str) -> AsyncIterator[Any]:
        refuse_sync(job, here=not self._task.is_async or drivers.running_loop() is None)
        return aresults(job, name, self._outcome_sql.schema, lambda asked: drivers.arun(self._given, asked))

    def step(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        return self._steps.step(job, name, call, fn)

    async def astep(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        return await self._steps.astep(job, name, call, fn)

    def complete(self, job: Job, conn: object, result: object) -> None:
        try:
            for statement in self._completion(job, conn, result):
                drivers.run(conn, statement)
        except Exception as error:
            raise self._explained(job, error) from error

    async def acomplete(self, job: Job, conn: object, result: object) -> None:
        try:
            for statement in self._completion(job, conn, result):
                await drivers.arun(conn, statement)
        except Exception as error:
            raise self._explained(job, error) from error

    def _completion(self, job: Job, conn: object, result: object) -> list[Statement[Any]]:
        check_own(job, conn, owned=bool(self._task.transactional) or self.iterating)
        done = own_end(job, result, stored=self._task.store_result)
        return self._outcome_sql.within(job, done, self.worker_id)

    def _explained(self, job: Job, error: Exception) -> Exception:
        """The error itself, or what to do if this connection does not see the job."""
        if sqlstate(error) != LOST or self.alone:
            return error
        return Error(
            f"job {job.id} ({job.task}): job.complete(conn) was given another connection than the drain, and does not "
            "see the job, which runs in the test's transaction. Give the code that is tested the test's connection, or "
            "commit, and name the database: drain(dsn=…)",
            job_id=job.id,
        )

    def end(self, *, kept: bool) -> None:
        """Keep the handler's writes, or undo them. Raises if they cannot be kept."""
        session, self._session = self._session, None
        if session is not None:
            try:
                if kept:
                    session.finish()
            finally:
                session.leave()
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(*_how(kept))

    async def aend(self, *, kept: bool) -> None:
        """`end` for async handlers."""
        session, self._session = self._session, None
        try:
            if session is not None and kept and not self.spoilt:
                await session.finish()
        except BaseException:
            kept = False
            raise
        finally:
            if session is not None:
                await session.leave()
            await self._aleave(kept=kept)

    async def _aleave(self, *, kept: bool) -> None:
        block, self._block = self._block, None
        spoilt, self.spoilt = self.spoilt, False
        if block is not None:
            await block.__aexit__(*_how(kept and not spoilt))

    def iterate(self, job: Job, source: Source[Any], size: int) -> Iterator[list[Any]]:
        return self._iterations.iterate(job, source, size)

    def aiterate(self, job: Job, source: AnySource[Any], size: int) -> AsyncIterator[list[Any]]:
        return self._iterations.aiterate(job, source, size)

    def left(self, job: Job) -> str | None:
        return self._iterations.left(job)

    def _refusal(self, job: Job, what: str) -> Error:
        told = f"job {job.id} ({job.task}): no job.{what} here"
        if not self._task.transactional:
            return Error(f"{told}: declare the task with transactional=True, or ask inside job.iterate")
        return Error(
            f"{told}: a sync handler needs drain() with psycopg below, an async handler adrain() with an async psycopg "
            f"connection. This drain was given {type(self._given).__name__}"
        )


def _how(kept: bool) -> tuple[Any, Any, Any]:
    return (None, None, None) if kept else (Rollback, Rollback(), None)


def _below(conn: Any) -> object:
    """The driver's connection below one of SQLAlchemy or Django, or of a cursor; `conn` itself if it is one."""
    if isinstance(conn, str):
        from django.db import connections

        conn = connections[conn]
    for _ in range(4):
        if isinstance(conn, Connection | AsyncConnection):
            break
        inner = getattr(conn, "driver_connection", None) or getattr(conn, "connection", None)
        conn = inner() if callable(inner) else inner
    return conn


def _of_sqlalchemy(conn: Any) -> Any:
    """SQLAlchemy's connection, of a session or itself; None if there is none."""
    if hasattr(conn, "get_bind"):
        return conn.connection()
    return conn if hasattr(conn, "exec_driver_sql") else None


async def _aof_sqlalchemy(conn: Any) -> Any:
    if hasattr(conn, "sync_session"):
        return await conn.connection()
    return conn if hasattr(conn, "get_raw_connection") else None


async def _abelow(conn: Any) -> object:
    if hasattr(conn, "get_raw_connection") or hasattr(conn, "sync_session"):
        made = await conn.connection() if hasattr(conn, "sync_session") else conn
        raw = await made.get_raw_connection()
        return raw.driver_connection
    return _below(conn)
