"""The backend of Django's tasks: `"BACKEND": "pgqueue.integrations.django.task_backend.Backend"` in TASKS.

A task of Django is a task of pgqueue under the path of its function, so each worker that has imported it runs its jobs.
An enqueue joins the transaction of its alias. Its result is the job: `get_result` is one statement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone

import pgqueue
from pgqueue.config import stages
from pgqueue.integrations.django import project_settings, task_handlers, task_results
from pgqueue.integrations.django.tasks_framework import backend, base, exceptions, normalize_json, signals
from pgqueue.jobs.values import HIGHEST_ID


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(base.Task):  # type: ignore[misc]  # Django has no types
    """A task of Django with two options of pgqueue's, as those of `@pgqueue.task`: `retry` and `timeout`.

    `@task(retry=3)` takes them in Django 6.1 and the backport, `.using(retry=3)` everywhere.
    """

    retry: pgqueue.RetryPolicy | int | None = None
    timeout: Any = None

    def __post_init__(self) -> None:
        base.Task.__post_init__(self)
        if isinstance(self.get_backend(), Backend):
            task_handlers.declare(self)

    def using(self, **options: Any) -> Task:
        """A copy with these options; None leaves one as it is."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})


class Backend(backend.BaseTaskBackend):  # type: ignore[misc]  # Django has no types
    """Jobs of pgqueue, in the database of the alias that OPTIONS name as "database", else in that of PGQUEUE."""

    task_class = Task
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        if unknown := self.options.keys() - {"database"}:
            raise ImproperlyConfigured(f"TASKS: {alias!r} has OPTIONS {', '.join(unknown)}; it may have database")

    @property
    def database(self) -> str:
        """The alias of DATABASES on which its jobs are enqueued and asked for."""
        return self.options.get("database") or project_settings.alias()

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Enqueue the call in the transaction of the alias."""
        ours, call = self._call(task, args, kwargs)
        handle = ours.enqueue(self.database, **call)
        result = task_results.new(task, handle.id, args, kwargs, self.alias)
        signals.task_enqueued.send(type(self), task_result=result)
        return result

    async def aenqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """`enqueue` in async code, in the thread of Django's `acreate`."""
        ours, call = self._call(task, args, kwargs)
        handle = await ours.aenqueue(self.database, **call)
        result = task_results.new(task, handle.id, args, kwargs, self.alias)
        await signals.task_enqueued.asend(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """What became of a call. Raises TaskResultDoesNotExist: unknown, rolled back, or removed by retention."""
        try:
            return self._result(pgqueue.get(self.database, _id(result_id)))
        except pgqueue.JobNotFound:
            raise exceptions.TaskResultDoesNotExist(result_id) from None

    async def aget_result(self, result_id: str) -> Any:
        """`get_result` in async code."""
        try:
            return self._result(await pgqueue.aget(self.database, _id(result_id)))
        except pgqueue.JobNotFound:
            raise exceptions.TaskResultDoesNotExist(result_id) from None

    def _result(self, info: pgqueue.JobInfo) -> Any:
        task = task_handlers.declared.get(info.task)
        if task is None:  # a job of another kind, or of a module that is not imported here
            raise exceptions.TaskResultDoesNotExist(str(info.id))
        return task_results.of(task, info, self.alias)

    def _call(self, task: Any, args: Any, kwargs: Any) -> tuple[pgqueue.Task[..., Any], dict[str, Any]]:
        self.validate_task(task)
        if stages():
            raise ImproperlyConfigured("TASKS: jobs are staged in an outbox here, and a staged job has no result")
        ours = task_handlers.declare(task).using(
            queue=task.queue_name,
            priority=task_results.band(task.priority),
            run_at=_aware(task.run_after),
            retry=getattr(task, "retry", None),
            timeout=getattr(task, "timeout", None),
        )
        return ours, {"args": normalize_json(args), "kwargs": normalize_json(kwargs)}


def _id(result_id: str) -> int:
    """The id of a job. Raises JobNotFound for a text that is none."""
    text = str(result_id)
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) <= HIGHEST_ID):
        raise pgqueue.JobNotFound(f"no job has the id {text:.40}")
    return int(text)


def _aware(moment: datetime | None) -> datetime | None:
    return moment if moment is None or settings.USE_TZ else timezone.make_aware(moment)
