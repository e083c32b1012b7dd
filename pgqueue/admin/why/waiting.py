"""What holds back a job that waits, before its keys are asked for: its time, pauses, workers, slots, its place.

Decides from what a statement has answered; asks nothing itself. A worker is *live* if it takes jobs and has sent a
heartbeat within its lease. It is *able* if it also knows the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain

from pgqueue.admin.queries import JobInfo
from pgqueue.admin.why.reasons import (
    HOLDERS_MOST,
    Facts,
    Reason,
    close_names,
    counted,
    holders_of,
    lasting,
    process_of,
)
from pgqueue.database import shown
from pgqueue.plain_text import plural

BEHIND_MOST = 1_000
"""Jobs before this one are counted up to this number."""
OVERDUE_SECONDS = 1.0
"""So long a job may be due before it is said that no worker makes it available."""
_TAKES = ("starting", "running")


def until_a_slot(job: JobInfo, facts: Facts) -> list[Reason]:
    """The rules up to the free slot that the job needs, in order."""
    now = shown.moment(facts["now"])
    assert now is not None
    able = [worker for worker in facts["workers"] if worker["knows"] and _live(worker)]
    found = [*_time(job, now), *_deadline(job, now), *_pauses(job, facts, now)]
    if not able:
        return [*found, _unserved(job, facts["workers"])]
    if job.state == "scheduled":
        return found
    return [*found, *_room(job, able, facts, now)]


def lane(job: JobInfo, n: int, urgent: int, whole: bool, pace: float | None) -> list[Reason]:
    """The jobs that a claim takes before it: of its queue, of which `pace` start in a second, and `urgent` others."""
    if not n and not urgent:
        return []
    said = []
    if n:
        said.append(f"{plural(n, 'job', 'jobs', counted(n, whole, BEHIND_MOST))} of queue {job.queue!r}")
    if urgent:
        jobs = plural(urgent, "more urgent job", "more urgent jobs", counted(urgent, whole, BEHIND_MOST))
        said.append(f"{jobs} of other queues")
    text = f"{' and '.join(said)} {'comes' if n + urgent == 1 else 'come'} before it, by priority and age"
    exact = whole and max(n, urgent) <= BEHIND_MOST
    details: dict[str, object] = {"jobs": min(n, BEHIND_MOST), "exact": exact, "queue": job.queue}
    details["urgent"] = min(urgent, BEHIND_MOST)
    if n and pace:
        seconds = min(n, BEHIND_MOST) / pace
        details |= {"pace": pace, "seconds": seconds}
        text += f"; at the present pace that takes {'about' if exact else 'at least'} {lasting(seconds)}"
    return [Reason("behind", text, details=details)]


def nothing(read_all: bool) -> Reason:
    """No rule holds the job back, as far as jobs before it were looked for."""
    if read_all:
        return Reason(
            "about_to_run", "nothing holds it back: a worker takes it with its next claim", details={"exact": True}
        )
    text = "nothing that was found holds it back; not all jobs that may come before it were looked at"
    return Reason("about_to_run", text, details={"exact": False})


def is_unserved(found: Iterable[Reason]) -> bool:
    """Whether a name may be mistyped."""
    return any(reason.code in ("no_worker", "unknown_task") for reason in found)


def with_close_names(job: JobInfo, found: Sequence[Reason], pairs: Iterable[tuple[str, str]]) -> list[Reason]:
    """The reasons, with the names that may be meant; `pairs` are the queues and tasks that live workers take."""
    queues: set[str] = {queue for queue, _ in pairs}
    here: set[str] = {task for queue, task in pairs if queue == job.queue and task}
    elsewhere = sorted(queue for queue, task in pairs if task == job.task and queue != job.queue)[:HOLDERS_MOST]
    named = []
    for reason in found:
        text, more = reason.text, {}
        if reason.code == "no_worker" and (close := close_names(job.queue, queues - {job.queue})):
            text, more = f"{text}; a queue that is served is {_listed(close)}", {"close": close}
        elif reason.code == "unknown_task":
            close = close_names(job.task, here)
            more = {"close": close, "elsewhere": elsewhere}
            if close:
                text += f"; a task that is known there is {_listed(close)}"
            if elsewhere:
                text += f"; workers of queue {_listed(elsewhere)} know it"
        named.append(replace(reason, text=text, details={**reason.details, **more}))
    return named


# The rules -----------------------------------------------------------------------------------------------------------


def _time(job: JobInfo, now: datetime) -> list[Reason]:
    if job.state != "scheduled" or job.run_at is None:
        return []
    left = (job.run_at - now).total_seconds()
    details: dict[str, object] = {"run_at": job.run_at, "seconds": left, "attempt": job.attempt + 1}
    if left <= -OVERDUE_SECONDS:
        text = f"it has been due for {lasting(-left)}, and no worker has made it available yet"
        return [Reason("promotion_overdue", text, job.run_at, details)]
    text = f"it is due in {lasting(left)}"
    if job.attempt:
        of = f" of {job.max_attempts}" if job.max_attempts else ""
        text += f", for attempt {job.attempt + 1}{of}"
        details |= {"max_attempts": job.max_attempts, "reason": job.reason}
        if job.attempts:
            last = job.attempts[-1]
            pause = (job.run_at - last.finished_at).total_seconds()
            details |= {"outcome": last.outcome, "error_type": last.error_type, "pause": pause}
            what = last.error_type or last.outcome
            text += f", {lasting(pause)} after the last one ended ({what})"
    elif job.reason:
        details["reason"] = job.reason
        text += f" ({job.reason})"
    return [Reason("not_due", text, None, details)]


def _deadline(job: JobInfo, now: datetime) -> list[Reason]:
    if job.deadline is None:
        return []
    details = {"deadline": job.deadline}
    if job.deadline <= now:
        text = (
            f"its deadline passed {lasting((now - job.deadline).total_seconds())} ago: "
            "it will be cancelled instead of run"
        )
        return [Reason("deadline", text, job.deadline, details)]
    if job.state == "scheduled" and job.run_at is not None and job.run_at >= job.deadline:
        text = "it is due only after its deadline: it will be cancelled instead of run"
        return [Reason("deadline", text, None, details)]
    return []


def _pauses(job: JobInfo, facts: Facts, now: datetime) -> list[Reason]:
    found = []
    for kind, name in (("queue", job.queue), ("task", job.task)):
        paused = facts[f"{kind}_paused"]
        if paused is not None and (since := shown.moment(paused["at"])) is not None:
            by = f" by {paused['by']}" if paused["by"] else ""
            text = f"{kind} {name!r} has been paused for {lasting((now - since).total_seconds())}{by}"
            found.append(Reason(f"{kind}_paused", text, since, {"name": name, "by": paused["by"]}))
    return found


def _unserved(job: JobInfo, workers: Sequence[Facts]) -> Reason:
    """No worker may take the job: either none serves its queue, or none of those knows its task."""
    live = [worker for worker in workers if _live(worker)]
    details: dict[str, object] = {"queue": job.queue, "workers": len(live)}
    if live:
        text = f"none of the {len(live)} live workers of queue {job.queue!r} knows task {job.task!r}"
        if len(live) == 1:
            text = f"the live worker of queue {job.queue!r} does not know task {job.task!r}"
        more, numbers = _away([worker for worker in workers if worker["knows"]], "that knows it", "that know it")
        return Reason("unknown_task", text + more, None, {**details, "task": job.task, **numbers})
    more, numbers = _away(workers, "of its workers", "of its workers")
    return Reason("no_worker", f"no live worker serves queue {job.queue!r}{more}", None, {**details, **numbers})


def _away(workers: Sequence[Facts], one: str, many: str) -> tuple[str, dict[str, object]]:
    """What is said of workers that are not live: how many are quiet, and how many silent."""
    text = ""
    quiet = [worker for worker in workers if worker["state"] not in _TAKES]
    silent = [worker for worker in workers if worker["state"] in _TAKES]
    if quiet:
        takes = plural(len(quiet), f"{one} takes", f"{many} take")
        text += f"; {takes} no new jobs ({_processes(quiet)})"
    if silent:
        oldest = max(worker["beat_age"] for worker in silent)
        gives = plural(len(silent), f"{one} gives", f"{many} give")
        text += f"; {gives} no sign of life for up to {lasting(oldest)} ({_processes(silent)})"
    return text, {"quiet": len(quiet), "silent": len(silent)}


def _slots(job: JobInfo, able: Sequence[Facts], facts: Facts, now: datetime) -> list[Reason]:
    """All slots of all able workers are busy. One worker with a free slot, and the rule does not hold.

    If a worker runs a poison job alone, no other job has a slot there.
    """
    slots = taken = 0
    busy: list[Facts] = []
    alone: list[Facts] = []
    for worker in able:
        held = [each for each in facts["held"] if each["worker_id"] == worker["id"]]
        mine = [{**each, **_place(worker)} for each in held if _shares(job, worker, each)]
        number = _slot_number(worker) - worker["lost"]
        n, apart = _taken(worker, mine, facts), [{**each, **_place(worker)} for each in held if each["crashes"] > 1]
        if n < number and not apart:
            return []
        slots += max(number, 0)
        taken += len(apart) or n
        busy += apart or mine
        alone += apart
    busy.sort(key=lambda each: (each["since"], each["id"]))
    holders = holders_of(busy)
    workers = "its worker" if len(able) == 1 else f"{len(able)} workers"
    text = f"all {slots} slots of {workers} are busy" if slots != 1 else f"the one slot of {workers} is busy"
    since = holders[0].since if holders else None
    if since is not None:
        text += f"; {holders[0]} has run for {lasting((now - since).total_seconds())}"
        more = taken - 1
        text += f", and {more:,} more" if more else ""
    if alone:
        text += f"; no other job runs beside job {alone[0]['id']}, for workers died under it"
    lost = sum(worker["lost"] for worker in able)
    if lost:
        text += f"; {plural(lost, 'slot is', 'slots are')} lost to handlers that did not stop"
    return [Reason("slots_busy", text, since, {"slots": slots, "workers": len(able), "lost": lost}, holders)]


def _room(job: JobInfo, able: Sequence[Facts], facts: Facts, now: datetime) -> list[Reason]:
    """A worker has room if it has a free slot, and none of its jobs is in the way of a poison job."""
    crashes, held = facts["place"]["crashes"], facts["held"]
    in_the_way = _in_the_way(crashes, able, held) if crashes else {}
    others = [worker for worker in able if worker["id"] not in in_the_way]
    if crashes > 1 and not others:  # it waits for more than a slot
        return [_poison(crashes, in_the_way)]
    busy = _slots(job, others or able, facts, now)
    if not in_the_way or (others and not busy):
        return busy
    return [_poison(crashes, in_the_way), *busy]


def _in_the_way(crashes: int, able: Sequence[Facts], held: Sequence[Facts]) -> dict[int, list[Facts]]:
    """By worker: its jobs beside which the poison job may not run. After one crash these are other poison jobs, after
    more crashes all jobs."""
    found: dict[int, list[Facts]] = {}
    for worker in able:
        for each in held:
            if each["worker_id"] == worker["id"] and (crashes > 1 or each["crashes"]):
                found.setdefault(worker["id"], []).append({**each, **_place(worker)})
    return found


def _poison(crashes: int, in_the_way: Mapping[int, Sequence[Facts]]) -> Reason:
    alone = crashes > 1
    holders = sorted(chain.from_iterable(in_the_way.values()), key=lambda each: (each["since"], each["id"]))
    times = "twice" if crashes == 2 else f"{crashes} times"
    text = (
        f"it was running {times} when a worker died, and waits until a worker has nothing else to run"
        if alone
        else "it was running when a worker died, and waits until another such job has ended"
    )
    return Reason("poison", text, None, {"crashes": crashes, "alone": alone}, holders_of(holders))


def _live(worker: Facts) -> bool:
    return worker["state"] in _TAKES and worker["beat_age"] < worker["lease"]


def _taken(worker: Facts, mine: Sequence[Facts], facts: Facts) -> int:
    """How many of its slots have a job. If not all of its jobs were read, the worker's last heartbeat says it."""
    if (worker["looked"] and facts["whole"]) or worker["slots"] or worker["apart"]:
        return len(mine)
    return max(len(mine), int(worker["running"]))


def _slot_number(worker: Facts) -> int:
    """How many slots of this worker the job's queue may fill: its own, or the common ones."""
    return int(worker["slots"] or worker["concurrency"])


def _shares(job: JobInfo, worker: Facts, other: Facts) -> bool:
    """Whether the other job fills one of these slots."""
    if worker["slots"]:
        return bool(other["queue"] == job.queue)
    return other["queue"] not in worker["apart"]


def _place(worker: Facts) -> dict[str, object]:
    return {"worker": worker["id"], "host": worker["host"], "pid": worker["pid"]}


def _processes(workers: Sequence[Facts]) -> str:
    return _listed([process_of(worker) or "" for worker in workers[:3]]) + (", …" if workers[3:] else "")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) if names and ":" not in names[0] else ", ".join(names)
