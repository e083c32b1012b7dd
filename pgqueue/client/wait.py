"""Waits for the end of a job, on its own connection: by LISTEN, and by looking.

Used by JobHandle. A wait writes a row in `job_waiter`. Every statement that ends the job finds the row and notifies the
channel of this job. Without waiters nothing is notified, because a transaction with a NOTIFY holds a lock of the whole
database while it commits.

The order is: commit the row, LISTEN, look. No end of a job is missed:
1. If it commits before the look, the look sees it.
2. If it commits later and its statement saw the row, the notification comes.
3. If its statement began before the row was committed, a later look finds it.
4. If LISTEN is of no use, a later look finds it, too. This is the case behind a pooler, on a standby, without the right
   to write that row, and with `notify=False`.

If the first connection cannot be made, the caller gets the driver's error. If the time of the wait has ended the
attempt, it gets ResultTimeout. Each host that is named has its part of that time, 2 s at least. Naive: a frozen one
takes all of it.

A connection that breaks or does not answer later is replaced as long as there is time, because the job goes on, too.
It leads to a server that can be written if the address has one. If the server only reads, as in a switchover:
1. No row is written and none removed: an error of that would end the wait. The leader prunes a row that is left.
2. If this wait has seen the job, but not on this connection, a standby may not have heard of it yet. It looks again.

Never changes a job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from time import sleep
from typing import TYPE_CHECKING, Any, cast

from pgqueue.config import Config
from pgqueue.database import drivers
from pgqueue.database.conninfo import connect_timeout, connect_timeout_at_most
from pgqueue.database.statements import Row, Statement, text
from pgqueue.errors import Error, JobNotFound, ResultTimeout
from pgqueue.jobs.states import ENDED
from pgqueue.steady_clock import monotonic

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("pgqueue")

LOOK_FIRST, LOOK_MOST, LOOK_FACTOR = 0.005, 0.25, 1.4
"""Seconds between the looks of a wait that does not listen: the first, the longest, and the factor of growth."""
TOLD_FIRST, TOLD_MOST, TOLD_FACTOR = 0.01, 1.0, 3.0
"""The same for a wait that listens. It may miss a notification, most likely in the first moment."""
CONNECT_FIRST, CONNECT_MOST, CONNECT_FACTOR = 0.05, 2.0, 2.0
"""The same between attempts to connect again."""
ANSWER_SECONDS = 10.0
"""If a look takes longer, the link is dead."""
LIMIT_LEAST = 1.0
"""No limit of a connection is shorter. An error that comes earlier was not made by one."""
LAG_SECONDS = 600.0
"""If a server that only reads has not shown a job for so long that was seen before, the job is not there any more."""
LEAVE_SECONDS = 2.0
"""If the wait is cancelled, a statement under way ends within this time, or its connection is broken."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of a job, and once it has ended what `result` returns or raises."""

    state: str
    result: str | None
    reason: str | None
    error: str | None

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Try:
    """Run this statement. If the server refuses it, the answer is None, and the wait goes on without it."""

    statement: Statement[Any]


@dataclass(frozen=True, slots=True)
class Listen:
    """Listen on this channel from now on."""

    channel: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait until a notification comes, but no longer than this."""

    seconds: float


Steps = Generator[Statement[Any] | Try | Listen | Pause, Any, Outcome]


@dataclass(slots=True)
class Wait:
    """One wait for the end of a job: the steps to take on its connection, and its state."""

    job_id: int
    end: float
    """On the monotonic clock; infinite without a timeout."""
    config: Config
    waiter: int | None = None
    """The number of our row in `job_waiter`, as long as it may exist."""
    seen: bool = False
    """Whether the job was seen."""

    def steps(self, pid: int) -> Steps:
        """The steps on one connection. `pid` is the server process as the connection reports it."""
        told, hears = False, self._statement("hears", pid=pid)
        if self.waiter is not None and (yield hears):  # left by a connection that broke
            yield self.leave()
            self.waiter = None
        ask = find_outcome(self.job_id, self.config.schema)
        outcome: Outcome = yield from self._first_look(ask)
        if not outcome.ended and self._listens() and self.left() > 0 and (yield hears):
            begun = yield Try(self._statement("begin", id=self.job_id))
            if told := begun is not None:
                self.waiter = begun
                yield Listen(f"{self.config.schema}.:ended.{self.job_id}")
                outcome = self._there((yield ask))
        pauses = growing(TOLD_FIRST, TOLD_MOST, TOLD_FACTOR) if told else growing(LOOK_FIRST, LOOK_MOST, LOOK_FACTOR)
        while not outcome.ended:
            if (left := self.left()) <= 0:
                raise self._over("had not ended in time; it goes on")
            yield Pause(min(next(pauses), left))
            outcome = self._there((yield ask))
        return outcome

    def leave(self) -> Try:
        """The step that removes our row."""
        return Try(self._statement("leave", waiter=self.waiter))

    def lost(self, error: Exception) -> None:
        """The connection broke, or none could be made. Raises ResultTimeout if there is no time for another one."""
        self.late(error)
        log.warning("waiting for job %d: %s; connecting again", self.job_id, str(error).strip() or type(error).__name__)

    def late(self, error: Exception) -> None:
        """Raises ResultTimeout if there is no time left. The error is its cause."""
        if self.left() <= 0:
            raise self._over(f"was not seen to end in time: {error}") from error

    def left(self) -> float:
        """The seconds until the wait is over."""
        return self.end - monotonic()

    def patience(self) -> float:
        """How long an answer may take: one second more than is left, so that the wait ends by its own timeout."""
        return max(0.0, min(ANSWER_SECONDS, self.left())) + 1.0

    def dsn(self) -> str:
        dsn = self.config.require_dsn()
        return self.config.listen_dsn or dsn

    def options(self, dsn: str) -> dict[str, Any]:
        """The options of its connections. Rounded up: the time of all hosts is not over before that of the wait."""
        from pgqueue.database import primary

        seconds = ceil(min(ANSWER_SECONDS, self.left() / primary.named_hosts(dsn)))
        return connect_timeout_at_most(dsn, seconds) | {
            "autocommit": True,
            "prepare_threshold": None,
            "client_encoding": "utf8",
            "fallback_application_name": "pgqueue result",
        }

    def _first_look(self, ask: Statement[Outcome | None]) -> Steps:
        """How the job stands when it comes into view on this connection. Raises JobNotFound if it is not there."""
        pauses, lagging = growing(LOOK_FIRST, LOOK_MOST, LOOK_FACTOR), monotonic() + LAG_SECONDS
        outcome: Outcome | None = yield ask
        while outcome is None and self.seen and monotonic() < lagging:
            if only_reads := (yield self._statement("only_reads")):
                if (left := self.left()) <= 0:
                    raise self._over("was not seen to end in time: the server only reads, and does not have it yet")
                yield Pause(min(next(pauses), left))
            outcome = yield ask
            if not only_reads:  # it may have been promoted after the look before
                break
        found = self._there(outcome)
        self.seen = True
        return found

    def _there(self, outcome: Outcome | None) -> Outcome:
        if outcome is None:
            raise missing(self.job_id)
        return outcome

    def _listens(self) -> bool:
        return self.config.notify and self.config.listen_dsn is not None

    def _statement(self, name: str, **params: object) -> Statement[Any]:
        return Statement(text(f"wait_{name}", self.config.schema), params, _first)

    def _over(self, why: str) -> ResultTimeout:
        return ResultTimeout(f"job {self.job_id} {why}", job_id=self.job_id)


def find_outcome(job_id: int, schema: str) -> Statement[Outcome | None]:
    """Ask for the state of a job; None if no job has this id."""
    return Statement(text("wait_outcome", schema), {"id": job_id}, lambda rows: Outcome(*rows[0]) if rows else None)


def missing(job_id: int) -> JobNotFound:
    return JobNotFound(
        f"job {job_id} is not there: its transaction is open or was rolled back, or retention has removed it",
        job_id=job_id,
    )


# The drivers ---------------------------------------------------------------------------------------------------------


def see(wait: Wait) -> Outcome:
    """Wait for the end of the job in this thread."""
    import psycopg

    with _first_connect(wait):
        conn = _connect(wait)
    while True:
        with conn:
            try:
                return _play(conn, wait)
            except psycopg.OperationalError as error:
                if not _passes(conn, error):
                    raise
                wait.lost(error)
        for pause in growing(CONNECT_FIRST, CONNECT_MOST, CONNECT_FACTOR):
            sleep(pause)
            try:
                conn = _connect(wait)
                break
            except psycopg.OperationalError as error:
                wait.lost(error)


async def asee(wait: Wait) -> Outcome:
    """Wait for the end of the job on this loop."""
    import asyncio  # not at the top: slow to import for a process that only enqueues, or shows --help

    import psycopg

    with _first_connect(wait):
        conn = await _aconnect(wait)
    while True:
        async with conn:
            try:
                return await _aplay(conn, wait)
            except psycopg.OperationalError as error:
                if not _passes(conn, error):
                    raise
                wait.lost(error)
        for pause in growing(CONNECT_FIRST, CONNECT_MOST, CONNECT_FACTOR):
            await asyncio.sleep(pause)
            try:
                conn = await _aconnect(wait)
                break
            except psycopg.OperationalError as error:
                wait.lost(error)


@contextmanager
def _first_connect(wait: Wait) -> Iterator[None]:
    """An error of the first connection is the caller's. If a limit made it, and no time is left, ResultTimeout is."""
    import psycopg

    began = monotonic()
    try:
        yield
    except psycopg.OperationalError as error:
        if monotonic() - began >= LIMIT_LEAST:
            wait.late(error)
        raise


def _passes(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], error: psycopg.OperationalError) -> bool:
    """Whether the wait goes on after this error: the connection is lost, or a standby has cancelled a look in favour of
    what it replays."""
    return conn.closed or (error.sqlstate or "").startswith("40")


def _play(conn: psycopg.Connection[Any], wait: Wait) -> Outcome:
    """Take the steps of the wait. At its end, also after an error, our row is removed if the connection lives."""
    import psycopg

    steps = wait.steps(conn.info.backend_pid)
    answer: Any = None
    try:
        while True:
            match steps.send(answer):
                case Statement() as statement:
                    with _bounded(conn, wait):
                        answer = drivers.run(conn, statement)
                case Try(statement):
                    answer = _try(conn, wait, statement)
                case Listen(channel):
                    with _bounded(conn, wait):
                        conn.execute(_listen(channel))
                case Pause(seconds):
                    _pause(conn, seconds)
    except StopIteration as end:
        return cast("Outcome", end.value)
    finally:
        if wait.waiter is not None and not conn.closed:
            with suppress(psycopg.OperationalError):  # the leader prunes rows that are left
                _try(conn, wait, wait.leave().statement)


def _try(conn: psycopg.Connection[Any], wait: Wait, statement: Statement[Any]) -> Any:
    """The answer; None if the server refuses the statement. Raises OperationalError if the connection is lost."""
    import psycopg

    try:
        with _bounded(conn, wait):
            return drivers.run(conn, statement)
    except psycopg.Error:
        if conn.closed:
            raise
        return None


def _pause(conn: psycopg.Connection[Any], seconds: float) -> None:
    """Wait for a notification. The timeout of `notifies` is measured by a clock that a test may have stopped."""
    from select import POLLIN, poll

    if not list(conn.notifies(timeout=0)):
        socket = poll()
        socket.register(conn.fileno(), POLLIN)
        socket.poll(1000.0 * seconds)
        for _ in conn.notifies(timeout=0):
            pass


async def _aplay(conn: psycopg.AsyncConnection[Any], wait: Wait) -> Outcome:
    import asyncio

    import psycopg

    steps = wait.steps(conn.info.backend_pid)
    answer: Any = None
    try:
        while True:
            match steps.send(answer):
                case Statement() as statement:
                    answer = await _aanswer(conn, wait, drivers.arun(conn, statement), steps)
                case Try(statement):
                    answer = await _aanswer(conn, wait, _atry(conn, statement), steps)
                case Listen(channel):
                    await _aanswer(conn, wait, conn.execute(_listen(channel)))
                case Pause(seconds):
                    with suppress(TimeoutError):  # by the loop's clock: that of `notifies` a test may have stopped
                        async with asyncio.timeout(seconds):
                            async for _ in conn.notifies(stop_after=1):
                                pass
    except StopIteration as end:
        return cast("Outcome", end.value)
    finally:
        if wait.waiter is not None and not conn.closed:
            with suppress(psycopg.OperationalError):
                await _aanswer(conn, wait, _atry(conn, wait.leave().statement))


async def _atry(conn: psycopg.AsyncConnection[Any], statement: Statement[Any]) -> Any:
    import psycopg

    try:
        return await drivers.arun(conn, statement)
    except psycopg.Error:
        if conn.closed:
            raise
        return None


async def _aanswer(
    conn: psycopg.AsyncConnection[Any], wait: Wait, asking: Coroutine[Any, Any, Any], steps: Steps | None = None
) -> Any:
    """Wait for the answer. If the wait is cancelled meanwhile, the answer is read all the same.

    The steps get it, because it may be the number of our row. If the query were cancelled, it would be unknown whether
    the server has run it.
    """
    import asyncio

    doing = asyncio.ensure_future(asking)
    with _bounded_on_loop(conn, wait.patience()):
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            with _bounded_on_loop(conn, LEAVE_SECONDS):
                while not doing.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([doing])
            if not doing.cancelled() and doing.exception() is None and steps is not None:
                with suppress(StopIteration, Error):  # the cancellation is raised instead
                    steps.send(doing.result())
            raise


@contextmanager
def _bounded(conn: psycopg.Connection[Any], wait: Wait) -> Iterator[None]:
    """If there is no answer in time, break the connection: the call that waits for it gets an OperationalError."""
    from pgqueue.database.dead_link import hang_up

    with _after(wait.patience(), partial(hang_up, conn)):
        yield


@contextmanager
def _after(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Call this if the block lasts longer. In a thread of its own: a handler may wait here (see alarms)."""
    from threading import Timer

    timer = Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _bounded_on_loop(conn: psycopg.AsyncConnection[Any], seconds: float) -> Iterator[None]:
    from asyncio import get_running_loop

    from pgqueue.database.dead_link import hang_up

    timer = get_running_loop().call_later(seconds, hang_up, conn)
    try:
        yield
    finally:
        timer.cancel()


def connect(config: Config) -> psycopg.Connection[Any]:
    """A connection for one look, to a server that can be written if the address has one."""
    import psycopg

    from pgqueue.database import embedded, primary

    dsn = embedded.resolve(config.require_dsn())
    options: dict[str, Any] = {"autocommit": True, "prepare_threshold": None, "client_encoding": "utf8"}
    return primary.connect(psycopg.Connection, dsn, after=_after, **(connect_timeout(dsn) | options))


def _connect(wait: Wait) -> psycopg.Connection[Any]:
    import psycopg

    from pgqueue.database import embedded, primary

    dsn = embedded.resolve(wait.dsn())
    return primary.connect(psycopg.Connection, dsn, patience=wait.patience(), after=_after, **wait.options(dsn))


async def _aconnect(wait: Wait) -> psycopg.AsyncConnection[Any]:
    import psycopg

    from pgqueue.database import embedded, primary
    from pgqueue.database.dead_link import opened

    dsn = await embedded.aresolve(wait.dsn())
    options = wait.options(dsn)
    opening = primary.aconnect(psycopg.AsyncConnection, dsn, patience=wait.patience(), **options)
    # A name may have many addresses, and resolving it may take long: all together may take no longer than the wait, or
    # what the hosts may take that are named.
    hosts = float(options.get("connect_timeout", 0)) * primary.named_hosts(dsn)
    return await opened(opening, None if wait.end == inf else max(hosts, wait.left()) + 1.0)


def _listen(channel: str) -> bytes:
    """The LISTEN for this channel. It needs no escaping: a checked schema name, fixed text and digits."""
    return f'LISTEN "{channel}"'.encode()


def growing(first: float, most: float, factor: float) -> Iterator[float]:
    """Endless numbers: `first`, then larger by `factor` each time, up to `most`."""
    while True:
        yield min(first, most)
        first = min(most, first * factor)


def ending(timeout: float | None) -> float:
    """The monotonic time at which a wait with this timeout is over."""
    return inf if timeout is None else monotonic() + timeout


def _first(rows: list[Row]) -> Any:
    return rows[0][0] if rows else None
