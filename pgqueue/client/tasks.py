"""Tasks: functions that can be enqueued, and the registry that finds them again.

An application decorates its functions when its modules are imported. The client asks a `Task` for a `NewJob` and hands
that to `enqueue`. A worker looks up the name in a row among the tasks that its own modules declared. Every mistake in a
declaration is reported at import.

Never imports a module by a name found in the database: an unknown name stays unknown.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    Never,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from pgqueue.client.enqueue import aenqueue, aenqueue_many, enqueue, enqueue_many
from pgqueue.client.handle import JobHandle
from pgqueue.client.place import Place, declare, declared_at, name_of
from pgqueue.client.registry import declared_tasks
from pgqueue.client.schedules import spec
from pgqueue.databases import check_name, current
from pgqueue.errors import Error, InvalidArguments, InvalidOption
from pgqueue.jobs.batch import Batch
from pgqueue.jobs.codec import AwaitsResults, Codec, check_result, json_object, keywords_only
from pgqueue.jobs.concurrency import (
    Limit,
    Limiting,
    Lock,
    Locking,
    Rate,
    limiting,
    limits_of,
    locked,
    locking,
    rates_of,
)
from pgqueue.jobs.cron import Cron, Every, check_when
from pgqueue.jobs.functions import check_function, check_wrapper, default_name, hidden_body
from pgqueue.jobs.headers import with_timeout, with_waits
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.nodes import UnknownResult
from pgqueue.jobs.retry import RetryFunction, RetryPolicy, check_attempts, for_one_job
from pgqueue.jobs.unique import Unique, Uniqueness, idempotent_by, unique_by
from pgqueue.jobs.values import (
    Duration,
    aware,
    check_priority,
    check_queue,
    check_task_name,
    choice,
    flag,
    positive,
    seconds,
    start_by,
)
from pgqueue.options import checks_options, needs_arguments, no_option

if TYPE_CHECKING:
    from pgqueue.jobs.job import Job

log = logging.getLogger("pgqueue")

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
Called_co = TypeVar("Called_co", covariant=True)

REQUIRED: Literal["required"] = "required"
"""`transactional` of a task whose handlers must ask for their connection."""

Row = Mapping[str, Any] | tuple[Any, ...]
"""The arguments of one job in a batch: by name, or by position."""


_NOW = "task.enqueue(conn, …), on the connection of your transaction"
_LATER = "task.using(delay=30).enqueue(conn, …); also run_at=, queue=, priority=, retry="
_MADE = "task.new(…), a job for enqueue_many; from a handler job.enqueue(task, …) makes a successor"
WRAPPED = ". A decorator without functools.wraps gives all its functions one name: add it"
OTHER_WORDS = {
    **dict.fromkeys(["delay", "perform_async", "send", "defer", "kiq", "enqueue_call"], _NOW),
    **dict.fromkeys(["defer_async", "delay_on_commit"], f"{_NOW}; in async code `await task.aenqueue(conn, …)`"),
    **dict.fromkeys(
        [
            "apply_async",
            "send_with_options",
            "enqueue_in",
            "enqueue_at",
            "perform_in",
            "perform_at",
            "configure",
            "kicker",
        ],
        _LATER,
    ),
    **dict.fromkeys(["s", "si", "signature", "subtask", "message", "chunks", "map", "starmap"], _MADE),
    "apply": "task(…), which calls the function",
    "schedule": "@task(schedule=…), or pgqueue.schedules.add(…); for one call later `task.using(delay=…)`",
}
"""Methods of tasks in other queues (Celery, RQ, Dramatiq, Procrastinate, taskiq, Sidekiq), and what they are here."""


class TaskOptions(TypedDict, total=False):
    """The options of `@task(…)`."""

    name: str | None
    aliases: Iterable[str]
    queue: str
    priority: int
    retry: RetryPolicy | RetryFunction | int | None
    timeout: Duration | None
    deadline: Duration | None
    transactional: bool | Literal["required"]
    store_result: bool
    on_lost_lease: Literal["cancel", "keep"]
    lock: Lock | str | Callable[..., str | None] | None
    limit: Limit | int | None
    rate: Rate | str | None
    unique: Unique | str | Callable[..., str | None] | None
    schedule: Cron | Every | None
    schedule_in: str | None


class AllOptions(TaskOptions, total=False):
    """The options of a task, with the one that changes what its handler takes."""

    batch: Batch | None


@dataclass(frozen=True, slots=True, eq=False)
class Task(Generic[P, R_co]):
    """A function that can be enqueued: `P` are its parameters without the Job, `R_co` what it returns (or awaits to).

    Calling the task calls the function. `new` makes a job from a call and checks the arguments. `enqueue` inserts the
    job in the caller's transaction. `using` returns a copy with other options.

    >>> @task(name="billing.charge", queue="billing")
    ... def charge(customer: int, cents: int = 100) -> str:
    ...     return f"{customer}: {cents}"
    >>> charge(7)
    '7: 100'
    >>> charge.new(7).args, charge.using(priority=0).new(7, cents=250).priority
    ('{"customer":7}', 0)
    >>> charge.new("seven")
    Traceback (most recent call last):
    ...
    pgqueue.errors.InvalidArguments: task 'billing.charge': parameter customer: given 'seven' (str), needs int
    """

    name: str
    fn: Callable[..., Any] = field(repr=False)
    codec: Codec = field(repr=False)
    is_async: bool = False  # an `async def`: runs on the worker's event loop, not in a thread
    queue: str = "default"
    priority: int = 5
    retry: RetryPolicy = field(default=RetryPolicy(), repr=False)
    aliases: tuple[str, ...] = ()
    run_at: datetime | None = None
    delay_seconds: float | None = None
    headers: str | None = field(default=None, repr=False)
    max_attempts: int | None = None
    timeout: float | None = None
    job_timeout: float | None = None  # for the jobs that this copy makes; comes before `timeout`
    job_waits: RetryPolicy | None = field(default=None, repr=False)  # the same, before the waits of `retry`
    deadline: datetime | float | None = None
    transactional: bool | Literal["required"] = False
    store_result: bool = True
    on_lost_lease: Literal["cancel", "keep"] = "keep"
    locking: Locking | None = field(default=None, repr=False)
    limiting: Limiting | None = field(default=None, repr=False)
    uniqueness: Uniqueness | None = field(default=None, repr=False)
    recurs: Cron | Every | None = field(default=None, repr=False)
    recurs_in: str | None = None
    batch: Batch | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself; no job is made."""
        return self.fn(*args, **kwargs)

    @property
    def wants_job(self) -> bool:
        """True if the function's first parameter is the Job."""
        return self.codec.wants_job

    def new(self, /, *args: P.args, **kwargs: P.kwargs) -> NewJob[R_co]:
        """Return the job of this call, for `enqueue_many`. Raises InvalidArguments if the arguments do not fit."""
        results = None
        try:
            encoded = self.codec.encode(args, kwargs)
        except AwaitsResults:
            encoded, results = self.codec.awaiting(args, kwargs)
        new: NewJob[R_co] = NewJob(
            self.name,
            encoded,
            self.queue,
            self.priority,
            self.run_at,
            self.delay_seconds,
            self.headers,
            self.max_attempts,
            self.deadline,
            results=results,
        )
        if self.locking is None and self.limiting is None and self.uniqueness is None:
            return new
        arguments = self.codec.arguments(args, kwargs)
        if results is not None:
            arguments = {**arguments, **{name: UnknownResult(result) for name, result in results.items()}}
        if self.locking is not None:
            new = locked(new, self.locking, arguments)
        if self.limiting is not None:
            new = self.limiting.limited(new, arguments)
        return new if self.uniqueness is None else self.uniqueness.keyed(new, arguments)

    @needs_arguments(2, "the connection of your transaction comes first: task.enqueue(conn, …)")
    def enqueue(self, conn: object, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R_co]:
        """Enqueue a call on the caller's connection, in its transaction. The job exists if that commits."""
        return enqueue(conn, self, *args, **kwargs)

    @needs_arguments(2, "the connection of your transaction comes first: task.enqueue(conn, …)")
    async def aenqueue(self, conn: object, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R_co]:
        """Enqueue a call on the caller's async connection, in its transaction."""
        return await aenqueue(conn, self, *args, **kwargs)

    @needs_arguments(3, "the connection of your transaction comes first: task.enqueue_many(conn, rows)")
    def enqueue_many(self, conn: object, rows: Iterable[Row], /) -> list[JobHandle[R_co]]:
        """Enqueue one job per row (a mapping of keywords or a tuple), in few statements, in the caller's transaction.

        If a row does not fit, InvalidArguments is raised with a note of its number, and no job was enqueued.
        """
        return enqueue_many(conn, self._jobs(rows))

    @needs_arguments(3, "the connection of your transaction comes first: task.enqueue_many(conn, rows)")
    async def aenqueue_many(self, conn: object, rows: Iterable[Row], /) -> list[JobHandle[R_co]]:
        """As `enqueue_many`, on an async connection."""
        return await aenqueue_many(conn, self._jobs(rows))

    def using(
        self,
        *,
        queue: str | None = None,
        priority: int | None = None,
        run_at: datetime | None = None,
        delay: Duration | None = None,
        retry: RetryPolicy | int | None = None,
        headers: Mapping[str, Any] | None = None,
        deadline: datetime | Duration | None = None,
        timeout: Duration | None = None,
        lock: Lock | str | Callable[..., str | None] | None = None,
        limit: Limit | int | None = None,
        rate: Rate | str | None = None,
        unique: Unique | str | Callable[..., str | None] | None = None,
        idempotency_key: str | None = None,
        **unknown: Never,
    ) -> Task[P, R_co]:
        """Return a copy with these options for the jobs it makes; the declared task stays as it is.

        A duration is a number of seconds, a timedelta, or a text such as "30s", "5m", "2h".

        - `run_at`, a time with a time zone, or `delay`, a duration. Each replaces the other one.
        - `retry`: the most attempts of these jobs; the waits in between follow the task's own policy. Or a RetryPolicy,
          whose waits travel with the job. Which exceptions are retried is said by the task's own policy alone.
        - `deadline`, a time, or how long after the enqueue. If the job has not started by then, it is cancelled.
        - `timeout` (for each attempt, a duration), `lock` and `unique` replace the task's own.
        - `limit` and `rate` replace the task's own. Their names travel with the job, their numbers do not: workers know
          them if they import the module that says this `using`, or a task with the same name and numbers.
        - `idempotency_key` names the request. While its job lives, and for 24 hours after its end, another enqueue with
          this key returns the handle of that job.

        Raises InvalidOption for values that cannot work, and for options that there are not.
        """
        if unknown:
            raise no_option(f"task {self.name!r}: using", unknown, Task.using)
        if run_at is not None and delay is not None:
            raise InvalidOption(f"task {self.name!r}: give run_at or delay, not both")
        if self.batch is not None and (lock is not None or rate is not None):
            raise _together("lock" if rate is None else "rate", self.name)
        timed = run_at is not None or delay is not None
        uniqueness = self.uniqueness if unique is None else unique_by(unique, self.codec, self.uniqueness)
        if idempotency_key is not None:
            uniqueness = idempotent_by(idempotency_key, self.codec, uniqueness)
        length = self.job_timeout if timeout is None else positive(timeout, "timeout")
        said = self.headers if headers is None else json_object(headers, f"task {self.name!r}, headers")
        attempts, waits = self.max_attempts, self.job_waits
        if retry is not None:
            policy = (
                for_one_job(retry, f"task {self.name!r}: using(retry=…)") if isinstance(retry, RetryPolicy) else None
            )
            attempts = check_attempts(retry) if policy is None else policy.attempts  # type: ignore[arg-type]  # an int
            waits = self.job_waits if policy is None else policy
        copy = replace(
            self,
            queue=self.queue if queue is None else check_queue(queue),
            priority=self.priority if priority is None else check_priority(priority),
            run_at=aware(run_at) if timed else self.run_at,
            delay_seconds=(None if delay is None else seconds(delay, "delay")) if timed else self.delay_seconds,
            max_attempts=attempts,
            deadline=self.deadline if deadline is None else start_by(deadline),
            locking=self.locking if lock is None else locking(lock, self.codec),
            uniqueness=uniqueness,
            job_timeout=length,
            job_waits=waits,
            headers=with_waits(with_timeout(said, length), waits),
        )
        return copy if limit is None and rate is None else copy._limited(limit, rate)

    if not TYPE_CHECKING:  # for type checkers an attribute that is not there stays an error

        def __getattr__(self, name: str) -> Any:
            """Words of other queues get an answer that names ours."""
            ours = OTHER_WORDS.get(name)
            if ours is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(f"task {self.name!r} has no {name!r}. Here it is {ours}")

    def _limited(self, limit: Limit | int | None, rate: Rate | str | None) -> Task[P, R_co]:
        """A copy with this limit and this rate. Raises InvalidOption if their names have other numbers elsewhere."""
        own = self.limiting
        if own is not None:
            limit, rate = own.limit if limit is None else limit, own.rate if rate is None else rate
        said = limiting(limit, rate, self.codec)
        assert said is not None
        others, names = limitings(declared()), (said.task, said.limit_name, said.rate_name)
        limits_of([*others, said]), rates_of([*others, said])
        if names not in used_limitings and len(used_limitings) >= USED_MOST:
            raise InvalidOption(
                f"task {self.name!r}: using() has named {USED_MOST:,} limits and rates here, and keeps them all for "
                "workers. For one of each customer or account use a lock, or the key of a rate"
            )
        used_limitings[names] = said
        return replace(self, limiting=said)

    def _jobs(self, rows: Iterable[Row]) -> Iterator[NewJob[R_co]]:
        new: Callable[..., NewJob[R_co]] = self.new
        for number, row in enumerate(rows):
            try:
                yield new(*row) if isinstance(row, tuple) else new(**_mapping(row))
            except InvalidArguments as error:
                error.add_note(f"in row {number} of the rows given (the first is 0)")
                raise


if TYPE_CHECKING:

    class NoType:
        """For type checkers only. No function names this type: only a parameter that takes anything accepts it."""

    class Declared(Task[P, R_co], Generic[P, R_co, Q, Called_co]):
        """For type checkers only: a Task with the signature of its function (`Q`, `Called_co`)."""

        def __call__(self, /, *args: Q.args, **kwargs: Q.kwargs) -> Called_co: ...

    class BatchDeclaration(Protocol):
        """For type checkers only: it makes a task of a function that takes many jobs. One job has one element."""

        @overload
        def __call__(
            self, fn: Callable[[list[Job], list[T]], Coroutine[Any, Any, Any]], /
        ) -> Declared[[T], Any, [list[Job], list[T]], Coroutine[Any, Any, Any]]: ...

        @overload
        def __call__(self, fn: Callable[[list[Job], list[T]], R], /) -> Declared[[T], Any, [list[Job], list[T]], R]: ...

        @overload
        def __call__(
            self, fn: Callable[[list[T]], Coroutine[Any, Any, Any]], /
        ) -> Declared[[T], Any, [list[T]], Coroutine[Any, Any, Any]]: ...

        @overload
        def __call__(self, fn: Callable[[list[T]], R], /) -> Declared[[T], Any, [list[T]], R]: ...


@dataclass(frozen=True, slots=True)
class Declaration:
    """Make a function a task: `@task`, or `@task(name=…, queue=…)`.

    The function is a plain `def` or an `async def`. A first parameter `job: Job` is given by the worker and is no
    argument. Raises InvalidOption for values that cannot work. The options:

    - `name`: the task's name in the database; default is module.qualname.
    - `aliases`: older names under which jobs may still wait.
    - `retry`: a number of attempts, a RetryPolicy, or a function f(attempt, exc) -> delay | None.
    - `timeout`: how long an attempt may run.
    - `deadline`: how long after its enqueue a job may start.
    - `transactional`: the handler's writes on `job.connection` are committed together with the job's completion, or not
      at all. What it writes through another session is not covered. So if a handler ends without having asked for its
      connection, that is logged, once for each task; with "required" its job is failed.
    - `store_result=False`: the handler's value is not kept.
    - `lock`: a `Lock`, or its key. At most one job of a key runs at a time.
    - `limit`: a `Limit`, or its number. At most this many of the task's jobs run at a time.
    - `rate`: a `Rate`, or its text. At most this many jobs start in a period.
    - `unique`: a `Unique`, or its key. At most one job of a key lives at a time.
    - `on_lost_lease`: what happens to a running job if its worker cannot reach the database and may soon be taken for
      dead. "keep" runs it on. "cancel" stops it, for effects that must never overlap. The default is "cancel" for a
      task with a lock or limit, else "keep".
    - `schedule`: a `Cron` or an `Every`. Each of its ticks enqueues a call without arguments.
    - `schedule_in`: where a worker works for several databases, the name of the one in which the schedule ticks.
      Default: in each of them.
    - `batch`: a `Batch`. One call of the handler takes many jobs: it has one parameter, a list, and each job has one
      element of it as its argument. It is not together with `lock` or `rate`.

    >>> @task(name="mail.send", aliases=["mail.deliver"], retry=3)
    ... async def send(address: str) -> None: ...
    >>> send.is_async, send.retry.attempts, find("mail.deliver") is send
    (True, 3, True)
    """

    options: AllOptions

    @overload  # a first parameter that takes anything: type checkers cannot distinguish it from a Job
    def __call__(self, fn: Callable[Concatenate[NoType, ...], Any], /) -> Task[..., Any]: ...

    @overload
    def __call__(
        self, fn: Callable[Concatenate[Job, P], Coroutine[Any, Any, R]], /
    ) -> Declared[P, R, Concatenate[Job, P], Coroutine[Any, Any, R]]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[Job, P], R], /) -> Declared[P, R, Concatenate[Job, P], R]: ...

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Declared[P, R, P, Coroutine[Any, Any, R]]: ...

    @overload
    def __call__(self, fn: Callable[P, R], /) -> Declared[P, R, P, R]: ...

    @overload
    def __call__(self, /, **options: Unpack[TaskOptions]) -> Declaration: ...

    @overload
    def __call__(self, /, *, batch: Batch, **options: Unpack[TaskOptions]) -> BatchDeclaration: ...

    def __call__(self, fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        known = {**TaskOptions.__annotations__, **AllOptions.__annotations__}
        if unknown := options.keys() - known.keys():
            raise no_option("@task", unknown, known)
        merged: AllOptions = {**self.options, **options}  # type: ignore[typeddict-item]  # their names are known
        return Declaration(merged) if fn is None else _register(_declare(fn, merged))


task = Declaration({})
registry: dict[str, Task[..., Any]] = declared_tasks
"""Every declared task under its name and under each alias."""
used_limitings: dict[tuple[str, str | None, str | None], Limiting] = {}
"""The limits and rates that `using` has given to tasks, by their names: workers declare these, too."""
USED_MOST = 1_000


def find(name: str) -> Task[..., Any] | None:
    """Return the task declared under this name or alias; None if the imported modules declare none."""
    return registry.get(name)


def declared() -> list[Task[..., Any]]:
    """Return every declared task once, in the order of declaration."""
    return list(dict.fromkeys(registry.values()))


@checks_options
def remote(name: str, *, queue: str = "default", priority: int = 5) -> Task[..., Any]:
    """Return a task of another codebase, known by name. It can be enqueued with keywords and plain JSON values.

    Its arguments are checked when it runs. Every keyword of `enqueue` is one of them, also `delay` or `queue`: options
    go through `using`. Calling it raises Error. No worker of this codebase runs it.

    >>> remote("billing.charge", queue="billing").new(customer=7).args
    '{"customer":7}'
    """

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        raise Error(f"task {name!r} belongs to another codebase: it can be enqueued here, not called")

    codec = keywords_only(check_task_name(name))
    return Task(name=name, fn=elsewhere, codec=codec, queue=check_queue(queue), priority=check_priority(priority))


def limitings(tasks: Iterable[Task[..., Any]]) -> list[Limiting]:
    """The limits and rates of these tasks, declared and given to them by `using`, by the tasks' names."""
    known = list(tasks)
    names = {each.name for each in known}
    found = [each.limiting for each in known if each.limiting is not None]
    found += [each for each in used_limitings.values() if each.task in names]
    return sorted(found, key=lambda each: each.task)


def holding(tasks: Mapping[str, Task[..., Any]]) -> frozenset[str]:
    """Names of the tasks whose jobs keep their keys while they wait for another attempt."""
    return frozenset(name for name, task in tasks.items() if task.locking and task.locking.lock.hold_on_retry)


def scheduled(tasks: Iterable[Task[..., Any]]) -> dict[str, dict[str, Any]]:
    """The columns of these tasks' schedules, by name. Raises InvalidOption if a task needs arguments.

    In a worker of one of several databases, schedules that tick in another one are left out.
    """
    specs: dict[str, dict[str, Any]] = {}
    here = current.get()
    for each in tasks:
        if each.recurs is not None and (here is None or each.recurs_in in (None, here.name)):
            what = f"task {each.name!r}: schedule"
            try:
                specs[each.name] = spec(each.recurs, each.new(), what)
            except InvalidArguments as error:
                raise InvalidOption(
                    f"{what}: its jobs have no arguments ({error}); add a schedule with them"
                ) from error
    return specs


def _declare(fn: Callable[..., Any], options: AllOptions) -> Task[..., Any]:
    if isinstance(fn, Task):
        raise InvalidOption(f"task {fn!r}: it is the task {fn.name!r} already; declare a plain def or async def")
    check_function(fn)
    given = options.get("name")
    name = check_task_name(default_name(fn) if given is None else given)
    aliases = options.get("aliases", ())
    if isinstance(aliases, str):
        raise InvalidOption(f"task {name!r}: aliases are a list of names, such as aliases=[{aliases!r}]")
    retry = options.get("retry")
    check_wrapper(fn, name)
    batch = _batch(options, name)
    codec = Codec.of(fn, name) if batch is None else Codec.of_batch(fn, name)
    store_result = flag(options.get("store_result", True), f"task {name!r}: store_result")
    if store_result and batch is None:
        check_result(name, fn)
    lock, limit, unique = options.get("lock"), options.get("limit"), options.get("unique")
    new: Task[..., Any] = Task(
        name=name,
        fn=fn,
        codec=codec,
        locking=None if lock is None else locking(lock, codec),
        limiting=limiting(limit, options.get("rate"), codec),
        uniqueness=None if unique is None else unique_by(unique, codec),
        is_async=inspect.iscoroutinefunction(fn),
        queue=check_queue(options.get("queue", "default")),
        priority=check_priority(options.get("priority", 5)),
        retry=RetryPolicy() if retry is None else RetryPolicy.of(retry),
        aliases=tuple(map(check_task_name, aliases)),
        timeout=positive(options.get("timeout"), f"task {name!r}: timeout"),
        deadline=positive(options.get("deadline"), f"task {name!r}: deadline"),
        transactional=_transactional(options.get("transactional", False), name),
        store_result=store_result,
        on_lost_lease=choice(
            options.get("on_lost_lease", "keep" if lock is None and limit is None else "cancel"),
            f"task {name!r}: on_lost_lease",
        ),
        recurs=None if (when := options.get("schedule")) is None else check_when(when, f"task {name!r}: schedule"),
        recurs_in=_schedule_in(options, name),
    )
    if batch is not None:
        new = replace(new, batch=batch)
    scheduled([new])
    if hidden := hidden_body(fn):
        log.warning(
            "task %s: a decorator hides that %s. If the wrapper runs it itself, as with asyncio.run, all is well. "
            "Else each attempt fails: make the wrapper `async def` and await what it calls",
            name,
            hidden,
        )
    return new


def _batch(options: AllOptions, name: str) -> Batch | None:
    batch = options.get("batch")
    if batch is None:
        return None
    if not isinstance(batch, Batch):
        raise InvalidOption(f"task {name!r}: batch {batch!r:.80}: use pgqueue.Batch, such as Batch(100, wait='200ms')")
    if options.get("lock") is not None or options.get("rate") is not None:
        raise _together("lock" if options.get("rate") is None else "rate", name)
    return batch


def _schedule_in(options: AllOptions, name: str) -> str | None:
    where = options.get("schedule_in")
    if where is not None and options.get("schedule") is None:
        raise InvalidOption(f"task {name!r}: schedule_in: there is no schedule")
    return None if where is None else check_name(where, f"task {name!r}: schedule_in")


def _together(option: str, name: str) -> InvalidOption:
    return InvalidOption(
        f"task {name!r}: a batch runs many jobs in one call, so its jobs cannot have a {option}: leave out one of both"
    )


def _transactional(value: object, name: str) -> bool | Literal["required"]:
    if isinstance(value, bool):
        return value
    if value == "required":
        return REQUIRED
    raise InvalidOption(f"task {name!r}: transactional: {value!r} is neither True, False nor 'required'")


def _register(new: Task[..., Any]) -> Task[..., Any]:
    names, here = (new.name, *new.aliases), Place.here()
    for name in names:
        other = registry.get(name)
        if other is None:
            continue
        before = declared_at(other.fn)
        if not here.replaces(before, one_name=name_of(other.fn) == name_of(new.fn)):
            raise InvalidOption(
                f"task name {name!r} is taken by {name_of(other.fn)} ({before.at}), so {name_of(new.fn)} ({here.at}) "
                "cannot have it: pass name=… to one"
                + (WRAPPED if name_of(other.fn) == name_of(new.fn) and name == default_name(new.fn) else "")
            )
    if replaced := registry.get(new.name):  # the module was imported again: names it no longer declares are removed
        for name in [name for name, each in registry.items() if each is replaced]:
            del registry[name]
    registry.update(dict.fromkeys(names, new))
    declare(new.fn, here)
    return new


def _mapping(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    raise InvalidArguments(f"a row is a mapping of keywords or a tuple, not {type(row).__qualname__}: {row!r:.80}")
