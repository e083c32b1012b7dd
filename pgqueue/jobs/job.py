"""A job: as it is about to be enqueued (`NewJob`), and as a worker has claimed it (`Job`).

    enqueue ──────────────▶ available ─────claim────▶ running ──returned──▶ completed
       │                     ▲   ▲  ▲                   │ │ │
       │ later           due │   │  └──released─────────┘ │ └──gave up──▶ failed
       └──────▶ scheduled ───┘   │                        │
                    ▲            └──── its worker died ───┤
                    └──────────── another attempt ────────┘

`blocked` (waits for its key), `skipped` and `cancelled` are the other states. A NewJob is made by tasks and written by
`enqueue`; a Job is made by the fetcher and read by handlers. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from math import isfinite
from time import perf_counter
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import msgspec

from pgqueue.errors import Error, InvalidArguments, InvalidOption
from pgqueue.jobs.context import NO_CONTEXT, AnySource, Source
from pgqueue.jobs.cron import tick_of
from pgqueue.jobs.headers import TIMEOUT, timeout_of
from pgqueue.jobs.keys import Keys

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class NewJob(msgspec.Struct, Generic[R_co], frozen=True):
    """A row to be: a task's name and its encoded arguments, everything checked. `R_co` is what the task returns.

    A Struct, because batches make thousands (0.06 µs; a frozen dataclass takes 0.7).
    """

    task: str
    args: str  # the text of a JSON object
    queue: str
    priority: int
    run_at: datetime | None  # with a time zone; at most one of run_at and delay
    delay: float | None  # seconds
    headers: str | None  # the text of a JSON object
    max_attempts: int | None  # None: as the task's retry policy says when it runs
    deadline: datetime | float | None = None  # with a time zone, or seconds from the enqueue
    lock_key: str | None = None
    lock_limit: int | None = None
    on_locked: str | None = None
    limit_key: str | None = None  # the limit's name
    rate_key: str | None = None  # the rate's name, or name:key
    keys: Keys | None = None


class Enqueueable(Protocol[P, R_co]):
    """What `enqueue` takes: anything that makes a NewJob of a call, checked against the signature `P`."""

    def new(self, *args: P.args, **kwargs: P.kwargs) -> NewJob[R_co]: ...


# -infinity in PostgreSQL's microseconds: a claim says so when the deadline has passed (fetch.sql).
_PASSED = -(1 << 63)
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

running_job: ContextVar[Job | None] = ContextVar("pgqueue_job", default=None)


def current_job() -> Job:
    """Return the job that is running here; RuntimeError outside of a handler.

    Works in async and sync handlers, in what they call, and in tasks and `asyncio.to_thread` calls they start; a bare
    `threading.Thread` does not inherit it.
    """
    job = running_job.get()
    if job is None:
        raise RuntimeError("pgqueue.current_job(): no job is running here; it works inside a task's handler only")
    return job


class Job:
    """A claimed job, as its handler sees it. Read it; only the worker changes it.

    >>> @pgqueue.task
    ... def charge(job: pgqueue.Job, order_id: int) -> None:
    ...     print(job.id, job.attempt, order_id)
    """

    __slots__ = (
        "_row",
        "args",
        "attempt",
        "began",
        "claim",
        "context",
        "crashes",
        "ended",
        "id",
        "max_attempts",
        "pos",
        "queue",
        "rank",
        "start_by",
        "started",
        "successors",
        "task",
        "written",
    )  # fmt: skip

    def __init__(self, row: tuple[Any, ...], claim: int) -> None:
        self._row = row
        self.claim = claim
        self.id: int
        """The job's number: the same in every attempt."""
        self.task: str
        """The task's name."""
        self.args: str
        """The arguments as the text of a JSON object."""
        self.attempt: int
        """Which attempt this is, from 1."""
        self.id, self.pos, self.rank, self.queue, self.task, self.args, self.attempt = row[:7]
        self.max_attempts: int | None = row[8]
        """How many attempts the enqueuer allowed; None: as the task's retry policy says."""
        self.crashes: int = row[9]
        """How many workers have died under it."""
        self.context = NO_CONTEXT
        """Set by what runs the job: a worker or `pgqueue.testing`."""
        self.start_by: float | None = None
        """Until when it may start, by `monotonic`, if it was let in under a rate; then STARTED or TOO_LATE."""
        self.began: float
        """Set when it begins to run, by `perf_counter`."""
        self.started: datetime | None = None
        """The same as a time; None until `started_at` is first read."""
        self.ended: object
        """Set when its transaction has been committed, to the outcome that was written in it."""
        self.written = False
        """Whether its handler has ended it in a transaction of its own; if that was committed is not known here."""
        self.successors: list[NewJob[Any]] | None = None
        """What it has enqueued, to be written with its completion."""

    @property
    def resources(self) -> Any:
        """What the worker's lifespan yielded; None without one."""
        return self.context.resources

    @property
    def priority(self) -> int:
        """0 (first) to 9."""
        return int(self._row[7])

    @property
    def snoozes(self) -> int:
        """How often it was put off without spending an attempt."""
        return int(self._row[10])

    @property
    def enqueued_at(self) -> datetime:
        """When it was enqueued, UTC, by the database's clock."""
        return _EPOCH + timedelta(microseconds=self._row[11])

    @property
    def run_at(self) -> datetime | None:
        """The time it was scheduled for, UTC; None if it was to run at once."""
        return None if self._row[12] is None else _EPOCH + timedelta(microseconds=self._row[12])

    @property
    def started_at(self) -> datetime:
        """When this attempt began, UTC, by this machine's clock."""
        if self.started is None:
            self.started = datetime.now(UTC) - timedelta(seconds=perf_counter() - self.began)
        return self.started

    @property
    def cancelled(self) -> bool:
        """Whether it was told to stop: cancelled, timed out, or its worker stops or lost it. Then `checkpoint` leaves.

        No I/O, from any thread. False in a handler that cannot be stopped, as in tests.
        """
        return self.context.stopping(self)

    @property
    def late(self) -> bool:
        """Whether its deadline had passed when it was claimed, by the database's clock; then it does not run."""
        return bool(self._row[13] == _PASSED)

    @property
    def deadline(self) -> datetime | None:
        """The time by which it had to start, UTC; None if there is none."""
        return None if self._row[13] is None else _EPOCH + timedelta(microseconds=self._row[13])

    @property
    def headers(self) -> dict[str, Any]:
        """The headers given at enqueue."""
        return msgspec.json.decode(self._row[14], type=dict[str, Any]) if self._row[14] else {}

    @property
    def tick(self) -> datetime | None:
        """The time of its schedule that it was made for, UTC, whenever it runs; None if no schedule has made it."""
        return tick_of(self.headers)

    @property
    def lock_key(self) -> str | None:
        """The key under which it runs alone; None without a lock."""
        key: str | None = self._row[15]
        return key

    @property
    def chained(self) -> bool:
        """Whether it came in behind another job of its lock, to run after that (see chains)."""
        return bool(self.pos < 0)

    @property
    def limit_key(self) -> str | None:
        """The name of the limit it runs under; None without one."""
        name: str | None = self._row[17]
        return name

    @property
    def rate_key(self) -> str | None:
        """The rate it was let in under, `name` or `name:key`; None without one."""
        key: str | None = self._row[18]
        return key

    @property
    def unique_key(self) -> str | None:
        """Its unique key; None without one."""
        return None if self._row[16] is None else msgspec.json.decode(self._row[16])[0]

    @property
    def idempotency_key(self) -> str | None:
        """The key its enqueuer gave, the same in every attempt; None if there was none (then `id` serves)."""
        return None if self._row[16] is None else msgspec.json.decode(self._row[16])[1]

    @property
    def connection(self) -> Any:
        """The psycopg connection of a task declared with `transactional=True`, inside the attempt's transaction.

        What is written on it is committed together with the job's completion, or not at all. Taken from the worker's
        pool and begun when it is first asked for. commit() and rollback() on it raise; savepoints
        (`with job.connection.transaction():`) are free. In an async handler: `await job.aconnection()`.
        """
        return self.context.connection(self)

    async def aconnection(self) -> Any:
        """`connection` for async handlers: a psycopg AsyncConnection inside the attempt's transaction."""
        return await self.context.aconnection(self)

    def session(self) -> Any:
        """A SQLAlchemy Session on `connection`; flushed before the job's completion is written and committed."""
        return self.context.session(self)

    def enqueue(self, task: Enqueueable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Enqueue a successor: it is written by the statement that completes this job, and exists if that commits.

        No I/O here. Dropped if the attempt ends in any other way: an error, `Snooze`, `Retry`, `Cancel`, `Fail`, or a
        dead worker. `task` is a task, also `task.using(…)`. Raises InvalidArguments at once for what does not fit it.

            job.enqueue(send_receipt, order_id)
        """
        make = getattr(task, "new", None)
        if make is None:
            raise InvalidArguments(
                f"{task!r} is not a task: declare it with @pgqueue.task, or use pgqueue.remote(name)"
            )
        if self.context.over:
            raise self.context._refusal(self, "enqueue()")
        if self.written:
            raise Error(f"job {self.id} ({self.task}): enqueue before job.complete(conn): that writes the successors")
        new = make(*args, **kwargs)
        if self.successors is None:
            self.successors = []
        self.successors.append(new)

    def complete(self, conn: object) -> None:
        """Complete this job as part of a transaction that the handler has opened itself, on any kind of connection.

            with psycopg.connect(dsn) as conn:
                conn.execute("UPDATE accounts …")
                job.complete(conn)

        When that transaction commits, the job is completed with it (its successors are written, too), whatever the
        handler does afterwards; what it returns then is not stored. If it does not commit, nothing has happened, and
        the attempt has failed. Raises JobLost, and the transaction cannot commit any more, if the job was given to
        another worker meanwhile; Error if there is no transaction, because the connection is in autocommit mode.
        """
        self.context.complete(self, conn)
        self._hand_over()

    async def acomplete(self, conn: object) -> None:
        """`complete` on an async connection."""
        await self.context.acomplete(self, conn)
        self._hand_over()

    def _hand_over(self) -> None:
        self.written = True
        self.successors = []  # those it had are written; an empty list makes the executor look at what has happened

    def checkpoint(self) -> None:
        """Leave the handler here if the job was told to stop: cancelled, timed out, or its worker stops or lost it.

        What it raises stops the handler as anywhere else: let it pass. For long loops: in threads that the handler has
        started (nothing is raised in those by itself), after what swallows exceptions, where stopping is convenient.
        No I/O, 0.12 µs. An async handler must give the loop a turn now and then, else no order to stop can reach it.
        """
        self.context.checkpoint(self)

    def progress(self, done: float, total: float | None = None) -> None:
        """Say how far the job is; shown by `pgqueue jobs` and `JobInfo.progress` while it runs.

            job.progress(i, len(rows))

        No I/O here, from any thread: say it as often as you like, the worker writes the last at most once a second.
        InvalidOption if `done` or `total` is no finite number, negative, or `done` more than `total`.
        """
        for number in (done, total):
            if number is not None and not (isinstance(number, int | float) and isfinite(number) and number >= 0):
                raise InvalidOption(f"progress {number!r}: use a finite number, 0 or more")
        if total is not None and done > total:
            raise InvalidOption(f"progress {done!r} of {total!r}: done cannot be more than the total")
        self.context.progress(self, done, total)

    def iterate(self, source: Source[T], size: int = 100) -> Iterator[list[T]]:
        """Go through a long list in batches, each one transaction; after a crash or a deploy, go on after the last.

            def users(cursor: int | None) -> Iterable[tuple[int, str]]:
                return conn.execute("SELECT id, email FROM users WHERE id > %s ORDER BY id", [cursor or 0])

            for batch in job.iterate(users, size=500):
                job.connection.executemany("INSERT INTO mail (email) VALUES (%s)", [[email] for email in batch])

        `source` gets a cursor, at first None, and gives (cursor, item) for everything after it, always in the same
        order; a cursor is any JSON value but None. When the loop asks for the next batch, what its body has written on
        `job.connection`, what it has enqueued by `job.enqueue`, and the cursor of its last item are committed together.
        So no batch is applied twice, and none left out, in whatever attempt, on whatever worker. The job can be stopped
        between batches, never in a commit.

        A loop that is left early (break, return, an exception) rolls back what that batch wrote; to stop early, let
        `source` end. Once per job: a second iteration raises Error. The task need not be transactional; if it is, what
        follows the loop is one more transaction, and `job.connection` must not be used before the loop.
        """
        return self.context.iterate(self, source, _size(size))

    def aiterate(self, source: AnySource[T], size: int = 100) -> AsyncIterator[list[T]]:
        """`iterate` for async handlers; `source` may give an async iterable.

        async for batch in job.aiterate(users, size=500):
            conn = await job.aconnection()
        """
        return self.context.aiterate(self, source, _size(size))

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.task} attempt {self.attempt}>"


def _size(size: int) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size >= 1:
        return size
    raise InvalidOption(f"size {size!r}: use how many items a batch has, 1 or more")


def late_of(jobs: Iterable[Job]) -> list[Job]:
    """Those that are late. Asked of every job that is claimed, so without a call for each (0.03 µs instead of 0.1)."""
    return [job for job in jobs if job._row[13] == _PASSED]


def own_timeout(job: Job) -> float | None:
    """How long it may run, in seconds, as its enqueuer said; None: as its task says. ValueError for what is no time."""
    return None if job._row[14] is None else timeout_of(job._row[14])


def timed_of(jobs: Iterable[Job]) -> list[Job]:
    """Those with a timeout of their own in their headers. Asked of every job that is claimed, too."""
    return [job for job in jobs if job._row[14] is not None and TIMEOUT in job._row[14]]


def keyed_of(ended: Iterable[tuple[Job, object]]) -> list[Job]:
    """Those that have a unique key. Asked of every job that ends, so as cheap as the one above."""
    return [job for job, _ in ended if job._row[16] is not None]


def fields(job: Job, **more: object) -> dict[str, object]:
    """What a line that names a job has as `extra`."""
    return {"job_id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempt, **more}


STARTED, TOO_LATE = 0.0, -1.0
"""What becomes of `start_by` when the job's turn comes."""

Lane = tuple[str, int, bool]
"""(queue, rank, whether its jobs have keys). How urgent a lane is the fetcher says, by the order in which it asks."""
