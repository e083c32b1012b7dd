"""Rows that the server refuses to have claimed: fewer jobs are asked for, down to one, and that one is put aside.

Part of the fetch, called by the fetcher. Claims nothing itself.

The server may refuse a claim for a value of one row, or not get through with it in time (statement_timeout). Then
nothing was taken, and the next claims of that kind ask for fewer jobs, down to one. That one is looked up, and claimed
by its position alone. If it is refused again, it is put aside: failed, reason `refused`. So a bad row costs a few
claims, and every other job is claimed as ever. If every job seems bad, it is not the rows: after REFUSED_MOST of them,
the error goes to the loop, which waits before it goes on.

A row stays if it cannot be put aside either: the application may have a check on `job_dead`, too. It also stays if a
trigger of the application has raised, or if another row has its id, which may be of a transaction that is still open:
none of it says anything of the row. This worker leaves it alone for a while (left_alone.py).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import psycopg

from pgqueue.database.backoff import without_values
from pgqueue.database.row_errors import refuses_move
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row
from pgqueue.database.triggers import trigger_of
from pgqueue.jobs.job import Lane
from pgqueue.jobs.outcomes import MESSAGE_MOST
from pgqueue.worker.doubles import stands_twice
from pgqueue.worker.fetch.kinds import Kind
from pgqueue.worker.left_alone import SOON_SECONDS, LeftAlone, Notice
from pgqueue.worker.mover import REFUSED_MOST
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

# After a claim was refused for a row, the next one asks for a part of its jobs. REFUSED_MOST jobs may be put aside one
# after the other, without a claim between them that took any.
NARROWER = 8
LEFT_SECONDS = 60.0


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
        self._left = LeftAlone[tuple[Lane, int]](Notice("cannot be started, and stays"), seconds=LEFT_SECONDS)
        """Positions of rows that can be neither claimed nor put aside."""

    def left_out(self) -> Collection[tuple[Lane, int]]:
        """The positions that are not to be asked for now."""
        return self._left.rows()

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
        """This job fails, reason `refused`; without its arguments and headers if these cannot be read. Or it stays.

        Raises the error after REFUSED_MOST jobs in a row.
        """
        self._in_a_row += 1
        if _may_be_over_soon(error):
            self._leave(row, error)
        else:
            await self._fail(row, error)
        if self._in_a_row >= REFUSED_MOST:
            raise error

    async def _fail(self, row: RefusedRow, error: psycopg.Error) -> None:
        said = without_values(error)
        params: dict[str, Any] = {
            "id": row.id,
            "pos": row.pos,
            "worker_id": self._state.id,
            "error_type": type(error).__name__,
            "message": f"the server refuses to start this job: {said}"[:MESSAGE_MOST],
            "notify": self._state.settings.notify,
        }
        link, last = self._session.link, error
        for bare in (False, True):
            try:
                [rows] = await self._session.run(link.statement("fetch_put_aside", **params, bare=bare))
            except psycopg.Error as again:
                if not refuses_move(again):
                    raise
                last = again
            else:
                if rows:
                    message = "job %d (%s) cannot be started: it is failed, reason refused (%s)"
                    log.error(message, row.id, row.task, said, extra={"job_id": row.id})
                return
        self._leave(row, last)

    def _leave(self, row: RefusedRow, error: psycopg.Error) -> None:
        """This row stays where it is. It is not asked for, so that no other job waits for it."""
        seconds = SOON_SECONDS if _may_be_over_soon(error) else LEFT_SECONDS
        name, extra = f"fetch: job {row.id} ({row.task})", {"job_id": row.id}
        self._left.leave((row.lane, row.pos), name, error, seconds=seconds, extra=extra)


def _may_be_over_soon(error: psycopg.Error) -> bool:
    """Whether the error says nothing of the row: a trigger has raised, or another row has its id."""
    return trigger_of(error) is not None or stands_twice(error)
