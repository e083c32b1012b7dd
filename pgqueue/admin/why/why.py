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
from pgqueue.admin.why import ended, keys, missing, running, waiting
from pgqueue.admin.why.reasons import CODES, Facts, Reason, Why
from pgqueue.config import config
from pgqueue.database import shown
from pgqueue.database.statements import Row, Statement, text
from pgqueue.database.steps import Steps, adrive, drive
from pgqueue.jobs.states import WAITING
from pgqueue.options import check_id, checks_options

ROUNDS = 5
"""How often a job that keeps moving is looked at."""
RECORDS_MOST = 100
"""The newest records of a job that are read."""


@checks_options
def why(conn: object, id: int) -> Why:
    """Return why this job does not run, is not finished, has ended, or is not there; the reasons in the claim's order.

    Each reason has a `code` (see `CODES`), a sentence, numbers, and the jobs or sessions behind it. An id without a job
    is no error: then the reasons say what may have become of it.

        for reason in pgqueue.why(conn, 4711).reasons:
            print(reason.code, reason.text)
    """
    return drive(conn, explaining(id))


@checks_options
async def awhy(conn: object, id: int) -> Why:
    """`why` for async connections."""
    return await adrive(conn, explaining(id))


def explaining(id: int) -> Steps[Why]:
    """The steps of `why`."""
    check_id(id, "why")
    schema, job = config().schema, None
    for _ in range(ROUNDS):
        job = read_one((yield Statement(text("queries_get", schema), {"id": id}, list)))
        if job is None:
            facts = yield from _asked("why_missing", schema, id=id)
            return _answer(id, None, missing.reasons(id, facts), facts)
        if job.state in WAITING:
            found = yield from _waiting(job, schema)
        elif job.state == "running":
            found = yield from _running(job, schema)
        else:
            found = yield from _ended(job, schema)
        if found is not None:
            return found
    moving = Reason("about_to_run", f"it has changed its state {ROUNDS} times while it was looked at")
    return _answer(id, job, [moving], (yield from _asked("why_now", schema)))


def _waiting(job: JobInfo, schema: str) -> Steps[Why | None]:
    """The answer for a waiting job; None if it has moved."""
    facts = yield from _asked("why_waiting", schema, id=job.id, queue=job.queue, task=job.task)
    place = facts["place"]
    if place is None or place["state"] != job.state:
        return None
    found, read_all = waiting.until_a_slot(job, facts), True
    if waiting.is_unserved(found):
        names = yield from _asked("why_names", schema)
        found = waiting.with_close_names(job, found, names)
    if job.state == "available":
        [(n, whole, pace, urgent)] = yield Statement(text("why_lane", schema), {"id": job.id}, list)
        if whole is None:
            return None
        found += waiting.lane(job, n, urgent, whole, pace)
        read_all = whole
    for key in keys.wanted(job, holds=place["holds"]):
        params = {"id": job.id, "rank": place["rank"], "key": key, "lock_limit": place["lock_limit"] or 1}
        said = yield from _asked("why_key", schema, **params)
        found += keys.reasons(job, key, said)
        read_all = read_all and said["whole"]
    if not found:
        found = [waiting.nothing(read_all)]
    return _answer(job.id, job, found, facts)


def _running(job: JobInfo, schema: str) -> Steps[Why | None]:
    """The answer for a running job; None if it has moved."""
    rows = yield Statement(text("why_running", schema), {"id": job.id}, list)
    if not rows:
        return None
    facts = json.loads(rows[0][0])
    by = (yield from _cancelled_by(job, schema))["by"] if facts["requests"] else ()
    return _answer(job.id, job, running.reasons(job, facts, by), facts)


def _ended(job: JobInfo, schema: str) -> Steps[Why]:
    """The answer for a job that has ended."""
    if job.state == "cancelled":
        facts = yield from _cancelled_by(job, schema)
        return _answer(job.id, job, ended.reasons(job, facts["by"]), facts)
    return _answer(job.id, job, ended.reasons(job, ()), (yield from _asked("why_now", schema)))


def _cancelled_by(job: JobInfo, schema: str) -> Steps[Any]:
    """The operators that have cancelled the job; of a job that was retried, only those since then."""
    ended_at = None if job.finished_at is None else str(job.finished_at)
    params = {"job": job.id, "ended_at": ended_at, "n": RECORDS_MOST, "most": BULKS_MOST}
    return (yield from _asked("why_cancelled_by", schema, **params))


def _asked(name: str, schema: str, **params: object) -> Steps[Any]:
    rows: list[Row] = yield Statement(text(name, schema), params, list)
    return json.loads(rows[0][0])


def _answer(id: int, job: JobInfo | None, found: list[Reason], facts: Facts) -> Why:
    at = shown.moment(facts["now"])
    assert at is not None and all(reason.code in CODES for reason in found)
    return Why(id, None if job is None else job.state, tuple(found), at, job)
