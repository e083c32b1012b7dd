"""Rows that the server refuses to have claimed: fewer jobs are asked for, down to one, and that one is put aside.

Part of the fetch, called by the fetcher. Claims nothing itself.

The server may refuse a claim for a value of one row, or not get through with it in time (statement_timeout). Then
nothing was taken, and the next claims of that kind ask for fewer jobs, down to one. That one is looked up, and claimed
by its position alone. If it is refused again, it is put aside: failed, reason `refused`. So a bad row costs a few
claims, and every other job is claimed as ever. If every job seems bad, it is not the rows: after REFUSED_MOST of them,
the error goes to the loop, which waits before it goes on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import psycopg

from pgqueue.database.backoff import without_values
from pgqueue.database.row_errors import refuses_row
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row
from pgqueue.jobs.job import Lane
from pgqueue.jobs.outcomes import MESSAGE_MOST
from pgqueue.worker.fetch.kinds import Kind
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

# After a claim was refused for a row, the next one asks for a part of its jobs. So many jobs may be put aside one after
# the other, without a claim between them that took any.
NARROWER = 8
REFUSED_MOST = 20


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """The job that a refused claim of one would have taken."""

    lane: Lane
    pos: int
    id: int
    task: str

    @staticmethod
    def read(row: Row, keyed: bool) -> RefusedRow:
        """From the answer of a kind's `first` statement."""
        queue, rank, pos, id, task = row
        return RefusedRow((queue, rank, keyed), pos, id, task)


class RefusedRows:
    """What to do after the server has refused a claim."""

    def __init__(self, session: Session, state: WorkerState) -> None:
        self._session = session
        self._state = state
        self._in_a_row = 0
        """How many jobs were put aside one after the other, without a claim that took any."""

    def claimed(self, kind: Kind, n: int, free: int, *, any: bool) -> None:
        """A claim of n jobs was not refused: the next one of this kind may ask for more, up to the room there is."""
        if kind.most is not None:
            kind.most = None if 2 * n >= free else 2 * n
        if any:
            self._in_a_row = 0

    def narrow(self, kind: Kind, n: int, error: psycopg.Error) -> bool:
        """A claim of n jobs was refused: the next one asks for fewer. Whether n was one: then the row is to be found.

        Raises the error if it was one job and the server was slow, which is no fault of the job.
        """
        kind.most = max(1, n // NARROWER)
        if n > 1:
            log.warning("a claim of %d jobs was refused (%s): fewer are claimed at once", n, without_values(error))
            return False
        if isinstance(error, psycopg.errors.QueryCanceled):
            raise error
        return True

    async def put_aside(self, row: RefusedRow, error: psycopg.Error) -> None:
        """This job fails, reason `refused`. If its arguments or headers cannot be read at all, without them.

        Raises the error after REFUSED_MOST jobs in a row.
        """
        said = without_values(error)
        params: dict[str, Any] = {
            "id": row.id,
            "pos": row.pos,
            "worker_id": self._state.id,
            "error_type": type(error).__name__,
            "message": f"the server refuses to start this job: {said}"[:MESSAGE_MOST],
            "notify": self._state.settings.notify,
        }
        link = self._session.link
        try:
            [rows] = await self._session.run(link.statement("fetch_put_aside", **params, bare=False))
        except psycopg.Error as again:
            if not refuses_row(again):
                raise
            [rows] = await self._session.run(link.statement("fetch_put_aside", **params, bare=True))
        if rows:
            name = f"job {row.id} ({row.task})"
            log.error("%s cannot be started: it is failed, reason refused (%s)", name, said, extra={"job_id": row.id})
        self._in_a_row += 1
        if self._in_a_row >= REFUSED_MOST:
            raise error
