"""Ends a process that a handler has forked, where it comes out of the handler: it is no worker.

The child of a fork returns, raises or leaves into the executor's code like its parent, with a copy of all jobs that
wait here. It would run them a second time. Here it ends instead, with `os._exit`: no hook, no `atexit`, no outcome.

- The executor looks after each handler, and before it. That is where plain tasks come out.
- Around a task with layers, such as a transaction or middleware, this layer is the innermost one. So no layer sees the
  child.
- A child that never comes out, as with multiprocessing, is left alone.

The exit code says how it came out: 0 returned, 1 raised, 130 KeyboardInterrupt, else what SystemExit says.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pgqueue.client.middleware import Handler, Layer
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
        """A sync handler that no child comes out of."""
        depth = self._depth

        def in_thread(*args: Any, **kwargs: Any) -> Any:
            try:
                value = call(*args, **kwargs)
            except BaseException as error:
                end_child(depth, current_job(), error)
                raise
            end_child(depth, current_job())
            return value

        return in_thread

    def on_loop(self, task: Task[..., Any], call: Handler) -> Handler:
        """The same of an async handler."""
        depth = self._depth

        async def on_loop(*args: Any, **kwargs: Any) -> Any:
            try:
                value = await call(*args, **kwargs)
            except BaseException as error:
                end_child(depth, current_job(), error)
                raise
            end_child(depth, current_job())
            return value

        return on_loop


def end_child(depth: int, job: Job, error: BaseException | None = None) -> None:
    """End this process if it was forked since `depth`, so by the handler of this job."""
    if forks.depth == depth:
        return
    code, raised = RAISED, None
    with suppress(BaseException):  # whatever the exception does when it is looked at: the child ends
        code = _code(error)
        raised = None if error is None or isinstance(error, SystemExit) else problem("failed", error).traceback
    forks.end(code, f"the handler of job {job.id} ({job.task}) has forked it, and it has come out of it", raised or "")


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
