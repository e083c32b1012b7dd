"""`why`: the reasons for which a job does not run, is not finished, or is not there.

Called by applications and by the CLI, on any connection, in its own transaction. It only reads. It asks for the job,
then for what decides about jobs in its state: two to five statements, each bounded (`sql/admin/why.sql`). They are not
one snapshot. A job that has moved meanwhile is looked at anew.

    waiting    waiting.py   time, pauses, workers, slots, place in the queue
               keys.py      lock, limit, rate
    running    running.py
    ended      ended.py
    not there  missing.py
"""

from __future__ import annotations

import json
from typing import Any

from pgqueue.admin.audit import BULKS_MOST
from pgqueue.admin.queries import JobInfo, read_one
from pgqueue.admin.why import ended, keys, missing, nodes, running, waiting
from pgqueue.admin.why.reasons import CODES, Facts, Reason, Why
from pgqueue.database import shown
from pgqueue.database.asking import asks, named, twin
from pgqueue.database.statements import Statement
from pgqueue.database.steps import Steps
from pgqueue.jobs.keys import NODE
from pgqueue.jobs.states import WAITING
from pgqueue.jobs.values import check_id

ROUNDS = 5
"""How often a job that keeps moving is looked at."""
RECORDS_MOST = 100
"""The newest records of a job that are read."""


@asks
def why(conn: object, id: int) -> Steps[Why]:
    """Return why this job does not run, is not finished, has ended, or is not there; the reasons in the claim's order.

    Each reason has a `code` (see `CODES`), a sentence, numbers, and the jobs or sessions behind it. An id without a job
    is no error: then the reasons say what may have become of it.

        for reason in pgqueue.why(conn, 4711).reasons:
            print(reason.code, reason.text)
    """
    check_id(id, "why")
    job = None
    for _ in range(ROUNDS):
        job = yield named("queries_get", read_one, id=id)
        if job is None:
            facts = yield _facts("why_missing", id=id)
            return _answer(id, None, missing.reasons(id, facts), facts)
        if job.state in WAITING:
            found = yield from _waiting(job)
        elif job.state == "running":
            found = yield from _running(job)
        else:
            found = yield from _ended(job)
        if found is not None:
            return found
    moving = Reason("about_to_run", f"it has changed its state {ROUNDS} times while it was looked at")
    return _answer(id, job, [moving], (yield _facts("why_now")))


awhy = twin(why)
"""`why` for async connections."""


def _waiting(job: JobInfo) -> Steps[Why | None]:
    """The answer for a waiting job; None if it has moved."""
    facts = yield _facts("why_waiting", id=job.id, queue=job.queue, task=job.task)
    place = facts["place"]
    if place is None or place["state"] != job.state:
        return None
    found, read_all = waiting.until_a_slot(job, facts), True
    if waiting.is_unserved(found):
        found = waiting.with_close_names(job, found, (yield _facts("why_names")))
    if job.state == "available":
        [(n, whole, pace, urgent)] = yield named("why_lane", id=job.id)
        if whole is None:
            return None
        found += waiting.lane(job, n, urgent, whole, pace)
        read_all = whole
    wanted = keys.wanted(job, holds=place["holds"])
    if wanted and wanted[0].startswith(NODE):
        said = yield _facts("why_node", id=job.id)
        if said is None:
            return None
        return _answer(job.id, job, found + nodes.reasons(said), facts)
    for key in wanted:
        params = {"id": job.id, "rank": place["rank"], "key": key, "lock_limit": place["lock_limit"] or 1}
        said = yield _facts("why_key", **params)
        found += keys.reasons(job, key, said)
        read_all = read_all and said["whole"]
    if not found:
        found = [waiting.nothing(read_all)]
    return _answer(job.id, job, found, facts)


def _running(job: JobInfo) -> Steps[Why | None]:
    """The answer for a running job; None if it has moved."""
    facts = yield _facts("why_running", id=job.id)
    if facts is None:
        return None
    by = (yield _cancelled_by(job))["by"] if facts["requests"] else ()
    return _answer(job.id, job, running.reasons(job, facts, by), facts)


def _ended(job: JobInfo) -> Steps[Why]:
    """The answer for a job that has ended."""
    if job.state == "cancelled":
        facts = yield _cancelled_by(job)
        return _answer(job.id, job, ended.reasons(job, facts["by"]), facts)
    return _answer(job.id, job, ended.reasons(job, ()), (yield _facts("why_now")))


def _cancelled_by(job: JobInfo) -> Statement[Any]:
    """The operators that have cancelled the job; of a job that was retried, only those since then."""
    ended_at = None if job.finished_at is None else str(job.finished_at)
    return _facts("why_cancelled_by", job=job.id, ended_at=ended_at, n=RECORDS_MOST, most=BULKS_MOST)


def _facts(name: str, **params: object) -> Statement[Any]:
    """The statement that asks for these facts; None if it finds no row."""
    return named(name, lambda rows: json.loads(rows[0][0]) if rows else None, **params)


def _answer(id: int, job: JobInfo | None, found: list[Reason], facts: Facts) -> Why:
    at = shown.moment(facts["now"])
    assert at is not None and all(reason.code in CODES for reason in found)
    return Why(id, None if job is None else job.state, tuple(found), at, job)
