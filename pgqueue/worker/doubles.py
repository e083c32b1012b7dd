"""What a worker does when a job cannot go where it has to, because a row of another table has its id.

Called by each service that moves jobs, after a violation of a unique index. First the sequences that lag are advanced:
else a new id might be given twice, too. Then one statement decides, whichever rows have met. A row that is another job
gets a new id; a second row of one job fails. Why no job is lost by that is said at the statement (doubles.sql).

The sequences may be set back between the two, as by a restore that is still going on. Then the new id, too, belongs to
another job or to what it has left, and the statement moves nothing. So all of it is sent again, `TRIES` times at most:
a service that moves jobs must not end for it. After the last the caller goes on as if nothing had been resolved: the
row is one that the server refuses (mover.py).
"""

from __future__ import annotations

import logging
import re

import psycopg

from pgqueue.database.backoff import one_line
from pgqueue.database.row_errors import meets_open_id
from pgqueue.database.sequences import advancing
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement
from pgqueue.database.triggers import trigger_of

log = logging.getLogger("pgqueue")

TRIES = 3
NEAR = 1_000
"""A sequence that lags gives one id after the other: so many on both sides of a doubled one are looked at, too."""
ID = re.compile(r"\(id\)=\((-?\d+)\)")
LEAST, MOST = -(2**63), 2**63 - 1


def is_double(error: BaseException) -> bool:
    """Whether the server says that a row of that id is there already. What a trigger of the application says is not
    meant."""
    return isinstance(error, psycopg.errors.UniqueViolation) and trigger_of(error) is None


def stands_twice(error: BaseException) -> bool:
    """Whether another row has the id. If that could not be resolved, it may be over soon: the row is locked just now,
    or its transaction is open."""
    return is_double(error) or meets_open_id(error)


async def resolve(session: Session, error: psycopg.Error, *, notify: bool) -> bool:
    """Resolve the id that this violation names, and those near it. Whether anything was put right.

    If not, the index is not one of these, the rows are locked just now, or no new id was free.
    """
    advanced, rows = await _resolved(session, _named(session, error, notify))
    for job_id, task, new_id, _, _ in rows:
        about = {"job_id": job_id}
        if new_id is not None:
            said = "job %d (%s) had the id of another job, as after a restore or a switchover: it is job %d now"
            log.warning(said, job_id, task, new_id, extra=about)
        else:
            said = "job %d (%s) had a second row, restored or inserted by hand; that row is failed: refused"
            log.error(said, job_id, task, extra=about)
    return bool(advanced or rows)


def _named(session: Session, error: psycopg.Error, notify: bool) -> list[Statement[list[Row]]]:
    """What resolves the id that the error names, as the server says it in any language: `(id)=(5)`."""
    named = ID.search(error.diag.message_detail or "")
    if named is None:
        return []
    low, high = max(LEAST, int(named[1]) - NEAR), min(MOST, int(named[1]) + NEAR)
    return [session.link.statement("doubles_resolve", low=low, high=high, notify=notify)]


async def _resolved(session: Session, statements: list[Statement[list[Row]]]) -> tuple[int, list[Row]]:
    """How many sequences were advanced, and the rows that were resolved."""
    for _ in range(TRIES):
        try:
            advanced, *answers = await session.run(advancing(session.link.schema, whole=False), *statements)
        except psycopg.errors.UniqueViolation as error:
            log.warning("the sequences were set back again, a new id was taken, too: %s", one_line(error))
        else:
            return advanced, [row for answer in answers for row in answer]
    return 0, []
