"""Every error of a command as one line for people and an exit code for scripts.

Called around each command by the group. Passwords are removed from everything that is printed. An error that is no
mistake of the user and no state of the database is a bug, and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from pgqueue.config import safe
from pgqueue.database.foreign_errors import POOLED, pooled, said
from pgqueue.database.triggers import trigger_of
from pgqueue.errors import (
    BulkNotFound,
    Error,
    FlowNotFound,
    InvalidArguments,
    InvalidOption,
    JobNotFound,
    LimitNotFound,
    NotConfigured,
    ScheduleDeclared,
    ScheduleNotFound,
    SchemaBehind,
    SchemaForeign,
    SchemaMissing,
    SchemaTooNew,
    UnsupportedServer,
)
from pgqueue.manual import Symptom, at_night
from pgqueue.plain_text import plain

DONE = 0
NO = 1
USAGE = 2
DATABASE = 3
SCHEMA = 4
DEADLINE = 5
INTERRUPTED = 130
BROKEN_PIPE = 141  # as if SIGPIPE had ended us: the reader, such as head, reads no more

_NO_TABLE = frozenset({"42P01", "3F000"})


class Refusal(click.ClickException):
    """One line on stderr, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(safe(message))
        self.exit_code = code  # type: ignore[misc]  # each Refusal has its own


class No(click.ClickException):
    """The answer is no: one line on stderr, which is no error, and exit code 1."""

    exit_code = NO

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.format_message(), file=file, err=file is None)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn an exception of a command into a Refusal with the right exit code."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit):
        raise
    except (KeyboardInterrupt, click.Abort):
        raise click.exceptions.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(BROKEN_PIPE) from None
    except Exception as error:
        code = code_of(error)
        if code is None:
            raise
        raise Refusal(line_of(error), code) from None


def code_of(error: BaseException) -> int | None:
    """The exit code for an error, or None if it is a bug."""
    match error:
        case NotConfigured() | InvalidOption() | InvalidArguments():
            return USAGE
        case (
            BulkNotFound() | FlowNotFound() | JobNotFound() | LimitNotFound() | ScheduleNotFound() | ScheduleDeclared()
        ):
            return NO
        case SchemaMissing() | SchemaForeign() | SchemaBehind() | SchemaTooNew() | UnsupportedServer():
            return SCHEMA
        case Error(__context__=ImportError()):  # the package of an extra is not installed
            return USAGE
        case Error():
            return DATABASE
    if not _is_psycopg(error):
        return None
    return SCHEMA if getattr(error, "sqlstate", None) in _NO_TABLE and trigger_of(error) is None else DATABASE


def _is_psycopg(error: BaseException, name: str = "Error") -> bool:
    """Recognised by name, so that psycopg need not be imported for this check."""
    return any(base.__module__ == "psycopg" and base.__name__ == name for base in type(error).__mro__)


def line_of(error: BaseException) -> str:
    """The text of an error with an exit code, on one line."""
    text = plain(" ".join(said(error).split())) or type(error).__name__
    if not _is_psycopg(error):
        return text
    if code_of(error) == SCHEMA:
        return f"the database lacks pgqueue's tables: {text}; run `pgqueue migrate`"
    function = trigger_of(error)
    if function is not None:
        return f"the application's function {function}, in a trigger on a table of pgqueue, has raised: {text}"
    if pooled(error):
        text += f". {POOLED}"
    where = f"; see {at_night(Symptom.FAILED_OVER)}" if _is_psycopg(error, "OperationalError") else ""
    return f"database unreachable or refused: {text}{where}"
