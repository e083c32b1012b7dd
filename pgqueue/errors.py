"""Every exception pgqueue raises.

All derive from `Error` and have `.job_id` if they are about a job. A message says what happened, to which job, and what
to do: it may be read at 3 a.m. Nothing here does I/O.
"""

from __future__ import annotations


class Error(Exception):
    """The base class of all exceptions of pgqueue."""

    def __init__(self, message: str = "", *, job_id: int | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class InvalidArguments(Error, TypeError):
    """The task's arguments do not fit its signature or cannot be stored; nothing reached the database."""


class PayloadTooLarge(InvalidArguments):
    """The encoded arguments are larger than the limit (bytes of JSON text)."""


class InvalidOption(Error, ValueError):
    """An option of a task, an enqueue or the configuration is wrong."""


class UnsupportedConnection(Error, TypeError):
    """pgqueue cannot use this kind of connection, or it is sync where async is needed (or the reverse)."""


class DuplicateJob(Error):
    """A unique key is held by another job; `.existing` is the id of that job."""

    def __init__(self, message: str = "", *, existing: int | None = None, job_id: int | None = None) -> None:
        super().__init__(message, job_id=job_id)
        self.existing = existing


class JobNotFound(Error, LookupError):
    """No job has this id: it never existed, its transaction rolled back, or retention has removed it."""


class FlowNotFound(Error, LookupError):
    """No flow has this id: it never existed, its transaction rolled back, or retention has removed its last job."""


class BulkNotFound(Error, LookupError):
    """There is no operation by filter with this id: it never was, or it is older than 90 days."""


class LimitNotFound(Error, LookupError):
    """No limit has this name."""


class ScheduleNotFound(Error, LookupError):
    """No schedule has this name."""


class ScheduleDeclared(Error):
    """Code declares the schedule of this name: it can be paused by hand, not changed or removed."""


class NotConfigured(Error):
    """No database is configured: neither an argument, `pgqueue.configure(dsn=…)`, nor PGQUEUE_DSN names one."""


class SchemaMissing(Error):
    """The database has no pgqueue schema; run `pgqueue migrate`."""


class SchemaBehind(Error):
    """The database's schema is older than this pgqueue; run `pgqueue migrate`."""


class SchemaForeign(Error):
    """The schema was made by a pgqueue before the first release, or by something else; use another schema."""


class SchemaTooNew(Error):
    """The database's schema has a breaking change this pgqueue does not know; upgrade pgqueue."""


class UnsupportedServer(Error):
    """The server is no PostgreSQL, or one that pgqueue does not work on: CockroachDB, YugabyteDB."""


class JobFailed(Error):
    """The awaited job failed for good."""


class JobCancelled(Error):
    """The awaited job was cancelled."""


class JobTimeout(Error, TimeoutError):
    """A job ran longer than its timeout: the error of the attempt, and of `result` if it was the last."""


class ResultTimeout(Error, TimeoutError):
    """The job had not finished within the timeout that the caller gave; it goes on."""


class JobLost(Error):
    """The job was given to another worker meanwhile: this run's outcome is dropped (fenced)."""
