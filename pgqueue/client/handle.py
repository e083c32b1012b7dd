"""What `enqueue` returns: the id of the new job, and the way to ask about it later.

A handle has no connection, because it outlives the application's transaction in which it was made. It asks through the
configured DSN. It sees what other sessions see: nothing until that transaction has committed. Only `info` asks on a
connection that it is given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pgqueue.client.wait import Outcome, Wait, asee, connect, ending, missing, see
from pgqueue.config import config
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text
from pgqueue.errors import Error, JobCancelled, JobFailed, JobTimeout
from pgqueue.jobs.values import Duration, check_id, seconds
from pgqueue.options import checks_options

if TYPE_CHECKING:
    from pgqueue.admin.queries import JobInfo

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class JobHandle(Generic[R]):
    """One enqueued job; `R` is what its task returns.

    `created` says whether this enqueue made the job. If it did not, this is the job that has the unique key, and
    `replaced` says whether this enqueue changed it.

    A job that was staged in an outbox has no id before a relay has delivered it: `id` is None, and `staged_id` the
    number of its row. It cannot be asked for here.
    """

    id: int
    created: bool = True
    replaced: bool = False
    staged_id: int | None = None

    @property
    def state(self) -> str:
        """The job's state now, such as 'available' or 'completed', read on a connection of its own.

        Raises JobNotFound while the enqueuing transaction is open, after its rollback, and after retention has removed
        the job. Raises NotConfigured without a DSN.

        If the address has several servers, it is read on the one that can be written. If none can, a standby is read:
        the state may be an older one, and a new job not there yet.
        """
        self._refuse_staged()
        with connect(config()) as conn:
            state = drivers.run(conn, find_state(self.id, config().schema))
        if state is None:
            raise missing(self.id)
        return state

    def info(self, conn: object) -> JobInfo:
        """Everything about the job, read on this connection: `pgqueue.get(conn, job.id)`.

        In the transaction that enqueued the job it is there at once. Raises JobNotFound as `get` does.

            assert job.info(conn).state == "available"
        """
        return drivers.run(conn, self._one())

    async def ainfo(self, conn: object) -> JobInfo:
        """`info` for async connections."""
        return await drivers.arun(conn, self._one())

    def result(self, timeout: Duration | None = None) -> R:
        """Wait until the job has ended and return its handler's value as plain JSON: a dataclass is a dict here.

        `timeout` is in seconds; None waits for ever. The wait opens its own connection, to the `listen_dsn` if there is
        one. A NOTIFY ends it within milliseconds. If LISTEN is not possible, it looks every 250 ms. Call it outside of
        the transaction that enqueued the job, after its COMMIT.

        It raises:
        - JobFailed: the job failed; the traceback of the last attempt is a note.
        - JobTimeout: the last attempt ran longer than its timeout.
        - JobCancelled: the job was cancelled.
        - ResultTimeout: the job has not ended within `timeout`; it goes on.
        - JobNotFound: no job has this id, or the enqueuing transaction is still open.
        - NotConfigured: there is no DSN.

        JobTimeout and ResultTimeout are both a TimeoutError: catch them by name.

            print(job.result(timeout=30))
        """
        return cast("R", _value(self.id, see(self._wait(timeout))))

    async def aresult(self, timeout: Duration | None = None) -> R:
        """`result` for async code; its connection is async, too."""
        return cast("R", _value(self.id, await asee(self._wait(timeout))))

    def _one(self) -> Statement[JobInfo]:
        from pgqueue.admin.queries import one  # imported here: an enqueue needs none of it

        self._refuse_staged()
        return one(self.id, config().schema)

    def _refuse_staged(self) -> None:
        if self.staged_id is not None:
            raise Error(f"staged job {self.staged_id}: it has no id yet; a relay delivers it to the queue")

    def _wait(self, timeout: Duration | None) -> Wait:
        self._refuse_staged()
        return Wait(self.id, ending(None if timeout is None else seconds(timeout, "timeout")), config())


@checks_options
def result(job_id: int, timeout: Duration | None = None) -> Any:
    """Wait for the end of the job with this id, and return its value: `JobHandle.result` where only the id is known.

    print(pgqueue.result(7, timeout=30))
    """
    job: JobHandle[Any] = JobHandle(check_id(job_id, "result"))
    return job.result(timeout)


@checks_options
async def aresult(job_id: int, timeout: Duration | None = None) -> Any:
    """`result` for async code."""
    job: JobHandle[Any] = JobHandle(check_id(job_id, "result"))
    return await job.aresult(timeout)


def find_state(job_id: int, schema: str) -> Statement[str | None]:
    """Ask for the state of a job; None if no job has this id."""
    return Statement(text("handle_state", schema), {"id": job_id}, _first)


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
    kind = JobTimeout if outcome.reason == "timeout" else JobFailed
    error = kind(f"job {job_id} failed ({outcome.reason}){f': {said}' if said else ''}", job_id=job_id)
    if traceback := last.get("traceback"):
        error.add_note(f"in its last attempt:\n{traceback}")
    return error


def _first(rows: list[Row]) -> Any:
    return rows[0][0] if rows else None
