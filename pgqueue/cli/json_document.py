"""What `--json` prints: one document of one shape for each command, also if it fails.

    {"items": [...], ...}

`items` is a list, also of one thing. Other fields say what is true of the whole. If a command fails, `error` says why
and with which exit code, and `items` is empty. The text is pure ASCII, so it cannot control a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Any


def document(items: Iterable[object], **more: object) -> str:
    """The document on one line. Dataclasses become objects, times ISO 8601 with their offset.

    >>> document([{"id": 7}], complete=True)
    '{"items": [{"id": 7}], "complete": true}'
    """
    return json.dumps({"items": list(items)} | more, default=_plain)


def failure(message: str, code: int) -> str:
    """The document of a command that ends with this message and exit code."""
    return document((), error={"code": code, "message": message})


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, as they are. `asdict` copies what is in them, and ends where that is deep."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return fields_of(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)
