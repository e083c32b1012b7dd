"""Why a running job is not finished: whether it has begun, for how long it runs, what it waits for, its worker.

Decides from what a statement has answered; asks nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pgqueue.admin.queries import JobInfo
from pgqueue.admin.why.reasons import Facts, Holder, Reason, Session, holders_of, lasting, process_of, sessions_of
from pgqueue.database import shown

BEATS_IN_LEASE = 3
"""A worker sends so many heartbeats within its lease."""


def reasons(job: JobInfo, facts: Facts, by: Sequence[Facts]) -> list[Reason]:
    """What there is to say of the job, in the order in which a person would ask. `by`: the operators that have
    cancelled it."""
    now, started = shown.moment(facts["now"]), shown.moment(facts["started_at"])
    assert now is not None and started is not None
    worker = facts["worker"]
    return [
        *_worker(worker),
        *_run(job, facts, (now - started).total_seconds(), started),
        *_requests(facts["requests"], by, now),
        *_sessions(facts["sessions"], now),
    ]


def _run(job: JobInfo, facts: Facts, seconds: float, started: datetime) -> list[Reason]:
    worker, behind = facts["worker"], facts["behind"]
    where = f"worker {worker['id']} ({process_of(worker)})" if worker else f"worker {job.worker_id}, which has no row"
    details: dict[str, object] = {
        "seconds": seconds,
        "worker": job.worker_id,
        "process": process_of(worker) if worker else None,
        "attempt": job.attempt,
    }
    if behind is not None:
        first = holders_of([behind])
        text = f"{where} has it, and runs {_named(first[0])} with the same lock {job.lock_key!r} before it"
        return [Reason("chain", text, started, details, first)]
    if worker and worker["begun"] is False:
        text = (
            f"{where} claimed it {lasting(seconds)} ago, and did not run it at its last heartbeat, "
            f"{lasting(worker['beat_age'])} ago: it waits for a slot, "
            "or it has ended and its outcome is not written yet"
        )
        return [Reason("at_hand", text, started, details)]
    if worker and worker["gathers"]:
        text = (
            f"{where} claimed it {lasting(seconds)} ago for a batch, and its call had not begun at the last heartbeat, "
            f"{lasting(worker['beat_age'])} ago: it waits for other jobs of the batch, or for a slot"
        )
        return [Reason("gathers", text, started, details)]
    text = f"it has run for {lasting(seconds)} on {where}, attempt {job.attempt}"
    if (usual := facts["p95"]) is not None:
        details["p95"] = usual
        text += f"; {'only ' if seconds > usual else ''}5 of 100 runs of this task take longer than {lasting(usual)}"
    if job.progress is not None:
        details |= {"done": job.progress.done, "total": job.progress.total, "said_at": job.progress.updated_at}
        text += f"; progress {job.progress}"
    return [Reason("running", text, started, details)]


def _worker(worker: Facts | None) -> list[Reason]:
    if worker is None:
        return []
    age, lease = worker["beat_age"], worker["lease"]
    details = {"worker": worker["id"], "process": process_of(worker), "silent": age, "rescue_at": lease}
    where = f"worker {worker['id']} ({process_of(worker)})"
    if worker["dead_at"] is not None:
        text = f"{where} is dead: its jobs are being given to other workers"
        return [Reason("worker_dead", text, shown.moment(worker["dead_at"]), details)]
    if age <= lease * 1.5 / BEATS_IN_LEASE:
        return []
    text = f"{where} has been silent for {lasting(age)}; its jobs are given to other workers after {lasting(lease)}"
    return [Reason("worker_silent", text, shown.moment(worker["beat_at"]), details)]


def _requests(requests: list[Facts], by: Sequence[Facts], now: datetime) -> list[Reason]:
    if not requests or (since := shown.moment(requests[0]["at"])) is None:
        return []
    reason = requests[0]["reason"]
    actor = by[0]["actor"] if by else None
    who = f" by {actor}" if actor else ""
    text = f"it was asked to stop {lasting((now - since).total_seconds())} ago{who} ({reason}), and goes on"
    return [Reason("cancel_requested", text, since, {"reason": reason, "requests": len(requests), "by": actor})]


def _sessions(sessions: list[Facts], now: datetime) -> list[Reason]:
    """The sessions of the job that wait for another session."""
    found = []
    for each in sessions:
        if not each["blocked_by"]:
            continue
        blocking = sessions_of(each["blocked_by"])
        text = f"its transaction (pid {each['pid']}) waits for {_waits(each)}, which {blocking[0]} holds"
        text += _standing(blocking[0], now)
        details = {"pid": each["pid"], "wait_type": each["wait_type"], "wait": each["wait"]}
        found.append(Reason("transaction_waits", text, shown.moment(each["since"]), details, (), blocking))
    return found


def _waits(session: Facts) -> str:
    """A role that may not see the session learns which session holds the lock, and not what the lock is."""
    return f"a lock ({session['wait']})" if session["wait"] else "a lock"


def _standing(session: Session, now: datetime) -> str:
    if session.since is None:
        return ""
    return f"; that one is {session.state}, its transaction began {lasting((now - session.since).total_seconds())} ago"


def _named(holder: Holder) -> str:
    return f"job {holder.id} ({holder.task})"
