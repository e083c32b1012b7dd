"""A staged job: what a row of the outbox says beside task and arguments, and the job that it becomes.

`client/outbox` writes it in the application's database, the relay reads it on its way to the queue. A row may also be
written by plain SQL, in any language: what is read here is therefore checked. No I/O.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec

from pgqueue.errors import Error, InvalidArguments, InvalidOption
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.keys import Keys
from pgqueue.jobs.sizes import TEXT_MOST
from pgqueue.jobs.validation import check_priority, check_queue, check_task_name

FORMAT = 1
"""The newest format of `options` that is known here."""

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=100 * 366 * 86_400)]


_NULL = msgspec.Raw(b"null")


class Options(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The JSON object in the column `options`. What is left out is the default."""

    queue: str = "default"
    priority: int = 5
    run_at: Moment | None = None
    delay: Seconds | None = None  # from the staging
    deadline: Moment | None = None
    deadline_seconds: Seconds | None = None  # from the staging
    headers: msgspec.Raw = _NULL  # a JSON object, not taken apart
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=32_767)] | None = None
    lock_key: str | None = None
    lock_limit: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    on_locked: Literal["wait", "skip", "once"] | None = None
    limit_key: str | None = None
    rate_key: str | None = None
    unique_key: str | None = None
    idempotency_key: str | None = None
    hold: Literal["pending", "live", "after"] = "live"
    hold_seconds: Seconds = 0.0
    on_duplicate: Literal["return", "replace"] = "return"
    debounce_max: Seconds | None = None


_decoder = msgspec.json.Decoder(Options)
_DEFAULTS = Options()


def options_of(job: NewJob[Any]) -> str | None:
    """The options of a job that is to be staged, as text; None if all are the defaults.

    Raises InvalidOption if the job's unique key asks for DuplicateJob: which job has a key is known at the queue only.
    """
    keys = job.keys
    if keys is not None and keys.on_duplicate == "raise":
        raise InvalidOption(
            f'task {job.task!r}: on_duplicate="raise" cannot be staged, because only the database of the queue knows '
            'which job has the key; use "return"'
        )
    by_time = isinstance(job.deadline, datetime)
    options = Options(
        queue=job.queue,
        priority=job.priority,
        run_at=_utc(job.run_at),
        delay=job.delay,
        deadline=_utc(job.deadline) if by_time else None,  # type: ignore[arg-type]  # a datetime then
        deadline_seconds=None if by_time else job.deadline,  # type: ignore[arg-type]
        headers=_NULL if job.headers is None else msgspec.Raw(job.headers.encode()),
        max_attempts=job.max_attempts,
        lock_key=job.lock_key,
        lock_limit=job.lock_limit,
        on_locked=job.on_locked,  # type: ignore[arg-type]  # one of them, since the declaration
        limit_key=job.limit_key,
        rate_key=job.rate_key,
    )
    if keys is not None:
        options.unique_key, options.idempotency_key = keys.unique, keys.idempotency
        options.hold, options.hold_seconds = keys.hold, keys.seconds  # type: ignore[assignment]
        options.on_duplicate, options.debounce_max = keys.on_duplicate, keys.debounce_max  # type: ignore[assignment]
    text = msgspec.json.encode(options).decode()
    return None if text == "{}" else text


def job_of(task: str, args: str | None, options: str | None, staged_at: datetime) -> NewJob[Any]:
    """The job of a row. Raises InvalidOption or InvalidArguments if it cannot be one; the message is the reason.

    `args` is None if they are larger than a job's arguments may be. Delays count from the staging.
    """
    check_task_name(task)
    if args is None:
        raise InvalidArguments(f"args have more than {TEXT_MOST:,} bytes as text: store the data and pass its key")
    if not args.startswith("{"):
        raise InvalidArguments(f"args are a JSON object, by parameter name, not {args:.40}")
    if options is None:
        return NewJob(task, args, _DEFAULTS.queue, _DEFAULTS.priority, None, None, None, None)
    said = _decoded(options)
    headers = None if bytes(said.headers) == b"null" else bytes(said.headers).decode()
    if headers is not None and not headers.startswith("{"):
        raise InvalidOption(f"options: headers are a JSON object, not {headers:.40}")
    keys = None
    if said.unique_key is not None or said.idempotency_key is not None:
        keys = Keys(
            said.unique_key,
            said.idempotency_key,
            said.hold,
            said.hold_seconds,
            said.on_duplicate,
            said.debounce_max,
        )
    return NewJob(
        task=task,
        args=args,
        queue=check_queue(said.queue),
        priority=check_priority(said.priority),
        run_at=_later(staged_at, said.delay) if said.run_at is None else _utc(said.run_at),
        delay=None,
        headers=headers,
        max_attempts=said.max_attempts,
        deadline=_later(staged_at, said.deadline_seconds) if said.deadline is None else _utc(said.deadline),
        lock_key=said.lock_key,
        lock_limit=said.lock_limit,
        on_locked=said.on_locked,
        limit_key=said.limit_key,
        rate_key=said.rate_key,
        keys=keys,
    )


def check_format(number: int) -> None:
    """Raise Error if a newer pgqueue has staged the row: it is for a newer relay, and no fault of the row."""
    if number > FORMAT:
        raise Error(f"a row of the outbox has format {number}, and this pgqueue knows {FORMAT}: upgrade the relay")


def _decoded(options: str) -> Options:
    try:
        return _decoder.decode(options)
    except msgspec.MsgspecError as error:
        raise InvalidOption(f"options: {error}") from None


def _later(staged_at: datetime, seconds: float | None) -> datetime | None:
    try:
        return None if seconds is None else staged_at + timedelta(seconds=seconds)
    except OverflowError:
        raise InvalidOption(f"{seconds:g} s after {staged_at:%Y-%m-%d} is behind the year 9999") from None


def _utc(moment: datetime | None) -> datetime | None:
    if moment is None:
        return None
    try:  # in UTC: PostgreSQL knows offsets up to 16 hours, Python up to 24
        return moment.astimezone(UTC)
    except OverflowError:
        raise InvalidOption(f"{moment!r}: give a time between the years 1 and 9999, in UTC") from None
