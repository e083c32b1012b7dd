"""What people see of keys, and do to them by hand: which jobs hold one, how many wait, take it away.

Called by the CLI, inside the caller's transaction, on any connection. Releasing is safe because truth is rows: it only
moves holders that do not run; the next in line is let in by a sweep, which counts as always. A job that runs keeps its
key as long as it runs, whatever is ordered: stop it (`cancel`), then it gives the key up itself. If its worker is known
to be dead, the job is given back as rescue does it, and is a holder that waits then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.statements import Row, Statement, text
from pgqueue.jobs.keys import check_key

RESCUED_MOST = 1_000


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that has a key. `age` is the seconds it has run; None: it does not (granted, or waiting for its retry)."""

    id: int
    task: str
    queue: str
    state: str
    worker: int | None
    process: str | None
    age: float | None


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A key with the jobs that hold it. `waiting` jobs wait for it (10,001: more than 10,000); `next` is the first of
    them and has waited for `waited` seconds."""

    key: str
    holders: tuple[Holder, ...]
    waiting: int
    next: int | None
    waited: float | None


@dataclass(frozen=True, slots=True)
class Running:
    """A job that runs and keeps its key."""

    id: int
    task: str
    worker: int
    process: str | None
    dead: bool


@dataclass(frozen=True, slots=True)
class Released:
    """The jobs that have lost the key, and those that run and keep it."""

    ids: tuple[int, ...]
    running: tuple[Running, ...]


def locks(conn: object, key: str | None = None) -> list[LockInfo]:
    """The keys that are held or waited for, the longest lines first; only this one, if one is given."""
    schema, _ = client()
    return drivers.run(conn, Statement(text("locks_list", schema), {"key": key}, _listed))


def release(conn: object, key: str) -> Released:
    """Take a key from its holders that do not run, and from those of workers that are known to be dead."""
    schema, notify = client()
    releasing = Statement(text("locks_release", schema), {"key": check_key(key), "notify": notify}, _released)
    done = drivers.run(conn, releasing)
    dead = {job.worker for job in done.running if job.dead}
    for worker_id in sorted(dead):
        params = {"worker_id": worker_id, "n": RESCUED_MOST, "first": False, "notify": notify}
        drivers.run(conn, Statement(text("rescue_jobs", schema), params, list))
    if not dead:
        return done
    after = drivers.run(conn, releasing)
    # Rescue takes the key itself from a job whose task no live worker knows.
    rescued = {job.id for job in done.running if job.dead}.difference(job.id for job in after.running)
    return Released(tuple(sorted({*done.ids, *after.ids, *rescued})), after.running)


def sentence(job: Running) -> str:
    """Why this job keeps the key, in words, for people."""
    where = f"worker {job.worker}" + (f" ({job.process})" if job.process else "")
    return f"job {job.id} ({job.task}) runs on {where} and keeps it until it ends: pgqueue cancel {job.id}"


def _listed(rows: list[Row]) -> list[LockInfo]:
    found = json.loads(rows[0][0])
    return [
        LockInfo(each["key"], _holders(each["holders"]), each["waiting"], each["next"], each["waited"])
        for each in found
    ]


def _holders(found: Sequence[dict[str, object]]) -> tuple[Holder, ...]:
    return tuple(Holder(**each) for each in found)  # type: ignore[arg-type]


def _released(rows: list[Row]) -> Released:
    ids, running = rows[0][:2]
    return Released(
        tuple(int(id) for id in ids.strip("{}").split(",") if id),
        tuple(Running(**each) for each in json.loads(running)),
    )
