"""Two log formatters: `Text`, and `Json` with one object per line.

Used by `pgqueue work`, and by applications in their own logging configuration. This module configures nothing itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from datetime import UTC, datetime
from traceback import print_exc
from typing import Any

from pgqueue.databases import current
from pgqueue.plain_text import foreign, plain_lines

# The attributes every record has. All others came with `extra=` and are written as fields.
_COMMON = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_harmless: set[str] = set()
"""The loggers whose calls raise nothing."""

worker_id: int | None = None
"""Of the worker that this process is. Set by `pgqueue work`; an application may have several in one process."""

worker_ids: dict[str, int] = {}
"""Of the workers that this process is, by the names of their databases, if it has several."""

trace_ids: Callable[[], Mapping[str, str]] | None = None
"""Set by `pgqueue.telemetry.otel`: `trace_id` and `span_id` of the span that is current where a line is logged."""


def harmless(*names: str) -> None:
    """From now on no call of these loggers raises, whatever the application's handlers, filters and factories do.

    A worker logs where an exception would cost it a slot, or a service. What stops a handler passes all the same.
    """
    for name in set(names) - _harmless:
        logger = logging.getLogger(name)
        _harmless.add(name)
        vars(logger).update(_log=_quiet(logger._log, frames=1), handle=_quiet(logger.handle))


def _quiet(call: Callable[..., None], frames: int = 0) -> Callable[..., None]:
    """`call`, which says on stderr what it would raise. `frames`: it looks so many frames up for its caller."""

    def quiet(*args: Any, **options: Any) -> None:
        if frames:
            options["stacklevel"] = options.get("stacklevel", 1) + frames
        try:
            call(*args, **options)
        except foreign():
            with suppress(Exception):  # where stderr is closed, too
                print_exc()

    return quiet


class Text(logging.Formatter):
    """`2026-11-20T10:00:00.000Z INFO pgqueue[4711 worker 12]: message`, and the traceback below it.

    4711 is the process, and 12 the ID of its worker, in a process of `pgqueue work` whose worker has one. If it works
    for several databases, the name of one stands before it: `[4711 shop-a worker 12]`.

    A message may hold a text from the database. So an entry begins at the left edge, and all its other lines are
    indented; what is not printable is a `?`. With `colours`, for a terminal, the level has one.
    """

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s[%(place)s]: %(message)s")
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        database, worker = _worker()
        place = [f"{record.process}", *([database] if database else []), *([f"worker {worker}"] if worker else [])]
        own = copy(record)  # other handlers get the record without it
        vars(own)["place"] = " ".join(place)
        text = plain_lines(super().format(own))
        colour = _colour(record) if self._colours else None
        if colour is None:
            return text
        before, level, after = text.partition(f" {record.levelname} ")
        return f"{before}\x1b[{colour}m{level}\x1b[0m{after}"

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)


class Json(logging.Formatter):
    """One JSON object on one line of ASCII: time, level, logger, process, worker, message, the extras, the traceback.

    `process` is the process's ID, `worker` the ID of its worker, where `pgqueue work` has one. `database` is the name
    of the worker's database, if the process has several. The traceback is the field `exception`.

    While `pgqueue.telemetry.otel` traces, `trace_id` and `span_id` are among the extras, if there is a span.

    The JSON is always valid: values that JSON lacks (NaN, an object, half a surrogate pair) become text. If an extra
    has one of our own names, a `_` is added to it.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
        }
        database, worker = _worker()
        if database is not None:
            line["database"] = database
        if worker is not None:
            line["worker"] = worker
        line["message"] = _message(record)
        if trace := self._trace(record):
            line["exception"] = trace
        if record.stack_info:
            line["stack"] = record.stack_info
        extras = {name: value for name, value in vars(record).items() if name not in _COMMON}
        if trace_ids is not None and "trace_id" not in extras:
            extras |= trace_ids()
        line |= {f"{name}_" if name in line else name: value for name, value in extras.items()}
        try:
            return _dump(line)
        except (ValueError, TypeError, RecursionError):
            return _dump({name: _dumpable(value) for name, value in line.items()})

    def _trace(self, record: logging.LogRecord) -> str | None:
        if record.exc_info and record.exc_info[0] is not None:
            return self.formatException(record.exc_info)
        return record.exc_text


def _worker() -> tuple[str | None, int | None]:
    """The name of the database to which the line belongs, if there are several, and the ID of the worker."""
    database = current.get()
    return (None, worker_id) if database is None else (database.name, worker_ids.get(database.name))


def _colour(record: logging.LogRecord) -> int | None:
    """Red for an error, yellow for a warning, green for a job that went well."""
    if record.levelno >= logging.WARNING:
        return 31 if record.levelno >= logging.ERROR else 33
    return 32 if getattr(record, "outcome", None) == "completed" else None


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # the arguments do not fit the message
        return f"{_text(record.msg)} {_text(record.args)}"


def _dump(value: Any) -> str:
    text = json.dumps(value, default=_text, ensure_ascii=False, allow_nan=False)
    if text.isascii():
        return text
    # Half a surrogate pair cannot be written, and not every stream takes characters beyond ASCII.
    return json.dumps(json.loads(text.encode(errors="replace")))


def _dumpable(value: object) -> object:
    try:
        _dump(value)
    except (ValueError, TypeError, RecursionError):
        return _text(value)
    return value


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"({type(value).__name__}, whose str() fails)"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
