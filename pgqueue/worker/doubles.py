"""What a worker does when a job cannot go where it has to, because a row of another table has its id.

Called by each service that moves jobs, after a violation of a unique index. First the sequences that lag are advanced:
else a new id might be given twice, too. Then the statement decides. A row that is another job gets a new id; a second
row of one job fails. Why no job is lost by that is said at `resolve_doubles` in sql/fragments.sql.
"""

from __future__ import annotations

import logging
from typing import Any

from pgqueue.database.sequences import advancing
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Statement

log = logging.getLogger("pgqueue")


async def resolve(session: Session, *statements: Statement[list[tuple[Any, ...]]]) -> int:
    """Send these statements, which are made of `resolve_doubles`; return the number of rows that were resolved.

    If it is 0, the index is not one of these, or the rows are locked just now.
    """
    _, *answers = await session.run(advancing(session.link.schema, whole=False), *statements)
    rows = [row for answer in answers for row in answer]
    for job_id, task, new_id, _, _ in rows:
        about = {"job_id": job_id}
        if new_id is not None:
            said = "job %d (%s) had the id of another job, as after a restore or a switchover: it is job %d now"
            log.warning(said, job_id, task, new_id, extra=about)
        else:
            said = "job %d (%s) had a second row, restored or inserted by hand; that row is failed: refused"
            log.error(said, job_id, task, extra=about)
    return len(rows)
