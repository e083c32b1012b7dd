"""Call the handler of one job and find its outcome: the executor without its slots.

`run` and `arun` need no database. A sync handler runs in the thread of the test, so that it sees that thread's
connections (Django's belong to a thread). Under `arun` and `adrain` a sync handler runs in another thread, as in a
worker. An async handler called from sync code always runs on a fresh loop in another thread. Where Django is loaded,
both see the test's connection (threads.py).
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from inspect import signature
from itertools import count
from time import perf_counter
from typing import Any, ParamSpec, TypeVar, overload

from pgqueue.client.middleware import Hooks, declared, wrapped
from pgqueue.client.tasks import Task
from pgqueue.jobs.batch import values
from pgqueue.jobs.context import JobContext
from pgqueue.jobs.fields import CLAIMED, claimed
from pgqueue.jobs.job import Job, NewJob, running_job
from pgqueue.jobs.outcomes import ASKS, Cancel, Completed, Fail, Outcome, Retry, Snooze, given, unfit
from pgqueue.jobs.values import EPOCH
from pgqueue.testing.context import DrainContext
from pgqueue.testing.resources import AS_DECLARED, Resources
from pgqueue.testing.threads import run_sync
from pgqueue.worker.run.batch_context import BatchContext

P = ParamSpec("P")
R = TypeVar("R")

Ran = tuple[Outcome, BaseException | None]
"""The outcome of a job, and the exception of its handler, if it raised one."""

# Exceptions that end an attempt. KeyboardInterrupt, and pytest's own (fail, skip, exit), end the test instead.
ATTEMPT_ERRORS = (Exception, SystemExit, asyncio.CancelledError)

_ids = count(1)
_KEPT = [name for name in CLAIMED if name in NewJob.__struct_fields__ and name not in ("run_at", "deadline")]
"""What a job that has just been claimed has of its enqueue: it was due, and in time."""


@overload
def run(task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
@overload
def run(task: Task[..., R], /, *args: Any, resources: Any, **kwargs: Any) -> R: ...
def run(task: Task[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the task's handler as a worker would, without a database, and return what it returns.

    The arguments are encoded to JSON and decoded again. The Job is made up, and `current_job()` works. Middleware and
    hooks are called. Exceptions are raised, and no attempt is retried. Raises InvalidArguments for arguments that an
    enqueue would refuse.

    `job.resources` is what is given as `resources`, else what the declared lifespan yields, which is entered for this
    call. If the task has a parameter of that name, `resources` is its argument.

    A task with a `Batch` is given one argument. Its handler is called with a list of one, and what it answers for that
    job is returned, or raised if it is an exception.

    >>> @pgqueue.task(name="testing.double")
    ... def double(job: pgqueue.Job, n: int) -> int:
    ...     assert pgqueue.current_job() is job
    ...     return 2 * n
    >>> run(double, 21)
    42
    """
    given = _resources(task, kwargs)
    return run_job(task, task.new(*args, **kwargs), given)[1]


@overload
async def arun(task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
@overload
async def arun(task: Task[..., R], /, *args: Any, resources: Any, **kwargs: Any) -> R: ...
async def arun(task: Task[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`run` on the loop of the test: an async handler may use objects that belong to that loop.

    assert await arun(send, "a@example.com") == "sent"
    """
    given = _resources(task, kwargs)
    return (await arun_job(task, task.new(*args, **kwargs), given))[1]


def run_job(task: Task[..., Any], new: NewJob[Any], given: Any) -> tuple[Job, Any]:
    """Run the handler of this job, without a database; return the job and what the handler returned."""
    job, hooks = _made_up(new), declared()
    with Resources(given) as resources, _telling(hooks, task, job) as gave:
        job.context = JobContext(resources.value())
        gave.append(_run_here(wrapped(task, hooks), job, resources))
    return job, gave[0]


async def arun_job(task: Task[..., Any], new: NewJob[Any], given: Any) -> tuple[Job, Any]:
    """`run_job` from a running loop."""
    job, hooks = _made_up(new), declared()
    async with Resources(given) as resources:
        with _telling(hooks, task, job) as gave:
            job.context = JobContext(await resources.avalue())
            gave.append(await _run_there(wrapped(task, hooks), job))
    return job, gave[0]


def _resources(task: Task[..., Any], kwargs: dict[str, Any]) -> Any:
    """Take the resources out of the arguments, unless they are the task's own."""
    own = "resources" in signature(task.fn).parameters
    return AS_DECLARED if own else kwargs.pop("resources", AS_DECLARED)


def call(job: Job, task: Task[..., Any], conn: object, worker_id: int, *, alone: bool, resources: Resources) -> Ran:
    """Run the job in this thread, with the drain's connection; return its outcome."""
    if (outcome := unfit(job)) is not None:
        return outcome, None
    job.context = context = DrainContext(task, conn, worker_id, alone=alone, resources=resources.value())
    try:
        what = context.covered(_run_here(task, job, resources))
        outcome = given(job, task.retry, what)
        context.end(kept=_kept(outcome, what))
        return outcome, None
    except ATTEMPT_ERRORS as error:
        context.end(kept=False)
        return given(job, task.retry, error, raised=True), error


async def acall(
    job: Job, task: Task[..., Any], conn: object, worker_id: int, *, alone: bool, resources: Resources
) -> Ran:
    """`call` from a running loop."""
    if (outcome := unfit(job)) is not None:
        return outcome, None
    given_resources = await resources.avalue()
    job.context = context = DrainContext(task, conn, worker_id, alone=alone, resources=given_resources)
    test = asyncio.current_task()
    try:
        what = context.covered(await _run_there(task, job))
        outcome = given(job, task.retry, what)
        await context.aend(kept=_kept(outcome, what))
        return outcome, None
    except ATTEMPT_ERRORS as error:
        await context.aend(kept=False)
        if test is not None and test.cancelling():  # the test is cancelled, not the attempt
            raise
        return given(job, task.retry, error, raised=True), error


def _kept(outcome: Outcome, what: object) -> bool:
    """Whether the writes of a transactional task are kept. They are not if its result cannot be stored."""
    return isinstance(outcome, Completed) or isinstance(what, Snooze | Retry | Cancel | Fail)


@contextmanager
def _telling(hooks: Hooks, task: Task[..., Any], job: Job) -> Iterator[list[Any]]:
    """Call `on_finish` with the job's outcome: the value in the list, or the exception that was raised."""
    gave: list[Any] = []
    try:
        yield gave
    except ATTEMPT_ERRORS as error:
        hooks.finished(job, given(job, task.retry, error, raised=True))
        raise
    hooks.finished(job, given(job, task.retry, gave[0]))


def _run_here(task: Task[..., Any], job: Job, resources: Resources) -> Any:
    if task.is_async:
        return resources.run(_handle_async(task, job))
    return contextvars.copy_context().run(_handle, task, job)


async def _run_there(task: Task[..., Any], job: Job) -> Any:
    if task.is_async:
        return await asyncio.create_task(_handle_async(task, job))
    return await run_sync(_handle, task, job)


def _handle(task: Task[..., Any], job: Job) -> Any:
    """Call the handler; the caller has made a context for it."""
    running_job.set(job)
    job.began = perf_counter()
    return _own(task, _calling(task, job)())


async def _handle_async(task: Task[..., Any], job: Job) -> Any:
    running_job.set(job)
    job.began = perf_counter()
    coroutine: Coroutine[Any, Any, Any] = _calling(task, job)()
    return _own(task, await coroutine)


def _calling(task: Task[..., Any], job: Job) -> Callable[[], Any]:
    args, kwargs = task.codec.decode(job.args)
    if task.batch is not None:  # here each job is a batch of its own
        job.context = BatchContext(job.context, job, ())
        return lambda: task.fn([job], list(args)) if task.wants_job else task.fn(list(args))
    return lambda: task.fn(job, *args, **kwargs) if task.wants_job else task.fn(*args, **kwargs)


def _own(task: Task[..., Any], answer: Any) -> Any:
    """What the handler answered for its job: of a batch the one value, raised if it is an exception."""
    if task.batch is None:
        return answer
    [value] = values(answer, 1)
    if isinstance(value, BaseException) and not isinstance(value, ASKS):
        raise value
    return value


def _made_up(new: NewJob[Any]) -> Job:
    """Make a job as if it had just been enqueued and claimed."""
    return Job(
        claimed(
            id=next(_ids),
            rank=2 * new.priority + 1,
            enqueued_at=microseconds(datetime.now(UTC)),
            unique_keys=new.keys and json.dumps([new.keys.unique, new.keys.idempotency]),
            **{name: getattr(new, name) for name in _KEPT},
        ),
        0,
    )


def microseconds(moment: datetime) -> int:
    """A time as the worker's connections read it: microseconds since 2000. Without a time zone it is UTC."""
    since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
