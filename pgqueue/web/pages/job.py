"""One job: what it is, its attempts in order, why it is where it is, what follows on it, and what was done by hand."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from pgqueue.admin.audit import AuditEntry, aaudit
from pgqueue.admin.bounded import cut_at
from pgqueue.admin.bulk.operations import acount_bulk
from pgqueue.admin.depth import Count
from pgqueue.admin.queries import STEPS_MOST, Attempt, JobInfo, JobStep, asearch
from pgqueue.admin.successors import SUCCESSORS_MOST, asuccessors, predecessor, retried
from pgqueue.admin.why.why import awhy
from pgqueue.jobs.outcomes import NO_FAILURES
from pgqueue.jobs.states import DONE
from pgqueue.web.attempts_line import WIDTH, line_of
from pgqueue.web.pages.jobs import hides_class
from pgqueue.web.pages.neighbours import neighbours
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.problems import Problem

CHANGES_MOST = 50
ALIKE_SHOWN = 5
"""So many other jobs that failed for the same cause are named."""

# Files of pgqueue that stand between a worker and the handler.
_OURS = re.compile(r'^\s+File "[^"]*[/\\]pgqueue[/\\](?:worker|client|jobs|database|testing)[/\\]')
_FRAME = re.compile(r'^\s+File "')


async def job(asked: Asked) -> Page:
    """The job as the only item, with `why`, `successors`, `same_cause` and `changes`; beside it its neighbours in the
    list that the visitor came from. Without such a job: what may have become of it, and 404."""
    id = asked.id
    found = await asked.read_shared(lambda conn: awhy(conn, id), "why", id)
    job = found.job
    if job is None:
        raise Problem(404, f"There is no job {id}", " ".join(_sentence(reason.text) for reason in found.reasons))
    changes = await asked.read_shared(lambda conn: aaudit(conn, job=id, limit=CHANGES_MOST), "changes of a job", id)
    ended = (job.id, job.state, job.finished_at)
    successors, _ = await asked.part_shared(lambda conn: asuccessors(conn, job), "successors", ended)
    item = plain(job) | {
        "key": job.key and asked.redaction.awaited(job.key),
        "why": plain(found.reasons),
        "predecessor": predecessor(job),
        "retried": retried(job),
        "successors": plain(successors),
        "successors_cut_at": cut_at(successors or (), SUCCESSORS_MOST),
        "steps": [plain(each) | {"attempt": _attempt_of(each, job)} for each in job.steps],
        "steps_cut_at": cut_at(job.steps, STEPS_MOST),
        "changes": [_change(each) for each in changes],
        "changes_cut_at": cut_at(changes, CHANGES_MOST),
        "error": _error(job),
        "same_cause": await _same_cause(asked, job),
    }
    beside = await neighbours(asked)
    shown = {"before": beside and beside.before, "next": beside and beside.next}
    view = {"now": found.at, "beside": beside, "line": line_of(job, found.at), "width": WIDTH}
    may = {"may_retry": {"bulk", "retry"} <= set(asked.rights)}
    return Page("job.html", [item], {"at": found.at, **shown}, view | may)


def _last_failed(job: JobInfo) -> Attempt | None:
    """The last attempt that says something of an error; None if there is none, or the job has completed since."""
    failed = [each for each in job.attempts if each.outcome not in NO_FAILURES]
    return failed[-1] if failed and job.state not in DONE else None


def _error(job: JobInfo) -> int | None:
    """The place among its attempts of the one whose error is told first."""
    last = _last_failed(job)
    return None if last is None else job.attempts.index(last)


async def _same_cause(asked: Asked, job: JobInfo) -> dict[str, Any] | None:
    """The failed jobs of its task whose error has the same class: how many others, and the newest of them.

    None if the job has no error, or if what is hidden would be found out.
    """
    last = _last_failed(job)
    if last is None:
        return None
    error_type = last.error_type or last.outcome
    if hides_class(error_type, asked.redaction) or asked.redaction.hides(("task",), job.task):
        return None
    given: dict[str, Any] = {"state": "failed", "task": job.task, "error_type": error_type}
    found, _ = await asked.part_shared(
        lambda conn: asearch(conn, room=1, limit=ALIKE_SHOWN + 1, **given), "same cause", given
    )
    if found is None:
        return None
    others = [each for each in found.jobs if each.id != job.id]
    count: Count | None = Count(len(others))
    if not found.complete:
        count, _ = await asked.part_shared(lambda conn: acount_bulk(conn, "retry", **given), "of same cause", given)
        if count is not None and job.state == "failed":
            count = Count(max(count.n - 1, len(others)), count.exact)
    newest = [{"id": each.id, "finished_at": each.finished_at} for each in others[:ALIKE_SHOWN]]
    return {"error_type": error_type, "count": plain(count), "jobs": newest}


def _attempt_of(step: JobStep, job: JobInfo) -> int:
    """The number of the attempt in which the step was recorded: the first one that ended behind it, or the last one."""
    ended = (each.attempt for each in job.attempts if each.finished_at >= step.at)
    return next(ended, job.attempt)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _change(entry: AuditEntry) -> dict[str, Any]:
    """Without the target: it may be a filter, with arguments of other jobs."""
    return {"at": entry.at, "actor": entry.actor, "role": entry.role, "action": entry.action}


def folded(traceback: str) -> list[tuple[bool, str]]:
    """The traceback in pieces: whether the frames are pgqueue's own, and the text."""
    ours, marked = False, []
    for line in traceback.splitlines():
        if _FRAME.match(line):
            ours = _OURS.match(line) is not None
        elif not line.startswith("    "):
            ours = False
        marked.append((ours, line))
    return [(mine, "\n".join(line for _, line in lines)) for mine, lines in groupby(marked, key=lambda each: each[0])]
