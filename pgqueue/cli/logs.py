"""A worker's log: to stderr, as text or JSON, or as a file for `logging.config.dictConfig` says.

What handlers print stands beside it, line by line (`write_whole_lines`).
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from pgqueue.logs import Json, Text

log = logging.getLogger("pgqueue")


def set_up(level: str, form: str) -> None:
    """Configure the root logger, so that handlers' own logging is seen too."""
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if form == "json" else Text(colours=on_terminal() and not os.environ.get("NO_COLOR")))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def write_whole_lines() -> None:
    """From now on what is printed comes with the end of its line, at once.

    It comes in one piece if one `print` makes it of texts and numbers, and it fits in 8 KB: no other thread of Python
    runs meanwhile. A longer text is handed on before its end. An object with a `__str__` in Python lets others run.

    Python alone does so on a terminal only. In a pipe it keeps 8 KB back, which are lost if the process is ended. With
    PYTHONUNBUFFERED a `print` is two writes, the text and its end, and a line of another thread may come between them.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # else it is closed, or of the application
            stream.reconfigure(line_buffering=True, write_through=False)


def on_terminal() -> bool:
    """Whether stderr, where the lines go, is a terminal: then a person looks on."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def load(file: Path) -> None:
    """Configure logging as the file says. Raises UsageError if dictConfig does not take it.

    Loggers that the file does not name stay as they are, unless it says otherwise. dictConfig's own default would
    silence them.
    """
    from logging import config

    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--log-config {file}: no JSON: {error}") from None
    if not isinstance(given, dict):
        raise click.UsageError(f"--log-config {file}: must be a JSON object, as logging.config.dictConfig takes it")
    try:
        config.dictConfig({"version": 1, "disable_existing_loggers": False} | given)
    except Exception as error:  # the classes that the file names may raise anything
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise click.UsageError(f"--log-config {file}: {error}{cause}") from error


def enable() -> None:
    """Let our loggers speak again. An application's dictConfig silences all that there are and that it does not name.

    Called when the application's modules are imported. Levels and handlers stay as they were set.
    """
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and f"{name}.".startswith("pgqueue."):
            logger.disabled = False


def last_words(message: str) -> None:
    """Log why this process ends. If the application's configuration lets no such line reach a terminal, it goes to
    stderr, too: a person who starts a worker looks there."""
    log.critical("%s", message)
    handlers = list(_handlers())  # if there is none, Python itself writes to stderr
    if not log.isEnabledFor(logging.CRITICAL) or (handlers and not any(map(_is_stream, handlers))):
        click.echo(f"Error: {message}", err=True)


def _handlers() -> Iterator[logging.Handler]:
    """The handlers that a line of our logger comes to."""
    logger: logging.Logger | None = log
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _is_stream(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
