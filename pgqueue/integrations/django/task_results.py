"""A job as a `TaskResult` of Django, and what is called otherwise there: priorities, states, errors."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from datetime import datetime
from typing import Any

from django.conf import settings
from django.utils import timezone

from pgqueue import errors
from pgqueue.admin.queries import Attempt, JobInfo
from pgqueue.integrations.django.tasks_framework import base
from pgqueue.jobs.outcomes import NO_FAILURES

STATUS = {
    **dict.fromkeys(("available", "scheduled", "blocked"), base.TaskResultStatus.READY),
    **dict.fromkeys(("failed", "cancelled", "skipped"), base.TaskResultStatus.FAILED),
    "running": base.TaskResultStatus.RUNNING,
    "completed": base.TaskResultStatus.SUCCESSFUL,
}
UP, DOWN = 20, 25
"""How many of Django's priorities above 0, and below, are one of pgqueue's."""


def band(priority: int) -> int:
    """Django's -100 to 100, the highest first, as pgqueue's 0 to 9, the lowest first; 0 is 5."""
    return 5 - -(-priority // UP) if priority > 0 else 5 + -(priority // DOWN)


def new(task: Any, id: int, args: Any, kwargs: Any, backend: str) -> Any:
    """The result of a job that was just enqueued."""
    return _result(task, id, backend, args, kwargs, enqueued_at=timezone.now())


def of(task: Any, info: JobInfo, backend: str) -> Any:
    """The result of a job. `task` is the one that was declared, which is given the options of the job."""
    runs = info.state in ("running", "completed")
    starts = [each.started_at for each in info.attempts] + ([info.started_at] if runs and info.started_at else [])
    workers = [each.worker_id for each in info.attempts] + ([info.worker_id] if runs and info.worker_id else [])
    made = _result(
        _as_enqueued(task, info),
        info.id,
        backend,
        info.args.get("args", []),
        info.args.get("kwargs", {}),
        status=STATUS[info.state],
        enqueued_at=_time(info.enqueued_at),
        started_at=_time(starts[0]) if starts else None,
        last_attempted_at=_time(starts[-1]) if starts else None,
        finished_at=_time(info.finished_at),
        errors=[_error(each) for each in info.attempts if each.outcome not in NO_FAILURES],
        worker_ids=[str(each) for each in workers],
    )
    return known(made, _return_value=info.result)


def known(result: Any, **more: Any) -> Any:
    """The result, of which more is known now: it is the same object, as code that holds it expects."""
    for name, value in more.items():
        object.__setattr__(result, name, value)
    return result


def path_of(kind: type) -> str:
    """Where a class is imported from."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _result(task: Any, id: int, backend: str, args: Any, kwargs: Any, **more: Any) -> Any:
    blank = {"status": base.TaskResultStatus.READY, "started_at": None, "finished_at": None, "last_attempted_at": None}
    given = blank | {"errors": [], "worker_ids": []} | more
    return base.TaskResult(task=task, id=str(id), args=args, kwargs=kwargs, backend=backend, **given)


def _as_enqueued(task: Any, info: JobInfo) -> Any:
    """A priority that is in the band of the job, if that of the declaration is not."""
    priority = task.priority
    if band(priority) != info.priority:
        priority = (5 - info.priority) * (UP if info.priority < 5 else DOWN)
    # `replace` would check it again as a new task: a queue that is no longer in the settings would raise.
    changed = {"priority": priority, "queue_name": info.queue, "run_after": _time(info.run_at)}
    return known(replace(task), **changed)


def _time(moment: datetime | None) -> datetime | None:
    return moment if moment is None or settings.USE_TZ else timezone.make_naive(moment)


def _error(attempt: Attempt) -> Any:
    told = attempt.traceback or attempt.message or attempt.outcome
    return base.TaskError(exception_class_path=_class_path(attempt), traceback=told)


def _class_path(attempt: Attempt) -> str:
    """Where the class of the exception is imported from. The row has its bare name, the traceback the module, too."""
    name = attempt.error_type or "JobFailed"
    line = re.compile(rf"[ +|]*((?:\w+\.)*){re.escape(name)}(?::|$)")
    found = [each for each in map(line.match, (attempt.traceback or "").splitlines()) if each]
    if found and found[-1][1]:
        return f"{found[-1][1]}{name}"
    return path_of(getattr(builtins if found or hasattr(builtins, name) else errors, name, errors.JobFailed))
