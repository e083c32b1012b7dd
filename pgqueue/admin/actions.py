"""What people do to jobs by hand: `cancel`, `retry`, `discard` and `reschedule` them, by id or all that fit a filter.

Called by applications and by the CLI, which is a thin layer over these functions. Everything happens inside the
caller's transaction, on any connection, and with its COMMIT or not at all. Never commits, never opens a connection.

A job may change its state while a statement looks for it: it may be promoted, claimed or completed. If a statement
finds no row, the job may exist all the same. A generator (`cancelling`, `rescheduling` …) therefore sends the
statement again, in a new snapshot, for the jobs that were just changing.

A job keeps its id when an enqueue with `on_duplicate="replace"` gives it another queue or task. Its time of end is
another one after it was retried and has ended anew. Both may happen after a filter has found the job, while the
statement waits for it, or while `pgqueue cancel` asks a person. So the statement gets the filter's queue, task and age,
and compares them with the row that it has locked.

In autocommit mode each statement is a transaction. Between two of them workers see the jobs of a flow half changed, and
go on with those that wait. So the order of the statements is one in which nothing goes on that is to be changed too:

1. A cancel begins with the jobs that have not been released, the last of the flow first. Else a job that waits for
   `node.failed` would start between two statements.
2. A retry ends with these, the first of the flow first. Else one of them would be cancelled again, for a job that it
   waits for and that is retried by the next statement.

A running job may add jobs to its flow (`job.add`) while a cancel of the flow goes on. So a cancel looks for jobs of the
flow until a look finds none that is new:

1. Such a job comes in the commit that ends a running job. The look after that commit sees it.
2. At the last look each job of the flow that lives is one that was cancelled, or that was asked to stop.
3. So what comes later comes of a job that was asked to stop, and has completed before it was. To hold its end up until
   this transaction commits would be against F23. The docs say to cancel the flow once more.

A discard has no need of that: it means jobs that have ended, and what is added lives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, overload

from pgqueue.admin.answers import Answer
from pgqueue.admin.filters import LEFT_OUT, Filter, checked, filtered, finding
from pgqueue.admin.retry_locks import locking
from pgqueue.config import client
from pgqueue.database.asking import changes_jobs, named, twin
from pgqueue.database.drivers import alone
from pgqueue.database.statements import integers
from pgqueue.database.steps import Steps
from pgqueue.errors import Error, InvalidOption, JobNotFound
from pgqueue.jobs.actors import actor_of
from pgqueue.jobs.states import DEAD, DONE, ENDED, LIVE, RETRYING, WAITING
from pgqueue.jobs.values import aware
from pgqueue.plain_text import plural

BATCH = 1_000
"""Jobs per statement. If each statement is a transaction, no other session waits long for a row."""
ROUNDS = 100
"""The statement is sent at most this often. Each time a job must have changed its state at that very moment."""
REASON_MOST = 500  # characters
BY_HAND = "cancelled by hand"


@dataclass(frozen=True, slots=True)
class By:
    """What the record says of a change: the filter that chose the jobs (None: they were named), and the actor."""

    asked: Filter | None = None
    actor: str | None = None

    def params(self) -> dict[str, object]:
        """The parameters of a statement that writes the record."""
        target = {} if self.asked is None else self.asked.named()
        return {"actor": actor_of(self.actor), "target": json.dumps(target)}

    def meant(self) -> dict[str, object]:
        """What a job has to be when it is locked: an enqueue may have given it another queue or task since it was
        found."""
        asked = self.asked
        return {"queue": None, "task": None} if asked is None else {"queue": asked.queue, "task": asked.task}


Judge = Callable[[int, str | None, Any], Answer | None]
"""Makes the answer for a job from its id, its state and the statement's result. None: its state was just changing."""


@overload
def cancel(conn: object, *ids: int, reason: str = BY_HAND, actor: str | None = None) -> list[Answer]: ...
@overload
def cancel(
    conn: object,
    *,
    state: str | Iterable[str] | None = None,
    queue: str | None = None,
    task: str | None = None,
    flow: int | None = None,
    limit: int | None = None,
    reason: str = BY_HAND,
    actor: str | None = None,
) -> list[Answer]: ...
@changes_jobs
def cancel(
    conn: object,
    *ids: int,
    reason: str = BY_HAND,
    state: str | Iterable[str] | None = LEFT_OUT,
    queue: str | None = LEFT_OUT,
    task: str | None = LEFT_OUT,
    flow: int | None = LEFT_OUT,
    limit: int | None = LEFT_OUT,
    actor: str | None = None,
) -> Steps[list[Answer]]:
    """Cancel jobs, with this transaction's COMMIT: waiting jobs end at once, running jobs are stopped.

    Give ids, or a filter for jobs: `state`, one or several (default: the four live states), `queue`, `task` (its
    name), `flow` (its id), and `limit` for the oldest of them. A statement changes up to 1,000 jobs; in autocommit mode
    each is a transaction.

    Each statement that changes jobs is a row of the record (`audit`), by `actor`, else by the role of the connection.

    There is one answer for each job, in order:
    - `cancelled`: it waited.
    - `requested`: it runs. Its worker is notified by the COMMIT; the job may still complete before.
    - `ended`: it had ended before, see `.state`.

    A handler is stopped as at a timeout: an async one by cancellation, a sync one by an exception at its next step in
    Python.

    If no job has one of the ids, JobNotFound is raised after all other jobs were handled: roll back to undo these. If a
    filter would choose all jobs, InvalidOption is raised. At REPEATABLE READ, if a job has changed since the
    transaction's snapshot, the driver's serialization failure is raised: try again in a new transaction.

        pgqueue.cancel(conn, job.id, reason="order withdrawn")
        pgqueue.cancel(conn, queue="mail", state="retrying")  # scheduled for another attempt
    """
    asked = filtered(ids, LIVE, (RETRYING,), state=state, queue=queue, task=task, flow=flow, limit=limit)
    return _found(_cancelling(ids, asked, reason, alone(conn), actor), asked)


acancel = twin(cancel)
"""`cancel` for async connections."""


@overload
def retry(conn: object, *ids: int, again: bool = False, actor: str | None = None) -> list[Answer]: ...
@overload
def retry(
    conn: object,
    *,
    state: str | Iterable[str] | None = None,
    queue: str | None = None,
    task: str | None = None,
    flow: int | None = None,
    limit: int | None = None,
    again: bool = False,
    actor: str | None = None,
) -> list[Answer]: ...
@changes_jobs
def retry(
    conn: object,
    *ids: int,
    again: bool = False,
    state: str | Iterable[str] | None = LEFT_OUT,
    queue: str | None = LEFT_OUT,
    task: str | None = LEFT_OUT,
    flow: int | None = LEFT_OUT,
    limit: int | None = LEFT_OUT,
    actor: str | None = None,
) -> Steps[list[Answer]]:
    """Run failed or cancelled jobs again, with this transaction's COMMIT: available at once, at the end of their lane.

    Give ids, or a filter for jobs: `state`, one or several (default: failed and cancelled), `queue`, `task` (its
    name), `flow` (its id), and `limit` for the oldest of them. A statement changes up to 1,000 jobs; in autocommit mode
    each is a transaction. Otherwise all are one transaction, which locks all jobs and their unique keys before it
    changes one.

    A failed or cancelled job keeps its id and its attempts, and may make at least one more. Its crashes and its reason
    are forgotten. A deadline that has passed is dropped. If it had a unique key, it takes the key again.

    A completed job is run only with `again`; a filter must name its state, too. A new job is made, without the unique
    keys. Its headers name the old job as `retry_of`.

    There is one answer for each job, in order: `retried`, `again` (see `.new`), `completed`, `alive` (see `.state`),
    `held` (see `.holder`), or `unreleased`: a job of a flow that was skipped before its turn came. Recorded, and
    raises, as `cancel`.

        pgqueue.retry(conn, state="failed", task="mail.send")
    """
    asked = _retried(ids, again, state=state, queue=queue, task=task, flow=flow, limit=limit)
    return _found(_retrying(ids, asked, again, alone(conn), actor), asked)


aretry = twin(retry)
"""`retry` for async connections."""


@overload
def discard(conn: object, *ids: int, actor: str | None = None) -> list[Answer]: ...
@overload
def discard(
    conn: object,
    *,
    state: str | Iterable[str] | None = None,
    queue: str | None = None,
    task: str | None = None,
    flow: int | None = None,
    older_than: float | timedelta | None = None,
    limit: int | None = None,
    actor: str | None = None,
) -> list[Answer]: ...
@changes_jobs
def discard(
    conn: object,
    *ids: int,
    state: str | Iterable[str] | None = LEFT_OUT,
    queue: str | None = LEFT_OUT,
    task: str | None = LEFT_OUT,
    flow: int | None = LEFT_OUT,
    older_than: float | timedelta | None = LEFT_OUT,
    limit: int | None = LEFT_OUT,
    actor: str | None = None,
) -> Steps[list[Answer]]:
    """Delete jobs that have ended, with their attempts, arguments and results, with this transaction's COMMIT.

    Give ids, or a filter for jobs: `state`, one or several (default: those of ended jobs), `queue`, `task` (its name),
    `flow` (its id), `older_than` (they ended longer ago), and `limit` for the oldest of them. A statement deletes up to
    1,000 jobs; in autocommit mode each is a transaction.

    A job that has not ended is not deleted: cancel it first. A unique key or an idempotency key that still holds goes
    on answering with the id of the deleted job until it expires; else the same request would be a new job.

    There is one answer for each job, in order: `discarded`, `alive` (see `.state`), or `needed`: a job of its
    flow waits, or would wait after a retry. Recorded, and raises, as `cancel`.

        pgqueue.discard(conn, task="mail.send", older_than=timedelta(days=2))
    """
    asked = _discarded(ids, state=state, queue=queue, task=task, flow=flow, older_than=older_than, limit=limit)
    return _found(_discarding(ids, asked, actor), asked)


adiscard = twin(discard)
"""`discard` for async connections."""


@changes_jobs
def reschedule(conn: object, *ids: int, at: datetime, actor: str | None = None) -> Steps[list[Answer]]:
    """Let jobs that wait start at another time, with this transaction's COMMIT; at once if that has come.

    Jobs that are scheduled, available or blocked wait for the new time. Their attempts, deadlines and unique keys stay
    as they are. A job that keeps its lock for its next attempt (`hold_on_retry`), or was granted a key, gives it up,
    and waits for it anew. `at` is a datetime with a time zone.

    There is one answer for each job, in order: `rescheduled`, `running`, or `over`, see `.state`. A job that has ended
    is not rescheduled: retry it. Recorded, and raises, as `cancel`.

        pgqueue.reschedule(conn, job.id, at=datetime.now(UTC) + timedelta(hours=2))
    """
    return _found(rescheduling(ids, at, By(None, actor)), None)


areschedule = twin(reschedule)
"""`reschedule` for async connections."""


# The steps -----------------------------------------------------------------------------------------------------------


def _cancelling(
    ids: Sequence[int], asked: Filter | None, reason: str, alone: bool, actor: str | None
) -> Steps[list[Answer]]:
    chosen: Sequence[int] = ids if asked is None else (yield from finding(asked))
    return (yield from cancelling(chosen, reason, By(asked, actor), one_transaction=not alone))


def _retrying(
    ids: Sequence[int], asked: Filter | None, again: bool, alone: bool, actor: str | None
) -> Steps[list[Answer]]:
    chosen: Sequence[int] = ids if asked is None else (yield from finding(asked))
    return (yield from retrying(chosen, again, By(asked, actor), one_transaction=not alone))


def _discarding(ids: Sequence[int], asked: Filter | None, actor: str | None) -> Steps[list[Answer]]:
    chosen: Sequence[int] = ids if asked is None else (yield from finding(asked))
    return (yield from discarding(chosen, By(asked, actor)))


def _discarded(ids: Sequence[int], **given: Any) -> Filter | None:
    return filtered(ids, ENDED, **given)


def _retried(ids: Sequence[int], again: bool, **given: Any) -> Filter | None:
    asked = filtered(ids, DEAD, DONE, **given)
    if asked is not None and not again and (done := [state for state in asked.states if state in DONE]):
        raise InvalidOption(f"state {done[0]!r}: jobs that have completed are run with again=True only")
    return asked


def cancelling(ids: Iterable[int], reason: str, by: By, *, one_transaction: bool = False) -> Steps[list[Answer]]:
    """Cancel these jobs; return an answer for each, which may be `missing`.

    `one_transaction`: all statements are in one transaction.
    """

    def judge(id: int, state: str | None, cancelled: bool) -> Answer | None:
        if cancelled:
            return Answer(id, "cancelled", state)
        if state == "running":
            return Answer(id, "requested", state)
        return None if state in WAITING else Answer(id, "missing" if state is None else "ended", state)

    params = by.params() | by.meant() | {"reason": checked_reason(reason), "notify": client()[1]}
    wanted = checked(ids)
    answers: list[Answer] = []
    for _ in range(ROUNDS):
        batches = list(_batches(wanted))
        if not one_transaction and len(batches) > 1:
            unreleased, others = yield from _unreleased(batches)
            batches = [*reversed(unreleased), *others]
        answers += yield from _settling("actions_cancel", wanted, params, judge, batches)
        if by.asked is None or by.asked.flow is None or by.asked.limit is not None:
            break
        known = {answer.id for answer in answers}
        wanted = [id for id in (yield from finding(by.asked)) if id not in known]
        if not wanted:
            break
    return answers


def retrying(ids: Iterable[int], again: bool, by: By, *, one_transaction: bool = False) -> Steps[list[Answer]]:
    """Run these jobs again; return an answer for each, which may be `missing`.

    `one_transaction`: all statements are in one transaction. If they are several, all locks come first (`retry_locks`).
    Else the jobs that had never been released come last.
    """

    def judge(id: int, state: str | None, new: int | None) -> Answer | None:
        if new is not None:
            return Answer(id, "retried" if new == id else "again", state, new)
        if state is None:
            return Answer(id, "missing", None)
        if state in LIVE:
            return Answer(id, "alive", state)
        if state == "unreleased":
            return Answer(id, "unreleased", "skipped")
        return None if state in DEAD or again else Answer(id, "completed", state)

    wanted = checked(ids)
    batches = list(_batches(wanted))
    refused: dict[int, Answer] = {}
    if one_transaction and len(batches) > 1:
        for id, (state, holder) in (yield from locking(batches, LIVE, client()[0])).items():
            refused[id] = Answer(id, "alive" if holder is None else "held", state, holder=holder)
        batches = list(_batches(id for id in wanted if id not in refused))
    elif len(batches) > 1:
        unreleased, others = yield from _unreleased(batches)
        batches = [*others, *unreleased]
    params = by.params() | {"again": again, "notify": client()[1]}
    return (yield from _settling("actions_retry", wanted, params, judge, batches, refused))


def discarding(ids: Iterable[int], by: By) -> Steps[list[Answer]]:
    """Delete these jobs; return an answer for each, which may be `missing`."""

    def judge(id: int, state: str | None, discarded: bool) -> Answer | None:
        if discarded:
            return Answer(id, "discarded", state)
        if state in LIVE:
            return Answer(id, "alive", state)
        if state == "needed":
            return Answer(id, "needed", None)
        return Answer(id, "missing", None) if state is None else None

    params = by.params() | {"older": None if by.asked is None else by.asked.older_than}
    wanted = checked(ids)
    answers = yield from _settling("actions_discard", wanted, params, judge, _batches(wanted))
    left = [answer.id for answer in answers if answer.did == "needed"]
    if not left or len(batches := list(_batches([answer.id for answer in answers]))) == 1:
        return answers
    # Jobs of later batches may have needed these, and are gone now. The last nodes come first. This transaction has the
    # locks of all batches already, so the other order of the rows holds nothing up.
    found = {answer.id: answer for answer in answers}
    for batch in reversed(batches):
        if again := [id for id in batch if found[id].did == "needed"]:
            settled = yield from _settling("actions_discard", again, params, judge, _batches(again))
            found |= {answer.id: answer for answer in settled}
    return [found[answer.id] for answer in answers]


def rescheduling(ids: Iterable[int], at: datetime, by: By) -> Steps[list[Answer]]:
    """Let these jobs start at this time; return an answer for each, which may be `missing`."""
    if not isinstance(at, datetime):
        raise InvalidOption(f"at {at!r}: give a datetime with a time zone")

    def judge(id: int, state: str | None, moved: bool) -> Answer | None:
        if moved:
            return Answer(id, "rescheduled", state)
        if state == "running":
            return Answer(id, "running", state)
        return None if state in WAITING else Answer(id, "missing" if state is None else "over", state)

    params = by.params() | {"at": str(aware(at)), "notify": client()[1]}
    wanted = checked(ids)
    return _settling("actions_reschedule", wanted, params, judge, _batches(wanted))


def _settling(
    name: str,
    wanted: Sequence[int],
    params: Mapping[str, object],
    judge: Judge,
    batches: Iterable[list[int]],
    known: Mapping[int, Answer] | None = None,
) -> Steps[list[Answer]]:
    """Send the statement for each batch until every job has an answer; `known` are answers that there are. A job
    without an answer was just changing its state."""
    answers = dict(known or {})
    for batch in batches:
        moving = batch
        for _ in range(ROUNDS):
            values = {"ids": integers(moving), **params}
            for id, state, changed, holder, _ in (yield named(name, **values)):
                if holder is not None:
                    answers[id] = Answer(id, "held", state, holder=holder)
                elif (answer := judge(id, state, changed)) is not None:
                    answers[id] = answer
            moving = [id for id in moving if id not in answers]
            if not moving:
                break
        else:
            raise _restless(moving)
    return [answers[id] for id in wanted]


def _unreleased(batches: Sequence[Sequence[int]]) -> Steps[tuple[list[list[int]], list[list[int]]]]:
    """The batches of the jobs that have not been released, and those of the others."""
    found: set[int] = set()
    for batch in batches:
        found.update(id for (id,) in (yield named("actions_unreleased", ids=integers(batch))))
    others = [id for batch in batches for id in batch if id not in found]
    return list(_batches(found)), list(_batches(others))


def _batches(ids: Iterable[int]) -> Iterator[list[int]]:
    """The ids in order, each once, in batches: in one transaction all changes by hand lock rows in this order."""
    ordered = sorted(set(ids))
    for first in range(0, len(ordered), BATCH):
        yield ordered[first : first + BATCH]


# What is given and what comes back -----------------------------------------------------------------------------------


def checked_reason(reason: str) -> str:
    """The reason of a cancel, if it is one line of 1 to 500 printable characters; else InvalidOption."""
    if not isinstance(reason, str) or not 0 < len(reason) <= REASON_MOST or not reason.isprintable():
        raise InvalidOption(f"reason {reason!r}: give 1 to {REASON_MOST} printable characters, on one line")
    return reason


def _found(changing: Steps[list[Answer]], asked: Filter | None) -> Steps[list[Answer]]:
    """Return the answers, or raise JobNotFound if a given id has no job. Jobs that a filter found may be removed by
    retention a moment later: that is no error."""
    answers = yield from changing
    missing = [answer.id for answer in answers if answer.did == "missing"]
    if missing and asked is None:
        others = plural(len(answers) - len(missing), "other was", "others were")
        raise JobNotFound(
            f"no job {_listed(missing)}: unknown id, its transaction is open or was rolled back, removed by retention, "
            "or younger than this transaction's snapshot (REPEATABLE READ). "
            f"{others} dealt with, to take effect if you commit",
            job_id=missing[0],
        )
    return answers


def _restless(ids: list[int]) -> Error:
    return Error(
        f"jobs {_listed(ids)} changed their state each of {ROUNDS} times; nothing was done to them, try again",
        job_id=ids[0],
    )


def _listed(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:20])) + " …" * (len(ids) > 20)
