"""A worker's log: to stderr, as text or JSON, or as a file for `logging.config.dictConfig` says."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click

from pgqueue.logs import Json, Text


def set_up(level: str, form: str) -> None:
    """Configure the root logger, so that handlers' own logging is seen too."""
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if form == "json" else Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


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
