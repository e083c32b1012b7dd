"""Why a job has ended as it has: its reason, and its attempts."""

from __future__ import annotations

from collections.abc import Sequence

from pgqueue.admin.queries import JobInfo
from pgqueue.admin.why.reasons import Facts, Reason, lasting
from pgqueue.jobs.states import DEAD

_MEANS = {
    "error": "its handler failed",
    "timeout": "its handler ran longer than its timeout",
    "crashed": "three workers died while it ran",
    "deadline": "its deadline passed",
    "refused": "no worker or server could take it",
    "arguments": "its arguments do not fit the task",
    "dependency": "a job that it waited for failed or was cancelled",
}
"""What the reasons mean that pgqueue itself gives. Any other text is of the handler, or of an operator. So is a reason
to cancel a job whose deadline has not passed."""
SAID_MOST = 300
"""The error of the last attempt is cut to so many characters; `pgqueue jobs ID` has all of it."""


def reasons(job: JobInfo, by: Sequence[Facts]) -> list[Reason]:
    """The one reason: how the job has ended, when, and after which attempts. `by`: the operators that have
    cancelled it."""
    details: dict[str, object] = {"reason": job.reason, "attempt": job.attempt, "attempts": len(job.attempts)}
    text = {"completed": "it completed", "skipped": "it was skipped", "failed": "it failed"}.get(
        job.state, "it was cancelled"
    )
    if job.finished_at is not None:
        details["finished_at"] = job.finished_at
        text += f" at {job.finished_at:%Y-%m-%d %H:%M:%S} UTC"
        if job.started_at is not None:
            seconds = (job.finished_at - job.started_at).total_seconds()
            details["seconds"] = seconds
            text += f", after {lasting(seconds)}"
    if by and job.state == "cancelled":
        details["by"] = by[0]["actor"]
        text += f", by {by[0]['actor']}"
    if job.state == "skipped" and job.reason == "dependency":
        text += ": no job that it waited for failed"
    elif job.state == "skipped":
        text += f": another job had its lock {job.lock_key!r}" if job.lock_key else ""
    elif job.reason:
        text += f": {job.reason}" + (f" ({_MEANS[job.reason]})" if _is_ours(job) else "")
    if job.attempt and job.state != "skipped":
        text += f"; attempt {job.attempt}" + (f" of {job.max_attempts}" if job.max_attempts else "")
    if job.attempts and job.state in DEAD:
        last = job.attempts[-1]
        details |= {"outcome": last.outcome, "error_type": last.error_type, "message": last.message}
        said = ": ".join(part for part in (last.error_type, last.message) if part)
        text += f"; the last one: {last.outcome}" + (f" ({_cut(said)})" if said else "")
    return [Reason(job.state, text, job.finished_at, details)]


def _is_ours(job: JobInfo) -> bool:
    """Whether pgqueue itself has given the reason."""
    if job.state != "cancelled":
        return job.reason in _MEANS
    if job.reason == "dependency":
        return bool(job.attempts) and (job.attempts[-1].message or "").startswith("dependency: ")
    late = job.deadline is not None and job.finished_at is not None and job.deadline <= job.finished_at
    return job.reason == "deadline" and late


def _cut(said: str) -> str:
    return said if len(said) <= SAID_MOST else f"{said[: SAID_MOST - 1].rstrip()}…"
