"""Enqueue with unique keys: at most one job per key. Another enqueue of the key gets the handle of that job.

Called by `enqueue` for batches in which a job has a key. Never commits, opens no connection. The statements:
1. `unique_enqueue` takes the keys, inserts the jobs that got theirs, and answers which job has the keys of the others.
   Its function acts as the owner of the schema: a role that enqueues has no right on the table of keys.
2. If jobs are to be replaced, `unique_enqueue_replace` writes them anew. The first statement has locked them.

Why at most one job holds a key:
1. A job has a key if its row in `unique_key` exists and `key_state` says that it holds. The transaction that makes the
   job writes this row.
2. The primary key allows one row per key: a second insert waits for the first transaction. If that one commits, the
   second caller reads the committed row. If it rolls back, the second row is inserted.
3. A row is removed only in the version that was read. The statement has read the row and the state of its job in one
   snapshot, and found that the key is not held.
4. A job that has ended can live again only by `retry`, which writes the row again. It gets the key, or it finds that
   another job has it.
5. After a removal no job has the key, not even the one to be enqueued: its insert may lose, and is judged anew.

Why two enqueues never wait for each other in a circle:
1. All keys come first, in the order of their bytes, also those of other jobs of the batch. Then come the jobs that have
   keys of ours, in the order of their ids. Nothing is locked after them.
2. If a key was free but had a row, or a job has moved, the next lock would be out of order. Then all locks of the
   batch are given back, by a savepoint inside of `take_many_keys`, and taken anew.
3. A retry, successors and a cancel keep the same order (docs/design/database.md).

Other ways do not work or cost more:
- A look before the insert, without the constraint, makes two jobs (tests/client/test_unique_enqueue.py shows it).
- An insert that fails and is caught costs the caller's transaction, and fills the server's log.
- ON CONFLICT DO UPDATE would lock the winner's row for as long as the loser's transaction. It would leave a dead
  version for each loser.
- Free keys that are removed by a second statement, and inserted by a third, follow later keys:
  tests/system/test_lock_order.py shows the deadlock.

A deadlock is possible if one transaction takes keys in several calls. PostgreSQL ends it.

A job that is replaced may have been asked to stop, and given back by its worker before it began. The request was about
what the job was before. The statement that replaces the job deletes it. Else the next look at requests would cancel
what was just enqueued.

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
from pgqueue.client.job_parameters import column, columns, key_columns, key_values, lines, values
from pgqueue.config import client
from pgqueue.database.statements import Row, Statement, text
from pgqueue.database.steps import Steps, adrive, drive
from pgqueue.errors import DuplicateJob, Error
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.keys import Keys
from pgqueue.jobs.nodes import refuse_results

log = logging.getLogger("pgqueue")

OLDER = (
    "if this is a function, a type or a column of pgqueue, the schema of this database is older than this pgqueue; run "
    "`pgqueue migrate --check` to see what it lacks, then `pgqueue migrate`"
)
NOTES = {
    "40001": "a unique key was taken since this transaction took its snapshot (REPEATABLE READ or SERIALIZABLE), or a "
    "job that has one has moved since; roll back and try again in a new transaction",
    "40P01": "two transactions each waited for a unique key of the other; roll back and try again. Give all keys to "
    "one enqueue_many, or always in the same order",
    "55P03": "another transaction has just taken one of these unique keys, or is changing the job that has one, and is "
    "still open: it is not known yet whether that will stand. Roll back (or to a savepoint) and try again. The wait is "
    "bounded by lock_timeout, by 5 s if that is 0",
    "42703": OLDER,
    "42704": OLDER,
    "42883": OLDER,
}

ROUNDS = 100
"""How often a job is asked for whose holder could not be replaced: each time another session has moved it."""

Placed = tuple[int, NewJob[Any]]
"""A job with its place in the batch."""


class Holder(NamedTuple):
    """The job that has a key: an id alone is not enough, because ids are given again after a restore."""

    id: int
    enqueued_at: str
    """As the server wrote it, to the microsecond."""


def enqueue(conn: object, jobs: Sequence[NewJob[Any]]) -> list[JobHandle[Any]]:
    """Enqueue these jobs; return handles in their order. Each is of a new job, or of the job that has its key."""
    schema, notify = client()
    return drive(conn, enqueueing(jobs, schema=schema, notify=notify), NOTES)


async def aenqueue(conn: object, jobs: Sequence[NewJob[Any]]) -> list[JobHandle[Any]]:
    """`enqueue` on an async connection."""
    schema, notify = client()
    return await adrive(conn, enqueueing(jobs, schema=schema, notify=notify), NOTES)


def following(jobs: Sequence[NewJob[Any]], *, schema: str, notify: bool) -> Statement[None]:
    """The statement that enqueues these jobs as successors. If a job's key is held, the job is left out and logged."""

    def read(rows: list[Row]) -> None:
        for task, holder in json.loads(rows[0][0] or "[]"):
            log.info("the successor %s was not enqueued: job %d has its unique key", task, holder)

    params = columns(jobs) | key_columns(jobs) | {"notify": notify}
    params["on_duplicate"] = "return"  # a successor replaces no job
    return Statement(text("unique_enqueue_following", schema), params, read)


def impatient(schema: str) -> Statement[None]:
    """The statement after which the others of its transaction wait at most 5 ms for a lock."""
    return Statement(text("unique_enqueue_impatient", schema), {}, lambda rows: None)


# The steps -----------------------------------------------------------------------------------------------------------


def enqueueing(jobs: Sequence[NewJob[Any]], *, schema: str, notify: bool) -> Steps[list[JobHandle[Any]]]:
    """The steps that enqueue these jobs, at least one. For a connection that is driven elsewhere, too."""
    handles: dict[int, JobHandle[Any]] = {}
    left: list[Placed] = list(enumerate(jobs))
    for _ in range(ROUNDS):
        left = yield from _asking(left, handles, schema, notify)
        if not left:
            return [handles[place] for place in range(len(jobs))]
    raise Error(f"a job could not be replaced {ROUNDS} times, although it waits: does a trigger hold it where it is?")


def _asking(asked: list[Placed], handles: dict[int, JobHandle[Any]], schema: str, notify: bool) -> Steps[list[Placed]]:
    """Enqueue these, and give handles of what was made or found. Return those whose holder could not be replaced."""
    [(ids, lost, *_)] = yield _keyed([job for _, job in asked], schema, notify)
    handles |= {place: JobHandle(id) for (place, _), id in zip(asked, ids, strict=True) if id is not None}
    losers = [placed for placed in asked if placed[0] not in handles]
    replacing: list[tuple[Holder, Placed]] = []
    for (place, job), (name, holder, since, waits) in zip(losers, json.loads(lost or "[]"), strict=True):
        if waits and _keys(job).on_duplicate == "replace":
            replacing.append((Holder(holder, since), (place, job)))
        else:
            handles[place] = _duplicate(job, name, holder)
    return (yield from _replacing(replacing, handles, schema, notify)) if replacing else []


def _keyed(jobs: Sequence[NewJob[Any]], schema: str, notify: bool) -> Statement[list[Row]]:
    """The first statement. One job is the usual call, and a batch of one would cost a third more."""
    refuse_results(jobs)
    name = "unique_enqueue"
    params: dict[str, object] = {"notify": notify}
    if len(jobs) == 1 and (keys := jobs[0].keys) is not None:
        name += "_one"
        params |= values(jobs[0]) | key_values(keys)
    else:
        params |= columns(jobs) | key_columns(jobs)
    if any(job.keys is not None and job.keys.on_duplicate == "replace" for job in jobs):
        name += "_replacing"
    return Statement(text(name, schema), params, list)


def _replacing(
    replacing: list[tuple[Holder, Placed]], handles: dict[int, JobHandle[Any]], schema: str, notify: bool
) -> Steps[list[Placed]]:
    """Give each holder the values of the last job that replaces it. Return the jobs whose holder has moved.

    In a transaction none has: all are locked, or were made just now. In autocommit the locks ended with the statement.
    """
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
