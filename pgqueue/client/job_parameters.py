"""The values of jobs as parameters of one statement. Used by `enqueue` and `unique_enqueue`. No I/O.

One job has a parameter for each value. Of a batch each parameter is a column, as text: thousands of jobs become a few
parameters. The SQL splits these texts by `string_to_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from pgqueue.errors import InvalidArguments, InvalidOption, PayloadTooLarge
from pgqueue.jobs.job import NewJob

# A parameter of PostgreSQL holds 1 GB; a character takes at most 4 bytes.
_MOST_CHARACTERS = 250_000_000


def column(values: Sequence[Any], form: Callable[[Any], str | None] | None = None) -> str:
    """One column of a batch as text: a line for each job, or a single line if all jobs have the same value."""
    if len(set(values)) == 1:
        values = values[:1]
    if form is not None:
        values = [None if value is None else form(value) for value in values]
    return lines(["" if value is None else value for value in values])


def lines(values: Sequence[str]) -> str:
    """Join the values by line breaks. No value has a line break: JSON escapes them, and names do not have them.

    This is cheaper than one JSON document and much cheaper than psycopg's arrays.
    """
    joined = "\n".join(values)
    if joined.count("\n") != len(values) - 1:
        raise InvalidArguments("a line break in the JSON of a job: build jobs with task.new(…)")
    if len(joined) > _MOST_CHARACTERS:
        raise PayloadTooLarge(
            f"enqueue_many: {len(joined):,} characters in one batch, the limit is {_MOST_CHARACTERS:,}; split it"
        )
    return joined


def quoted(key: str) -> str:
    """A key as JSON, because a key may have line breaks."""
    return msgspec.json.encode(key).decode()


def columns(jobs: Sequence[NewJob[Any]]) -> dict[str, object]:
    """The jobs column by column, without their unique keys."""
    params = plain_columns(jobs)
    params["run_at"] = column([job.run_at for job in jobs], moment_of)
    params["delay"] = column([job.delay for job in jobs], repr)
    deadlines = [deadline_of(job) for job in jobs]
    params["deadline"] = column([deadline for deadline, _ in deadlines])
    params["deadline_seconds"] = column([seconds for _, seconds in deadlines], repr)
    params["lock_key"] = column([job.lock_key for job in jobs], quoted)
    params["lock_limit"] = column([job.lock_limit for job in jobs], str)
    params["on_locked"] = column([job.on_locked for job in jobs])
    params["limit_key"] = column([job.limit_key for job in jobs], quoted)
    params["rate_key"] = column([job.rate_key for job in jobs], quoted)
    return params


def plain_columns(jobs: Sequence[NewJob[Any]]) -> dict[str, object]:
    return {
        "task": column([job.task for job in jobs]),
        "args": lines([job.args for job in jobs]),
        "queue": column([job.queue for job in jobs]),
        "priority": column([job.priority for job in jobs], str),
        "headers": column([job.headers for job in jobs]),
        "max_attempts": column([job.max_attempts for job in jobs], str),
    }


def values(job: NewJob[Any]) -> dict[str, object]:
    """The values of one job, without its unique keys."""
    deadline, seconds = deadline_of(job)
    return plain_values(job) | {
        "run_at": moment_of(job.run_at),
        "delay": job.delay,
        "deadline": deadline,
        "deadline_seconds": seconds,
        "lock_key": job.lock_key,
        "lock_limit": job.lock_limit,
        "on_locked": job.on_locked,
        "limit_key": job.limit_key,
        "rate_key": job.rate_key,
    }


def plain_values(job: NewJob[Any]) -> dict[str, object]:
    return {
        "task": job.task,
        "args": job.args,
        "queue": job.queue,
        "priority": job.priority,
        "headers": job.headers,
        "max_attempts": job.max_attempts,
    }


def is_plain(job: NewJob[Any]) -> bool:
    """Whether the job may run at once and has no deadline, lock, limit or rate."""
    timed = job.run_at is not None or job.delay is not None or job.deadline is not None
    return not timed and job.lock_key is None and job.limit_key is None and job.rate_key is None


def has_keys(jobs: Sequence[NewJob[Any]]) -> bool:
    return any([job.keys is not None for job in jobs])


def deadline_of(job: NewJob[Any]) -> tuple[str | None, float | None]:
    """The job's deadline as a time, or as seconds from now; one of the two is None."""
    deadline = job.deadline
    return (moment_of(deadline), None) if isinstance(deadline, datetime) else (None, deadline)


def moment_of(moment: datetime | None) -> str | None:
    if moment is None:
        return None
    try:  # in UTC: PostgreSQL knows offsets up to 16 hours, Python up to 24
        return moment.astimezone(UTC).isoformat()
    except OverflowError:
        raise InvalidOption(f"{moment!r}: give a time between the years 1 and 9999, in UTC") from None
