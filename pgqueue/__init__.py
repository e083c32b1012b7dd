"""pgqueue: the job queue that lives entirely in PostgreSQL."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """The worker comes at its first use: an application that only enqueues needs neither asyncio nor psycopg."""
    if name == "Worker":
        from pgqueue.worker import Worker

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
