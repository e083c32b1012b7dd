"""What `enqueue` gives back: the id of the new job, and the way to ask about it later.

A handle knows no connection: it is made inside the application's transaction and outlives it, so it asks through the
configured DSN. It sees what other sessions see: nothing until that transaction has committed.

Who waits for a result says so with a row in `job_waiter`; whoever ends that job, in whatever way, finds the row and
notifies the channel of this one job. Without waiters nobody notifies: a transaction with a NOTIFY holds a lock of the
whole database while it commits, and completions wait for the disk there. The order is: row committed, LISTEN, look.
An end that commits before the look is seen by it; one that commits after, and whose statement saw the row, is heard.
The one left over, whose statement began before the row was there, is found by looking again, as is every end where
LISTEN is of no use: behind a pooler, on a standby, without the right to write that row, with `notify=False`.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pgqueue import connections
from pgqueue.config import Config, config
from pgqueue.errors import Error, JobCancelled, JobFailed, JobNotFound, ResultTimeout
from pgqueue.retry import seconds
from pgqueue.statements import Row, Statement, text

if TYPE_CHECKING:
    import psycopg

R = TypeVar("R")

LOOK_FIRST, LOOK_MOST, LOOK_FACTOR = 0.005, 0.25, 1.4
"""Seconds between looks of one whom nobody tells: at first, at most; and how they grow."""
TOLD_FIRST, TOLD_MOST, TOLD_FACTOR = 0.01, 1.0, 3.0
"""The same for one who listens: he looks for the hint he missed, most likely in the first moment."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job stands that may have ended: what `result` returns or raises once it has."""

    state: str
    result: str | None
    reason: str | None
    error: str | None

    @property
    def ended(self) -> bool:
        return self.state in ("completed", "skipped", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class JobHandle(Generic[R]):
    """One enqueued job; `R` is what its task returns. `created` says whether this enqueue made it."""

    id: int
    created: bool = True

    @property
    def state(self) -> str:
        """The job's state now, such as 'available' or 'completed', read on a connection of its own.

        Raises JobNotFound while the enqueuing transaction is open, after its rollback, and when retention has removed
        the job; NotConfigured without a DSN.
        """
        with connections.connect(autocommit=True) as conn:
            state = connections.run(conn, find_state(self.id, config().schema))
        if state is None:
            raise _missing(self.id)
        return state

    def result(self, timeout: float | timedelta | None = None) -> R:
        """Wait until the job has ended and return what its handler returned, as plain JSON: a dataclass is a dict here.

        `timeout` in seconds; None waits for ever. Told by NOTIFY within milliseconds on a connection of its own, to the
        `listen_dsn` if there is one; where that is not possible it looks every 250 ms. Only for outside of
        transactions: commit what enqueued the job first.

        Raises JobFailed (it says why, with the traceback of the last attempt as a note), JobCancelled, ResultTimeout
        (the job goes on), JobNotFound at once while the enqueuing transaction is open; NotConfigured without a DSN.

            print(job.result(timeout=30))
        """
        wait = _Wait(self.id, _end(timeout), config())
        with wait.connect() as conn:
            return cast("R", _value(self.id, _see(conn, wait)))

    async def aresult(self, timeout: float | timedelta | None = None) -> R:
        """`result` for async code; its connection is async, too."""
        wait = _Wait(self.id, _end(timeout), config())
        async with await wait.aconnect() as conn:
            return cast("R", _value(self.id, await _asee(conn, wait)))


def find_state(job_id: int, schema: str) -> Statement[str | None]:
    """Ask for the state of a job; None if there is no such job."""
    return Statement(text("handle_state", schema), {"id": job_id}, _first)


def find_outcome(job_id: int, schema: str) -> Statement[Outcome]:
    """Ask how a job stands; JobNotFound if there is no such job."""

    def read(rows: list[Row]) -> Outcome:
        if not rows:
            raise _missing(job_id)
        return Outcome(*rows[0])

    return Statement(text("handle_outcome", schema), {"id": job_id}, read)


# Waiting -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Listen:
    """Hear of the end of this job from now on."""

    channel: str


@dataclass(frozen=True, slots=True)
class _Pause:
    """Wait until something is heard, but no longer than this."""

    seconds: float


_Steps = Generator[Statement[Any] | _Listen | _Pause, Any, Outcome]


@dataclass(slots=True)
class _Wait:
    """One wait for the end of a job: what to do next, on a connection of its own."""

    job_id: int
    end: float
    config: Config
    waiter: int | None = None
    """The number of our row in `job_waiter`, as long as it may be there."""

    def steps(self, pid: int) -> _Steps:
        """`pid` is what the connection says of its server's process."""
        ask = find_outcome(self.job_id, self.config.schema)
        outcome: Outcome = yield ask
        if not outcome.ended and self._listens() and self._left() > 0 and (yield self._statement("hears", pid=pid)):
            self.waiter = yield self._statement("wait", id=self.job_id)
            yield _Listen(f"{self.config.schema}.:ended.{self.job_id}")
            outcome = yield ask
        pauses = _growing(LOOK_FIRST, LOOK_MOST, LOOK_FACTOR)
        if self.waiter is not None:
            pauses = _growing(TOLD_FIRST, TOLD_MOST, TOLD_FACTOR)
        while not outcome.ended:
            if (left := self._left()) <= 0:
                raise ResultTimeout(f"job {self.job_id} had not ended in time; it goes on", job_id=self.job_id)
            yield _Pause(min(next(pauses), left))
            outcome = yield ask
        return outcome

    def leave(self) -> Statement[Any]:
        """Take our row away."""
        return self._statement("leave", waiter=self.waiter)

    def connect(self) -> psycopg.Connection[Any]:
        import psycopg

        from pgqueue import embedded

        return psycopg.connect(embedded.resolve(self._dsn()), autocommit=True, prepare_threshold=None)

    async def aconnect(self) -> psycopg.AsyncConnection[Any]:
        import asyncio  # not at the top: whoever only enqueues, or asks for --help, need not pay 27 ms

        import psycopg

        from pgqueue import embedded

        dsn = await asyncio.to_thread(embedded.resolve, self._dsn())
        return await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None)

    def _dsn(self) -> str:
        dsn = self.config.require_dsn()
        return self.config.listen_dsn or dsn

    def _listens(self) -> bool:
        return self.config.notify and self.config.listen_dsn is not None

    def _left(self) -> float:
        return self.end - monotonic()

    def _statement(self, name: str, **params: object) -> Statement[Any]:
        return Statement(text(f"handle_{name}", self.config.schema), params, _first)


def _see(conn: psycopg.Connection[Any], wait: _Wait) -> Outcome:
    """Take the steps of the wait; whatever ends it, no row is left where we can reach it."""
    steps = wait.steps(conn.info.backend_pid)
    answer: Any = None
    try:
        while True:
            match steps.send(answer):
                case Statement() as statement:
                    answer = connections.run(conn, statement)
                case _Listen(channel):
                    conn.execute(_listen(channel))
                case _Pause(seconds):
                    for _ in conn.notifies(timeout=seconds, stop_after=1):
                        pass
    except StopIteration as end:
        return cast("Outcome", end.value)
    finally:
        if wait.waiter is not None and not conn.closed:
            connections.run(conn, wait.leave())


async def _asee(conn: psycopg.AsyncConnection[Any], wait: _Wait) -> Outcome:
    steps = wait.steps(conn.info.backend_pid)
    answer: Any = None
    try:
        while True:
            match steps.send(answer):
                case Statement() as statement:
                    answer = await connections.arun(conn, statement)
                case _Listen(channel):
                    await conn.execute(_listen(channel))
                case _Pause(seconds):
                    async for _ in conn.notifies(timeout=seconds, stop_after=1):
                        pass
    except StopIteration as end:
        return cast("Outcome", end.value)
    finally:
        if wait.waiter is not None and not conn.closed:
            await connections.arun(conn, wait.leave())


def _listen(channel: str) -> bytes:
    """The schema is a checked name, the rest are digits."""
    return f'LISTEN "{channel}"'.encode()


def _growing(first: float, most: float, factor: float) -> Iterator[float]:
    """For ever: `first`, then more and more, up to `most`."""
    while True:
        yield min(first, most)
        first = min(most, first * factor)


def _end(timeout: float | timedelta | None) -> float:
    return inf if timeout is None else monotonic() + seconds(timeout, "timeout")


# What is returned and raised -----------------------------------------------------------------------------------------


def _value(job_id: int, outcome: Outcome) -> Any:
    match outcome.state:
        case "failed":
            raise _failed(job_id, outcome)
        case "cancelled":
            raise JobCancelled(f"job {job_id} was cancelled: {outcome.reason}", job_id=job_id)
        case _:
            return None if outcome.result is None else json.loads(outcome.result)


def _failed(job_id: int, outcome: Outcome) -> Error:
    last: dict[str, str | None] = json.loads(outcome.error) if outcome.error else {}
    said = ": ".join(text for text in (last.get("error_type"), last.get("message")) if text)
    error = JobFailed(f"job {job_id} failed ({outcome.reason}){f': {said}' if said else ''}", job_id=job_id)
    if traceback := last.get("traceback"):
        error.add_note(f"in its last attempt:\n{traceback}")
    return error


def _missing(job_id: int) -> JobNotFound:
    return JobNotFound(
        f"job {job_id} is not there: its transaction is open or was rolled back, or retention has removed it",
        job_id=job_id,
    )


def _first(rows: list[Row]) -> Any:
    return rows[0][0] if rows else None
