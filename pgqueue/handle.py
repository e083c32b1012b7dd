"""What `enqueue` gives back: the id of the new job, and the way to ask about it later.

A handle knows no connection: it is made inside the application's transaction and outlives it, so it asks through the
configured DSN. It sees what other sessions see: nothing until that transaction has committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from pgqueue import connections
from pgqueue.config import config
from pgqueue.errors import JobNotFound
from pgqueue.statements import Row, Statement, text

R = TypeVar("R")


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
            raise JobNotFound(
                f"job {self.id} is not there: its transaction is open or was rolled back, or retention has removed it",
                job_id=self.id,
            )
        return state


def find_state(job_id: int, schema: str) -> Statement[str | None]:
    """Ask for the state of a job; None if there is no such job."""
    return Statement(text("handle_state", schema), {"id": job_id}, _first)


def _first(rows: list[Row]) -> str | None:
    return str(rows[0][0]) if rows else None
