"""Enqueue with unique keys: at most one job per key. Another enqueue of the key gets the handle of that job.

Called by `enqueue` for batches in which a job has a key. Never commits, opens no connection. The statements:
1. `unique_enqueue` inserts the keys, and the jobs that got all of their keys.
2. If a job lost a key, `unique_enqueue_judge` reads which job holds it. A key that no job holds any more is removed.
3. For jobs that lost a removed key, the first statement is sent again.

Why at most one job holds a key:
1. A job has a key if its row in `unique_key` exists and `key_state` says that it holds. The transaction that makes the
   job writes this row.
2. The primary key allows one row per key: a second insert waits for the first transaction. If that one commits, the
   second caller reads the committed row. If it rolls back, the second row is inserted.
3. A row is removed only in the version that was read. The statement has read the row and the state of its job in one
   snapshot, and found that the key is not held.
4. A job that has ended can live again only by `retry`, which writes the row again. It gets the key, or it finds that
   another job has it.
5. After a removal no job has the key, not even the one to be enqueued: its insert is sent again, and may lose.

Other ways do not work or cost more:
- A look before the insert, without the constraint, makes two jobs (tests/client/test_unique_enqueue.py shows it).
- An insert that fails and is caught costs the caller's transaction, and fills the server's log.
- ON CONFLICT DO UPDATE would lock the winner's row for as long as the loser's transaction. It would leave a dead
  version for each loser.

Every batch takes its keys in the order of their bytes: two batches cannot wait for each other. A deadlock is possible
if one transaction takes keys in several calls, or if a key's job ends in this very moment. PostgreSQL ends deadlocks.

A key with `hold="pending"` is held until its job starts. It promises the loser that this job will see what the loser's
transaction has written. To keep the promise, the loser locks that job's row: claims pass over it until the loser's
transaction has ended.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from pgqueue.client.handle import JobHandle
from pgqueue.client.job_parameters import column, columns, lines, quoted
from pgqueue.config import client
from pgqueue.database.statements import Row, Statement, text
from pgqueue.database.steps import Steps, adrive, drive
from pgqueue.errors import DuplicateJob, Error
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.keys import Keys

log = logging.getLogger("pgqueue")

ROUNDS = 100
"""The insert is sent at most this often: each time another job may have released the key just after it was found."""

OLDER = (
    "if this is a function or a column of pgqueue, the schema of this database is older than this pgqueue; run "
    "`pgqueue migrate --check` to see what it lacks, then `pgqueue migrate`"
)
NOTES = {
    "40001": "a unique key was taken since this transaction took its snapshot (REPEATABLE READ or SERIALIZABLE); roll "
    "back and try again in a new transaction",
    "40P01": "two transactions each waited for a unique key of the other; roll back and try again. Give all keys to "
    "one enqueue_many, or always in the same order",
    "55P03": "another transaction has just taken one of these unique keys and is still open: it is not known yet "
    "whether its job will exist. Roll back (or to a savepoint) and try again. The wait is bounded by lock_timeout, "
    "by 5 s if that is 0",
    "42703": OLDER,
    "42883": OLDER,
}

Placed = tuple[int, NewJob[Any]]
"""A job with its place in the batch."""


class Holder(NamedTuple):
    """The job that has a key: an id alone is not enough, because ids are given again after a restore."""

    id: int
    enqueued_at: str
    """As the server wrote it, to the microsecond."""


def enqueue(conn: object, jobs: Sequence[NewJob[Any]]) -> list[JobHandle[Any]]:
    """Enqueue these jobs; return handles in their order. Each is of a new job, or of the job that has its key."""
    return drive(conn, _enqueueing(jobs), NOTES)


async def aenqueue(conn: object, jobs: Sequence[NewJob[Any]]) -> list[JobHandle[Any]]:
    """`enqueue` on an async connection."""
    return await adrive(conn, _enqueueing(jobs), NOTES)


def following(jobs: Sequence[NewJob[Any]], *, schema: str, notify: bool) -> Statement[None]:
    """The statement that enqueues these jobs as successors. If a job's key is held, the job is left out and logged."""

    def read(rows: list[Row]) -> None:
        for task, holder in json.loads(rows[0][0] or "[]"):
            log.info("the successor %s was not enqueued: job %d has its unique key", task, holder)

    params = columns(jobs) | _key_columns(jobs) | {"notify": notify}
    return Statement(text("unique_enqueue_following", schema), params, read)


def impatient(schema: str) -> Statement[None]:
    """The statement after which the others of its transaction wait at most 5 ms for a lock."""
    return Statement(text("unique_enqueue_impatient", schema), {}, lambda rows: None)


# The steps -----------------------------------------------------------------------------------------------------------


def _enqueueing(jobs: Sequence[NewJob[Any]]) -> Steps[list[JobHandle[Any]]]:
    schema, notify = client()
    handles: dict[int, JobHandle[Any]] = {}
    left: list[Placed] = list(enumerate(jobs))
    for _ in range(ROUNDS):
        batch = [job for _, job in left]
        params = columns(batch) | _key_columns(batch) | {"notify": notify}
        [(ids, *_)] = yield Statement(text("unique_enqueue", schema), params, list)
        made = {place: id for (place, _), id in zip(left, ids, strict=True) if id is not None}
        handles |= {place: JobHandle(id) for place, id in made.items()}
        lost = [placed for placed in left if placed[0] not in made]
        if lost:
            lost = _among_themselves(lost, {place: jobs[place] for place in made}, handles)
        left = (yield from _losing(lost, handles)) if lost else []
        if not left:
            return [handles[place] for place in range(len(jobs))]
    names = [name for _, job in left for name in _keys(job).names()]
    raise Error(
        f"unique keys {', '.join(names[:5])}: released and taken again {ROUNDS} times while we asked; try again"
    )


def _among_themselves(
    lost: list[Placed], made: dict[int, NewJob[Any]], handles: dict[int, JobHandle[Any]]
) -> list[Placed]:
    """Give handles to jobs that lost to a job of their own batch. Return the other jobs, and those that replace."""
    mine = {name: place for place, job in made.items() if job.keys for name in job.keys.names()}
    others: list[Placed] = []
    for place, job in lost:
        names = [name for name in _keys(job).names() if name in mine]
        if names and _keys(job).on_duplicate != "replace":
            handles[place] = _duplicate(job, names[0], handles[mine[names[0]]].id)
        else:
            others.append((place, job))
    return others


def _losing(lost: list[Placed], handles: dict[int, JobHandle[Any]]) -> Steps[list[Placed]]:
    """Find the holders of the keys, and give handles of them. Return the jobs to try again: those without a holder, or
    with a holder that is just changing its state."""
    schema, _ = client()
    names = sorted({name for _, job in lost for name in _keys(job).names()})
    replaced = sorted({name for _, job in lost if _keys(job).on_duplicate == "replace" for name in _keys(job).names()})
    params = {"keys": json.dumps(names), "replaced": json.dumps(replaced)}
    [(found,)] = yield Statement(text("unique_enqueue_judge", schema), params, list)
    held = {name: (Holder(id, since), waits) for name, id, since, waits in json.loads(found)}
    left: list[Placed] = []
    replacing: list[tuple[Holder, Placed]] = []
    for place, job in lost:
        name = next((name for name in _keys(job).names() if name in held), None)
        if name is None:
            left.append((place, job))
            continue
        holder, waits = held[name]
        if waits and _keys(job).on_duplicate == "replace":
            replacing.append((holder, (place, job)))
        else:
            handles[place] = _duplicate(job, name, holder.id)
    return left + ((yield from _replacing(replacing, handles)) if replacing else [])


def _replacing(replacing: list[tuple[Holder, Placed]], handles: dict[int, JobHandle[Any]]) -> Steps[list[Placed]]:
    """Give each holder the values of the last job that replaces it. Return the jobs whose holder is just changing its
    state."""
    schema, notify = client()
    last = {holder: job for holder, (_, job) in replacing}
    jobs = list(last.values())
    params = columns(jobs) | {"notify": notify, "holder": lines([str(holder.id) for holder in last])}
    params["since"] = lines([holder.enqueued_at for holder in last])
    params["at_most"] = column([_keys(job).debounce_max for job in jobs], repr)
    [(changed, *_)] = yield Statement(text("unique_enqueue_replace", schema), params, list)
    for holder, (place, _) in replacing:
        if holder.id in changed:
            handles[place] = JobHandle(holder.id, created=False, replaced=True)
    return [placed for holder, placed in replacing if holder.id not in changed]


def _duplicate(job: NewJob[Any], name: str, holder: int) -> JobHandle[Any]:
    if _keys(job).on_duplicate == "raise":
        kind, _, key = name.partition(":")
        raise DuplicateJob(
            f"task {job.task!r}: job {holder} has the {kind} key {key!r}", existing=holder, job_id=holder
        )
    return JobHandle(holder, created=False)


def _keys(job: NewJob[Any]) -> Keys:
    assert job.keys is not None
    return job.keys


def _key_columns(jobs: Sequence[NewJob[Any]]) -> dict[str, object]:
    keys = [job.keys for job in jobs]
    return {
        "unique_key": column([each and each.unique for each in keys], quoted),
        "idempotency_key": column([each and each.idempotency for each in keys], quoted),
        "hold": column([each.hold if each else "live" for each in keys]),
        "hold_seconds": column([each and each.seconds for each in keys], repr),
    }
