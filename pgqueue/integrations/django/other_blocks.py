"""Says in the log if a job is enqueued on one alias while the `atomic` block around the call is that of another.

The job is committed by itself then: it is there although the block is rolled back. That is seldom meant.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import django
from django.db import connections

import pgqueue
from pgqueue.database.drivers import is_django

log = logging.getLogger("pgqueue")

LIBRARIES = tuple(f"{Path(module.__file__ or '').parent}/" for module in (pgqueue, django))
_told: set[str] = set()


def warn_of_other_blocks(conn: object) -> None:
    """Look at this connection, on which a job is about to be enqueued. It warns once for each line that enqueues."""
    if not is_django(conn):
        return
    alias = conn if isinstance(conn, str) else str(getattr(conn, "alias"))  # noqa: B009  # of any object
    opened = connections.all(initialized_only=True)
    blocks = [each.alias for each in opened if each.in_atomic_block]
    mine = next((each for each in opened if each.alias == alias), None)
    if not blocks or alias in blocks or (mine is not None and not mine.autocommit and mine.connection is not None):
        return
    line = _line()
    if line in _told:
        return
    _told.add(line)
    log.warning(
        "%s enqueues on %r inside of atomic() of %s: the job is committed by itself, and stays if that block is rolled "
        "back. Enqueue on the alias of the block, or open a block of %r, too. This is said once for each line",
        line,
        alias,
        ", ".join(map(repr, blocks)),
        alias,
    )


def _line() -> str:
    """Where the application has called us."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
