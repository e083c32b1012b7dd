"""What `enqueue` gives back: the id of the new job, and the way to ask about it later.

A handle knows no connection: it is made inside the application's transaction and outlives it, so it asks through the
configured DSN. It sees what other sessions see: nothing until that transaction has committed.

Waiting for a result is looking again, after 5 ms at first, 250 ms at most. No NOTIFY announces results: nobody can know
whether somebody listens, so every completion would have to send one, and a transaction with a NOTIFY holds a lock of
the whole database while it commits: completions, which wait for the disk there, would queue up behind each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from time import monotonic, sleep
from typing import Any, Generic, TypeVar, cast

from pgqueue import connections
from pgqueue.config import config
from pgqueue.errors import Error, JobCancelled, JobFailed, JobNotFound, ResultTimeout
from pgqueue.retry import seconds
from pgqueue.statements import Row, Statement, text

R = TypeVar("R")

LOOK_FIRST, LOOK_MOST, LOOK_FACTOR = 0.005, 0.25, 1.4  # seconds


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

        `timeout` in seconds; None waits for ever. Looks on a connection of its own, every 5 ms at first, every 250 ms
        later; only for outside of transactions: commit what enqueued the job first.

        Raises JobFailed (it says why, with the traceback of the last attempt as a note), JobCancelled, ResultTimeout
        (the job goes on), JobNotFound at once while the enqueuing transaction is open; NotConfigured without a DSN.

            print(job.result(timeout=30))
        """
        pauses, ask = _pauses(self.id, _end(timeout)), find_outcome(self.id, config().schema)
        with connections.connect(autocommit=True) as conn:
            outcome = connections.run(conn, ask)
            while not outcome.ended:
                sleep(next(pauses))
                outcome = connections.run(conn, ask)
        return cast("R", _value(self.id, outcome))

    async def aresult(self, timeout: float | timedelta | None = None) -> R:
        """`result` for async code; its connection is async, too."""
        import asyncio  # not at the top: whoever only enqueues, or asks for --help, need not pay 27 ms

        pauses, ask = _pauses(self.id, _end(timeout)), find_outcome(self.id, config().schema)
        async with await connections.aconnect(autocommit=True) as conn:
            outcome = await connections.arun(conn, ask)
            while not outcome.ended:
                await asyncio.sleep(next(pauses))
                outcome = await connections.arun(conn, ask)
        return cast("R", _value(self.id, outcome))


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


def _end(timeout: float | timedelta | None) -> float:
    return inf if timeout is None else monotonic() + seconds(timeout, "timeout")


def _pauses(job_id: int, end: float) -> Iterator[float]:
    """How long to wait after each look; ResultTimeout when the time is over."""
    pause = LOOK_FIRST
    while (left := end - monotonic()) > 0:
        yield min(pause, left)
        pause = min(LOOK_MOST, pause * LOOK_FACTOR)
    raise ResultTimeout(f"job {job_id} had not ended in time; it goes on", job_id=job_id)


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


def _first(rows: list[Row]) -> str | None:
    return str(rows[0][0]) if rows else None
