"""Runs a job again, in the same slot and soon, if the database aborted it: a deadlock, a serialization failure, a lock
timeout, or the end of the session that its own transaction was in. Such an abort is no failure of the handler, so it
spends no attempt.

Called by the executor with the exception of a handler, in its exception path only; a thread asks through the loop.
Every abort is a row in `attempt`, appended by one statement that also reads the fence. So the ten aborts of a job are
counted over all its claims and workers. A job that was given to another worker while it ran is not run again here. The
pause gives the other side of the conflict time. If the job is to stop, or the worker to take no more, both the pause
and the wait for the answer to that statement end early.

Two things may last for hours, so the job must not keep a slot. It is given back for a second, as often as need be
(`unable`). That spends no attempt, and no abort either:
- A COMMIT was refused because the server's NOTIFY queue is full.
- The session of the job's own transaction began read only (`sessions`), or an abort cannot be noted for that cause. If
  the handler itself made its transaction read only, that is its own error.
- No connection could be made for that transaction: the database is away.

While the database is away, an abort cannot be noted. The job waits for it in its slot, which is of no use meanwhile: a
failover spends no attempt. A job that ends the server itself each time is counted like any other, when it is back.

Never decides what becomes of a failure. If the ten are used up, or the server refuses to note it, the abort counts as a
failure (`outcomes.given`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from typing import Any

from pgqueue.database.backoff import LOST_SECONDS, described, doubled, is_loss, jittered, read_only, transient, within
from pgqueue.database.foreign_errors import attribute
from pgqueue.database.notify_queue import is_full
from pgqueue.database.sessions import Away, ReadOnly, Session
from pgqueue.jobs.job import Job, fields
from pgqueue.jobs.outcomes import RELEASED, Cancel, Fail, Outcome, Retried, Retry, Snooze, given, leaves, problem
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

ABORTS_MOST = 10
"""How many aborts a job has in its life, before the next one counts as a failure."""
PAUSE_LEAST, PAUSE_FIRST, PAUSE_MOST = 0.05, 0.1, 1.0
UNABLE_SECONDS = 1.0
"""How long a job waits for room in the NOTIFY queue, or to write, before it runs again, at least."""
# deadlock_detected, serialization_failure, lock_not_available
STATES = frozenset({"40P01", "40001", "55P03"})
# admin_shutdown, crash_shutdown, cannot_connect_now; not those of timeouts (25P03, 25P04): there the handler was slow
ENDED = frozenset({"57P01", "57P02", "57P03"})
# connection_exception, …_does_not_exist, …_failure; not 08P01, by which a pooler also tells of its timeouts
GONE = frozenset({"08000", "08003", "08006"})
SERVER_CRASHED = "server conn crashed"
"""What PgBouncer says under 08P01 when the server's session has ended, in English always."""
WRAPPERS_MOST = 8


def aborted(retry: RetryPolicy, error: BaseException, session_lost: bool = False) -> bool:
    """Whether this is an abort to be retried in place. Requests of the handler, `fail_on` and a retry function come
    first.

    If the session of the job's own transaction is lost, its writes are undone, whatever the handler made of the error.
    """
    each_of = leaves(error)
    asks = (Snooze, Retry, Cancel, Fail, *retry.fail_on)
    if retry.function is not None or any(isinstance(each, asks) for each in (error, *each_of)):
        return False
    if session_lost and isinstance(error, Exception) and all(_ended(each) for each in each_of):
        return True
    return all(sqlstate(each) in STATES for each in each_of)


def _ended(error: BaseException) -> bool:
    """Whether this error can be what the end of a session looks like. Most drivers then have no SQLSTATE."""
    state = sqlstate(error)
    crashed = state == "08P01" and any(SERVER_CRASHED in str(each) for each in _causes(error, "orig", "__cause__"))
    return state is None or state in ENDED or state in GONE or crashed


def unable(error: BaseException) -> Retried | None:
    """How a job ends whose COMMIT was refused because the NOTIFY queue is full, or whose session could not be made or
    began read only; None after any other error.

    Nothing of the attempt was committed. Whether it was the COMMIT of a transactional task, or of the handler's own
    connection: the handler has not failed, so its retry policy is not asked.
    """
    begun = any(isinstance(each, ReadOnly | Away) for each in _causes(error, "orig", "__cause__", "__context__"))
    return _given_back(error) if begun or is_full(error) else None


def _given_back(error: BaseException) -> Retried:
    return Retried(jittered(UNABLE_SECONDS), problem("interrupted", error), spent=False)


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE in this exception, whatever driver raised it, whatever wraps that (SQLAlchemy, Django, `from`).

    Of a group that of its first exception.
    """
    states = (attribute(each, "sqlstate") or attribute(each, "pgcode") for each in _causes(error, "orig", "__cause__"))
    return next((state for state in states if isinstance(state, str)), None)


def _causes(error: BaseException, *names: str) -> Iterator[BaseException]:
    """The exception, of a group its first one, and what it wraps under the first of these names that it has."""
    inner: object = leaves(error)[0]
    for _ in range(WRAPPERS_MOST):
        if not isinstance(inner, BaseException):
            break
        yield inner
        inner = next(filter(None, (attribute(inner, name) for name in names)), None)


class SerializationRetries:
    """Notes aborts over the given session, and waits before the job runs again."""

    def __init__(self, session: Session, state: WorkerState) -> None:
        self.retried = 0
        """How many runs were made again in place."""
        self._session = session
        self._state = state
        self._pausing: dict[Job, asyncio.Event] = {}
        self._noting: set[asyncio.Future[int | None]] = set()
        self._closed = False

    async def again(self, job: Job, retry: RetryPolicy, error: BaseException) -> Outcome | None:
        """Note the abort and wait: None when it is time to run the job again, else how it ends. Called on the loop."""
        self._pausing[job] = left = asyncio.Event()
        try:
            return await self._again(job, retry, error, left)
        finally:
            del self._pausing[job]

    def leave(self, job: Job) -> None:
        """This job is to stop: if it waits to run again, it does not."""
        if event := self._pausing.get(job):
            event.set()

    def leave_all(self) -> None:
        """No job that waits now is to run again here."""
        for event in self._pausing.values():
            event.set()

    def close(self) -> None:
        """From now on no job is to run again here."""
        self._closed = True
        self.leave_all()

    async def _again(self, job: Job, retry: RetryPolicy, error: BaseException, left: asyncio.Event) -> Outcome | None:
        noting = self._begin_noting(job, error)
        await _first(noting, left)
        if left.is_set() and not noting.done():
            return RELEASED
        try:
            before = noting.result()
        except Exception as away:
            if read_only(away) or self._session.link.outage.read_only():
                return _given_back(error)
            message = "job %d (%s) was aborted; that could not be noted (%s), so it counts as a failure"
            log.warning(message, job.id, job.task, described(away), extra=fields(job))
            return given(job, retry, error, raised=True)
        if before is None and job.written:  # `job.complete(conn)`, and that was committed: the completer finds out
            return given(job, retry, error, raised=True)
        if before is None:
            message = "job %d (%s): had been given to another worker; it is not run again here"
            log.warning(message, job.id, job.task, extra=fields(job))
            return RELEASED  # its fence does not hold any more: nothing is written
        if before >= ABORTS_MOST:
            return given(job, retry, error, raised=True)
        message = "job %d (%s) was aborted by the database (%s) and runs again"
        log.info(message, job.id, job.task, sqlstate(error) or "its session is lost", extra=fields(job))
        if self._closed or await within(left.wait(), pause(before + 1)):
            return RELEASED
        self.retried += 1
        return None

    def _begin_noting(self, job: Job, error: BaseException) -> asyncio.Future[int | None]:
        """`_note`, which is never cancelled: that would wait for the database, too."""
        noting = asyncio.ensure_future(self._note(job, error))
        self._noting.add(noting)
        noting.add_done_callback(self._noting_ended)
        return noting

    def _noting_ended(self, noting: asyncio.Future[int | None]) -> None:
        self._noting.discard(noting)
        if not noting.cancelled():
            noting.exception()  # the call that waited for it has seen it

    async def _note(self, job: Job, error: BaseException) -> int | None:
        what = problem("aborted", error)
        note = self._session.link.statement(
            "serialization_retries_note",
            id=job.id,
            claim=job.claim,
            worker_id=self._state.id,
            most=ABORTS_MOST,
            error_type=what.error_type,
            message=what.message,
            traceback=what.traceback,
            version_tag=self._state.settings.version_tag,
        )
        tried = False
        while True:
            try:
                [rows] = await self._session.run(note)
            except Exception as error_of_note:
                # Its session may have ended with the job's: a new one is made, which waits while the server is away.
                if read_only(error_of_note) or not (is_loss(error_of_note) or (transient(error_of_note) and not tried)):
                    raise
                tried = True
                await asyncio.sleep(LOST_SECONDS)
            else:
                return int(rows[0][0]) if rows else None


async def _first(noting: asyncio.Future[int | None], left: asyncio.Event) -> None:
    """Wait for the answer, or until the job is to stop. A session gives no message up without an error."""
    leaving = asyncio.ensure_future(left.wait())
    waited: list[asyncio.Future[Any]] = [noting, leaving]
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()


def pause(abort: int) -> float:
    """Seconds before the run after this abort: 50 ms at least, up to 1 s as they add up, at random in between."""
    return random.uniform(PAUSE_LEAST, doubled(PAUSE_FIRST, abort - 1, PAUSE_MOST))
