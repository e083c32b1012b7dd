"""Keys by hand: list which jobs hold a key and how many wait for it, and take a key away from its holders.

Called by the CLI, inside the caller's transaction, on any connection. A release is safe because it only moves holders
that do not run. The next job is unblocked by a sweep, which counts holders as always. A running job always keeps its
key: cancel the job, then it gives up the key itself. If its worker is known to be dead, the job is first given back, as
rescue does it. After that it is a holder that waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pgqueue.admin.bounded import Bounded
from pgqueue.config import client
from pgqueue.database.asking import asks, changes_jobs, named, twin
from pgqueue.database.statements import Row, Statement
from pgqueue.database.steps import Steps
from pgqueue.jobs.actors import actor_of
from pgqueue.jobs.keys import check_key
from pgqueue.jobs.values import check_text

T = TypeVar("T")

RESCUED_MOST = 1_000
LOCKS_MOST = 1_000
"""So many keys with waiting jobs are looked at, the first ones by name. As many jobs of a state that hold one."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that has a key. `age` is the seconds it has run; None if it does not run yet, or waits for its retry."""

    id: int
    task: str
    queue: str
    state: str
    worker: int | None
    process: str | None
    age: float | None


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A key with the jobs that hold it.

    `waiting` is the number of jobs that wait for it; 10,001 means more than 10,000. `next` is the first of them; it has
    waited for `waited` seconds.
    """

    key: str
    holders: tuple[Holder, ...]
    waiting: int
    next: int | None
    waited: float | None


@dataclass(frozen=True, slots=True)
class Running:
    """A running job, which keeps its key."""

    id: int
    task: str
    worker: int
    process: str | None
    dead: bool


@dataclass(frozen=True, slots=True)
class Released:
    """The jobs that have lost the key (`ids`), and the running jobs that keep it."""

    ids: tuple[int, ...]
    running: tuple[Running, ...]


@asks
def locks(conn: object, key: str | None = None, *, begins: str = "") -> Statement[list[LockInfo]]:
    """The keys that are held or waited for and begin so, those with the most waiting jobs first. With `key` only this
    one. Of keys that jobs wait for, the first 1,000 by name are looked at; `begins` finds the others."""
    return _listing(key, begins, lambda found: found.rows)


alocks = twin(locks)
"""`locks` for async connections."""


@asks
def bounded_locks(conn: object, key: str | None = None, *, begins: str = "") -> Statement[Bounded[LockInfo]]:
    """As `locks`, and also says whether there may be other keys, which jobs wait for or hold."""
    return _listing(key, begins, lambda found: found)


abounded_locks = twin(bounded_locks)
"""`bounded_locks` for async connections."""


@changes_jobs
def release(conn: object, key: str, *, actor: str | None = None) -> Steps[Released]:
    """Take a key from the holders that do not run, and from holders whose worker is known to be dead."""
    notify = client()[1]
    releasing = named("locks_release", key=check_key(key), notify=notify, actor=actor_of(actor))
    done = _released((yield releasing))
    dead = {job.worker for job in done.running if job.dead}
    for worker_id in sorted(dead):
        params = {"worker_id": worker_id, "n": RESCUED_MOST, "first": False, "passed": "{}", "notify": notify}
        yield named("rescue_jobs", **params)
    if not dead:
        return done
    after = _released((yield releasing))
    # Rescue takes the key itself from a job whose task no live worker knows.
    rescued = {job.id for job in done.running if job.dead}.difference(job.id for job in after.running)
    return Released(tuple(sorted({*done.ids, *after.ids, *rescued})), after.running)


arelease = twin(release)
"""`release` for async connections."""


def sentence(job: Running) -> str:
    """A sentence for people: why this job keeps the key."""
    where = f"worker {job.worker}" + (f" ({job.process})" if job.process else "")
    return f"job {job.id} ({job.task}) runs on {where} and keeps it until it ends: pgqueue cancel {job.id}"


def _listing(key: str | None, begins: str, answer: Callable[[Bounded[LockInfo]], T]) -> Statement[T]:
    check_text(key, "key")
    check_text(begins, "begins")

    def read(rows: list[Row]) -> T:
        found, is_cut = rows[0]
        locks = msgspec.json.decode(found, type=list[LockInfo], strict=False)
        return answer(Bounded(locks, LOCKS_MOST if is_cut else None))

    return named("locks_list", read, key=key, begins=begins if key is None else key)


def _released(rows: list[Row]) -> Released:
    ids, running = rows[0][:2]
    return Released(
        tuple(int(id) for id in ids.strip("{}").split(",") if id),
        tuple(Running(**each) for each in json.loads(running)),
    )
