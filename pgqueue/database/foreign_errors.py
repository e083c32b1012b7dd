"""Reads exceptions of foreign code, whose properties may fail. No I/O."""

from __future__ import annotations

from pgqueue.plain_text import asked

POOLED = "A pooler is in between that cannot do prepared statements: set PGQUEUE_PREPARE=off"


def attribute(error: object, name: str) -> object:
    """The value of this attribute; None if there is none, or if it cannot be read."""
    return asked(lambda: getattr(error, name, None), lambda _: None)


def said(error: object) -> str:
    """The server's message, with its detail and its hint; not the statement and the functions that it names."""
    diag = attribute(error, "diag")
    parts = [attribute(diag, f"message_{part}") for part in ("primary", "detail", "hint")]
    return "; ".join(str(part) for part in parts if part) if parts[0] else str(error)


def wrapped(error: BaseException) -> list[object]:
    """The error, and those that it may wrap: SQLAlchemy and Django wrap the driver's."""
    return [error, attribute(error, "orig"), attribute(error, "__cause__")]


def pooled(error: BaseException) -> bool:
    """Whether a prepared statement is there already, or is not there: a pooler has given the connection another
    session."""
    return attribute(error, "sqlstate") in ("42P05", "26000")
