"""Results that nobody wants: `store_result=False` keeps what a handler returns out of the history.

Used by the worker when it starts. What a handler asks for (`Snooze` and its like) is no result and passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pgqueue.asks import Cancel, Fail, Retry, Snooze
from pgqueue.tasks import Task


def unstored(tasks: Mapping[str, Task[..., Any]]) -> dict[str, Task[..., Any]]:
    """These tasks, with handlers that return nothing where a result is not to be stored."""
    return {name: task if task.store_result else silent(task) for name, task in tasks.items()}


def silent(task: Task[..., Any]) -> Task[..., Any]:
    """The task, with a handler that returns nothing but what it asks for."""
    fn = task.fn

    def in_thread(*args: Any, **kwargs: Any) -> Any:
        return _asked(fn(*args, **kwargs))

    async def on_loop(*args: Any, **kwargs: Any) -> Any:
        return _asked(await fn(*args, **kwargs))

    return replace(task, fn=on_loop if task.is_async else in_thread)


def _asked(value: object) -> object:
    return value if isinstance(value, Snooze | Retry | Cancel | Fail) else None
