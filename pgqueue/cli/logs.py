"""How a worker logs: lines for people, or one JSON object per line for machines. Everything goes to stderr."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

# What every record has; the rest came with `extra=` and belongs to the line.
_COMMON = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up(level: str, form: str) -> None:
    """Configure the root logger, so that handlers' own logging is seen too."""
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if form == "json" else Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class Text(logging.Formatter):
    """`2026-11-20T10:00:00.000Z INFO pgqueue: message`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)


class Json(logging.Formatter):
    """One object: time, level, logger, message, the extras, and the traceback as `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _COMMON}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
