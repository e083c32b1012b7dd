"""`@transactional`: what a handler writes through the ORM, and the completion of its job, are one commit.

A task with `transactional=True` is something else: its transaction is on a connection of the worker's, of which the
ORM knows nothing (noticed_writes.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

from django.db import connections, transaction

from pgqueue.errors import Error, InvalidOption
from pgqueue.integrations.django import project_settings
from pgqueue.integrations.django.connections import in_a_worker
from pgqueue.jobs.job import Job, current_job
from pgqueue.jobs.outcomes import ASKS

P = ParamSpec("P")
R = TypeVar("R")

ADDRESS = ("HOST", "PORT", "NAME")


@overload
def transactional(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def transactional(*, using: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def transactional(function: Any = None, /, *, using: str | None = None) -> Any:
    """Run this handler in `atomic`, and complete its job in the same transaction, with what it returns as the result.

        @pgqueue.task
        @transactional
        def welcome(customer: int) -> int:
            return Letter.objects.create(customer=customer).id

    If it raises, nothing that it has written is kept, and the attempt has failed. If it returns Snooze, Retry, Cancel
    or Fail, nothing is kept either. `using` is the alias of the ORM's database, which must be the queue's. A drain runs
    the handler in `atomic` and completes the job itself. An `async def` raises InvalidOption.
    """
    if function is None:
        return lambda given: _transactional(given, using)
    return _transactional(function, using)


def _transactional(function: Callable[P, R], using: str | None) -> Callable[P, R]:
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise InvalidOption(
            f"@transactional stands below @pgqueue.task, above a plain def, not above {function!r}; Django has no "
            "async transactions"
        )

    @wraps(function)
    def in_transaction(*args: P.args, **kwargs: P.kwargs) -> R:
        job, alias = current_job(), using or project_settings.alias()
        working = in_a_worker(job)
        _check_database(job, alias)
        # Durable: a job inside of another block would be completed by the commit of that one, if it ever comes.
        with transaction.atomic(alias, durable=working):
            result: R = function(*args, **kwargs)
            if isinstance(result, ASKS):
                transaction.set_rollback(True, alias)
            elif working:
                job.complete(connections[alias], result=result)
        return result

    return in_transaction


def _check_database(job: Job, alias: str) -> None:
    """The job can be completed only in the database of the queue."""
    theirs, ours = (connections[name].settings_dict for name in (alias, project_settings.alias()))
    if any(theirs[part] != ours[part] for part in ADDRESS):
        raise Error(
            f"job {job.id} ({job.task}): the alias {alias!r} is another database than {project_settings.alias()!r}, in "
            "which the queue is: one commit cannot be in both. Leave @transactional out; then the job may run twice",
            job_id=job.id,
        )
