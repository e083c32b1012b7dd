"""A staged job: what a row of the outbox says beside task and arguments, and the job that it becomes.

`client/outbox` writes it in the application's database, the relay reads it on its way to the queue. A row may also be
written by plain SQL, in any language: what is read here is therefore checked. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any

import msgspec

from pgqueue.errors import Error, InvalidArguments, InvalidOption
from pgqueue.jobs.fields import FIELDS, KEY_FIELDS, NULL, Field, compiled
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.keys import Keys
from pgqueue.jobs.nodes import refuse_results
from pgqueue.jobs.sizes import TEXT_MOST
from pgqueue.jobs.values import check_priority, check_queue, check_task_name, utc

FORMAT = 1
"""The newest format of `options` that is known here."""

_STAGED = [field for field in FIELDS if field.staged is not None]


def options_type(fields: Iterable[Field]) -> Any:
    """The type of the JSON object in the column `options`. What is left out is the default."""
    typed = [(field.name, field.staged, field.default) for field in fields]
    return msgspec.defstruct("Options", typed, omit_defaults=True, forbid_unknown_fields=True)


Options = options_type([*_STAGED, *KEY_FIELDS])
"""Delays count from the staging, headers are not taken apart."""
_decoder = msgspec.json.Decoder(Options)
_DEFAULTS = Options()


def options_of(job: NewJob[Any]) -> str | None:
    """The options of a job that is to be staged, as text; None if all are the defaults.

    Raises InvalidOption if the job's unique key asks for DuplicateJob: which job has a key is known at the queue only.
    """
    keys = job.keys
    refuse_results([job])
    if keys is not None and keys.on_duplicate == "raise":
        raise InvalidOption(
            f'task {job.task!r}: on_duplicate="raise" cannot be staged, because only the database of the queue knows '
            'which job has the key; use "return"'
        )
    options = _options(job) if keys is None else _keyed_options(job, keys)
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
    has_keys = said.unique_key is not None or said.idempotency_key is not None
    run_at = _later(staged_at, said.delay) if said.run_at is None else _utc(said.run_at)
    deadline = _later(staged_at, said.deadline_seconds) if said.deadline is None else _utc(said.deadline)
    return _new_job(task, args, said, headers, run_at, deadline, _keys_of(said) if has_keys else None)


def check_format(number: int) -> None:
    """Raise Error if a newer pgqueue has staged the row: it is for a newer relay, and no fault of the row."""
    if number > FORMAT:
        raise Error(f"a row of the outbox has format {number}, and this pgqueue knows {FORMAT}: upgrade the relay")


def _decoded(options: str) -> Any:
    try:
        return _decoder.decode(options)
    except msgspec.MsgspecError as error:
        raise InvalidOption(f"options: {error}") from None
    except RecursionError:
        raise InvalidOption("options: they are nested too deeply to be read") from None


def _later(staged_at: datetime, seconds: float | None) -> datetime | None:
    try:
        return None if seconds is None else staged_at + timedelta(seconds=seconds)
    except OverflowError:
        raise InvalidOption(f"{seconds:g} s after {staged_at:%Y-%m-%d} is behind the year 9999") from None


def _utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else utc(moment)


# What the table makes -------------------------------------------------------------------------------------------------


def making(options: Any, fields: Iterable[Field]) -> Callable[..., Any]:
    """The function of a job, and of its keys if the fields are those of keys, too, that makes its options."""
    return compiled(f"lambda job, keys=None: options({', '.join(map(_value, fields))})", _NAMES | {"options": options})


def reading(new_job: Any) -> Callable[..., Any]:
    """The function that makes a job of its options and what was read of them. It takes all other fields as they are."""
    read = {
        "queue": "check_queue(said.queue)",
        "priority": "check_priority(said.priority)",
        "delay": "None",
        "results": "None",
        "node": "None",
    }
    read |= {name: name for name in ("task", "args", "headers", "run_at", "deadline", "keys")}
    said = ", ".join(read.get(name, f"said.{name}") for name in new_job.__struct_fields__)
    text = f"lambda task, args, said, headers, run_at, deadline, keys: new_job({said})"
    return compiled(text, _NAMES | {"new_job": new_job})


def _value(field: Field) -> str:
    if field.name == "headers":
        return "NULL if job.headers is None else Raw(job.headers.encode())"
    return f"utc({field.read})" if field.line == "moment" else field.read


_NAMES = {"utc": _utc, "Raw": msgspec.Raw, "NULL": NULL, "check_queue": check_queue, "check_priority": check_priority}
_options = making(Options, _STAGED)
_keyed_options = making(Options, [*_STAGED, *KEY_FIELDS])
_new_job: Callable[..., NewJob[Any]] = reading(NewJob)
_keys_of = compiled(f"lambda said: Keys({', '.join(f'said.{field.name}' for field in KEY_FIELDS)})", {"Keys": Keys})
