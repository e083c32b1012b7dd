"""pgqueue: the job queue that lives entirely in PostgreSQL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgqueue.admin.actions import acancel, adiscard, areschedule, aretry, cancel, discard, reschedule, retry
    from pgqueue.admin.audit import AuditEntry, aaudit, audit
    from pgqueue.admin.bulk.operations import (
        Bulk,
        BulkPreview,
        abulk,
        abulks,
        aget_bulk,
        apreview_bulk,
        astop_bulk,
        bulk,
        bulks,
        get_bulk,
        preview_bulk,
        stop_bulk,
    )
    from pgqueue.admin.depth import QueueInfo, adepth, aqueues, depth, queues
    from pgqueue.admin.doctor import Diagnosis, Finding, adoctor, doctor
    from pgqueue.admin.error_groups import ErrorGroup, aerror_groups, error_groups
    from pgqueue.admin.history import HistoryRow, ahistory, history
    from pgqueue.admin.queries import JobInfo, afind, aget, find, get
    from pgqueue.admin.queues import apause, aresume, pause, resume
    from pgqueue.admin.stack import Stack, astack, stack
    from pgqueue.admin.why.reasons import Reason, Why
    from pgqueue.admin.why.why import awhy, why
    from pgqueue.admin.workers import workers
    from pgqueue.client import schedules
    from pgqueue.client.enqueue import aenqueue, aenqueue_many, enqueue, enqueue_many
    from pgqueue.client.handle import JobHandle, aresult, result
    from pgqueue.client.job_outcome import JobOutcome
    from pgqueue.client.lifespan import lifespan
    from pgqueue.client.middleware import middleware, on_finish, on_start
    from pgqueue.client.outbox import Outbox
    from pgqueue.client.tasks import Task, remote, task
    from pgqueue.config import configure
    from pgqueue.database.drivers import aconnect, connect
    from pgqueue.database.migrations import amigrate, migrate
    from pgqueue.errors import (
        BulkNotFound,
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
        SchemaForeign,
        SchemaMissing,
        SchemaTooNew,
        UnsupportedConnection,
    )
    from pgqueue.jobs.actors import acting
    from pgqueue.jobs.concurrency import Limit, Lock, Rate
    from pgqueue.jobs.cron import Cron, Every
    from pgqueue.jobs.job import Job, NewJob, current_job
    from pgqueue.jobs.outcomes import Cancel, Fail, Retry, Snooze
    from pgqueue.jobs.retry import RetryPolicy
    from pgqueue.jobs.unique import Unique
    from pgqueue.relay.callable_target import CallableTarget, Refuse, StagedJob
    from pgqueue.relay.celery_target import CeleryTarget
    from pgqueue.relay.relay import Relay
    from pgqueue.worker.liveness.watchdog import Watchdog
    from pgqueue.worker.worker import Worker

__all__ = [
    "AuditEntry",
    "Bulk",
    "BulkNotFound",
    "BulkPreview",
    "CallableTarget",
    "Cancel",
    "CeleryTarget",
    "Cron",
    "Diagnosis",
    "DuplicateJob",
    "Error",
    "ErrorGroup",
    "Every",
    "Fail",
    "Finding",
    "HistoryRow",
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
    "Outbox",
    "PayloadTooLarge",
    "QueueInfo",
    "Rate",
    "Reason",
    "Refuse",
    "Relay",
    "ResultTimeout",
    "Retry",
    "RetryPolicy",
    "ScheduleDeclared",
    "ScheduleNotFound",
    "SchemaBehind",
    "SchemaForeign",
    "SchemaMissing",
    "SchemaTooNew",
    "Snooze",
    "Stack",
    "StagedJob",
    "Task",
    "Unique",
    "UnsupportedConnection",
    "Watchdog",
    "Why",
    "Worker",
    "aaudit",
    "abulk",
    "abulks",
    "acancel",
    "aconnect",
    "acting",
    "adepth",
    "adiscard",
    "adoctor",
    "aenqueue",
    "aenqueue_many",
    "aerror_groups",
    "afind",
    "aget",
    "aget_bulk",
    "ahistory",
    "amigrate",
    "apause",
    "apreview_bulk",
    "aqueues",
    "areschedule",
    "aresult",
    "aresume",
    "aretry",
    "astack",
    "astop_bulk",
    "audit",
    "awhy",
    "bulk",
    "bulks",
    "cancel",
    "configure",
    "connect",
    "current_job",
    "depth",
    "discard",
    "doctor",
    "enqueue",
    "enqueue_many",
    "error_groups",
    "find",
    "get",
    "get_bulk",
    "history",
    "lifespan",
    "middleware",
    "migrate",
    "on_finish",
    "on_start",
    "pause",
    "preview_bulk",
    "queues",
    "remote",
    "reschedule",
    "result",
    "resume",
    "retry",
    "schedules",
    "stack",
    "stop_bulk",
    "task",
    "why",
    "workers",
]

_PLACES = {
    "config": "configure",
    "database.drivers": "aconnect connect",
    "database.migrations": "amigrate migrate",
    "admin.depth": "QueueInfo adepth aqueues depth queues",
    "admin.doctor": "Diagnosis Finding adoctor doctor",
    "admin.error_groups": "ErrorGroup aerror_groups error_groups",
    "admin.history": "HistoryRow ahistory history",
    "admin.queries": "JobInfo afind aget find get",
    "client.enqueue": "aenqueue aenqueue_many enqueue enqueue_many",
    "errors": "BulkNotFound DuplicateJob Error InvalidArguments InvalidOption JobCancelled JobFailed JobLost "
    "JobNotFound JobTimeout NotConfigured PayloadTooLarge ResultTimeout ScheduleDeclared ScheduleNotFound "
    "SchemaBehind SchemaForeign SchemaMissing SchemaTooNew UnsupportedConnection",
    "client.handle": "JobHandle aresult result",
    "client.outbox": "Outbox",
    "client.job_outcome": "JobOutcome",
    "client.middleware": "middleware on_finish on_start",
    "jobs.actors": "acting",
    "jobs.job": "Job NewJob current_job",
    "client.lifespan": "lifespan",
    "jobs.outcomes": "Cancel Fail Retry Snooze",
    "admin.actions": "acancel adiscard areschedule aretry cancel discard reschedule retry",
    "jobs.concurrency": "Limit Lock Rate",
    "admin.audit": "AuditEntry aaudit audit",
    "admin.bulk.operations": "Bulk BulkPreview abulk abulks aget_bulk apreview_bulk astop_bulk bulk bulks "
    "get_bulk preview_bulk stop_bulk",
    "admin.queues": "apause aresume pause resume",
    "jobs.retry": "RetryPolicy",
    "client.tasks": "Task remote task",
    "jobs.cron": "Cron Every",
    "jobs.unique": "Unique",
    "admin.stack": "Stack astack stack",
    "admin.why.reasons": "Reason Why",
    "admin.why.why": "awhy why",
    "admin.workers": "workers",
    "relay.relay": "Relay",
    "relay.callable_target": "CallableTarget Refuse StagedJob",
    "relay.celery_target": "CeleryTarget",
    "worker.liveness.watchdog": "Watchdog",
    "worker.worker": "Worker",
}
_PLACE = {name: place for place, names in _PLACES.items() for name in names.split()}
_MODULES = {"schedules": "client.schedules"}
"""Public names of modules, where they differ from the module's place."""


def __getattr__(name: str) -> Any:
    """Import a name at its first use: an enqueue needs no worker, and a probe (`pgqueue health`) needs few modules."""
    if name in _PLACE:
        found = getattr(import_module(f"{__name__}.{_PLACE[name]}"), name)
        globals()[name] = found
        return found
    try:  # a module, such as pgqueue.errors
        if not name.startswith("_"):
            return import_module(f"{__name__}.{_MODULES.get(name, name)}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
