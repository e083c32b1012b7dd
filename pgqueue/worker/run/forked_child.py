"""Ends a process that was forked while a job ran, where it comes out of the code that forked it: it is no worker.

The child of a fork returns, raises or leaves into our code like its parent, with a copy of all jobs that wait here. It
would run them a second time. Here it ends instead, with `os._exit`: no hook, no `atexit`, no outcome. A handler may
fork, and so may a hook, middleware, a class that arguments are decoded to, and a filter of the log. The count of forks
is compared behind each of them:

- The executor looks where it calls a handler, after that, and when it has handed on the outcome. That is where the run
  of a plain task comes out of code of the application.
- Around a task with layers, such as a transaction or middleware, a `ForkGuard` is the innermost layer. So no layer sees
  a child of the handler, and no handler one of a layer.
- Each hook and each middleware has such a guard of its own (`guarded`). So none is called in a child of another one.
- A child that never comes out, as with multiprocessing, is left alone.

The exit code says how it came out: 0 returned, 1 raised, 130 KeyboardInterrupt, else what SystemExit says.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from pgqueue.client.middleware import Handler, Hooks, Layer
from pgqueue.client.tasks import Task
from pgqueue.database import forks
from pgqueue.jobs.job import Job, current_job
from pgqueue.jobs.outcomes import problem

RAISED = 1
INTERRUPTED = 130


class ForkGuard:
    """The innermost layer of tasks that have any of `others`."""

    def __init__(self, others: Sequence[Layer]) -> None:
        self._others = others
        self._depth = forks.depth

    def wraps(self, task: Task[..., Any]) -> bool:
        """Whether this task has another layer."""
        return any(layer.wraps(task) for layer in self._others)

    def in_thread(self, task: Task[..., Any], call: Handler) -> Handler:
        """A sync handler that no child comes into or out of."""
        return _guard(call, self._depth)

    def on_loop(self, task: Task[..., Any], call: Handler) -> Handler:
        """The same of an async handler."""
        return _guard_async(call, self._depth)


def guarded(hooks: Hooks) -> Hooks:
    """Return these hooks and middleware, so that no child comes into or out of any of them."""
    depth = forks.depth
    return replace(
        hooks,
        on_start=tuple(_guard(each, depth) for each in hooks.on_start),
        on_finish=tuple(_guard(each, depth) for each in hooks.on_finish),
        middleware=tuple(
            _guard_async(each, depth) if iscoroutinefunction(each) else _guard(each, depth) for each in hooks.middleware
        ),
    )


def _guard(call: Handler, depth: int) -> Handler:
    @wraps(call)  # a hook that fails is named
    def in_thread(*args: Any, **kwargs: Any) -> Any:
        end_child(depth, current_job())
        try:
            value = call(*args, **kwargs)
        except BaseException as error:
            end_child(depth, current_job(), error)
            raise
        end_child(depth, current_job())
        return value

    return in_thread


def _guard_async(call: Handler, depth: int) -> Handler:
    @wraps(call)
    async def on_loop(*args: Any, **kwargs: Any) -> Any:
        end_child(depth, current_job())
        try:
            value = await call(*args, **kwargs)
        except BaseException as error:
            end_child(depth, current_job(), error)
            raise
        end_child(depth, current_job())
        return value

    return on_loop


def end_child(depth: int, job: Job, error: BaseException | None = None) -> None:
    """End this process if it was forked since `depth`, so in the run of this job."""
    if forks.depth == depth:
        return
    code, raised = RAISED, None
    with suppress(BaseException):  # whatever the exception does when it is looked at: the child ends
        code = _code(error)
        raised = None if error is None or isinstance(error, SystemExit) else problem("failed", error).traceback
    by = f"it was forked while job {job.id} ({job.task}) ran, by its handler or by what is around that"
    forks.end(code, f"{by}, and has come out of it", raised or "")


def _code(error: BaseException | None) -> int:
    """The exit code, as the interpreter would give it."""
    match error:
        case None:
            return 0
        case SystemExit(code=None):
            return 0
        case SystemExit(code=int(code)):
            return code & 0xFF
        case KeyboardInterrupt():
            return INTERRUPTED
    return RAISED
