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

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import partial
from math import isfinite
from time import perf_counter
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import msgspec

from pgqueue.errors import Error, InvalidArguments, InvalidOption
from pgqueue.jobs.context import NO_CONTEXT, AnySource, Source
from pgqueue.jobs.cron import tick_of
from pgqueue.jobs.headers import TIMEOUT, timeout_of, waits_of, with_parent
from pgqueue.jobs.keys import Keys
from pgqueue.jobs.nodes import NODE_BITS, NodeResult, refuse_results
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.jobs.sizes import KEY_MOST, TEXT_MOST
from pgqueue.jobs.step_names import check_name
from pgqueue.jobs.values import EPOCH, whole

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
F = TypeVar("F")


class NewJob(msgspec.Struct, Generic[R_co], frozen=True):
    """A job to enqueue: a task's name and its encoded arguments, everything checked. `R_co` is what the task returns.

    It is a Struct, because batches make thousands of them and a frozen dataclass takes ten times longer.
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
    results: dict[str, NodeResult] | None = None  # parameters that get the result of a node: of a job of a flow only
    node: int | None = None  # of a job that a running job has added to its own node


class Enqueueable(Protocol[P, R_co]):
    """What `enqueue` takes: an object that makes a NewJob from a call, checked against the signature `P`."""

    def new(self, *args: P.args, **kwargs: P.kwargs) -> NewJob[R_co]: ...


# -infinity in PostgreSQL's microseconds: a claim answers it if the deadline has passed (fetch.sql).
_PASSED = -(1 << 63)

running_job: ContextVar[Job | None] = ContextVar("pgqueue_job", default=None)


def current_job() -> Job:
    """Return the job that is running here. Raises RuntimeError outside of a handler.

    Works in async and sync handlers, in functions they call, and in tasks and `asyncio.to_thread` calls they start. A
    bare `threading.Thread` does not inherit it.
    """
    job = running_job.get()
    if job is None:
        raise RuntimeError("pgqueue.current_job(): no job is running here; it works inside a task's handler only")
    return job


class Job:
    """A claimed job, as its handler sees it. Handlers only read it; the worker changes it.

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
        "own_end",
        "pos",
        "queue",
        "ran",
        "rank",
        "session_lost",
        "start_by",
        "started",
        "steps",
        "successors",
        "task",
        "traceparent",
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
        """The arguments as the text of a JSON object; None if the job is `too_large`: then it does not run."""
        self.attempt: int
        """Which attempt this is, from 1."""
        self.id, self.pos, self.rank, self.queue, self.task, self.args, self.attempt = row[:7]
        self.max_attempts: int | None = row[8]
        """Number of attempts the enqueuer allowed; None: as the task's retry policy says."""
        self.crashes: int = row[9]
        """Number of workers that died while running this job."""
        self.context = NO_CONTEXT
        """Set by the runner of the job: a worker or `pgqueue.testing`."""
        self.start_by: float | None = None
        """If a rate has let the job start: until when it may start, by `monotonic`. Later STARTED or TOO_LATE."""
        self.began: float
        """When the job began to run, by `perf_counter`; not set before."""
        self.ran: float
        """For how many seconds it has run; not set before it has ended."""
        self.started: datetime | None = None
        """`began` as a time of day; None until `started_at` is first read."""
        self.traceparent: str
        """The span of this attempt, as W3C writes it; not set unless `pgqueue.telemetry.otel` has."""
        self.steps: Any
        """The durable steps of this run; not set before the first one."""
        self.ended: object
        """The outcome that the job's own transaction has written; set when that transaction was committed."""
        self.written = False
        """Whether the handler has ended the job in its own transaction. Only the database knows if that committed."""
        self.own_end: Exception | None = None
        """What the job fails with because the handler's SQL has ended a transaction that only the worker may end."""
        self.session_lost = False
        """Whether the session of the attempt's own transaction ended before a COMMIT: nothing of it was kept."""
        self.successors: list[NewJob[Any]] | None = None
        """The jobs it has enqueued, to be written with its completion."""

    @property
    def resources(self) -> Any:
        """The value that the worker's lifespan yielded; None without a lifespan."""
        return self.context.resources

    @property
    def priority(self) -> int:
        """0 (first) to 9."""
        return int(self._row[7])

    @property
    def snoozes(self) -> int:
        """How often the job was put off without spending an attempt."""
        return int(self._row[10])

    @property
    def enqueued_at(self) -> datetime:
        """When the job was enqueued, UTC, by the database's clock."""
        return EPOCH + timedelta(microseconds=self._row[11])

    @property
    def run_at(self) -> datetime | None:
        """The time the job was scheduled for, UTC; None if it was to run at once."""
        return None if self._row[12] is None else EPOCH + timedelta(microseconds=self._row[12])

    @property
    def started_at(self) -> datetime:
        """When this attempt began, UTC, by this machine's clock."""
        if self.started is None:
            self.started = datetime.now(UTC) - timedelta(seconds=perf_counter() - self.began)
        return self.started

    @property
    def cancelled(self) -> bool:
        """Whether the job must stop: it was cancelled or timed out, or its worker stops or lost it.

        Then `checkpoint` leaves the handler. No I/O; may be read in any thread. False if the handler cannot be stopped,
        as in tests.
        """
        return self.context.stopping(self)

    @property
    def late(self) -> bool:
        """Whether the deadline had passed at the claim, by the database's clock. Then the job does not run."""
        return bool(self._row[13] == _PASSED)

    @property
    def too_large(self) -> str | None:
        """Which of its values is larger than an enqueue takes, as it may be after a plain INSERT; None: none is."""
        return None if self.args is not None else _too_large(*msgspec.json.decode(self._row[20]))

    @property
    def deadline(self) -> datetime | None:
        """The time by which the job had to start, UTC; None if there is none."""
        return None if self._row[13] is None else EPOCH + timedelta(microseconds=self._row[13])

    @property
    def headers(self) -> dict[str, Any]:
        """The headers given at enqueue."""
        return msgspec.json.decode(self._row[14], type=dict[str, Any]) if self._row[14] else {}

    @property
    def tick(self) -> datetime | None:
        """The time of the schedule that this job was made for, UTC. None if no schedule has made the job."""
        return tick_of(self.headers)

    @property
    def lock_key(self) -> str | None:
        """The key of its lock; None without a lock."""
        key: str | None = self._row[15]
        return key

    @property
    def chained(self) -> bool:
        """Whether the job was claimed together with an earlier job of its lock, to run after that one (`chains`)."""
        return bool(self.pos < 0)

    @property
    def limit_key(self) -> str | None:
        """The name of its limit; None without a limit."""
        name: str | None = self._row[17]
        return name

    @property
    def rate_key(self) -> str | None:
        """The key of its rate, `name` or `name:key`; None without a rate."""
        key: str | None = self._row[18]
        return key

    @property
    def node(self) -> int | None:
        """The node of its flow, the flow's number included; None for a job of no flow."""
        node: int | None = self._row[19]
        return node

    @property
    def flow(self) -> int | None:
        """The id of its flow; None for a job of no flow.

        print(job.flow)
        """
        return None if self.node is None else self.node >> NODE_BITS

    @property
    def unique_key(self) -> str | None:
        """Its unique key; None without a unique key."""
        return None if self._row[16] is None else msgspec.json.decode(self._row[16])[0]

    @property
    def idempotency_key(self) -> str | None:
        """The idempotency key its enqueuer gave, the same in every attempt. None without one; then `id` serves."""
        return None if self._row[16] is None else msgspec.json.decode(self._row[16])[1]

    @property
    def connection(self) -> Any:
        """The psycopg connection of a task declared with `transactional=True`, inside the attempt's transaction.

        Writes on it are committed together with the job's completion, or not at all. The connection comes from the
        worker's pool; its transaction begins when it is first used. commit() and rollback() on it raise. Savepoints
        (`with job.connection.transaction():`) are allowed. In an async handler use `await job.aconnection()`.
        """
        return self.context.connection(self)

    async def aconnection(self) -> Any:
        """`connection` for async handlers: a psycopg AsyncConnection inside the attempt's transaction."""
        return await self.context.aconnection(self)

    def session(self) -> Any:
        """A SQLAlchemy Session on `connection`. It is flushed before the job's completion is written and committed."""
        return self.context.session(self)

    async def asession(self) -> Any:
        """`session` for async handlers: a SQLAlchemy AsyncSession on the connection of `aconnection`.

        session = await job.asession()
        session.add(Order(id=order_id))
        """
        return await self.context.asession(self)

    def enqueue(self, task: Enqueueable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Enqueue a successor: it is written together with this job's completion, and exists if that commits.

        No I/O here. The successor is dropped if the attempt ends in any other way: an error, `Snooze`, `Retry`,
        `Cancel`, `Fail`, or a dead worker. Inside a `step` or a batch of `iterate` it is written with that. `task` is a
        task, also `task.using(…)`. If the arguments do not fit it, InvalidArguments is raised at once.

            job.enqueue(send_receipt, order_id)
        """
        make = getattr(task, "new", None)
        if make is None:
            raise InvalidArguments(
                f"{task!r} is not a task: declare it with @pgqueue.task, or use pgqueue.remote(name)"
            )
        self._follow("enqueue", lambda: make(*args, **kwargs))

    def add(self, new: NewJob[Any], /) -> None:
        """Add a job to the node of this one in its flow: what waits for the node waits for that job, too.

        It is written together with this job's completion, and dropped in any other case, as by `enqueue`. So the node
        has not ended in between. Inside a `step` or a batch of `iterate` it is written with that.

        Raises InvalidOption if this job is of no flow, or the new one has a unique key or takes the result of a node;
        InvalidArguments if it is no job.

            job.add(crawl.new(link))
        """
        if not isinstance(new, NewJob):
            raise InvalidArguments(f"job.add takes what task.new(…) returns, not {type(new).__qualname__}")
        if self.node is None:
            raise InvalidOption(
                f"job {self.id} ({self.task}) is of no flow, so there is no node to add a job to; use job.enqueue"
            )
        if new.keys is not None:
            raise InvalidOption(
                f"task {new.task!r}: a job that is added to a node has no unique key: another job could have it, and "
                "the node would end without this one"
            )
        self._follow("add", lambda: msgspec.structs.replace(new, node=self.node))

    def results(self, node: str) -> Iterator[Any]:
        """Read the results of a node of this job's flow, by its name: one for each job of it, in the order of the jobs.

            for parcel in job.results("picked"):
                weight += parcel["weight"]

        They are plain JSON, as of `JobHandle.result`; None for a job that did not complete or has no result. They are
        read page by page, in short statements of their own, so there may be more of them than arguments can hold. Let
        this job's node wait for that one: of a node that has not ended, only the jobs that have ended are read.

        Raises InvalidOption if this job is of no flow, or no node of it has this name, and Error in an async handler.
        """
        return self.context.results(self, self._node_name(node))

    def aresults(self, node: str) -> AsyncIterator[Any]:
        """`results` for async handlers.

        async for parcel in job.aresults("picked"): ...
        """
        return self.context.aresults(self, self._node_name(node))

    def _node_name(self, node: str) -> str:
        if self.node is None:
            raise InvalidOption(
                f"job {self.id} ({self.task}) is of no flow, so there is no node to read results of; a completed "
                "job that is run again is a new job of no flow: enqueue the flow anew"
            )
        if not isinstance(node, str):
            raise InvalidOption(f"results {node!r:.80}: give the name of a node, as flow.add(…, name=…) says it")
        return node

    def _follow(self, how: str, make: Callable[[], NewJob[Any]]) -> None:
        """Keep a job that is to be written with the completion."""
        if self.context.over:
            raise self.context._refusal(self, f"{how}()")
        if self.written:
            raise Error(f"job {self.id} ({self.task}): {how} before job.complete(conn): that writes the successors")
        new = make()
        refuse_results([new])
        new = msgspec.structs.replace(new, headers=with_parent(new.headers, self.id))
        new = self.context.successor(new)
        if self.successors is None:
            self.successors = []
        self.successors.append(new)

    def complete(self, conn: object, *, result: object = None) -> None:
        """Complete this job as part of a transaction that the handler has opened itself, on any kind of connection.

            with psycopg.connect(dsn) as conn:
                conn.execute("UPDATE accounts …")
                job.complete(conn)

        When that transaction commits, the job is completed with it and with this `result`, and its successors are
        written. Nothing that the handler does afterwards changes that, and its return value is not stored. If the
        transaction does not commit, the attempt has failed.

        If the job was given to another worker meanwhile, JobLost is raised, and the transaction cannot commit any more.
        If the connection is in autocommit mode, there is no transaction, and Error is raised.
        """
        self.context.complete(self, conn, result)
        self._hand_over()

    async def acomplete(self, conn: object, *, result: object = None) -> None:
        """`complete` on an async connection."""
        await self.context.acomplete(self, conn, result)
        self._hand_over()

    def _hand_over(self) -> None:
        self.written = True
        # The successors are written. An empty list, unlike None, makes the executor look at what has happened.
        self.successors = []

    def checkpoint(self) -> None:
        """Leave the handler here if the job must stop: it was cancelled or timed out, or its worker stops or lost it.

        It raises the exception that also stops handlers elsewhere: do not catch it. Use it in long loops, after code
        that swallows exceptions, or where stopping is convenient. In threads that the handler has started, no exception
        is raised otherwise. No I/O, very cheap. An async handler must give the loop a turn now and then, else no order
        to stop can reach it.
        """
        self.context.checkpoint(self)

    def progress(self, done: float, total: float | None = None) -> None:
        """Report how far the job is. `pgqueue jobs` and `JobInfo.progress` show it while the job runs.

            job.progress(i, len(rows))

        No I/O here; call it from any thread and as often as you like. The worker writes the last report, at most once a
        second. Raises InvalidOption if a number is not finite, or negative, or if `done` is more than `total`.
        """
        for number in (done, total):
            if number is not None and not (isinstance(number, int | float) and isfinite(number) and number >= 0):
                raise InvalidOption(f"progress {number!r}: use a finite number, 0 or more")
        if total is not None and done > total:
            raise InvalidOption(f"progress {done!r} of {total!r}: done cannot be more than the total")
        self.context.progress(self, done, total)

    def iterate(self, source: Source[T], size: int = 100) -> Iterator[list[T]]:
        """Walk a long list in batches, one transaction each. After a crash or a deploy the job goes on after the last.

            def users(cursor: int | None) -> Iterable[tuple[int, str]]:
                return conn.execute("SELECT id, email FROM users WHERE id > %s ORDER BY id", [cursor or 0])

            for batch in job.iterate(users, size=500):
                job.connection.execute("INSERT INTO mail (email) SELECT unnest(%s::text[])", [batch])

        `source` gets a cursor, at first None. It gives (cursor, item) for every item after the cursor, always in the
        same order. A cursor is any JSON value but None.

        When the loop asks for the next batch, one commit contains the body's writes on `job.connection`, its jobs from
        `job.enqueue`, and the last item's cursor. No batch is applied twice and none is left out, over all attempts and
        workers. The job can be stopped between batches, never in a commit.

        If the loop is left early (break, return, an exception), the writes of that batch are rolled back. To stop
        early, let `source` end. A job may iterate once: a second iteration raises Error. The task need not be
        transactional. If it is, the code after the loop is one more transaction, and `job.connection` must not be used
        before the loop.
        """
        return self.context.iterate(self, _source(source), _size(size))

    def aiterate(self, source: AnySource[T], size: int = 100) -> AsyncIterator[list[T]]:
        """`iterate` for async handlers; `source` may give an async iterable.

        async for batch in job.aiterate(users, size=500):
            conn = await job.aconnection()
        """
        return self.context.aiterate(self, _source(source), _size(size))

    def step(self, name: str, fn: Callable[Q, R], /, *args: Q.args, **kwargs: Q.kwargs) -> R:
        """Call `fn` with these arguments, and record what it returns: a later attempt gets that back, without a call.

            receipt = job.step("charge", charge, order_id, cents=900)
            job.step("mail", send_mail, receipt.address)

        What `fn` writes on `job.connection` and the record are one commit, at the end of the step: it takes effect
        once. So are the jobs that `fn` enqueues by `job.enqueue` and `job.add`. What it does elsewhere happens at least
        once: it is recorded after that. `job.connection` is not asked for before a step, only inside of it, or after
        the last one.

        A step is known by its name: printable text of 1 to 200 bytes, once in a run. Answers are JSON, as large as a
        result, read as the annotation of `fn` says. A step in the body of `iterate` is committed before its batch;
        `iterate` inside of a step raises Error. If `fn` raises, nothing of the step is kept. The record stays with
        its job: after a failure, for a retry by hand, and in history. Raises InvalidOption for a name that was used in
        this run, and Error for an answer that cannot be stored or read back, and beyond 10,000 steps of a job.
        """
        return self.context.step(self, check_name(name), partial(fn, *args, **kwargs), fn)  # type: ignore[no-any-return]

    async def astep(self, name: str, fn: Callable[Q, Any], /, *args: Q.args, **kwargs: Q.kwargs) -> Any:
        """`step` for async handlers; `fn` is async or not.

        receipt = await job.astep("charge", charge, order_id)
        """
        return await self.context.astep(self, check_name(name), partial(fn, *args, **kwargs), fn)

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.task} attempt {self.attempt}>"


def _source(source: F) -> F:
    if callable(source):
        return source
    raise InvalidOption(
        f"the source of an iteration is a {type(source).__name__}: give a function of a cursor, at first None, "
        "that gives (cursor, item) for every item after it"
    )


def _size(size: int) -> int:
    if whole(size, 1):
        return size
    raise InvalidOption(f"size {size!r}: use how many items a batch has, 1 or more")


def unfit_of(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that do not run: late, or too large. Every claimed job is checked, therefore without a call for each."""
    return [job for job in jobs if job._row[13] == _PASSED or job.args is None]


def _too_large(args: int | None, headers: int | None, no_headers: bool, key: int | None) -> str:
    """What is wrong with a job whose values have these sizes. None: so large that it has no text."""
    sizes = {"arguments": args, "headers": 0 if no_headers else headers}
    for what, size in sizes.items():
        if size is None:
            return f"its {what} have more than a thousand million bytes as text, the limit is {TEXT_MOST}"
        if size > TEXT_MOST:
            return f"its {what} have {size} bytes as text, the limit is {TEXT_MOST}"
    return f"its unique key has {key} bytes, the limit is {KEY_MOST}"


def own_timeout(job: Job) -> float | None:
    """The seconds the enqueuer lets the job run; None: as its task says. Raises ValueError if the header is no time."""
    return None if job._row[14] is None else timeout_of(job._row[14])


def own_waits(job: Job) -> RetryPolicy | None:
    """The waits between attempts that the enqueuer has given; None: as its task says. Raises ValueError if the header
    is no policy."""
    return waits_of(job._row[14])


def timed_of(jobs: Iterable[Job]) -> list[Job]:
    """The jobs with a timeout in their headers. Every claimed job is checked, therefore without a call for each."""
    return [job for job in jobs if job._row[14] is not None and TIMEOUT in job._row[14]]


def keyed_of(ended: Iterable[tuple[Job, object]]) -> list[Job]:
    """The jobs that have a unique key. Every job that ends is checked, therefore without a call for each."""
    return [job for job, _ in ended if job._row[16] is not None]


def dues_of(ended: Iterable[tuple[Job, object]]) -> list[int]:
    """When each of these jobs could first run, by the database's clock: microseconds since the year 2000.

    Every job that ends is asked, therefore without a call for each.
    """
    rows = [job._row for job, _ in ended]
    return [row[11] if row[12] is None or row[12] < row[11] else row[12] for row in rows]


def traceparents(jobs: Iterable[Job]) -> list[str | None]:
    """The span of each of these attempts; an empty list if none has one."""
    found = [getattr(job, "traceparent", None) for job in jobs]
    return found if any(found) else []


def fields(job: Job, **more: object) -> dict[str, object]:
    """The `extra` of a log line that names a job. If the attempt has a span, its ids are among them."""
    said = {"job_id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempt, **more}
    if (span := getattr(job, "traceparent", None)) is not None:
        _, said["trace_id"], said["span_id"], _ = span.split("-")
    return said


def again(job: Job) -> Job:
    """This job for another run in the same attempt, where the handler of the last run goes on: what that still calls
    must not reach the new run."""
    anew = Job(job._row, job.claim)
    anew.attempt, anew.began = job.attempt, job.began
    return anew


STARTED, TOO_LATE = 0.0, -1.0
"""The values of `start_by` once the job was to start."""

Lane = tuple[str, int, bool]
"""(queue, rank, whether its jobs have keys). The fetcher's order of asking decides how urgent a lane is."""


def nodes_of(jobs: Iterable[Job]) -> list[int]:
    """The nodes of those of these jobs that have one."""
    return [job._row[19] for job in jobs if job._row[19] is not None]
