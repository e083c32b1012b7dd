"""Run the jobs that are due, on the connection of the test, in its transaction: a worker with one slot and no loop.

A drain uses a worker's steps and statements: promote, claim, call, write the outcome. While it lasts it has a row in
`pgqueue.worker`. Each handler runs in a savepoint. If the attempt fails, its writes on this connection are undone. An
error in its SQL does not end the transaction of the test. Never commits, except on a connection that `drain()` opens
itself, which is to a database of tests (own_database.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

from pgqueue.client import tasks
from pgqueue.client.middleware import declared, wrapped
from pgqueue.config import config, database_of_tests
from pgqueue.database.asking import named
from pgqueue.database.drivers import aconnect_to, connect_to
from pgqueue.database.statements import Row, Statement, text
from pgqueue.errors import Error
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import (
    COMPLETED,
    RELEASED,
    Cancel,
    Cancelled,
    Completed,
    Failed,
    Handed,
    Outcome,
    Released,
    Retried,
    Snooze,
    given,
)
from pgqueue.jobs.values import UNIX_EPOCH
from pgqueue.plain_text import plural
from pgqueue.testing import own_database
from pgqueue.testing.clock import Clock
from pgqueue.testing.handlers import Ran
from pgqueue.testing.resources import AS_DECLARED, Resources
from pgqueue.testing.steps import Call, Command, Steps, aplay, play
from pgqueue.worker.complete.outcome_sql import OutcomeSql
from pgqueue.worker.concurrency.waiter_cursors import FRONT
from pgqueue.worker.fetch.fetcher import RANKS
from pgqueue.worker.flows.releaser import BYTES_MOST
from pgqueue.worker.leader.scheduler import BATCH, EVER

NODES = 1_000
MOST = 10_000
"""The most attempts of one drain; a job that enqueues itself would never end."""

NO_TRANSACTION = "25P01"
LEASE = 3_600.0  # long, so that no other worker declares us dead while a test waits in a debugger


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did. `retried` counts attempts that are made again; `cancelled` and `failed` count ended jobs.

    `errors` are the exceptions that handlers raised, except Snooze and Cancel, each with a note of its job. Attempts
    that were made again are included. `unknown` are the names of tasks that are not imported: their jobs are left.

    >>> Drained(completed=2)
    Drained(completed=2, retried=0, failed=0, cancelled=0, errors=(), unknown=())
    """

    completed: int = 0
    retried: int = 0
    failed: int = 0
    cancelled: int = 0
    errors: tuple[BaseException, ...] = ()
    unknown: tuple[str, ...] = ()

    def check(self) -> Drained:
        """Raise the first exception of a handler, or Error if a due job did not complete. Else return this object."""
        if self.errors:
            raise self.errors[0]
        if self.retried or self.failed or self.cancelled or self.unknown:
            raise Error(f"not every job completed: {self}; pgqueue.find(conn) says why")
        return self


@dataclass(slots=True)
class _Account:
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("completed", "retried", "failed", "cancelled"), 0)
    )
    errors: list[BaseException] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    """Ids of jobs with another attempt to come."""

    def add(self, job: Job, outcome: Outcome, error: BaseException | None) -> None:
        self.waiting.discard(job.id)
        match outcome:
            case Completed():
                self.counts["completed"] += 1
            case Failed():
                self.counts["failed"] += 1
            case Cancelled():
                self.counts["cancelled"] += 1
            case Retried() | Released():
                self.counts["retried"] += 1
                self.waiting.add(job.id)
        if error is not None and not isinstance(error, Snooze | Cancel):
            error.add_note(f"in job {job.id} ({job.task}), attempt {job.attempt}, arguments {job.args}")
            self.errors.append(error)

    def attempts(self) -> int:
        return sum(self.counts.values())

    def closed(self, unknown: Iterable[str]) -> Drained:
        return Drained(**self.counts, errors=tuple(self.errors), unknown=tuple(unknown))


def drain(
    conn: object = None,
    clock: Clock | None = None,
    *,
    dsn: str | None = None,
    most: int = MOST,
    resources: Any = AS_DECLARED,
) -> Drained:
    """Run every due job to its end, also jobs that jobs enqueue and those of flows, in this process, and return the
    account.

        with psycopg.connect(dsn) as conn:
            remind.enqueue(conn, customer=1)
            assert drain(conn).completed == 1
            conn.rollback()  # there was no job, and no reminder

    `conn` is of any kind that `enqueue` takes, inside a transaction. With `dsn`, or without both, a connection is
    opened, and every step is committed, as a worker does. Without both it is to the database of the fixture
    `pgqueue_db`, or to that of Django's tests; inside of a TestCase it is Django's own connection. There is no other
    default: the configured database may be that of your development. Error names it.

    If an attempt fails, the next one is made when its time has come. With a `clock` the clock is turned forward to that
    time. Without one the job is left for a later drain. Jobs that were scheduled for later are left alone in both
    cases: turn the clock yourself.

    One job runs at a time: locks are kept, and no job waits for a limit or a rate. A job of a task with a `Batch` is a
    batch of its own.

    Sync handlers run in this thread, async handlers on a fresh loop in another thread. Exceptions of handlers are in
    `.errors`, and not raised: `drain(conn).check()` raises them. After `most` attempts Error is raised.

    `job.resources` is what is given as `resources`, else what the declared lifespan yields. The lifespan is entered
    before the first handler, in the other thread, and left at the end.
    """
    place = own_database.place(conn, dsn)
    with Resources(resources) as own_resources:
        if place.conn is None:
            with connect_to(place.dsn) as own:
                return play(own, _drain(clock, most, own_resources, alone=True))
        return play(place.conn, _drain(clock, most, own_resources, alone=False))


async def adrain(
    conn: object = None,
    clock: Clock | None = None,
    *,
    dsn: str | None = None,
    most: int = MOST,
    resources: Any = AS_DECLARED,
) -> Drained:
    """`drain` for async connections: async handlers run on this loop, sync handlers in threads, one at a time."""
    place = await own_database.aplace(conn, dsn)
    async with Resources(resources) as own_resources:
        if place.conn is None:
            async with await aconnect_to(place.dsn) as own:
                return await aplay(own, _drain(clock, most, own_resources, alone=True))
        return await aplay(place.conn, _drain(clock, most, own_resources, alone=False))


# The steps ------------------------------------------------------------------------------------------------------------


def _drain(clock: Clock | None, most: int, resources: Resources, *, alone: bool) -> Steps[Drained]:
    """The steps of a drain. `alone`: the connection is our own, and every step is committed."""
    account = _Account()
    yield from _in_transaction(alone)
    worker_id, turned = (yield _register()), False
    for claim in count(1):
        job = yield from _claim(worker_id, claim)
        if job is None:
            # No job right after a turn of the clock: another session holds that row, and another turn does not help.
            if turned or clock is None or not (yield from _forward(clock, account.waiting)):
                break
            turned = True
            continue
        turned = False
        try:
            if account.attempts() >= most:
                ran = plural(most, "attempt", "attempts")
                raise Error(f"drain ran {ran} and there is more to do: does {job.task} enqueue itself?")
            yield from _commit(alone)
            outcome, error = yield from _attempt(job, worker_id, alone, resources)
            outcome = yield _ending(job, outcome, worker_id)
            account.add(job, outcome, error)
            if (release := _endings().release([(job, outcome)])) is not None:
                yield release
            yield from _commit(alone)
        except BaseException:
            if alone:
                yield from _give_back(job, worker_id)
            raise
    yield named("registration_leave", worker_id=worker_id)
    [(unknown,)] = yield named("drain_unknown", tasks=list(tasks.registry))
    return account.closed(unknown)


def _in_transaction(alone: bool) -> Steps[None]:
    """Check for a transaction before anything is done: without one nothing could be rolled back."""
    if alone:
        return
    try:
        yield Command("SAVEPOINT pgqueue_drain")
    except Exception as error:
        if _state(error) != NO_TRANSACTION:
            raise
        how = "drain(dsn=…), which names the database" if database_of_tests() is None else "drain()"
        raise Error(
            f"drain works in your transaction, and this connection is in none: open one, or call {how}"
        ) from error
    yield Command("RELEASE SAVEPOINT pgqueue_drain")


def _state(error: Exception) -> str | None:
    """The SQLSTATE of an error. SQLAlchemy and Django wrap the driver's error."""
    for each in (error, getattr(error, "orig", None), error.__cause__, getattr(error, "orig", error).__cause__):
        state: str | None = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if state:
            return state
    return None


def _commit(alone: bool) -> Steps[None]:
    if alone:
        yield Command("COMMIT")


def _give_back(job: Job, worker_id: int) -> Steps[None]:
    """Undo what other sessions can see: the job waits again, and its worker's row is removed."""
    yield Command("ROLLBACK")
    yield _endings().one(job, RELEASED, worker_id)
    yield named("registration_leave", worker_id=worker_id)
    yield Command("COMMIT")


def _claim(worker_id: int, claim: int) -> Steps[Job | None]:
    """Promote due jobs. Then take the most urgent job with a free lock, of all queues that are not paused. If there is
    none, go on with the jobs that wait for nodes of flows which have ended, and look again."""
    while True:
        yield named("scheduler_promote", after=EVER, passed="{}", n=BATCH, notify=False)
        job = yield from _claim_due(worker_id, claim)
        if job is not None or not (yield from _release(worker_id)):
            return job


def _release(worker_id: int) -> Steps[bool]:
    """Go on with all jobs that wait for nodes which have ended; whether there were any."""
    went = False
    after: str | None = ""
    about = {"worker_id": worker_id, "version_tag": _endings().version_tag, "notify": False}
    while after is not None:
        [(nodes, after)] = yield named("release_walk", after=after, n=NODES)
        while nodes:
            asks = {"nodes": list(nodes), "n": BATCH, "passed": "{}", "bytes": BYTES_MOST}
            [(count, others, *_)] = yield named("release_jobs", **asks, **about)
            went = went or count > 0
            # As many as were asked for: of these nodes there may be more. None: another session has locked them.
            asked = [*others, *(nodes if count == BATCH else [])]
            nodes = [node for (node,) in (yield named("release_look", nodes=asked))] if asked and count else []
    return went


def _claim_due(worker_id: int, claim: int) -> Steps[Job | None]:
    """Take the most urgent of the jobs that are due."""
    waiting = 0
    while True:
        yield from _fetch(worker_id, claim)
        job = yield from _claimed(worker_id, claim)
        if job is not None:
            return job
        [(keys, queues, number)] = yield named("drain_blocked")
        if number == waiting:  # no further job was blocked
            return None
        yield named("drain_lock", keys=keys)
        yield from _unblock(worker_id, claim, keys, queues)
        job = yield from _claimed(worker_id, claim)
        if job is not None:
            return job
        passing = {"worker_id": worker_id, "claim": claim, "tasks": list(tasks.registry)}
        yield Command(text("drain_pass", config().schema), passing)
        job = yield from _claimed(worker_id, claim)
        if job is not None:
            return job
        [(_, _, waiting)] = yield named("drain_blocked")


def _fetch(worker_id: int, claim: int) -> Steps[None]:
    """Claim the most urgent job, plain or with keys. A job with keys may be blocked instead."""
    known = list(tasks.registry)
    [(queues, keyed)] = yield named("drain_queues", tasks=known)
    lanes = [(queue, rank) for rank in (-2, -1, *RANKS) for queue in queues]
    params: dict[str, object] = {
        "queues": [queue for queue, _ in lanes],
        "ranks": [rank for _, rank in lanes],
        "afters": [0] * len(lanes),
        "uptos": [2**63 - 1] * len(lanes),
        "mosts": [1] * len(lanes),
        "tasks": known,
        "worker_id": worker_id,
        "claim": claim,
        "n": 1,
    }
    if keyed:
        yield Command(text("keyed_claim_move", config().schema), params | {"starts": "{}", "lines": "{}"})
    else:
        yield Command(text("fetch_claim", config().schema), params)


def _unblock(worker_id: int, claim: int, keys: list[str], queues: list[str]) -> Steps[None]:
    """Unblock one of the jobs that wait for these keys, and skip heads that are to be skipped."""
    params: dict[str, object] = {
        "keys": keys,
        "afters": [0] * len(keys),
        "ranks": [FRONT[0]] * len(keys),
        "ids": [FRONT[1]] * len(keys),
        "queues": queues,
        "pools": [1] * len(queues),
        "slots": [1],
        "tasks": list(tasks.registry),
        "worker_id": worker_id,
        "claim": claim,
        "notify": False,
    }
    yield Command(text("unblock_move", config().schema), params)
    yield Command(text("unblock_skip", config().schema), params | {"fresh": [], "heads": True})


def _claimed(worker_id: int, claim: int) -> Steps[Job | None]:
    rows: list[Row] = yield named("drain_claimed", worker_id=worker_id, claim=claim)
    return Job(rows[0], claim) if rows else None


def _attempt(job: Job, worker_id: int, alone: bool, resources: Resources) -> Steps[Ran]:
    """Call the handler, with middleware and hooks; return the outcome and the error."""
    hooks = declared()
    call = Call(job, wrapped(tasks.registry[job.task], hooks), worker_id, alone, resources)
    ran = yield from _in_savepoint(call)
    hooks.finished(job, ran[0])
    return ran


def _in_savepoint(call: Call) -> Steps[Ran]:
    """Run the handler in a savepoint: released if it returned, rolled back if it raised. With `alone` without one."""
    if call.alone:
        ran: Ran = yield call
        return ran
    yield Command("SAVEPOINT pgqueue_job")
    outcome, error = yield call
    if error is None:
        try:
            yield Command("RELEASE SAVEPOINT pgqueue_job")
            return outcome, error
        except Exception as broken:  # the handler went on after an error in its SQL: its writes cannot be kept
            outcome, error = given(call.job, call.task.retry, broken, raised=True), broken
    yield Command("ROLLBACK TO SAVEPOINT pgqueue_job")
    yield Command("RELEASE SAVEPOINT pgqueue_job")
    return outcome, error


def _forward(clock: Clock, waiting: set[int]) -> Steps[bool]:
    """Turn the clock to the next attempt of a job that failed here. False if no attempt is to come."""
    [(due,)] = yield named("drain_due", ids=sorted(waiting))
    if due is None:
        return False
    yield from clock.turn(max(clock.now, UNIX_EPOCH + timedelta(microseconds=due)))
    return True


# The statements -------------------------------------------------------------------------------------------------------


def _register() -> Statement[int]:
    params = {
        "lease": LEASE,
        "pid": os.getpid(),
        "concurrency": 1,
        "host": socket.gethostname(),
        "version_tag": "testing",
        "queues": [],
        "tasks": [],
        "slots": [],
        "listens": False,
    }
    return named("registration_register", lambda rows: int(rows[0][0]), **params)


def _ending(job: Job, outcome: Outcome, worker_id: int) -> Statement[Outcome]:
    """The completer's statement for this outcome. It answers the outcome that counts: a handler that has called
    `job.complete` has completed the job, if that was kept."""
    ending = _endings().one(job, outcome, worker_id)

    def read(rows: list[Row]) -> Outcome:
        was_there = ending.read(rows) is None
        if isinstance(outcome, Handed):
            return outcome.otherwise if was_there else COMPLETED
        if not was_there:
            raise Error(f"job {job.id} ({job.task}) is not running any more: its handler moved or deleted its own row")
        return outcome

    return Statement(ending.sql, ending.params, read)


def _endings() -> OutcomeSql:
    return OutcomeSql(config().schema, "testing", notify=False, array=list, holding=tasks.holding(tasks.registry))
