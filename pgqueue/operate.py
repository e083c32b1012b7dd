"""What people do by hand: `pause` and `resume` a queue, `cancel` and `retry` jobs.

Called by applications and by the CLI, which is a thin skin over these. Everything happens inside the caller's
transaction, on any connection, and with its COMMIT or not at all. Never commits, never opens a connection.

A job may move while somebody asks for it: be promoted, claimed, completed. So 0 rows never mean "no such job": a
generator (`cancelling`, `retrying`) says which statement to send next, looks at what came back, and asks again, in a
new snapshot, for what was on the move. Two small drivers send its statements, one of them async.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pgqueue import connections
from pgqueue.config import client
from pgqueue.errors import Error, InvalidArguments, InvalidOption, JobNotFound
from pgqueue.job import check_queue
from pgqueue.statements import Row, Statement, integers, text

T = TypeVar("T")
Steps = Generator[Statement[list[Row]], list[Row], T]
"""What to send, one statement after another; what comes back is sent in; at the end the result."""

ROUNDS = 100
"""How often a job may be on the move each time we look; each takes a claim or a promotion at that very moment."""
WALKED_MOST = 20_000
REASON_MOST = 500  # characters
WAITING = frozenset({"available", "scheduled", "blocked"})
DEAD = frozenset({"failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one job that something was asked of.

    `did` is, of a cancel: `cancelled` (it waited, and ends with this transaction), `requested` (it runs, and its worker
    will stop it), `ended` (it had before). Of a retry: `retried` (it is available again), `again` (it had completed;
    `new` is the job that does it once more), `completed` (it had, and `again` was not asked for), `alive` (it has not
    ended). Of both: `missing` (there is no such job). `state` is the state it was found in.
    """

    id: int
    did: str
    state: str | None
    new: int | None = None


REFUSALS = frozenset({"ended", "missing", "completed", "alive"})
"""What `did` says where nothing was done."""


def sentence(answer: Answer) -> str:
    """The answer in words, for people."""
    said = {
        "cancelled": "cancelled",
        "requested": "runs; its worker was asked to stop it",
        "ended": f"had ended already: {answer.state}",
        "retried": "is available again",
        "again": f"had completed; job {answer.new} does it again",
        "completed": "had completed; --again runs it once more, as a new job",
        "alive": f"has not ended: {answer.state}",
        "missing": "is not there: no such id, not committed, or removed by retention",
    }
    return f"job {answer.id} {said[answer.did]}"


def cancel(conn: object, *ids: int, reason: str = "cancelled by hand") -> list[Answer]:
    """Cancel jobs, with this transaction's COMMIT: those that wait end at once, those that run are stopped.

    One answer for each id, in order: `cancelled`, `requested` (it runs; its worker hears of it after the COMMIT; it may
    still complete before), `ended` (it had, see `.state`). A handler is stopped as at a timeout: an async one by
    cancellation, a sync one by an exception at its next step in Python.

    Raises JobNotFound, after all others have been dealt with, for an id that no job has; roll back to undo them. At
    REPEATABLE READ a job that moved since the transaction's snapshot raises the driver's serialization failure: try
    again in a new transaction.

        pgqueue.cancel(conn, job.id, reason="order withdrawn")
    """
    return _found(drive(conn, cancelling(ids, reason)))


async def acancel(conn: object, *ids: int, reason: str = "cancelled by hand") -> list[Answer]:
    """`cancel` for async connections."""
    return _found(await _adrive(conn, cancelling(ids, reason)))


def retry(conn: object, *ids: int, again: bool = False) -> list[Answer]:
    """Run failed or cancelled jobs again, with this transaction's COMMIT: available at once, at the end of their lane.

    A job keeps its id and its attempts, and is allowed one more at least; its crashes and its reason are forgotten, a
    deadline that has passed is dropped. A completed one is run only with `again`, as a new job whose headers name the
    old as `retry_of`. One answer for each id, in order: `retried`, `again` (see `.new`), `completed`, `alive` (see
    `.state`).

    Raises JobNotFound, after all others have been dealt with, and at REPEATABLE READ the driver's serialization
    failure, as `cancel` does.

        pgqueue.retry(conn, *[job.id for job in pgqueue.find(conn, state="failed", task="mail.send")])
    """
    return _found(drive(conn, retrying(ids, again)))


async def aretry(conn: object, *ids: int, again: bool = False) -> list[Answer]:
    """`retry` for async connections."""
    return _found(await _adrive(conn, retrying(ids, again)))


def pause(conn: object, queue: str) -> bool:
    """Stop a queue: once this is committed no worker takes a job from it. False if it was paused already.

    What has been taken goes on, also the few jobs that wait in a worker for their turn; enqueuing goes on as well. It
    holds until `resume`, whatever restarts in the meantime.

        pgqueue.pause(conn, "mail")
    """
    return connections.run(conn, _pausing(queue))


async def apause(conn: object, queue: str) -> bool:
    """`pause` for async connections."""
    return await connections.arun(conn, _pausing(queue))


def resume(conn: object, queue: str) -> bool:
    """Open a paused queue again; its workers look at once. False if it was not paused."""
    return connections.run(conn, _resuming(queue))


async def aresume(conn: object, queue: str) -> bool:
    """`resume` for async connections."""
    return await connections.arun(conn, _resuming(queue))


# The steps -----------------------------------------------------------------------------------------------------------


def cancelling(ids: Iterable[int], reason: str) -> Steps[list[Answer]]:
    """Cancel these jobs; an answer for each, `missing` among them."""
    wanted, reason = _ids(ids), _reason(reason)
    schema, notify = client()
    answers: dict[int, Answer] = {}
    moving = sorted(set(wanted))
    for _ in range(ROUNDS):
        if not moving:
            break
        params: dict[str, object] = {"ids": integers(moving), "reason": reason, "notify": notify}
        for id, state, cancelled, _ in (yield Statement(text("operate_cancel", schema), params, list)):
            if cancelled:
                answers[id] = Answer(id, "cancelled", state)
            elif state == "running":
                answers[id] = Answer(id, "requested", state)
            elif state not in WAITING:
                answers[id] = Answer(id, "missing" if state is None else "ended", state)
        moving = [id for id in moving if id not in answers]
    if moving:
        raise _restless(moving)
    return [answers[id] for id in wanted]


def retrying(ids: Iterable[int], again: bool) -> Steps[list[Answer]]:
    """Run these dead jobs again; an answer for each, `missing` among them."""
    wanted = _ids(ids)
    schema, notify = client()
    answers: dict[int, Answer] = {}
    moving = sorted(set(wanted))
    for _ in range(ROUNDS):
        if not moving:
            break
        params: dict[str, object] = {"ids": integers(moving), "again": again, "notify": notify}
        for id, state, new, _ in (yield Statement(text("operate_retry", schema), params, list)):
            if new is not None:
                answers[id] = Answer(id, "retried" if new == id else "again", state, new)
            elif state is None:
                answers[id] = Answer(id, "missing", None)
            elif state in WAITING or state == "running":
                answers[id] = Answer(id, "alive", state)
            elif state not in DEAD and not again:
                answers[id] = Answer(id, "completed", state)
        moving = [id for id in moving if id not in answers]
    if moving:
        raise _restless(moving)
    return [answers[id] for id in wanted]


def matching(states: Sequence[str], *, queue: str | None, task: str | None) -> Steps[list[int]]:
    """The ids of all jobs that fit, looked for in pieces of 20,000 rows."""
    schema, _ = client()
    found: list[int] = []
    after: int | None = 0
    while after is not None:
        params = {"states": list(states), "queue": queue, "task": task, "after": after, "most": WALKED_MOST}
        [(ids, after)] = yield Statement(text("operate_matching", schema), params, list)
        found += json.loads(ids)
    return found


def _pausing(queue: str) -> Statement[bool]:
    schema, _ = client()
    return Statement(text("operate_pause", schema), {"queue": check_queue(queue)}, bool)


def _resuming(queue: str) -> Statement[bool]:
    schema, notify = client()
    return Statement(text("operate_resume", schema), {"queue": check_queue(queue), "notify": notify}, bool)


# The drivers ---------------------------------------------------------------------------------------------------------


def drive(conn: object, steps: Steps[T]) -> T:
    """Send what the steps say, on this connection; their result."""
    try:
        statement = next(steps)
        while True:
            statement = steps.send(connections.run(conn, statement))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except Exception as error:
        _explain(error)
        raise


async def _adrive(conn: object, steps: Steps[T]) -> T:
    try:
        statement = next(steps)
        while True:
            statement = steps.send(await connections.arun(conn, statement))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except Exception as error:
        _explain(error)
        raise


def _explain(error: Exception) -> None:
    """Add to the driver's error, which applications know how to retry on, what it means for the job."""
    for each in (error, getattr(error, "orig", None), error.__cause__):
        if (getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)) == "40001":
            error.add_note(
                "pgqueue: the job has moved since this transaction took its snapshot (REPEATABLE READ or "
                "SERIALIZABLE); roll back and try again in a new transaction"
            )
            return


# What is given and what comes back -----------------------------------------------------------------------------------


def _ids(ids: Iterable[int]) -> list[int]:
    wanted = list(ids)
    for id in wanted:
        if not isinstance(id, int) or isinstance(id, bool) or not 0 < id < 1 << 63:
            raise InvalidArguments(f"{id!r} is no job's id: give whole numbers, as job.id")
    return wanted


def _reason(reason: str) -> str:
    if not isinstance(reason, str) or not 0 < len(reason) <= REASON_MOST or not reason.isprintable():
        raise InvalidOption(f"reason {reason!r}: give 1 to {REASON_MOST} printable characters, on one line")
    return reason


def _found(answers: list[Answer]) -> list[Answer]:
    """The answers, if every id has a job."""
    missing = [answer.id for answer in answers if answer.did == "missing"]
    if missing:
        raise JobNotFound(
            f"no job {_listed(missing)}: no such id, its transaction is open or was rolled back, retention has removed "
            "it, or it is younger than this transaction's snapshot (REPEATABLE READ); "
            f"{len(answers) - len(missing)} others were dealt with and take effect if you commit",
            job_id=missing[0],
        )
    return answers


def _restless(ids: list[int]) -> Error:
    return Error(
        f"jobs {_listed(ids)} were on the move each of {ROUNDS} times; nothing was done to them, try again",
        job_id=ids[0],
    )


def _listed(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:20])) + " …" * (len(ids) > 20)
