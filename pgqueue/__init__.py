"""pgqueue: the job queue that lives entirely in PostgreSQL."""

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
    SchemaBehind,
    SchemaMissing,
    SchemaTooNew,
    UnsupportedConnection,
)
from pgqueue.handle import JobHandle
from pgqueue.job import NewJob
from pgqueue.retry import RetryPolicy
from pgqueue.tasks import Task, remote, task

__all__ = [
    "DuplicateJob",
    "Error",
    "InvalidArguments",
    "InvalidOption",
    "JobCancelled",
    "JobFailed",
    "JobHandle",
    "JobInfo",
    "JobLost",
    "JobNotFound",
    "JobTimeout",
    "NewJob",
    "NotConfigured",
    "PayloadTooLarge",
    "QueueInfo",
    "ResultTimeout",
    "RetryPolicy",
    "SchemaBehind",
    "SchemaMissing",
    "SchemaTooNew",
    "Task",
    "UnsupportedConnection",
    "aconnect",
    "aenqueue",
    "aenqueue_many",
    "afind",
    "aget",
    "aqueues",
    "configure",
    "connect",
    "enqueue",
    "enqueue_many",
    "find",
    "get",
    "queues",
    "remote",
    "task",
]
