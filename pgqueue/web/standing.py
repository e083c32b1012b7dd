"""How one of several databases stands, in one row of the page of all: what the overview begins with.

Called by `source.py`, in one transaction that only reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pgqueue.admin.depth import Count, ameasured, queue_list
from pgqueue.admin.doctor import Finding, adiagnosis
from pgqueue.admin.history import ahistory
from pgqueue.admin.queries import astanding
from pgqueue.config import config
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text
from pgqueue.web.pages.queues_in_need import InNeed, in_need, ordered
from pgqueue.web.problems import Problem


@dataclass(frozen=True, slots=True)
class Standing:
    """`oldest`: seconds that the oldest job that could run has waited. `workers`: those that live."""

    number: int
    waiting: Count
    running: Count
    failed: int
    completed: int
    oldest: float | None
    workers: int
    findings: tuple[Finding, ...]
    in_need: tuple[InNeed, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """How a database stands; or why that is not known, and since when.

    `as_of`: the time of an older answer, while the next one is under way. `number`: the last one that the database has
    said, also if it is away.
    """

    standing: Standing | None = None
    problem: Problem | None = None
    since: datetime | None = None
    as_of: datetime | None = None
    number: int | None = None


async def standing(conn: object) -> Standing:
    """How the database of this connection stands now; `failed` and `completed` are of the last hour."""
    known = await ameasured(conn)
    status = await astanding(conn, known)
    diagnosis = await adiagnosis(conn, known)
    hour = await ahistory(conn, by="all")
    waiting = [status.states[name] for name in ("available", "blocked")]
    return Standing(
        await drivers.arun(conn, _number()),
        Count(sum(each.n for each in waiting), all(each.exact for each in waiting)),
        status.states["running"],
        sum(row.failed or 0 for row in hour),
        sum(row.completed or 0 for row in hour),
        max((queue.oldest for queue in queue_list(known) if queue.oldest is not None), default=None),
        sum(worker.state != "dead" for worker in status.workers),
        tuple(diagnosis.findings),
        in_need(ordered(known)),
    )


def _number() -> Statement[int]:
    """The statement that asks for the number of this database; 0 if it has none."""

    def read(rows: list[Row]) -> int:
        return int(rows[0][0]) if rows else 0

    return Statement(text("sequences_number", config().schema), {}, read)
