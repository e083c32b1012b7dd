"""`stack`: where the handler of a running job stands just now, asked of its worker through the database.

Called by applications and by the CLI. A request is a row; the worker answers in it, and then the row is deleted. The
worker looks for requests with each heartbeat, and at once if it hears a NOTIFY. So this takes a third of the lease at
most, unless the worker is in trouble. It reads no value of the handler, only files, lines and names.

Two transactions at least: the worker must see the request. So the connection is in autocommit mode.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from time import sleep
from typing import Any

from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.asking import named
from pgqueue.database.statements import Row, Statement
from pgqueue.errors import InvalidOption, JobNotFound, ResultTimeout
from pgqueue.jobs.values import check_id
from pgqueue.options import checks_options
from pgqueue.steady_clock import monotonic

LOOK_SECONDS = 0.05
PATIENCE = 5.0
"""Seconds beside a third of the worker's lease, within which it answers if all is well."""


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One call of a stack: the file, the line in it, and the name of the function."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.name}'


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a job stands. `frames` are outermost first, from the handler on; `left_out` more of them were not shown.

    `where` is `thread` for a sync handler, `task` for an async one, and `waiting` if the worker has the job and does
    not run it just now: then there are no frames.
    """

    job: int
    worker: int | None
    process: str | None
    where: str
    frames: tuple[StackFrame, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was made, and the worker that is to answer it."""

    id: int
    job: int
    worker: int | None
    process: str | None
    lease: float
    beat_age: float | None

    def patience(self, timeout: float | None) -> float:
        """How many seconds to wait for the answer."""
        return self.lease / 3 + PATIENCE if timeout is None else timeout

    def unanswered(self, seconds: float) -> ResultTimeout:
        """The error of a worker that has not answered in time."""
        where = self._where()
        age = "" if self.beat_age is None else f"; its last heartbeat was {self.beat_age:.0f} s old when it was asked"
        return ResultTimeout(
            f"{where} has not answered for job {self.job} within {seconds:g} s{age}",
            job_id=self.job,
        )

    def moved(self, worker: int) -> ResultTimeout:
        """The error of a worker that has lost the job before it answered: another worker runs it, and has answered."""
        return ResultTimeout(
            f"{self._where()} has not answered for job {self.job}, which was given to worker {worker} meanwhile: "
            "ask again",
            job_id=self.job,
        )

    def _where(self) -> str:
        return f"worker {self.worker} ({self.process})" if self.process else f"worker {self.worker}"


@checks_options
def stack(conn: object, id: int, timeout: float | None = None) -> Stack:
    """Return where the handler of this running job stands, as its worker says within `timeout` seconds.

    The default is a third of the worker's lease and 5 s. The connection must be in autocommit mode. Raises JobNotFound
    if the job does not run, ResultTimeout if its worker does not answer, or another worker is given the job meanwhile.

        with pgqueue.connect(autocommit=True) as conn:
            print(*pgqueue.stack(conn, 4711).frames, sep="\\n")
    """
    _check(conn)
    request = drivers.run(conn, asking(id))
    try:
        seconds = request.patience(timeout)
        end = monotonic() + seconds
        while (found := drivers.run(conn, answer(request))) is None:
            if monotonic() >= end:
                raise request.unanswered(seconds)
            sleep(LOOK_SECONDS)
        return found
    finally:
        drivers.run(conn, forgetting(request))


@checks_options
async def astack(conn: object, id: int, timeout: float | None = None) -> Stack:
    """`stack` for async connections."""
    _check(conn)
    request = await drivers.arun(conn, asking(id))
    try:
        seconds = request.patience(timeout)
        end = monotonic() + seconds
        while (found := await drivers.arun(conn, answer(request))) is None:
            if monotonic() >= end:
                raise request.unanswered(seconds)
            await asyncio.sleep(LOOK_SECONDS)
        return found
    finally:
        await drivers.arun(conn, forgetting(request))


def asking(id: int) -> Statement[Request]:
    """The statement that asks for the stack of this job. Raises JobNotFound if the job does not run."""
    check_id(id, "stack")

    def read(rows: list[Row]) -> Request:
        if not rows:
            raise JobNotFound(f"job {id} does not run: it has no stack; `pgqueue why {id}` says more", job_id=id)
        request, worker, host, pid, lease, beat_age, _ = rows[0]
        return Request(request, id, worker, host and f"{host}:{pid}", lease or 15.0, beat_age)

    return named("stack_ask", read, id=id, notify=client()[1])


def answer(request: Request) -> Statement[Stack | None]:
    """The statement that looks for the answer. Raises JobNotFound if the job has ended before it came."""

    def read(rows: list[Row]) -> Stack | None:
        said, runs = rows[0] if rows else (None, False)
        if said is not None:
            return _stack(request, json.loads(said))
        if not runs:
            raise JobNotFound(f"job {request.job} has ended before its worker answered", job_id=request.job)
        return None

    return named("stack_read", read, request=request.id)


def forgetting(request: Request) -> Statement[None]:
    """The statement that deletes the request."""
    return named("stack_forget", lambda rows: None, request=request.id)


def _stack(request: Request, said: dict[str, Any]) -> Stack:
    if said["worker"] != request.worker:
        raise request.moved(said["worker"])
    frames = tuple(StackFrame(*frame) for frame in said["frames"])
    return Stack(request.job, request.worker, request.process, said["where"], frames, said["left_out"])


def _check(conn: object) -> None:
    drivers.check_connection(conn)
    if not drivers.alone(conn):
        raise InvalidOption("stack: give a connection in autocommit mode; the worker must see the request")
