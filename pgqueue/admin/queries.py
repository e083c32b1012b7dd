"""Questions about jobs and workers: `get`, `find`, `status`. How many jobs there are is asked by `depth`.

Called by applications and by the CLI, which is a thin layer over these functions. Pure functions make the statements;
the public functions run them on the connection, `a…` on an async one. Every statement only reads, in the connection's
own transaction. Its rows are JSON texts, which every driver reads alike. Never changes a job.

The work is bounded at any size of the tables. Counts are exact up to 10,000 and estimates beyond (`Count.exact`). A
search looks at 20,000 jobs of the states asked for, in the order of an index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Unpack

import msgspec

from pgqueue.admin import depth
from pgqueue.admin.depth import Count as Count
from pgqueue.admin.depth import Measured, QueueInfo, UnknownTask
from pgqueue.admin.filters import LISTED, Criteria, Filter, searched
from pgqueue.config import config
from pgqueue.database import shown, steps
from pgqueue.database.asking import asks, twin
from pgqueue.database.statements import Row, Statement, text
from pgqueue.database.steps import Steps
from pgqueue.errors import InvalidOption, JobNotFound
from pgqueue.jobs.states import ENDED, PARTITIONS, RETRYING, STATES
from pgqueue.jobs.values import HIGHEST_ID, check_id

SEARCHED_MOST = 20_000
"""A search looks at no more jobs than this."""
LIMIT_MOST = 10_000
ROOM = 64 << 20
"""So many bytes the arguments, headers and results of a page take. They are read at once; those of the largest jobs are
not shown."""
STEPS_MOST = 200
"""So many steps of a job are read, the first ones."""
STEPS_ROOM = 1 << 20
"""So many bytes the answers of steps take beside the errors of a list of jobs."""

_PLACE = re.compile(
    r"(\d{4,6}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?[+-][\d:]{2,8}(?: BC)?|-?infinity)/(\d{1,19})", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that did not complete: what happened, on which worker, when."""

    attempt: int
    outcome: str
    error_type: str | None
    message: str | None
    traceback: str | None
    worker_id: int
    version_tag: str | None
    started_at: datetime
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The last progress that a running job reported (`job.progress`), and when it was written; `str()` for people."""

    done: float
    total: float | None
    updated_at: datetime | None

    def __str__(self) -> str:
        done, total = _short(self.done), _short(self.total)
        return f"{done} of {total} ({100 * self.done / self.total:.0f} %)" if self.total else done


@dataclass(frozen=True, slots=True)
class JobStep:
    """A durable step of a job (`job.step`): its name, when its answer was recorded, and the answer."""

    name: str
    at: datetime
    result: Any


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job in the database. Times are UTC, by the database's clock.

    `reason` says why it has failed, was cancelled, or waits for another attempt. `key` is what a blocked job waits for.
    `flow` is the id of its flow, and `node` the number of its node there; None for a job of no flow.
    `progress` is the last one a running job reported. `attempts` are those that did not complete, oldest first. `steps`
    are its first 200 durable steps, of all attempts, in the order of their ends. `find` leaves both empty. If
    arguments, headers, a result or the answer of a step are too large to be shown, or cannot be read, they are an
    object with one key, `pgqueue`, that says so.
    """

    id: int
    state: str
    queue: str
    task: str
    priority: int
    args: Mapping[str, Any]
    headers: Mapping[str, Any] | None
    enqueued_at: datetime
    run_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    deadline: datetime | None
    attempt: int
    max_attempts: int | None
    crashes: int
    snoozes: int
    worker_id: int | None
    version_tag: str | None
    lock_key: str | None
    limit_key: str | None
    rate_key: str | None
    key: str | None
    unique_key: str | None
    idempotency_key: str | None
    flow: int | None
    node: int | None
    progress: JobProgress | None
    reason: str | None
    result: Any
    attempts: tuple[Attempt, ...] = ()
    steps: tuple[JobStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """The jobs a search found, in its order. `searched` is None if it found enough, else the jobs it looked at.

    `after` is where the next search goes on; None if there is nothing more to look at. It is the id of a job; in the
    order of a time it is a text, the time and the id.
    """

    jobs: tuple[JobInfo, ...]
    searched: int | None
    after: int | str | None = None

    @property
    def complete(self) -> bool:
        """Whether no other job fits. If False, the jobs behind these were not looked at, or not needed."""
        return self.searched is not None and self.searched < SEARCHED_MOST


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker process. Ages are in seconds.

    `state` is `dead` if it was declared dead, or has sent no heartbeat for three of its leases. `lost` is the number of
    slots with a handler that did not stop at its timeout. `tasks` is the number of task names that it knows, with
    aliases.
    """

    id: int
    host: str
    pid: int
    state: str
    version_tag: str
    concurrency: int
    running: int
    lost: int
    queues: tuple[str, ...]
    tasks: int
    started_at: datetime
    beat_age: float


@dataclass(frozen=True, slots=True)
class PausedTask:
    """A task that is paused in all queues, since when, and by which actor, else database role."""

    name: str
    paused_at: datetime
    paused_by: str | None


@dataclass(frozen=True, slots=True)
class Status:
    """States, queues and workers. At most 1,000 queues and the newest 1,000 workers.

    `counted_at` is when the jobs were counted: at the time `at`, or up to 120 seconds before. If jobs that have ended
    were counted before the others, it is the time of the ended ones. `unknown` are the tasks with waiting jobs that no
    live worker of their queue knows, the most frequent first. `read_only`: the database is, by order, so workers take
    nothing. `number`: the jobs' ids of this database begin at `number << 43`, see docs/operations.md.
    """

    database: str
    schema: str
    version: int
    server_version: str
    at: datetime
    counted_at: datetime
    states: Mapping[str, Count]
    queues: tuple[QueueInfo, ...]
    unknown: tuple[UnknownTask, ...]
    workers: tuple[WorkerInfo, ...]
    paused_tasks: tuple[PausedTask, ...] = ()
    read_only: bool = False
    number: int = 0


class _Standing(msgspec.Struct):
    """What one statement answers of a status."""

    database: str
    schema: str
    version: int
    server_version: str
    at: datetime
    workers: tuple[WorkerInfo, ...]
    paused_tasks: tuple[PausedTask, ...]
    read_only: bool
    number: int


@asks
def get(conn: object, id: int) -> Statement[JobInfo]:
    """Return the job with its attempts. Raises JobNotFound: unknown id, not committed, or removed by retention."""
    return one(id, config().schema)


aget = twin(get)
"""`get` for async connections."""


@asks
def find(conn: object, **asked: Unpack[Criteria]) -> Steps[list[JobInfo]]:
    """Return the jobs that fit, the newest first, at most `limit` (1 to 10,000; default 50).

    - `state`: one state or several. `"retrying"` are the scheduled jobs that wait for another attempt.
    - `queue`, `task`: by name.
    - `key`: a lock key, a unique key or an idempotency key. The job that has a unique or idempotency key now comes
      first, however many jobs there are.
    - `args`: the job has these arguments, and may have others: `{"order_id": 7}`.
    - `worker`: the id of a worker. The job runs there, has ended there, or an attempt of it that did not complete was
      made there.
    - `error_type`: an attempt has failed with an exception of this class, whatever became of the job. Of an attempt
      without an exception it is the outcome, such as `"crashed"`.
    - `error`: the text stands in the reason, or in the error of an attempt; upper and lower case are alike.
    - `since`, `until`: enqueued at that time or later, and before that time.
    - `flow`: the id of a flow, whose jobs it has. Then only these are looked at, the highest id first whatever `state`
      says, and `after` is an id.
    - `node`: with `flow`, the number of one of its nodes. Then only its jobs are looked at. Of a flow with hundreds of
      thousands of jobs ask so: without a node each page reads all of them.
    - `after`: what `search` returned as `Page.after`; only jobs behind that place are looked at.

    The states decide the order. Scheduled jobs alone: by the time at which they are due, the first one first. Ended
    jobs alone: by the time of their end, the last one first. Else by id, the highest one first; there `after` is an id.

    The search looks at the first 20,000 jobs of the states in this order: it may miss others. `after` goes on there.

        pgqueue.find(conn, state="failed", task="billing.charge", args={"order_id": 7})
    """
    return _jobs(searching(config().schema, **asked))


afind = twin(find)
"""`find` for async connections."""


@asks
def search(conn: object, *, room: int = ROOM, **asked: Unpack[Criteria]) -> Steps[Page]:
    """As `find`, and also returns how many jobs were looked at, and where to go on.

    The arguments, headers and results of a page take `room` bytes at most; those of its largest jobs are not shown.
    """
    return searching(config().schema, room, **asked)


asearch = twin(search)
"""`search` for async connections."""


@asks
def status(conn: object) -> Steps[Status]:
    """Return the numbers of jobs by state, the queues and the workers."""
    return standing(config().schema)


astatus = twin(status)
"""`status` for async connections."""


@asks
def state_counts(conn: object) -> Steps[tuple[datetime, dict[str, Count]] | None]:
    """Return the time, and how many jobs there are in each state that can be asked for.

    Never measures: None if the tables are large, and no worker has measured them in the last two minutes.
    """
    schema = config().schema
    found = yield from depth.fresh(schema)
    if found is None:
        return None
    ended, _ = yield from depth.history(schema)
    groups = [*found.groups, *ended]
    counts = {state: depth.total(each for each in groups if each.state == state) for state in STATES}
    retrying = (each for each in found.groups if (each.state, each.reason) == ("scheduled", "retry"))
    return shown.at(found.now), counts | {RETRYING: depth.total(retrying)}


astate_counts = twin(state_counts)
"""`state_counts` for async connections."""


async def astanding(conn: object, found: Measured) -> Status:
    """`astatus` with numbers that were read before."""
    return await steps.adrive(conn, standing(config().schema, found), {})


# The statements ------------------------------------------------------------------------------------------------------


def one(id: int, schema: str) -> Statement[JobInfo]:
    """The statement that asks for one job with its attempts."""

    check_id(id, "get")

    def read(rows: list[Row]) -> JobInfo:
        job = read_one(rows)
        if job is None:
            raise JobNotFound(
                f"job {id} is not there: unknown id, its transaction is open or was rolled back, "
                "or retention has removed it",
                job_id=id,
            )
        return job

    return Statement(text("queries_get", schema), {"id": id}, read)


def read_one(rows: list[Row]) -> JobInfo | None:
    """The job of these rows of `queries_get`; None if there is none."""
    if not rows:
        return None
    job, attempts, said, steps = rows[0]
    row = json.loads(job) | {"said": said and json.loads(said)}
    return read_job(row, tuple(map(_attempt, json.loads(attempts))), read_steps(json.loads(steps)))


def searching(schema: str, room: int = ROOM, **given: Unpack[Criteria]) -> Steps[Page]:
    """The statements of a search. With a key the jobs that have it now come first, and are left out of the walk.

    What is asked is checked at once, before the first of them.
    """
    asked = searched(given, STATES, LIMIT_MOST)
    return _searching(newest(asked, schema, given.get("after"), room=room), asked, schema, given.get("after"), room)


def _jobs(search: Steps[Page]) -> Steps[list[JobInfo]]:
    return list((yield from search).jobs)


def _searching(walk: Statement[Page], asked: Filter, schema: str, after: int | str | None, room: int) -> Steps[Page]:
    if asked.key is None:
        page: Page = yield walk
        return page
    [[found]] = yield Statement(text("queries_keyed", schema), walk.params, list)
    limit = asked.limit or LISTED
    held = tuple(map(read_job, json.loads(found)))[:limit]
    if after is None and len(held) == limit:
        return Page(held, None, _FIRST[_order(asked)])
    first = () if after is not None else held
    walk = newest(replace(asked, limit=limit - len(first)), schema, after, tuple(job.id for job in held), room)
    page = yield walk
    return Page(first + page.jobs, page.searched, page.after)


def newest(
    asked: Filter, schema: str, after: int | str | None = None, but: Iterable[int] = (), room: int = ROOM
) -> Statement[Page]:
    """The statement that asks for the newest jobs that fit, behind the place `after`, without those of the ids in
    `but`; their values take `room` bytes at most."""
    states, limit, order = {*asked.states}, asked.limit or LISTED, _order(asked)
    params = asked.searched() | {
        "parts": [
            part
            for part, held in PARTITIONS.items()  # whole ones: a job that is filtered out was looked at
            if {*held} & states or (part == "scheduled" and RETRYING in states)
        ],
        "but": list(but),
        "n": limit,
        "most": SEARCHED_MOST,
        "room": room,
    }
    name, place = _from(order, after) if asked.flow is None else _of_flow(after)
    return Statement(text(name, schema), params | place, lambda rows: _page(rows, limit, order))


def place_of(job: JobInfo, **asked: Unpack[Criteria]) -> int | str | None:
    """Where a search of this filter goes on behind the job; None if the job has no place in its order."""
    order = _order(searched(asked, STATES, LIMIT_MOST))
    if order == "id":
        return job.id
    at: datetime | None = getattr(job, order)
    return None if at is None else f"{at.isoformat()}/{job.id}"


def _order(asked: Filter) -> str:
    """The column that orders the jobs of these states. Each one has an index in this order, so a page is short work."""
    states = set(asked.states)
    if states <= {"scheduled", RETRYING} and asked.flow is None:
        return "run_at"
    return "finished_at" if states <= {*ENDED} and asked.flow is None else "id"


_FIRST: Mapping[str, int | str] = {
    "id": HIGHEST_ID,
    "run_at": "-infinity/1",
    "finished_at": f"infinity/{HIGHEST_ID}",
}
"""By order: the place before the first job."""
_STATEMENTS = {"id": "queries_find", "run_at": "queries_find_scheduled", "finished_at": "queries_find_ended"}


def _from(order: str, after: int | str | None) -> tuple[str, dict[str, object]]:
    """The statement that reads in this order behind that place, and the parameters that name the place."""
    name = _STATEMENTS[order]
    if after is None:
        return name, {}
    if order == "id":
        return f"{name}_after", {"after": check_id(after, "after")}
    found = _PLACE.fullmatch(after) if isinstance(after, str) else None
    if found is None or int(found[2]) > HIGHEST_ID:
        raise InvalidOption(f"after {after!r}: jobs of these states are in the order of {order}; give Page.after")
    return f"{name}_after", {"at": found[1], "after": int(found[2])}


def _of_flow(after: int | str | None) -> tuple[str, dict[str, object]]:
    """As `_from`, for the jobs of a flow."""
    return "queries_flow", {"after": None if after is None else check_id(after, "after")}


def standing(schema: str, found: Measured | None = None) -> Steps[Status]:
    """The statements that ask for the status, and for the numbers if they were not read before."""
    if found is None:
        found = yield from depth.measured(schema)
    ended, ended_at = yield from depth.history(schema)
    [[said]] = yield Statement(text("queries_status", schema), {}, list)
    of_state: dict[str, list[depth.Group]] = {state: [] for state in STATES}
    for group in (*found.groups, *ended):
        of_state[group.state].append(group)
    return Status(
        **msgspec.structs.asdict(msgspec.json.decode(said, type=_Standing)),
        counted_at=shown.at(found.counted_at if ended_at is None else min(found.counted_at, ended_at)),
        states={state: depth.total(groups) for state, groups in of_state.items()},
        queues=tuple(depth.queue_list(found)),
        unknown=depth.unknown_list(found.groups),
    )


# What comes back -----------------------------------------------------------------------------------------------------


def _page(rows: list[Row], limit: int, order: str) -> Page:
    read, walked = rows[0]
    found = json.loads(read)
    jobs = tuple(map(read_job, found))
    searched, *last = (None, None) if walked is None else json.loads(walked)
    if len(jobs) == limit:
        return Page(jobs, None, _place(order, found[-1][order], jobs[-1].id))
    return Page(jobs, searched, _place(order, *last) if searched == SEARCHED_MOST else None)


def _place(order: str, *last: Any) -> int | str:
    """Where the next page begins: behind the job of this id, or of this time (as the server has written it) and id."""
    return int(last[-1]) if order == "id" else f"{last[0]}/{last[1]}"


def read_job(row: Mapping[str, Any], attempts: tuple[Attempt, ...] = (), steps: tuple[JobStep, ...] = ()) -> JobInfo:
    """The job of a row of `shown`, with what it has said of how far it is."""
    said = row["said"]
    progress = said and JobProgress(**shown.timed(said, JobProgress))
    values = {name: shown.value(row[name]) for name in ("args", "headers", "result")}
    return JobInfo(**shown.timed(row, JobInfo) | values | {"progress": progress}, attempts=attempts, steps=steps)


def _attempt(row: Mapping[str, Any]) -> Attempt:
    return Attempt(**shown.timed(row, Attempt))


def read_steps(rows: Iterable[Mapping[str, Any]]) -> tuple[JobStep, ...]:
    """The durable steps of these rows."""
    return tuple(map(_step, rows))


def _step(row: Mapping[str, Any]) -> JobStep:
    return JobStep(**shown.timed(row, JobStep) | {"result": shown.value(row["result"])})


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"
