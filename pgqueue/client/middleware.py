"""What an application puts around its jobs: `@middleware`, `@on_start`, `@on_finish`.

Declared at import beside the tasks, as the lifespan is. A worker takes them when it starts. All that a worker puts
around a handler is one chain of layers (`wrapped`), of which `Hooks` is one; `Hooks.finishing` stands between executor
and completer. A layer that a task does not need is not there, so a job without hooks pays nothing. Nothing here does
I/O.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from pgqueue.client.job_outcome import JobOutcome
from pgqueue.client.observers import Observer, Watched, observers, tell
from pgqueue.client.place import Place, declare, declared_at, name_of
from pgqueue.client.tasks import Task
from pgqueue.errors import InvalidOption
from pgqueue.jobs.job import Job, NewJob, current_job, fields
from pgqueue.jobs.outcomes import ASKS, NEVER_RUN, WRITTEN, Outcome, written_in
from pgqueue.options import checks_options

log = logging.getLogger("pgqueue")


OnStart = Callable[[Job], None]
OnFinish = Callable[[Job, JobOutcome], None]
Middleware = Callable[[Job, Callable[[], Any]], Any]
Finish = Callable[[Job, Outcome], None]
Handler = Callable[..., Any]
"""A handler as it is called: a function, or one that returns an awaitable."""

S = TypeVar("S", bound=OnStart)
F = TypeVar("F", bound=OnFinish)
M = TypeVar("M", bound=Middleware)
Hook = TypeVar("Hook", bound=Callable[..., Any])

# The chain ------------------------------------------------------------------------------------------------------------


class Layer(Protocol):
    """One wrapper of handlers: hooks, a transaction, a timeout. It calls `call` where the handler shall run."""

    def wraps(self, task: Task[..., Any]) -> bool:
        """Whether the handler of this task is wrapped; else it pays nothing."""
        ...

    def in_thread(self, task: Task[..., Any], call: Handler) -> Handler:
        """A sync handler, wrapped."""
        ...

    def on_loop(self, task: Task[..., Any], call: Handler) -> Handler:
        """An async handler, wrapped."""
        ...


def wrapped(task: Task[..., Any], *layers: Layer) -> Task[..., Any]:
    """This task with these layers around its handler, the first one innermost; itself if none wraps it."""
    call = task.fn
    for layer in layers:
        if layer.wraps(task):
            call = layer.on_loop(task, call) if task.is_async else layer.in_thread(task, call)
    return task if call is task.fn else replace(task, fn=call)


# Declaring ------------------------------------------------------------------------------------------------------------

_on_start: list[OnStart] = []
_on_finish: list[OnFinish] = []
_middleware: list[Middleware] = []


@checks_options
def on_start(function: S) -> S:
    """Call this function with every job that is about to run, where the job runs: on the loop or in its thread.

    It must be quick, because on the loop all other jobs wait for it. An `async def` raises InvalidOption. If the
    function raises, this is logged with its name, and the job runs all the same. The handler sees the context variables
    that it sets.

    >>> @pgqueue.on_start
    ... def announce(job: pgqueue.Job) -> None:
    ...     print(job.task, job.attempt)
    """
    return _declare("on_start", _plain("on_start", function), _on_start, 1)


@checks_options
def on_finish(function: F) -> F:
    """Call this function with the job and a `JobOutcome` after every attempt whose handler was started.

    It is called once per start, after the outcome was decided and handed on to be written. It is called where the job
    ran. If the job was taken away from a handler that does not stop, it is called on the loop. It must be quick and no
    `async def`, as `on_start`. If it raises, this is logged with its name and changes nothing. A worker that is killed
    calls no hook.

    >>> @pgqueue.on_finish
    ... def measure(job: pgqueue.Job, outcome: pgqueue.JobOutcome) -> None:
    ...     print(job.task, outcome.name, outcome.seconds)
    """
    return _declare("on_finish", _plain("on_finish", function), _on_finish, 2)


@checks_options
def middleware(function: M) -> M:
    """Put this function around the handlers of all tasks: a plain one around sync ones, an async one around async ones.

    It gets the job and `call`, which runs the handler and returns its value. What the middleware returns counts as the
    handler's value, and an exception of it fails the attempt. If it does not call `call`, the handler does not run. The
    middleware declared first is the outermost.

    For a transactional task `call` includes the commit and returns None. The result is committed by then: a value that
    the middleware returns after that is ignored.

    >>> @pgqueue.middleware
    ... def trace(job, call):
    ...     with span(job.task):
    ...         return call()
    """
    return _declare("middleware", function, _middleware, 2)


def _plain(what: str, function: Hook) -> Hook:
    if inspect.iscoroutinefunction(function):
        raise InvalidOption(
            f"@pgqueue.{what}: {name_of(function)} is async, and would never be awaited: use a plain def"
        )
    return function


def _declare(what: str, function: Hook, declared: list[Any], parameters: int) -> Hook:
    """Keep the function. If its module is imported again, the new function replaces the old one (see place)."""
    generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if generator or not inspect.isfunction(function):
        raise InvalidOption(f"@pgqueue.{what}: {function!r} must be a function, and no generator")
    try:
        inspect.signature(function).bind(*(None,) * parameters)
    except TypeError:
        given = ("job", "job, outcome", "job, call")[0 if parameters == 1 else 1 + (what == "middleware")]
        raise InvalidOption(f"@pgqueue.{what}: {name_of(function)} is called with ({given})") from None
    here, name = Place.here(), name_of(function)
    for place, each in enumerate(declared):
        if name_of(each) == name and here.replaces(declared_at(each), one_name=True):
            declared[place] = function
            break
    else:
        declared.append(function)
    declare(function, here)
    return cast(Hook, function)


# Calling --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Begun:
    """The start of a job's handler: its time, and the context in which `on_finish` is called."""

    at: float
    context: Context
    successors: tuple[NewJob[Any], ...] = ()
    """What `on_start` has enqueued: it stands if the handler is called again within the attempt."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The declared hooks and middleware, and the observers around them, for one worker."""

    on_start: tuple[OnStart, ...] = ()
    on_finish: tuple[OnFinish, ...] = ()
    middleware: tuple[Middleware, ...] = ()
    observers: tuple[Observer, ...] = ()
    # Changed by the loop and by threads; each changes only the key of its own job.
    _begun: dict[Job, Begun] = field(default_factory=dict)

    def wraps(self, task: Task[..., Any]) -> bool:
        """Whether this task has hooks, middleware or observers."""
        return bool(self.on_start or self.on_finish or self.observers or self._middleware_of(task))

    def in_thread(self, task: Task[..., Any], call: Handler) -> Handler:
        """A sync handler with its hooks."""
        if chain := self._middleware_of(task):
            call = _around(call, chain)
            if RESULTS.wraps(task) and not task.transactional:
                call = RESULTS.in_thread(task, call)
        call = self._beginning(call) if self.on_start or self.on_finish else call
        return self._watched(call) if self.observers else call

    def on_loop(self, task: Task[..., Any], call: Handler) -> Handler:
        """An async handler with its hooks."""
        if chain := self._middleware_of(task):
            call = _around_async(call, chain)
            if RESULTS.wraps(task) and not task.transactional:
                call = RESULTS.on_loop(task, call)
        call = self._beginning_async(call) if self.on_start or self.on_finish else call
        return self._watched_async(call) if self.observers else call

    def _middleware_of(self, task: Task[..., Any]) -> list[Middleware]:
        return [each for each in self.middleware if inspect.iscoroutinefunction(each) is task.is_async]

    def finishing(self, finish: Finish) -> Finish:
        """Return a function that calls `finish`, then the hooks: even if a hook hangs, the outcome is written."""
        if not self.on_start and not self.on_finish and not self.observers:
            return finish

        def finish_and_tell(job: Job, outcome: Outcome) -> None:
            finish(job, outcome)
            self.finished(job, outcome)

        return finish_and_tell

    def finished(self, job: Job, outcome: Outcome) -> None:
        """If the job's handler was started, call `on_finish` for it, once. Observers are told of every outcome."""
        begun = self._begun.pop(job, None)
        if begun is not None and self.on_finish:
            told = JobOutcome.of(written_in(job, outcome), perf_counter() - begun.at)
            for hook in self.on_finish:
                begun.context.run(_tell, hook, job, told)
        self.left(job, outcome)

    def left(self, job: Job, outcome: Outcome) -> None:
        """Tell the observers what becomes of an attempt. Its handler may go on: then `on_finish` is not called."""
        if self.observers:
            began: float | None = getattr(job, "began", None)
            tell(
                self.observers,
                job,
                JobOutcome.of(written_in(job, outcome), 0.0 if began is None else perf_counter() - began),
            )

    def _watched(self, call: Handler) -> Handler:
        def in_thread(*args: Any, **kwargs: Any) -> Any:
            job = current_job()
            with Watched(self.observers, lambda observer: observer.running(job)):
                return call(*args, **kwargs)

        return in_thread

    def _watched_async(self, call: Handler) -> Handler:
        async def on_loop(*args: Any, **kwargs: Any) -> Any:
            job = current_job()
            with Watched(self.observers, lambda observer: observer.running(job)):
                return await call(*args, **kwargs)

        return on_loop

    def _beginning(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def in_thread(*args: Any, **kwargs: Any) -> Any:
            self.begin(current_job())
            return fn(*args, **kwargs)

        return in_thread

    def _beginning_async(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        async def on_loop(*args: Any, **kwargs: Any) -> Any:
            self.begin(current_job())
            return await fn(*args, **kwargs)

        return on_loop

    def begin(self, job: Job) -> None:
        """Call `on_start` for this job, once in an attempt, where its handler is about to be called."""
        if not self.on_start and not self.on_finish:
            return
        if (before := self._begun.get(job)) is not None:  # the handler is called again within the same attempt
            job.successors = list(before.successors) or None
            return
        # Noted before the hooks run: a job that is stopped in the middle of them counts as started.
        begun = self._begun[job] = Begun(perf_counter(), copy_context())
        for hook in self.on_start:
            try:
                hook(job)
            except BaseException as error:
                if not isinstance(error, Exception) and job.cancelled:  # it stops the job, not the hook
                    raise
                _complain("on_start hook %s failed; job %d (%s) runs all the same", name_of(hook), job)
        begun.context, begun.successors = copy_context(), tuple(job.successors or ())


def declared() -> Hooks:
    """The hooks declared so far, and the observers."""
    return Hooks(tuple(_on_start), tuple(_on_finish), tuple(_middleware), tuple(observers))


def _tell(hook: OnFinish, job: Job, told: JobOutcome) -> None:
    try:
        hook(job, told)
    except BaseException:  # an exception that leaves here would cost the worker a slot
        _complain("on_finish hook %s failed; the outcome of job %d (%s) stands", name_of(hook), job)


def _complain(message: str, name: str, job: Job) -> None:
    log.exception(message, name, job.id, job.task, extra=fields(job, hook=name))


def _around(fn: Callable[..., Any], chain: list[Middleware]) -> Callable[..., Any]:
    def in_thread(*args: Any, **kwargs: Any) -> Any:
        called = _Called(current_job())
        with called:
            called.value = _nested(chain, called.job, lambda: called.gave(fn(*args, **kwargs)))()
        return called.value

    return in_thread


def _around_async(fn: Callable[..., Any], chain: list[Middleware]) -> Callable[..., Any]:
    async def on_loop(*args: Any, **kwargs: Any) -> Any:
        called = _Called(current_job())

        async def innermost() -> Any:
            return called.gave(await fn(*args, **kwargs))

        with called:
            called.value = await cast(Awaitable[Any], _nested(chain, called.job, innermost)())
        return called.value

    return on_loop


def _nested(chain: list[Middleware], job: Job, call: Callable[[], Any]) -> Callable[[], Any]:
    """The chain as one call; its first middleware is the outermost."""
    for each in reversed(chain):
        call = partial(each, job, call)
    return call


class _Called:
    """A call through middleware, with its value. If the outcome is decided inside, as by a transaction, that counts."""

    __slots__ = ("decided", "job", "value")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.value: Any = None
        self.decided: Outcome | None = None

    def gave(self, value: Any) -> Any:
        """Take the handler's value; return the value that the innermost middleware gets."""
        if not isinstance(value, Outcome):
            return value
        if self.decided is not WRITTEN:
            self.decided = value
        return None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is not None:
            if self.decided is not WRITTEN or isinstance(error, GeneratorExit):
                return False
            text = "middleware failed when job %d (%s) had been committed; it stays so"
            log.error(text, self.job.id, self.job.task, extra=fields(self.job), exc_info=error)
        if self.decided is not None:
            self.value = self.decided
        return True


class Results:
    """The layer of tasks whose results are not stored: the handler returns Snooze, Retry, Cancel or Fail, else None."""

    def wraps(self, task: Task[..., Any]) -> bool:
        """Whether the task's results are not stored. Those of a batch are left out where its answer is taken apart."""
        return not task.store_result and task.batch is None

    def in_thread(self, task: Task[..., Any], call: Handler) -> Handler:
        """A sync handler that returns Snooze, Retry, Cancel or Fail, else None."""
        return lambda *args, **kwargs: _asked(call(*args, **kwargs))

    def on_loop(self, task: Task[..., Any], call: Handler) -> Handler:
        """The same of an async handler."""

        async def on_loop(*args: Any, **kwargs: Any) -> Any:
            return _asked(await call(*args, **kwargs))

        return on_loop


RESULTS = Results()


def _asked(value: object) -> object:
    return value if value is not None and isinstance(value, (*ASKS, *NEVER_RUN)) else None
