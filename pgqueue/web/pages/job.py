"""One job: what it is, its attempts in order, why it is where it is, what follows on it, and what was done by hand."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from pgqueue.admin.audit import AuditEntry, aaudit
from pgqueue.admin.queries import JobInfo, JobStep
from pgqueue.admin.successors import asuccessors, predecessor, retried
from pgqueue.admin.why.why import awhy
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.problems import Problem

CHANGES_MOST = 50

# Files of pgqueue that stand between a worker and the handler.
_OURS = re.compile(r'^\s+File "[^"]*[/\\]pgqueue[/\\](?:worker|client|jobs|database|testing)[/\\]')
_FRAME = re.compile(r'^\s+File "')


async def job(asked: Asked) -> Page:
    """The job as the only item, with `why`, `successors` and `changes`. Without such a job: what may have become of it,
    and 404."""
    id = asked.id
    found = await asked.read(lambda conn: awhy(conn, id))
    job = found.job
    if job is None:
        raise Problem(404, f"There is no job {id}", " ".join(_sentence(reason.text) for reason in found.reasons))
    changes = await asked.read(lambda conn: aaudit(conn, job=id, limit=CHANGES_MOST))
    successors, _ = await asked.part(lambda conn: asuccessors(conn, job))
    item = plain(job) | {
        "key": job.key and asked.redaction.awaited(job.key),
        "why": plain(found.reasons),
        "predecessor": predecessor(job),
        "retried": retried(job),
        "successors": plain(successors),
        "steps": [plain(each) | {"attempt": _attempt_of(each, job)} for each in job.steps],
        "changes": [_change(each) for each in changes],
    }
    return Page("job.html", [item], {"at": found.at})


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
