"""Helpers for services: loops, pauses with jitter, patience with the database, steps that no cancellation interrupts.

Every service of a worker uses them instead of own code to start, stop and back off. They never decide what is done.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import psycopg

from pgqueue.database.foreign_errors import POOLED, pooled
from pgqueue.database.row_errors import meets_open_id
from pgqueue.database.triggers import trigger_of

log = logging.getLogger("pgqueue")

_TRANSIENT = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    TimeoutError,
    OSError,
    # A standby that has not been promoted yet answers this.
    psycopg.InternalError,
    # A new connection cures these: a prepared statement's plan outlived a migration, or a pooler lost it.
    psycopg.errors.FeatureNotSupported,
    psycopg.errors.InvalidSqlStatementName,
)

_AWAY = ("08", "57P", "53300", "25006")
"""SQLSTATE classes and codes by which a server, or a pooler, ends a session or takes none. So is 25006 (`read_only`):
a session keeps what it began with, so only another one may write."""
LOST_SECONDS = 0.05
"""A service whose session is lost asks again after this time. The session paces its connections (see outage)."""
OPEN_ID = "Another transaction has inserted a job of the same id, as after a restore, and is still open"
NO_THREAD = "can't start new thread"
"""What Python says, without a class of its own."""
BACKOFF_MOST = 5.0
"""The longest pause of a service after failures, in seconds."""
DOUBLINGS_MOST = 64
"""No pause is doubled more often. Below 1,024 times, where a float overflows, and far above any longest pause."""
FAILED_SECONDS = 60.0
"""A service that only counts, and has failed, tries again after this time."""


def transient(error: BaseException) -> bool:
    """Whether trying again can help: the database is away, restarting, failing over or overloaded.

    A missing table or a missing right is not transient: the worker logs it and ends. What a trigger of the application
    raises is transient, whatever it is: the trigger may be mended while the worker works.
    """
    return isinstance(error, _TRANSIENT) or starved(error) or emptied(error) or trigger_of(error) is not None


def starved(error: BaseException) -> bool:
    """Whether the process has no memory, or can start no thread: to look up the name of a host takes one."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == NO_THREAD)


UNHIDE = "pgqueue needs all rows: ALTER TABLE … DISABLE ROW LEVEL SECURITY, or ALTER ROLE … BYPASSRLS"


def emptied(error: BaseException) -> bool:
    """Whether the leaf of a history is unknown, because something has emptied the table `ring`. Its rows are put back
    by `registration_restore_settings`."""
    if not isinstance(error, psycopg.errors.CheckViolation) or error.diag.constraint_name is not None:
        return False
    # No partition for the row: its bin is NULL.
    return error.diag.table_name in {"job_done", "job_dead", "attempt", "history_minute", "history_hour"}


def described(error: BaseException) -> str:
    """The error in words. If a trigger of the application has raised it, that is named. So is the setting for a pooler
    that cannot do prepared statements, and an open transaction that has the id of a job."""
    said, function = without_values(error), trigger_of(error)
    if pooled(error):
        said += f". {POOLED}"
    if meets_open_id(error):
        said += f". {OPEN_ID}"
    return said if function is None else f"the application's function {function}, in a trigger, has raised: {said}"


def without_values(error: BaseException) -> str:
    """What the server says, without the detail that quotes the whole row: its arguments may be private."""
    said = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    more = f". {UNHIDE}" if hides_rows(error) else ""
    return (one_line(error) if said is None else said) + more


def hides_rows(error: BaseException) -> bool:
    """Whether row level security hides rows of the table from this role: with `row_security = off` that is refused. It
    is known by the function of the server: the message may be in any language."""
    return isinstance(error, psycopg.errors.InsufficientPrivilege) and error.diag.source_function == "check_enable_rls"


def is_loss(error: BaseException) -> bool:
    """Whether the error says that the connection or the server is gone, or takes no writes. Else the server has
    answered the statement."""
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return error.sqlstate.startswith(_AWAY)
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | OSError)


def read_only(error: BaseException) -> bool:
    """Whether the session may not write: `default_transaction_read_only` is on, or it is on a standby. That is an order
    of the operator, as during a switchover: nothing is taken from the database until it is lifted."""
    return isinstance(error, psycopg.errors.ReadOnlySqlTransaction)


def one_line(error: BaseException) -> str:
    """What the error says, in one line: the driver's own texts have several."""
    return " ".join(str(error).split()) or type(error).__name__


def jittered(seconds: float) -> float:
    """`seconds` times a random 1 to 2, so that workers started together do not stay in step."""
    return seconds * random.uniform(1.0, 2.0)


def doubled(seconds: float, times: int, most: float) -> float:
    """`seconds`, doubled so many times, and `most` at most. The number of times may be any: a count has no end.

    >>> doubled(0.05, 2, 5.0), doubled(0.05, 10**9, 5.0)
    (0.2, 5.0)
    """
    return min(most, seconds * 2.0 ** min(times, DOUBLINGS_MOST))


class Backoff:
    """Growing pauses with jitter, 50 ms at first and 5 s at most. After a success they start again at the first."""

    def __init__(self, first: float = 0.05, most: float = BACKOFF_MOST) -> None:
        self._first, self._most, self._next = first, most, first

    def succeeded(self) -> None:
        self._next = self._first

    def pause(self) -> float:
        seconds = random.uniform(self._next / 2, self._next)
        self._next = min(self._most, self._next * 2)
        return seconds


def of_data(error: BaseException) -> bool:
    """Whether the server met a value that does not fit: a row that was restored, or inserted by hand."""
    return isinstance(error, psycopg.DataError | psycopg.IntegrityError)


async def persist(
    step: Callable[[], Awaitable[None]],
    *,
    name: str,
    until: Callable[[], bool] = lambda: False,
    answers: Callable[[], int] | None = None,
    past_data: bool = False,
    only_counts: bool = False,
    most: float = BACKOFF_MOST,
) -> None:
    """Repeat `step` until cancelled or `until()` is true. A transient error is logged, then comes a pause, `most`
    seconds at most. Any other error is raised.

    - `answers` counts the answered statements of the step's session. A step that was answered none starts no back-off
      anew: many steps only wait. Without it, every step that returns does.
    - After a loss of the connection there is no pause and no line: the session has said so, and paces its connections.
    - `past_data`: an error of data is like a transient one. For services that read what others have written: one bad
      row must not end the process.
    - `only_counts`: no job waits for this service. Any other error is logged, one of ours with its traceback, and the
      step is repeated after a minute. A number that cannot be found out must not end the worker.
    """
    backoff, seen = Backoff(most=most), 0
    while not until():
        try:
            await step()
            if answers is None or answers() != seen:
                backoff.succeeded()
        except Exception as error:
            if transient(error) or (past_data and of_data(error)):
                pause, level = backoff.pause(), logging.WARNING
                if is_loss(error):
                    pause, level = LOST_SECONDS, logging.DEBUG
                log.log(level, "%s: %s; trying again in %.2f s", name, described(error), pause)
            elif only_counts:
                pause = FAILED_SECONDS
                said = "%s: this failed, and is tried again later; no job waits for it: %s"
                log.error(said, name, described(error), exc_info=not isinstance(error, psycopg.Error))
            else:
                raise
            await asyncio.sleep(pause)
        seen = 0 if answers is None else answers()


async def wait(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for `event` at most `seconds`; return whether it was set. Never clears it."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True


async def within(awaitable: Awaitable[object], seconds: float) -> bool:
    """Await `awaitable` at most `seconds`; return whether it ended in time. If not, it was cancelled."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await awaitable
    except TimeoutError:
        return False
    return True


async def to_its_end(step: Coroutine[Any, Any, None]) -> None:
    """Await `step`. A cancellation meanwhile is raised only after `step` has ended."""
    doing = asyncio.ensure_future(step)
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        while not doing.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([doing])
        if not doing.cancelled():
            doing.exception()  # taken, so that it is not reported: the cancellation is raised instead
        raise
