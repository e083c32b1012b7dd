"""The handlers that workers call for Django's tasks: one for each task, under the path of its function.

What a job is given stands in `args` and `kwargs`, as it was enqueued: JSON, which no annotation changes. Around the
function are Django's signals `task_started` and `task_finished`. They fail no job: their errors are logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import iscoroutinefunction
from traceback import format_exception
from typing import Any

from django.utils import timezone

import pgqueue
from pgqueue.client import tasks
from pgqueue.integrations.django import task_results
from pgqueue.integrations.django.tasks_framework import base, normalize_json, signals
from pgqueue.jobs.outcomes import ASKS

declared: dict[str, Any] = {}
"""Each task of Django that this process has declared, by the path of its function."""
_running: dict[pgqueue.Job, Any] = {}
_sending: set[asyncio.Task[Any]] = set()


def declare(task: Any) -> pgqueue.Task[..., Any]:
    """The task of pgqueue for this task of Django, which is declared at the first time."""
    path, before = task.module_path, declared.get(task.module_path)
    if before is None or before.func is not task.func:
        handler: Callable[..., Any] = _async_handler(path) if iscoroutinefunction(task.func) else _sync_handler(path)
        options: Any = {name: getattr(task, name, None) for name in ("retry", "timeout")}
        priority = task_results.band(task.priority)
        pgqueue.task(name=path, queue=task.queue_name, priority=priority, **options)(handler)
        declared[path] = task
    return tasks.registry[path]


def _sync_handler(path: str) -> Callable[..., Any]:
    def handler(job: pgqueue.Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        task = declared[path]
        backend = task.get_backend()
        try:
            info = pgqueue.get(backend.database, job.id)
        except pgqueue.JobNotFound:
            info = None
        result = _begun(task, job, info, args, kwargs)
        signals.task_started.send_robust(type(backend), task_result=result)
        try:
            return _returned(result, task.func(*_context(task, result), *args, **kwargs))
        except BaseException as error:
            _raised(result, error)
            raise

    return handler


def _async_handler(path: str) -> Callable[..., Any]:
    async def handler(job: pgqueue.Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        task = declared[path]
        backend = task.get_backend()
        try:
            info = await pgqueue.aget(backend.database, job.id)
        except pgqueue.JobNotFound:
            info = None
        result = _begun(task, job, info, args, kwargs)
        await signals.task_started.asend_robust(type(backend), task_result=result)
        try:
            return _returned(result, await task.func(*_context(task, result), *args, **kwargs))
        except BaseException as error:
            _raised(result, error)
            raise

    return handler


def _begun(task: Any, job: pgqueue.Job, info: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result while the job runs. `info` is None in a drain whose connection is not Django's."""
    if info is not None:
        result = task_results.of(task, info, task.backend)
    else:
        fresh = task_results.new(task, job.id, args, kwargs, task.backend)
        unknown = {"worker_ids": [""] * job.attempt, "started_at": job.started_at, "last_attempted_at": job.started_at}
        result = task_results.known(fresh, status=base.TaskResultStatus.RUNNING, **unknown)
    _running[job] = result
    return result


def _context(task: Any, result: Any) -> tuple[Any, ...]:
    return (base.TaskContext(task_result=result),) if task.takes_context else ()


def _returned(result: Any, value: Any) -> Any:
    if isinstance(value, ASKS):
        return value
    plain = normalize_json(value)
    task_results.known(result, _return_value=plain)
    return plain


def _raised(result: Any, error: BaseException) -> None:
    path, said = task_results.path_of(type(error)), "".join(format_exception(error))
    result.errors.append(base.TaskError(exception_class_path=path, traceback=said))


@pgqueue.on_finish
def send_finished(job: pgqueue.Job, outcome: pgqueue.JobOutcome) -> None:
    """If this was the end of one of Django's tasks, say so. On a loop the receivers are called a little later."""
    result = _running.pop(job, None)
    status = {
        "completed": base.TaskResultStatus.SUCCESSFUL,
        "failed": base.TaskResultStatus.FAILED,
        "cancelled": base.TaskResultStatus.FAILED,
    }.get(outcome.name)
    if result is None or status is None:
        return
    task_results.known(result, status=status, finished_at=timezone.now())
    sender = type(result.task.get_backend())
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        signals.task_finished.send_robust(sender, task_result=result)
        return
    sending = loop.create_task(signals.task_finished.asend_robust(sender, task_result=result))
    _sending.add(sending)
    sending.add_done_callback(_sending.discard)
