"""pgqueue: the job queue that lives entirely in PostgreSQL."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgqueue.asks import Cancel, Fail, Retry, Snooze
    from pgqueue.config import configure
    from pgqueue.connections import aconnect, connect
    from pgqueue.control import JobInfo, QueueInfo, afind, aget, aqueues, find, get, queues
    from pgqueue.enqueue import aenqueue, aenqueue_many, enqueue, enqueue_many
    from pgqueue.errors import (
        DuplicateJob,
        Error,
        InvalidArguments,
        InvalidOption,
        JobCancelled,
        JobFailed,
        JobLost,
        JobNotFound,
        JobTimeout,
        NotConfigured,
        PayloadTooLarge,
        ResultTimeout,
        ScheduleDeclared,
        ScheduleNotFound,
        SchemaBehind,
        SchemaMissing,
        SchemaTooNew,
        UnsupportedConnection,
    )
    from pgqueue.handle import JobHandle
    from pgqueue.hooks import JobOutcome, middleware, on_finish, on_start
    from pgqueue.job import Job, NewJob, current_job
    from pgqueue.lifespan import lifespan
    from pgqueue.operate import acancel, aretry, cancel, retry
    from pgqueue.options import Limit, Lock, Rate
    from pgqueue.pausing import apause, aresume, pause, resume
    from pgqueue.retry import RetryPolicy
    from pgqueue.tasks import Task, remote, task
    from pgqueue.timing import Cron, Every
    from pgqueue.uniqueness import Unique
    from pgqueue.worker import Worker

__all__ = [
    "Cancel",
    "Cron",
    "DuplicateJob",
    "Error",
    "Every",
    "Fail",
    "InvalidArguments",
    "InvalidOption",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobHandle",
    "JobInfo",
    "JobLost",
    "JobNotFound",
    "JobOutcome",
    "JobTimeout",
    "Limit",
    "Lock",
    "NewJob",
    "NotConfigured",
    "PayloadTooLarge",
    "QueueInfo",
    "Rate",
    "ResultTimeout",
    "Retry",
    "RetryPolicy",
    "ScheduleDeclared",
    "ScheduleNotFound",
    "SchemaBehind",
    "SchemaMissing",
    "SchemaTooNew",
    "Snooze",
    "Task",
    "Unique",
    "UnsupportedConnection",
    "Worker",
    "acancel",
    "aconnect",
    "aenqueue",
    "aenqueue_many",
    "afind",
    "aget",
    "apause",
    "aqueues",
    "aresume",
    "aretry",
    "cancel",
    "configure",
    "connect",
    "current_job",
    "enqueue",
    "enqueue_many",
    "find",
    "get",
    "lifespan",
    "middleware",
    "on_finish",
    "on_start",
    "pause",
    "queues",
    "remote",
    "resume",
    "retry",
    "task",
]

_PLACES = {
    "asks": "Cancel Fail Retry Snooze",
    "config": "configure",
    "connections": "aconnect connect",
    "control": "JobInfo QueueInfo afind aget aqueues find get queues",
    "enqueue": "aenqueue aenqueue_many enqueue enqueue_many",
    "errors": "DuplicateJob Error InvalidArguments InvalidOption JobCancelled JobFailed JobLost JobNotFound JobTimeout "
    "NotConfigured PayloadTooLarge ResultTimeout ScheduleDeclared ScheduleNotFound SchemaBehind SchemaMissing "
    "SchemaTooNew UnsupportedConnection",
    "handle": "JobHandle",
    "hooks": "JobOutcome middleware on_finish on_start",
    "job": "Job NewJob current_job",
    "lifespan": "lifespan",
    "operate": "acancel aretry cancel retry",
    "options": "Limit Lock Rate",
    "pausing": "apause aresume pause resume",
    "retry": "RetryPolicy",
    "tasks": "Task remote task",
    "timing": "Cron Every",
    "uniqueness": "Unique",
    "worker": "Worker",
}
_PLACE = {name: place for place, names in _PLACES.items() for name in names.split()}


class _Package(ModuleType):
    """This package: a public name is what it is, also when the module of the same name (`retry`) is imported later."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PLACE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Each name comes at its first use: who enqueues needs no worker, and a probe (`pgqueue health`) hardly any."""
    if name in _PLACE:
        found = getattr(import_module(f"{__name__}.{_PLACE[name]}"), name)
        globals()[name] = found
        return found
    try:  # a module, such as pgqueue.errors
        if not name.startswith("_"):
            return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
